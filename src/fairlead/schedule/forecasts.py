"""What the fleet's predictor expects of a request everywhere, computed once per decision."""

from fairlead.fleet.columns import scalar
from fairlead.fleet.fleet import Fleet
from fairlead.fleet.predictor import Estimate
from fairlead.model.request import Request
from fairlead.schedule.cycle import Cycle, Key
from fairlead.schedule.framework import prefix_share

#: Terms of the latency model over all slots.
ESTIMATE: Key[Estimate] = Key("estimate")


def estimate(request: Request, fleet: Fleet, cycle: Cycle) -> Estimate:
    """The columns of `ESTIMATE`; those of several slots in milliseconds."""
    return cycle.once(ESTIMATE, _estimate, request, fleet, cycle)


def _estimate(request: Request, fleet: Fleet, cycle: Cycle) -> Estimate:
    share = prefix_share(request, fleet, cycle)
    hit = None if share is None else share * scalar(request.prompt_tokens)
    return fleet.predictor.estimate(request.prompt_tokens, hit, cycle.now)
