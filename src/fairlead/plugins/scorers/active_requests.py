"""`active-requests`: prefer endpoints that have few of our own requests in flight."""

from typing import Annotated

import numpy as np
from msgspec import Meta

from fairlead.fleet.columns import FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.params import Params
from fairlead.schedule.cycle import Cycle
from fairlead.schedule.framework import CANDIDATES


class ActiveRequestsParams(Params, frozen=True, kw_only=True):
    #: With so many requests an endpoint still counts as idle.
    idle_threshold: Annotated[int, Meta(ge=0)] = 0
    #: The best score of an endpoint that is not idle.
    max_busy_score: Annotated[float, Meta(ge=0, le=1)] = 1.0


class ActiveRequests:
    """1 where idle, else (most - count) / most · `maxBusyScore`, over the candidates.

    Source: the reference picker's active-request-scorer. Counts are leases: charged at the decision, freed at the end.
    """

    type = "active-requests"
    Params = ActiveRequestsParams
    weight = 1.0

    def __init__(self, params: ActiveRequestsParams, name: str = type) -> None:
        self.name = name
        self._idle = params.idle_threshold
        self._busy = params.max_busy_score

    def score(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | None:
        count, candidates = fleet.table.inflight, cycle.get(CANDIDATES)
        among = count if candidates is None else count[candidates]
        most = float(among.max()) if len(among) else 0.0
        if most <= self._idle:
            return None if candidates is None else np.ones(len(count))
        busy = np.clip((most - count) / most, 0.0, 1.0) * self._busy
        return np.where(count <= self._idle, 1.0, busy)
