"""Filters for endpoints that have room: by queue, KV memory, requests in flight, or any metric."""

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import numpy as np
from pydantic import Field

from fairlead.core.columns import BoolColumn, FloatColumn, top
from fairlead.core.policy import Cycle, Stage
from fairlead.core.request import Request
from fairlead.core.view import FleetView
from fairlead.plugins.columns import below, metric_column, unless_all
from fairlead.plugins.params import Params, Plain, Seconds


class QueueDepthParams(Params):
    max_queue_length: int = Field(
        default=50,
        ge=1,
        description="Keep while fewer requests wait. Recommended: 80 % of the engine's max_num_seqs (256 → 200).",
    )


class QueueDepth(Plain[QueueDepthParams]):
    """Keeps endpoints with fewer than `maxQueueLength` effectively waiting requests (scraped, corrected by our own)."""

    type = "queue-depth"
    Params = QueueDepthParams
    stage = Stage.LOAD

    def keep(self, request: Request, fleet: FleetView, cycle: Cycle) -> BoolColumn | None:
        return below(fleet.table.queue, self._params.max_queue_length)


#: Above this utilisation an endpoint is kept but demoted, down to half its score at the limit.
SOFT_LIMIT = 0.85


class MemoryPressureParams(Params):
    max_kv_utilization: float = Field(
        default=0.95,
        validation_alias="maxKVUtilization",
        serialization_alias="maxKVUtilization",
        gt=0,
        le=1,
        description="Keep while the share of KV blocks in use is lower.",
    )
    check_interval: Seconds = Field(
        default=5.0, description="A reading older than this no longer speaks against an endpoint."
    )


class MemoryPressure(Plain[MemoryPressureParams]):
    """Keeps endpoints with KV utilisation below `maxKVUtilization`; above 0.85 the score is lowered."""

    type = "memory-pressure"
    Params = MemoryPressureParams
    stage = Stage.LOAD

    def keep(self, request: Request, fleet: FleetView, cycle: Cycle) -> BoolColumn | None:
        mask = below(fleet.table.kv, self._params.max_kv_utilization)
        oldest = cycle.now - self._params.check_interval
        return None if mask is None else unless_all(mask | (fleet.table.sampled_at < oldest))

    def demote(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None:
        kv, limit = fleet.table.kv, self._params.max_kv_utilization
        soft = min(SOFT_LIMIT, limit)
        if top(kv) <= soft:
            return None
        return 1.0 - 0.5 * np.clip((kv - soft) / max(limit - soft, 1e-9), 0.0, 1.0)


class ConcurrencyParams(Params):
    max_concurrency: float = Field(default=100.0, gt=0, description="Requests in flight that an endpoint takes.")
    max_token_concurrency: float = Field(
        default=1_000_000.0, gt=0, description="Uncached prompt tokens before their first token that it takes."
    )
    concurrency_mode: Literal["requests", "tokens", "hybrid"] = Field(
        default="requests", description="What counts; `hybrid` is the higher of both."
    )
    headroom: float = Field(default=0.0, ge=0, description="How far past 1 an endpoint may be and still be kept.")


class Concurrency(Plain[ConcurrencyParams]):
    """Keeps endpoints with in-flight / maximum < 1 + headroom.

    Source: the reference picker's concurrency-detector, used as a filter.
    """

    type = "concurrency"
    Params = ConcurrencyParams
    stage = Stage.LOAD

    def keep(self, request: Request, fleet: FleetView, cycle: Cycle) -> BoolColumn | None:
        return below(self._ratio(fleet), 1.0 + self._params.headroom)

    def _ratio(self, fleet: FleetView) -> FloatColumn:
        requests = fleet.table.inflight / self._params.max_concurrency
        if self._params.concurrency_mode == "requests":
            return requests
        tokens = fleet.table.pending_tokens / self._params.max_token_concurrency
        return tokens if self._params.concurrency_mode == "tokens" else requests.clip(min=tokens)


_KEEP: Final[Mapping[str, Callable[[Any, float], BoolColumn]]] = {
    "LessThan": np.less,
    "LessThanOrEqual": np.less_equal,
    "GreaterThan": np.greater,
    "GreaterThanOrEqual": np.greater_equal,
    "Equal": np.equal,
    "NotEqual": np.not_equal,
}


class MetricLimitParams(Params):
    metric: str = Field(min_length=1, description="A name under `metrics.engines.NAME.extra`, or a built-in column.")
    operator: Literal["LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual", "Equal", "NotEqual"] = Field(
        description="How to compare."
    )
    value: float = Field(description="What to compare with.")
    keep_missing: bool = Field(default=True, description="Keep endpoints that do not report the metric.")


class MetricLimit(Plain[MetricLimitParams]):
    """Keeps endpoints where `metric operator value` holds. If none is left, the fallback chooses, as for load."""

    type = "metric-limit"
    Params = MetricLimitParams
    stage = Stage.LOAD

    def keep(self, request: Request, fleet: FleetView, cycle: Cycle) -> BoolColumn | None:
        params = self._params
        values = metric_column(fleet, params.metric)
        holds = _KEEP[params.operator](values, params.value)
        return unless_all(np.where(np.isnan(values), params.keep_missing, holds))
