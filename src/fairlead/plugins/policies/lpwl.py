"""`lpwl`: least prefill work left. Pending uncached prompt tokens plus those of this request."""

from fairlead.fleet.columns import FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.policies.ranked import Ranked
from fairlead.schedule.cycle import Cycle
from fairlead.schedule.framework import prefix_share


class Lpwl(Ranked):
    """argmin pending + max(1, prompt - hit)."""

    type = "lpwl"

    def cost(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn:
        return fleet.table.pending_tokens + uncached(request, fleet, cycle)


def uncached(request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | float:
    """Prompt tokens that each endpoint would have to compute, at least 1."""
    share = prefix_share(request, fleet, cycle)
    tokens = float(max(request.prompt_tokens, 1))
    return tokens if share is None else (tokens - share * tokens).clip(1.0)
