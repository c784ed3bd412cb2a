"""The reference's flow control → ours. It is on with the feature gate `flowControl` only; what the document does not
name has our defaults, not the reference's: its detector stops the pool when scrapes fail.

Rules
* `priorityBands` become bands with limits and policies of their own, `defaultPriorityBand` what holds for all others.
  An entry that leaves something out has the general default of it, not that of `defaultPriorityBand`, as there.
* What cannot be said here is noted where it stands, by its name.
"""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from fairlead.config.builtins import Kind
from fairlead.config.epp import parameters as ref
from fairlead.config.epp.document import Band, FlowControl
from fairlead.config.epp.instances import Instance
from fairlead.config.problems import Report
from fairlead.config.queueing import BandSettings, Evicting, Shedding
from fairlead.config.schema import LONGEST_WAIT, BandSpec, FlowSettings, FlowSpec, PluginSpec, QueueLimit, QueueLimits
from fairlead.plugins.ceilings import HoldbackCeilingParams, StaticCeilingParams
from fairlead.plugins.fairness import DeficitFairness
from fairlead.plugins.orderings import LeastWorkOrdering
from fairlead.plugins.params import NoParams
from fairlead.plugins.saturations import ConcurrencyDetectorParams, UtilizationDetectorParams
from fairlead.wire.problem import Place, shorten

AT: Place = ("flowControl",)
ADMITTER = "probabilistic-admitter"
OURS = f"what is not named has Fairlead's defaults: {DeficitFairness.type}, {LeastWorkOrdering.type}, own ledger"
NO_TEMPLATE = (
    "a template for all priorities below 0 cannot be said here: they have what defaultPriorityBand says, unless "
    "priorityBands names their priority; say it there for each that is in use"
)
EVICTS = "requests below priority 0 make way for higher ones that have waited for {} ms, whatever the saturation is"
OTHER_LEVEL = "the pool's saturation is that of flowControl.saturationDetector: its own thresholds are not used"
#: The reference's type → the kind of ours, and its type.
_TYPES: dict[str, tuple[Kind, str]] = {
    "global-strict-fairness-policy": ("fairness", "global-strict"),
    "round-robin-fairness-policy": ("fairness", "round-robin"),
    "program-aware-fairness": ("fairness", "least-attained-service"),
    "fcfs-ordering-policy": ("ordering", "fcfs"),
    "edf-ordering-policy": ("ordering", "edf"),
    "slo-deadline-ordering-policy": ("ordering", "edf"),
    "static-usage-limit-policy": ("ceiling", "static-usage-limit-policy"),
    "priority-holdback-policy": ("ceiling", "priority-holdback-policy"),
    "soft-reflective-ceiling-policy": ("ceiling", "soft-reflective-ceiling-policy"),
    "utilization-detector": ("saturation", "utilization-detector"),
    "concurrency-detector": ("saturation", "concurrency-detector"),
}


class NamedBand(Struct):
    """A band of the document, and the plugins that it refers to."""

    place: Place
    band: Band = Band()
    fairness: Instance | None = None
    ordering: Instance | None = None

    def says(self) -> tuple[Any, ...]:
        return self.band.max_requests, self.band.max_bytes, _name(self.fairness), _name(self.ordering)


class Named(Struct):
    """The plugins that the document refers to. `bands`: those with a priority."""

    default: NamedBand
    negative: NamedBand | None = None
    bands: Sequence[NamedBand] = ()
    saturation: Instance | None = None
    limit: Instance | None = None
    admitter: Instance | None = None


def flow_spec(flow: FlowControl, named: Named, report: Report) -> FlowSpec:
    """What it says in our words; what has no counterpart is noted."""
    report.note(AT, OURS)
    if named.negative is not None and named.negative.says() != named.default.says():
        report.note(named.negative.place, NO_TEMPLATE)
    ttl = _ttl(flow.default_request_ttl, 60.0)
    total = QueueLimit(requests=flow.max_requests or None, bytes=flow.max_bytes or None)
    eviction = Evicting() if flow.enable_eviction else None
    if eviction is not None:
        report.note((*AT, "enableEviction"), EVICTS.format(round(eviction.after * 1e3)))
    settings = FlowSettings(
        ttl=ttl,
        no_endpoint_ttl=_ttl(flow.no_endpoint_request_ttl, ttl),
        limits=QueueLimits(total=total, band=_limit(named.default.band)),
        early_shedding=_shedding(named, report),
        eviction=eviction,
    )
    default = named.default
    return FlowSpec(
        settings=settings,
        fairness=_spec("fairness", default.fairness, report),
        ordering=_spec("ordering", default.ordering, report),
        saturation=_spec("saturation", named.saturation, report),
        ceiling=_spec("ceiling", named.limit, report),
        bands=_bands(named, report),
    )


def without_flow(admitter: Instance, report: Report) -> None:
    """The gate is off, and nothing refuses sheddable requests early."""
    report.note(admitter.place, f"{ADMITTER}: requests are not shed by it: that takes the feature gate flowControl")


def _bands(named: Named, report: Report) -> tuple[BandSpec, ...]:
    default, found = named.default, dict[int, BandSpec]()
    for one in named.bands:
        priority = one.band.priority
        if priority in found:
            report.add((*one.place, "priority"), f"the band of priority {priority} is there already")
        fairness, ordering = one.fairness, one.ordering
        found[priority] = BandSpec(
            settings=BandSettings(priority=priority, limits=_limit(one.band)),
            fairness=_spec("fairness", fairness, report) or _general("fairness", default.fairness, one, report),
            ordering=_spec("ordering", ordering, report) or _general("ordering", default.ordering, one, report),
        )
    return tuple(found.values())


def _general(kind: Kind, default: Instance | None, band: NamedBand, report: Report) -> PluginSpec | None:
    """What a band has that names none; `None` = that of all bands, which is the same."""
    if default is None:
        return None
    cls: Any = DeficitFairness if kind == "fairness" else LeastWorkOrdering
    return PluginSpec(
        kind=kind, type=cls.type, name=cls.type, parameters=cls.Params(), path=report.path((*band.place, kind))
    )


def _limit(band: Band) -> QueueLimit:
    """0 = the default."""
    usual = QueueLimits().band
    return QueueLimit(requests=band.max_requests or usual.requests, bytes=band.max_bytes or usual.bytes)


def _shedding(named: Named, report: Report) -> Shedding | None:
    admitter = named.admitter
    if admitter is None:
        return None
    given: ref.ProbabilisticAdmitter = admitter.parameters
    detector = named.saturation.parameters if named.saturation is not None else None
    if (
        not isinstance(detector, ref.UtilizationDetector)
        or detector.queue_depth_threshold != given.queue_depth_threshold
        or detector.kv_cache_util_threshold != given.kv_cache_util_threshold
    ):
        report.note(admitter.place, f"{ADMITTER}: {OTHER_LEVEL}")
    return Shedding(power=given.power, scale=given.k)


def _name(one: Instance | None) -> str:
    return one.name if one is not None else ""


def _ttl(said: float | None, default: float) -> float:
    """0 = as long as a gateway waits."""
    return default if said is None else min(said or LONGEST_WAIT, LONGEST_WAIT)


def _spec(kind: Kind, one: Instance | None, report: Report) -> PluginSpec | None:
    if one is None:
        return None
    found, type = _TYPES.get(one.type, ("", one.type))
    if found != kind:
        hint = f"types of that kind: {', '.join(name for name, (its, _) in _TYPES.items() if its == kind)}"
        report.add(one.place, f"'{shorten(one.name)}' ({one.type}) is referred to as {kind} of flow control", hint)
        return None
    return PluginSpec(
        kind=kind,
        type=type,
        name=one.name,
        parameters=_parameters(one.parameters),
        path=report.path(one.place),
        lines=one.lines,
        stands_for=one.type,
    )


def _parameters(given: Any) -> Any:
    """Of our plugin in its stead."""
    if isinstance(given, ref.UtilizationDetector):
        return UtilizationDetectorParams(
            queue_depth_threshold=given.queue_depth_threshold,
            kv_cache_util_threshold=given.kv_cache_util_threshold,
        )
    if isinstance(given, ref.ConcurrencyDetector):
        return ConcurrencyDetectorParams(
            max_concurrency=given.max_concurrency,
            max_token_concurrency=given.max_token_concurrency,
            concurrency_mode=given.concurrency_mode,
        )
    if isinstance(given, ref.StaticLimit):
        return StaticCeilingParams(threshold=given.threshold)
    if isinstance(given, ref.Holdback):
        return HoldbackCeilingParams(
            min_ceiling=given.min_ceiling, max_ceiling=given.max_ceiling, shape=given.shape, domain=given.domain
        )
    return NoParams()
