"""Service-level objectives of a whole run: whether it holds them, and whether it is already certain to miss them.

`ttft_p95=2s` says that 95 % of the requests have their first token within two seconds. A request that was shed or
failed never has its first token, so it counts as a miss: refusing more requests does not improve the result. A request
that its client cancelled is judged by what had happened until then.
"""

import re
from collections.abc import Iterator, Sequence
from math import ceil, inf

from msgspec import Struct

from fairlead.lab.simulator.simulation import NOT_OVER
from fairlead.lab.simulator.world import Job
from fairlead.plugins.params import typed_duration

TTFT, TPOT, E2E, FAILED = "ttft", "tpot", "e2e", "failed"
_NAME = re.compile(r"(ttft|tpot|e2e)_p(\d{1,2}(?:\.\d+)?)")
#: The share of requests that may fail if the objective does not set one.
MAY_FAIL = 0.01
_EXPECTED = "expected e.g. ttft_p95=2s,tpot_p95=50ms,e2e_p99=30s,failed=1%"


class Objective(Struct, frozen=True):
    """`share` of the requests stay within `limit` milliseconds or, for `failed`, are served."""

    what: str
    share: float
    limit: float = 0.0

    @property
    def name(self) -> str:
        return FAILED if self.what == FAILED else f"{self.what}_p{self.share * 100:g}"

    def __str__(self) -> str:
        return f"{self.name}={self.shown(1.0 - self.share if self.what == FAILED else self.limit)}"

    def shown(self, value: float) -> str:
        """A measured value of this objective as text for people."""
        if self.what == FAILED:
            return f"{value:.3g}" if value == inf else f"{value * 100:.3g}%"
        if value == inf:
            return "never"
        return f"{value * 1e-3:,.3g}s" if value >= 1000.0 else f"{value:.3g}ms"

    def may_miss(self, requests: int) -> int:
        """How many out of `requests` may miss the objective."""
        return requests - ceil(self.share * requests - 1e-9)

    def measured(self, jobs: Sequence[Job]) -> float:
        """The measured value: milliseconds, infinite if too many requests never got that far; for `failed`, a share."""
        if self.what == FAILED:
            return sum(map(_lost, jobs)) / len(jobs) if jobs else 0.0
        values = sorted(value for job in jobs if (value := _value(job, self.what)) is not None)
        return values[len(values) - self.may_miss(len(values)) - 1] if values else 0.0

    def held(self, value: float) -> bool:
        return value <= (1.0 - self.share + 1e-9 if self.what == FAILED else self.limit)

    def missed(self, job: Job, now: float) -> bool:
        """Whether the request is certain to miss, whatever happens next. `now`: kernel seconds."""
        if self.what == FAILED or _lost(job):
            return _lost(job)
        if job.status == "waiting":
            return _so_far(job, self.what, now) > self.limit
        value = _value(job, self.what)
        return value is not None and value > self.limit


def objectives(text: str) -> tuple[Objective, ...]:
    """Parse `ttft_p95=2s,tpot_p95=50ms`; `failed=1%` is added if it is missing. Raises `ValueError`."""
    parsed: dict[str, Objective] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        match = _NAME.fullmatch(name)
        if not equals or (match is None and name != FAILED):
            raise ValueError(f"{part!r} is not an objective; {_EXPECTED}")
        made = _failing(part, value) if match is None else _within(match[1], float(match[2]), part, value)
        if made.name in parsed:
            raise ValueError(f"{made.name} is given twice")
        parsed[made.name] = made
    if not set(parsed) - {FAILED}:
        raise ValueError(f"no objective for a latency in {text!r}; {_EXPECTED}")
    parsed.setdefault(FAILED, Objective(FAILED, 1.0 - MAY_FAIL))
    return tuple(parsed.values())


def _within(what: str, percent: float, part: str, value: str) -> Objective:
    try:
        limit = typed_duration(value) * 1e3
    except ValueError as error:
        raise ValueError(f"{part!r}: {error}") from None
    if not 0.0 < percent < 100.0 or limit <= 0.0:
        raise ValueError(f"{part!r}: percentiles are between p1 and p99.9, limits above 0")
    return Objective(what, percent / 100.0, limit)


def _failing(part: str, value: str) -> Objective:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(%?)", value)
    lost = float(match[1]) / (100.0 if match[2] else 1.0) if match else 2.0
    if lost >= 1.0:
        raise ValueError(f"{part!r}: expected a share such as 1% or 0.01")
    return Objective(FAILED, 1.0 - lost)


def hopeless(wanted: Sequence[Objective], jobs: Sequence[Job], now: float) -> bool:
    """Whether at least one of the objectives is certain to be missed."""
    return any(_beyond(objective, jobs, now) for objective in wanted)


def _beyond(objective: Objective, jobs: Sequence[Job], now: float) -> bool:
    left = objective.may_miss(len(jobs))
    for job in jobs:
        # A job that has not arrived has no request yet.
        if job.request is not None and objective.missed(job, now):
            left -= 1
            if left < 0:
                return True
    return False


def goodput(wanted: Sequence[Objective], jobs: Sequence[Job]) -> float:
    """The share of requests within every limit. If there are several limits of one kind, only the largest counts.
    Requests that their clients cancelled are left out."""
    limits = loosest(wanted)
    stayed = [job for job in jobs if job.status != "cancelled"]
    good = sum(all((_value(job, what) or 0.0) <= limit for what, limit in limits) for job in stayed)
    return good / len(stayed) if stayed else 0.0


def loosest(wanted: Sequence[Objective]) -> tuple[tuple[str, float], ...]:
    """(what, milliseconds): beyond this limit, a request is a miss for every objective of its kind."""
    limits: dict[str, float] = {}
    for objective in wanted:
        if objective.what != FAILED:
            limits[objective.what] = max(objective.limit, limits.get(objective.what, 0.0))
    return tuple(limits.items())


def decided_after_s(wanted: Sequence[Objective], scenario_records: Iterator[tuple[float, int]]) -> float:
    """Seconds after the start by which it is certain for every request whether it is within all limits; infinite if
    there is no such bound. Records are (arrival in seconds, output tokens)."""
    limits = dict(loosest(wanted))
    if E2E not in limits and TTFT not in limits:
        return inf
    ttft, tpot = limits.get(TTFT, 0.0), limits.get(TPOT, 0.0)
    return max(
        (arrival_s + max(limits.get(E2E, 0.0), ttft + tpot * out) * 1e-3 for arrival_s, out in scenario_records),
        default=0.0,
    )


def _lost(job: Job) -> bool:
    return job.status in ("shed", "failed") and job.reason != NOT_OVER


def _value(job: Job, what: str) -> float | None:
    """The value of a request in milliseconds: infinite if the request failed; `None` if the request does not count for
    this kind of latency."""
    if _lost(job):
        return inf
    if what == TTFT:
        return job.ttft_ms if job.first_at >= 0 else job.e2e_ms if job.status == "cancelled" else inf
    if job.status == "cancelled" or (what == TPOT and job.record.out_tokens < 2):
        return None
    if job.status != "done":
        return inf
    return job.tpot_ms if what == TPOT else job.e2e_ms


def _so_far(job: Job, what: str, now: float) -> float:
    """The least value, in milliseconds, that a request in progress can end with."""
    if what == TTFT:
        return ((job.first_at if job.first_at >= 0 else now) - job.arrived) * 1e3
    if what == E2E:
        return (now - job.arrived) * 1e3
    if job.first_at < 0 or job.record.out_tokens < 2:
        return 0.0
    return (now - job.first_at) * 1e3 / (job.record.out_tokens - 1)
