"""`running-requests`: prefer endpoints with the smallest running batch of all candidates."""

from fairlead.fleet.columns import FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.params import NoParams
from fairlead.plugins.ranges import lower_is_better
from fairlead.schedule.cycle import Cycle
from fairlead.schedule.framework import CANDIDATES


class RunningRequests:
    """(most - running) / (most - fewest), 1 when all run alike."""

    type = "running-requests"
    Params = NoParams
    weight = 1.0

    def __init__(self, params: NoParams, name: str = type) -> None:
        self.name = name

    def score(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | None:
        return lower_is_better(fleet.table.active, cycle.get(CANDIDATES))
