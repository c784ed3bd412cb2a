"""`health`: avoid endpoints that do not answer, as long as others do."""

from typing import Annotated

import numpy as np
from msgspec import Meta

from fairlead.fleet.columns import BoolColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.params import Params
from fairlead.schedule.cycle import Cycle


class HealthParams(Params, frozen=True, kw_only=True):
    #: Failed scrapes in a row that make an endpoint suspect.
    failed_scrapes: Annotated[int, Meta(ge=1)] = 3


class Health:
    """Removes endpoints that failed several scrapes, or several responses moments ago.

    It never removes the last ones: when all look ill, the fault is more likely ours, and a pool must not halt over it.
    It is about availability, not load: where load filters leave nothing, the fallback still avoids ill endpoints.
    """

    type = "health"
    Params = HealthParams
    hard = False
    steady = True
    availability = True

    def __init__(self, params: HealthParams, name: str = type) -> None:
        self.name = name
        self._failures = params.failed_scrapes

    def keep(self, request: Request, fleet: Fleet, cycle: Cycle) -> BoolColumn | None:
        table = fleet.table
        if not table.troubled:
            return None  # by far the most frequent case; an endpoint with no error is not ejected
        well = (table.failures < self._failures) & (table.ejected_until <= cycle.now)
        healthy = np.count_nonzero(well & table.alive)
        if healthy == table.count or not healthy:
            return None
        return well
