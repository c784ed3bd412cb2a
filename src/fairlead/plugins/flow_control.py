"""The flow-control plugins of a configuration: fairness, orderings, ceilings and saturation. `fairlead.core.fairness`
and `fairlead.core.gates` implement them.
"""

from math import inf
from typing import Annotated, Literal

from pydantic import Field

from fairlead.core.fairness import (
    EarliestDeadline,
    Fcfs,
    LeastWork,
    RoundRobin,
    StartTimeFair,
    Strict,
)
from fairlead.core.gates import Concurrency, Holdback, Reflective, Static, Utilization
from fairlead.core.view import FleetView
from fairlead.plugins.params import Params, Plain


class GlobalStrict(Plain, Strict):
    """One queue per band, without fairness between tenants."""

    type = "global-strict"


class RoundRobinFairness(Plain, RoundRobin):
    """One request of each flow in turn."""

    type = "round-robin"


class StartTimeFairness(Plain, StartTimeFair):
    """The flow that got the least work goes first. The default."""

    type = "start-time-fair"


class FirstCome(Plain, Fcfs):
    """First come, first served."""

    type = "fcfs"


class Deadline(Plain, EarliestDeadline):
    """Earliest deadline first: the end of the time to live, or the client's TTFT objective."""

    type = "edf"


class LeastWorkParams(Params):
    ageing: float = Field(default=1000.0, gt=0, description="Uncached prompt tokens forgiven per second of waiting.")


class LeastWorkOrdering(LeastWork):
    """The least predicted work first, with ageing. The default."""

    type = "least-work"
    Params = LeastWorkParams

    def __init__(self, params: LeastWorkParams | None = None, name: str = type) -> None:
        super().__init__((params or LeastWorkParams()).ageing)
        self.name = name


Ceiling = Annotated[float, Field(gt=0, le=100)]


class StaticCeilingParams(Params):
    threshold: Ceiling = Field(default=1.0, description="Bands are served while the pool's saturation is below this.")


class StaticCeiling(Static):
    """The same ceiling for all bands."""

    type = "static-usage-limit-policy"
    Params = StaticCeilingParams

    def __init__(self, params: StaticCeilingParams | None = None, name: str = type) -> None:
        super().__init__((params or StaticCeilingParams()).threshold)
        self.name = name


class HoldbackCeilingParams(Params):
    min_ceiling: Ceiling = Field(description="Ceiling of the lowest band.")
    max_ceiling: Ceiling = Field(default=1.0, description="Ceiling of the highest band.")
    shape: Literal["linear"] = Field(
        default="linear", description="How ceilings fall from the highest band to the lowest."
    )
    domain: Literal["rank", "value"] = Field(
        default="rank", description="Whether they fall by the ranks of the bands or by their priorities (`value`)."
    )


class HoldbackCeiling(Holdback):
    """A lower ceiling for lower bands, so that the rest stays free for higher bands."""

    type = "priority-holdback-policy"
    Params = HoldbackCeilingParams

    def __init__(self, params: HoldbackCeilingParams, name: str = type) -> None:
        super().__init__(params.min_ceiling, params.max_ceiling, params.domain)
        self.name = name


class ReflectiveCeiling(Plain, Reflective):
    """The fuller the pool, the less often lower bands are served."""

    type = "soft-reflective-ceiling-policy"


Positive = Annotated[float, Field(gt=0)]


class UtilizationDetectorParams(Params):
    queue_depth_threshold: Positive = Field(default=5.0, description="Waiting requests at which an endpoint is full.")
    kv_cache_util_threshold: float = Field(
        default=0.8, gt=0, le=1, description="Share of KV blocks in use at which it is full."
    )


class UtilizationDetector:
    """Mean of max(waiting / threshold, KV usage / threshold) over endpoints with fresh metrics."""

    type = "utilization-detector"
    Params = UtilizationDetectorParams

    def __init__(self, params: UtilizationDetectorParams | None = None, name: str = type) -> None:
        params = params or UtilizationDetectorParams()
        self.name = name
        self._level = Utilization(params.queue_depth_threshold, params.kv_cache_util_threshold)

    def level(self, fleet: FleetView, now: float) -> float:
        return self._level(fleet, now)


class ConcurrencyDetectorParams(Params):
    max_concurrency: Positive = Field(default=100.0, description="Requests in flight, per endpoint.")
    max_token_concurrency: Positive = Field(default=1e6, description="Prompt tokens in flight, per endpoint.")
    concurrency_mode: Literal["requests", "tokens", "hybrid"] = Field(
        default="requests", description="What counts; `hybrid` is the larger of both."
    )


class ConcurrencyDetector:
    """Mean over endpoints of our own requests, prompt tokens or the larger of both, as a share of the maximum."""

    type = "concurrency-detector"
    Params = ConcurrencyDetectorParams

    def __init__(self, params: ConcurrencyDetectorParams | None = None, name: str = type) -> None:
        params = params or ConcurrencyDetectorParams()
        self.name = name
        mode = params.concurrency_mode
        requests = params.max_concurrency if mode != "tokens" else inf
        tokens = params.max_token_concurrency if mode != "requests" else inf
        self._level = Concurrency(requests, tokens)

    def level(self, fleet: FleetView, now: float) -> float:
        return self._level(fleet, now)
