"""Saturation of the pool as one number, by the reference's names and formulas; see `fairlead.admit.gates`."""

from math import inf
from typing import Annotated, Literal

from msgspec import Meta

from fairlead.admit.gates import Concurrency, Utilization
from fairlead.fleet.fleet import Fleet
from fairlead.plugins.params import Params

Positive = Annotated[float, Meta(gt=0)]


class UtilizationDetectorParams(Params, frozen=True, kw_only=True):
    queue_depth_threshold: Positive = 5.0
    kv_cache_util_threshold: Annotated[float, Meta(gt=0, le=1)] = 0.8


class UtilizationDetector:
    """Mean of max(waiting / threshold, KV usage / threshold) over endpoints with fresh metrics."""

    type = "utilization-detector"
    Params = UtilizationDetectorParams

    def __init__(self, params: UtilizationDetectorParams | None = None, name: str = type) -> None:
        params = params or UtilizationDetectorParams()
        self.name = name
        self._level = Utilization(params.queue_depth_threshold, params.kv_cache_util_threshold)

    def level(self, fleet: Fleet, now: float) -> float:
        return self._level(fleet, now)


class ConcurrencyDetectorParams(Params, frozen=True, kw_only=True):
    #: Per endpoint.
    max_concurrency: Positive = 100.0
    max_token_concurrency: Positive = 1e6
    concurrency_mode: Literal["requests", "tokens", "hybrid"] = "requests"


class ConcurrencyDetector:
    """Mean over endpoints of our own requests, prompt tokens or the larger of both, as a share of what is allowed."""

    type = "concurrency-detector"
    Params = ConcurrencyDetectorParams

    def __init__(self, params: ConcurrencyDetectorParams | None = None, name: str = type) -> None:
        params = params or ConcurrencyDetectorParams()
        self.name = name
        mode = params.concurrency_mode
        requests = params.max_concurrency if mode != "tokens" else inf
        tokens = params.max_token_concurrency if mode != "requests" else inf
        self._level = Concurrency(requests, tokens)

    def level(self, fleet: Fleet, now: float) -> float:
        return self._level(fleet, now)
