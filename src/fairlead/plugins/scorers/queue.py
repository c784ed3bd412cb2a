"""`queue`: prefer endpoints with the fewest waiting requests of all candidates."""

from fairlead.fleet.columns import FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.params import NoParams
from fairlead.plugins.ranges import lower_is_better
from fairlead.schedule.cycle import Cycle
from fairlead.schedule.framework import CANDIDATES


class Queue:
    """(most - waiting) / (most - fewest), 1 when all wait alike. One request more or less can be the whole range."""

    type = "queue"
    Params = NoParams
    weight = 1.0

    def __init__(self, params: NoParams, name: str = type) -> None:
        self.name = name

    def score(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | None:
        return lower_is_better(fleet.table.queue, cycle.get(CANDIDATES))
