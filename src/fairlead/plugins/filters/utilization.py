"""`utilization`: avoid endpoints whose queue or KV memory is past a set point."""

from typing import Annotated

import numpy as np
from msgspec import Meta

from fairlead.fleet.columns import BoolColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.masks import unless_all
from fairlead.plugins.params import Params
from fairlead.schedule.cycle import Cycle


class UtilizationParams(Params, frozen=True, kw_only=True):
    #: Waiting requests that count as saturated.
    queue_depth_threshold: Annotated[float, Meta(gt=0)] = 5.0
    #: Share of KV blocks in use that counts as saturated.
    kv_cache_util_threshold: Annotated[float, Meta(gt=0, le=1)] = 0.8
    #: How far past 1 an endpoint may be and still be kept.
    headroom: Annotated[float, Meta(ge=0)] = 0.0


class Utilization:
    """Keeps endpoints with max(waiting / threshold, kv / threshold) < 1 + headroom; all when none is below.

    Source: the reference picker's utilization-detector, used as a filter.
    """

    type = "utilization"
    Params = UtilizationParams
    hard = False
    availability = True

    def __init__(self, params: UtilizationParams, name: str = type) -> None:
        self.name = name
        self._queue = params.queue_depth_threshold * (1.0 + params.headroom)
        self._kv = params.kv_cache_util_threshold * (1.0 + params.headroom)

    def keep(self, request: Request, fleet: Fleet, cycle: Cycle) -> BoolColumn | None:
        table = fleet.table
        mask: BoolColumn = np.logical_and(table.queue < self._queue, table.kv < self._kv)
        return unless_all(mask)
