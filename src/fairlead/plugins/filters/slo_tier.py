"""`slo-tier`: among endpoints that will keep the request's SLOs, as long as there are any."""

from typing import Annotated

import numpy as np
from msgspec import Meta

from fairlead.fleet.columns import BoolColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.latency import headroom
from fairlead.plugins.masks import unless_all
from fairlead.plugins.params import Params
from fairlead.schedule.cycle import Cycle


class SloTierParams(Params, frozen=True, kw_only=True):
    #: So often those that will miss it are taken all the same, so that predictions are put to the test.
    epsilon_explore_neg: Annotated[float, Meta(ge=0, le=1)] = 0.01


class SloTier:
    """Keeps endpoints whose predicted latency is within the SLOs; all when none is. Silent without an SLO.

    Source: the reference picker's slo-headroom-tier-filter; there services beside the picker predict, here the fleet's
    own predictor.
    """

    type = "slo-tier"
    Params = SloTierParams
    hard = False
    availability = True

    def __init__(self, params: SloTierParams, name: str = type) -> None:
        self.name = name
        self._params = params

    def keep(self, request: Request, fleet: Fleet, cycle: Cycle) -> BoolColumn | None:
        if request.slo_ttft_ms <= 0 and request.slo_tpot_ms <= 0:
            return None
        left = fleet.table.alive if cycle.left is None else cycle.left
        keeps = headroom(request, fleet, cycle, 1.0, 1.0)[1] & left
        count = np.count_nonzero(keeps)
        if not count or count == np.count_nonzero(left):
            return None
        if self._params.epsilon_explore_neg and cycle.rng.random() < self._params.epsilon_explore_neg:
            return unless_all(~keeps)
        return keeps
