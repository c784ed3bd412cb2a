"""What latency to expect, in milliseconds per endpoint."""

from fairlead.fleet.columns import BoolColumn, FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.schedule.cycle import Cycle
from fairlead.schedule.forecasts import estimate


def backlog_ms(fleet: Fleet, throughput: float) -> FloatColumn:
    """Until the uncached prompt tokens in flight are through, at so many tokens per second."""
    return fleet.table.pending_tokens * (1000.0 / throughput)


def ttft_ms(request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn:
    """Time to first token, by the fleet's predictor."""
    terms = estimate(request, fleet, cycle)
    return terms.ttft + fleet.predictor.memory_wait(terms.used)


def tpot_ms(request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn:
    """Time per output token, by the fleet's predictor."""
    return fleet.predictor.tpot_kappa * estimate(request, fleet, cycle).step


def headroom(request: Request, fleet: Fleet, cycle: Cycle, ttft: float, tpot: float) -> tuple[FloatColumn, BoolColumn]:
    """(how much of its SLOs an endpoint leaves, which endpoints keep all of them).

    The former is a weighted sum over the SLOs that the request has, of which there must be one, each as a share of the
    SLO: 1 = answers at once, 0 = just in time, below 0 = too late.
    """
    left: FloatColumn | float = 0.0
    keeps: BoolColumn = fleet.table.alive
    for slo, weight, predict in ((request.slo_ttft_ms, ttft, ttft_ms), (request.slo_tpot_ms, tpot, tpot_ms)):
        if slo > 0:
            share = 1.0 - predict(request, fleet, cycle) / slo
            left = left + weight * share
            keeps = keeps & (share > 0)
    assert not isinstance(left, float)
    return left, keeps
