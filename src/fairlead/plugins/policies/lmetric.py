"""`lmetric`: prefill work times batch size, without any parameter."""

from fairlead.fleet.columns import FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.policies.lpwl import uncached
from fairlead.plugins.policies.ranked import Ranked
from fairlead.schedule.cycle import Cycle


class Lmetric(Ranked):
    """argmin (pending + uncached) · (batch + 1). The + 1 keeps an idle endpoint from costing nothing whatever it must
    compute."""

    type = "lmetric"

    def cost(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn:
        table = fleet.table
        return (table.pending_tokens + uncached(request, fleet, cycle)) * (table.queue + table.active + 1.0)
