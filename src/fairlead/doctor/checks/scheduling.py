"""`scheduling`: whether a running scheduler decides quickly, and if not, what holds it up."""

from math import inf

from fairlead.doctor.finding import Finding, Kind, Severity
from fairlead.doctor.run import Check
from fairlead.doctor.site import Site

_DOCS = "docs/troubleshooting.md#scheduling-is-slow"

CPU = Kind(
    "scheduling.cpu", Severity.ERROR, "the scheduler's process comes to its turn late",
    "give it a core of its own: raise its CPU request and limit, or take load generators off the machine", _DOCS,
)  # fmt: skip
PLUGIN = Kind(
    "scheduling.plugin", Severity.ERROR, "one plugin takes most of the time of decisions",
    "take it out, or make it work over columns; `fairlead explain` shows what it adds to a decision", _DOCS,
)  # fmt: skip
SLOW = Kind(
    "scheduling.slow", Severity.WARNING, "decisions take long",
    "see the sizes of prompts and of the pool; a remote scheduler adds its network, see scheduler.deadline", _DOCS,
)  # fmt: skip

_SLOW, _LATE = 0.05, 0.05
_QUANTILE = 0.95
#: Decisions from which on a quantile means something.
_ENOUGH = 100
_MOST = 0.5


async def quantile(site: Site, name: str, share: float) -> tuple[float, float]:
    """(upper bound of the bucket that it lies in, seconds; number of observations), over all series."""
    counts: dict[float, float] = {}
    for labels, count in await site.metric(f"{name}_bucket"):
        bound = float(labels.get("le", "inf").replace("+Inf", "inf"))
        counts[bound] = counts.get(bound, 0.0) + count
    total = counts.get(inf, 0.0)
    bounds = sorted(bound for bound, count in counts.items() if count >= share * total)
    return (bounds[0] if bounds else 0.0), total


async def _sums(site: Site) -> dict[str, float]:
    """Seconds by plugin."""
    found: dict[str, float] = {}
    for labels, seconds in await site.metric("llm_d_epp_plugin_duration_seconds_sum"):
        name = labels.get("plugin_name", "")
        found[name] = found.get(name, 0.0) + seconds
    return found


async def _run(site: Site) -> list[Finding]:
    lag, ticks = await quantile(site, "fairlead_loop_lag_seconds", _QUANTILE)
    found = []
    if ticks >= _ENOUGH and lag > _LATE:
        found.append(CPU.at("", f"{_QUANTILE:.0%} of its timers fire within {lag:g} s"))
    slowest, decisions = await quantile(site, "llm_d_epp_scheduler_e2e_duration_seconds", _QUANTILE)
    if decisions < _ENOUGH or slowest <= _SLOW:
        return found
    evidence = f"{_QUANTILE:.0%} of {decisions:g} decisions within {slowest:g} s"
    sums = await _sums(site)
    worst = max(sums, key=lambda name: sums[name], default="")
    if worst and sums[worst] > _MOST * sum(sums.values()):
        return [*found, PLUGIN.at(worst, f"{evidence}; {sums[worst]:.1f} s of {sum(sums.values()):.1f} s in plugins")]
    return found or [SLOW.at("", evidence)]


CHECK = Check(
    name="scheduling",
    about="decisions are made quickly",
    kinds=(CPU, PLUGIN, SLOW),
    run=_run,
    needs=("admin",),
)
