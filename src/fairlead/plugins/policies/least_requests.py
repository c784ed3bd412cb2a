"""`least-requests`: the endpoint with the fewest requests in flight, whatever they cost."""

from fairlead.fleet.columns import FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.policies.ranked import Ranked
from fairlead.schedule.cycle import Cycle


class LeastRequests(Ranked):
    """Waiting + running."""

    type = "least-requests"

    def cost(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn:
        return fleet.table.queue + fleet.table.active
