"""The flow-control plugins of a configuration: fairness, orderings, ceilings and saturation."""

from collections.abc import Sequence
from math import inf
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fairlead.core.fairness import RoundRobin, StartTimeFair, Strict
from fairlead.core.flow import Waiting
from fairlead.core.gates import mean
from fairlead.core.view import FleetView
from fairlead.plugins.params import NoParams, Params, Plain


class GlobalStrict(Plain[NoParams], Strict):
    """One queue per band, without fairness between tenants."""

    type = "global-strict"


class RoundRobinFairness(Plain[NoParams], RoundRobin):
    """One request of each flow in turn."""

    type = "round-robin"


class StartTimeFairness(Plain[NoParams], StartTimeFair):
    """The flow that got the least work goes first. The default."""

    type = "start-time-fair"


# Starvation bounds of orderings if requests keep arriving:
# * `fcfs`: a request waits only for requests that arrived before it.
# * `edf`: a request with a deadline is overtaken only by earlier deadlines, so by no request that arrives later than
#   its deadline less the shortest time to live. Requests without a deadline follow all others, in `fcfs` order.
# * `least-work`: a request of w tokens is overtaken only by those that arrive within w / `ageing` seconds after it.


class Fcfs(Plain[NoParams]):
    """First come, first served."""

    type = "fcfs"

    def key(self, waiting: Waiting) -> float:
        return waiting.since


class EarliestDeadline(Plain[NoParams]):
    """Earliest deadline first: the end of the time to live, or the client's TTFT objective."""

    type = "edf"

    def key(self, waiting: Waiting) -> float:
        slo = waiting.request.slo_ttft_ms
        return min(waiting.deadline, waiting.request.arrived + slo / 1000.0 if slo > 0 else inf)


class LeastWorkParams(Params):
    ageing: float = Field(default=1000.0, gt=0, description="Uncached prompt tokens forgiven per second of waiting.")


class LeastWork(Plain[LeastWorkParams]):
    """The least predicted work first, with ageing. The default."""

    type = "least-work"
    Params = LeastWorkParams

    def key(self, waiting: Waiting) -> float:
        # The same order as by work - ageing · (now - since), but the key does not change while the request waits.
        return float(waiting.work + self._params.ageing * waiting.since)


# Usage ceilings: the saturation of the pool below which a band is served. Above it, room is kept for higher bands.
#
# The saturation is that of the gate: 1 = its set point. `c_i` is the ceiling of band i of N; band 0 is the highest. The
# formulas are those of the reference picker:
#
# * static     c_i = threshold
# * holdback   c_i = max - i·(max - min)/(N - 1), or by the priorities' values instead of their ranks
# * reflective c_i = 1 - i·saturation/(N - 1). A band above its ceiling is not stopped but slowed down: it is served at
#              one of `round(saturation/(1 - saturation))` calls of `allowed`. The highest band is never held back.
#
# Holding back is preventive: the room is wasted if no request of a higher band comes. The alternative is eviction.

Ceiling = Annotated[float, Field(gt=0, le=100)]


class StaticCeilingParams(Params):
    threshold: Ceiling = Field(default=1.0, description="Bands are served while the pool's saturation is below this.")


class StaticCeiling(Plain[StaticCeilingParams]):
    """The same ceiling for all bands."""

    type = "static-usage-limit-policy"
    Params = StaticCeilingParams

    def allowed(self, level: float, priorities: Sequence[int]) -> list[bool]:
        return [level < self._params.threshold] * len(priorities)


class HoldbackCeilingParams(Params):
    min_ceiling: Ceiling = Field(description="Ceiling of the lowest band.")
    max_ceiling: Ceiling = Field(default=1.0, description="Ceiling of the highest band.")
    shape: Literal["linear"] = Field(
        default="linear", description="How ceilings fall from the highest band to the lowest."
    )
    domain: Literal["rank", "value"] = Field(
        default="rank", description="Whether they fall by the ranks of the bands or by their priorities (`value`)."
    )


class HoldbackCeiling(Plain[HoldbackCeilingParams]):
    """A lower ceiling for lower bands, so that the rest stays free for higher bands."""

    type = "priority-holdback-policy"
    Params = HoldbackCeilingParams

    def __init__(self, params: HoldbackCeilingParams, name: str = type) -> None:
        super().__init__(params, name)
        if params.min_ceiling > params.max_ceiling:
            raise ValueError("the ceilings must satisfy 0 < lowest <= highest")

    def allowed(self, level: float, priorities: Sequence[int]) -> list[bool]:
        return [level < ceiling for ceiling in self.ceilings(priorities)]

    def ceilings(self, priorities: Sequence[int]) -> list[float]:
        """The ceiling of each band, in the order of `priorities`. A single band has the highest ceiling."""
        highest, span = self._params.max_ceiling, self._params.max_ceiling - self._params.min_ceiling
        if self._params.domain == "rank" or priorities[0] == priorities[-1]:
            last = max(len(priorities) - 1, 1)
            return [highest - rank * span / last for rank in range(len(priorities))]
        top, spread = priorities[0], priorities[0] - priorities[-1]
        return [highest - (top - priority) * span / spread for priority in priorities]


#: A slowed band is served at least once in this many calls of `allowed`.
_LONGEST = 1000


class ReflectiveCeiling(Plain[NoParams]):
    """The fuller the pool, the less often lower bands are served."""

    type = "soft-reflective-ceiling-policy"

    def __init__(self, params: NoParams | None = None, name: str = type) -> None:
        super().__init__(params, name)
        self._looks = 0

    def allowed(self, level: float, priorities: Sequence[int]) -> list[bool]:
        last = max(len(priorities) - 1, 1)
        self._looks += 1
        period = _LONGEST if level >= 1.0 else min(max(round(level / (1.0 - level)), 1), _LONGEST)
        turn = self._looks % period == 0
        return [rank == 0 or turn or level < 1.0 - rank * level / last for rank in range(len(priorities))]


Positive = Annotated[float, Field(gt=0)]


class UtilizationDetectorParams(Params):
    queue_depth_threshold: Positive = Field(default=5.0, description="Waiting requests at which an endpoint is full.")
    kv_cache_util_threshold: float = Field(
        default=0.8, gt=0, le=1, description="Share of KV blocks in use at which an endpoint is full."
    )


class UtilizationDetector(Plain[UtilizationDetectorParams]):
    """Mean of max(waiting / threshold, KV usage / threshold) over endpoints with fresh metrics."""

    type = "utilization-detector"
    Params = UtilizationDetectorParams

    def level(self, fleet: FleetView, now: float) -> float:
        table, params = fleet.table, self._params
        # In the reference picker, endpoints without fresh metrics count as full, so failing scrapes stop the pool.
        fresh = table.alive & (now - table.sampled_at <= fleet.staleness)
        full = np.maximum(table.queue / params.queue_depth_threshold, table.kv / params.kv_cache_util_threshold)
        return mean(full, fresh)


class ConcurrencyDetectorParams(Params):
    max_concurrency: Positive = Field(default=100.0, description="Requests in flight, per endpoint.")
    max_token_concurrency: Positive = Field(
        default=1e6, description="Uncached prompt tokens before their first token, per endpoint."
    )
    concurrency_mode: Literal["requests", "tokens", "hybrid"] = Field(
        default="requests", description="What counts; `hybrid` is the larger of both."
    )


class ConcurrencyDetector(Plain[ConcurrencyDetectorParams]):
    """Mean over endpoints of our requests, uncached prompt tokens or the larger of both, as a share of the maximum."""

    type = "concurrency-detector"
    Params = ConcurrencyDetectorParams

    def level(self, fleet: FleetView, now: float) -> float:
        table, params = fleet.table, self._params
        requests, tokens = table.inflight / params.max_concurrency, table.pending_tokens / params.max_token_concurrency
        if params.concurrency_mode == "hybrid":
            return mean(np.maximum(requests, tokens), table.alive)
        return mean(requests if params.concurrency_mode == "requests" else tokens, table.alive)
