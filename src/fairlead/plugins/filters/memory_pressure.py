"""`memory-pressure`: avoid endpoints whose KV cache is nearly full, and prefer others before it is."""

from typing import Annotated

import numpy as np
from msgspec import Meta, field

from fairlead.fleet.columns import BoolColumn, FloatColumn, top
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.durations import Duration, seconds
from fairlead.plugins.masks import below, unless_all
from fairlead.plugins.params import Params
from fairlead.schedule.cycle import Cycle

#: From this utilisation on an endpoint is kept but demoted, down to half its score at the limit.
SOFT_LIMIT = 0.85


class MemoryPressureParams(Params, frozen=True, kw_only=True):
    #: Keep while the share of KV blocks in use is lower.
    max_kv_utilization: Annotated[float, Meta(gt=0, le=1)] = field(default=0.95, name="maxKVUtilization")
    #: A reading older than this no longer speaks against an endpoint.
    check_interval: Duration = "5s"


class MemoryPressure:
    """Keeps endpoints with KV utilisation below `maxKVUtilization`; above 0.85 the score is lowered."""

    type = "memory-pressure"
    Params = MemoryPressureParams
    hard = False

    def __init__(self, params: MemoryPressureParams, name: str = type) -> None:
        self.name = name
        self._limit = params.max_kv_utilization
        self._soft = min(SOFT_LIMIT, self._limit)
        self._max_age = seconds(params.check_interval)

    def keep(self, request: Request, fleet: Fleet, cycle: Cycle) -> BoolColumn | None:
        mask = below(fleet.table.kv, self._limit)
        return None if mask is None else unless_all(mask | (fleet.table.sampled_at < cycle.now - self._max_age))

    def demote(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | None:
        kv = fleet.table.kv
        if top(kv) <= self._soft:
            return None
        return 1.0 - 0.5 * np.clip((kv - self._soft) / max(self._limit - self._soft, 1e-9), 0.0, 1.0)
