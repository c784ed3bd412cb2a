"""`cost-model`, the default: sends a request to the endpoint where it costs the least time, its own and all others'.

    J_i = TTFT_i + interference·(B_i + waiting)·P_i + decode·steps·S_i + memory·price of the memory it takes there
          + pauses + patience - reuse

J is in milliseconds. Its terms, and the learned speeds behind them, are those of the cost kernel: `fairlead.core.cost`.
The price of memory keeps a prompt from being copied to an endpoint where it evicts what other requests need. `pauses`
keeps requests away from endpoints that get long prompts. `patience` bounds how long a request waits for the sake of
others. `reuse` copies cached beginnings to endpoints that have far fewer requests.

Candidates within 10 % of the lowest cost count as equal, because forecasts are no more exact. The one with the most
free KV cache is chosen, so that prefixes spread over all caches.
With an SLO (request headers), the best endpoint that keeps it is chosen. A batch request (priority < 0) takes the one
that keeps it most tightly without more work than elsewhere, and leaves the fast ones to others. If no endpoint keeps
the SLO, the lowest J decides.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import compress
from random import Random
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fairlead.core.columns import BoolColumn, FloatColumn
from fairlead.core.cost import DECODE, FEW, Terms, Weights, cost_of_one, parts, weighed
from fairlead.core.policy import Answer, Context, Cycle, Filter, Picked, Refused, loading, prefix_share
from fairlead.core.prefix import AS_FREE
from fairlead.core.profile import estimate
from fairlead.core.records import Trace
from fairlead.core.request import Request
from fairlead.core.view import FleetView
from fairlead.plugins.params import Params
from fairlead.plugins.pickers import MaxScore, MaxScoreParams
from fairlead.plugins.policies.ranked import Ranked

Weight = Annotated[float, Field(ge=0, le=1000)]
#: If at least this many requests wait at every endpoint, more replicas are needed: 80 % of vLLM's batch of 256.
OVERLOADED = 200.0
#: A prefill counts as about the least if it exceeds the least one by at most this share plus this many milliseconds.
LITTLE, LITTLE_MS = 0.1, 5.0
#: Costs that differ by at most this share count as the same.
_SAME = 0.02


class CostModelParams(Params):
    """Weights of the terms. The defaults suit all hardware, because every term is a time. Ablations set one to 0."""

    interference: Weight = Field(
        default=0.1, description="Weight of the delay that a prefill causes to running answers."
    )
    decode: Weight = Field(default=DECODE, description="Weight of the time of the answer's own tokens.")
    memory: Weight = Field(default=1.0, description="Weight of the KV memory that the request takes.")
    near_tie: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="Costs within this share of the best count as equal: then free cache decides.",
    )


class CostModel(Ranked):
    """The lowest cost in milliseconds, within the request's SLO if it has one."""

    type = "cost-model"
    Params = CostModelParams
    milliseconds = True

    def __init__(self, params: CostModelParams | None = None, name: str = type, filters: Sequence[Filter] = ()) -> None:
        params = params or CostModelParams()
        super().__init__(params, name, filters, WithinSlo(params.near_tie))
        self.weights = Weights(params.interference, params.decode, params.memory)
        self._nearly = 1.0 + params.near_tie
        #: Whether `choose` may take the fast path: no subclass or filter changes costs, no plugin observes picks.
        self._direct = type(self).cost is CostModel.cost and not self._demoters and not self._observers

    def cost(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn:
        if loading(request, fleet, cycle) is not None:
            return weighed(estimate(request, fleet, cycle), self.weights, fleet)
        share = prefix_share(request, fleet, cycle)
        return cost_of_one(float(request.prompt_tokens), share, self.weights, fleet, cycle.now)

    def costs(
        self, requests: Sequence[Request], shares: FloatColumn, terms: Terms, fleet: FleetView, context: Context
    ) -> FloatColumn:
        if type(self).cost is not CostModel.cost:  # a subclass has its own cost, for one request at a time
            return super().costs(requests, shares, terms, fleet, context)
        return weighed(terms, self.weights, fleet)

    def terms(self, request: Request, fleet: FleetView, cycle: Cycle) -> list[tuple[str, FloatColumn]]:
        """The parts of `cost` in milliseconds, for people: their sum is the cost."""
        listed, collisions = parts(estimate(request, fleet, cycle), self.weights, fleet), fleet.table.collisions
        known = prefix_share(request, fleet, cycle) is not None or loading(request, fleet, cycle) is not None
        return listed if known or collisions is None else [*listed, ("collisions", collisions)]

    def choose(self, request: Request, fleet: FleetView, context: Context) -> Answer:
        table = fleet.table
        if (
            self._direct
            and not (request.slo_ttft_ms or request.slo_tpot_ms or table.troubled)
            and request.subset is None
            and table.version == self._version
            and table is self._table
            and (request.target or request.model) in self._passed
        ):
            # The same result as below, without calling plugins that would change nothing.
            share = fleet.match(request)
            costs = cost_of_one(request.prompt_tokens, share, self.weights, fleet, context.now)
            count = len(costs)
            if count > FEW:
                slot = self._lowest(costs, fleet, context.rng)
                pick = Picked(slot)
            else:  # few endpoints: plain numbers are faster, because each operation of numpy has cold caches
                cost_at = costs.tolist().__getitem__
                order = sorted(range(count), key=cost_at)
                slot = first = order[0]
                ties = bisect_right(order, cost_at(first) * self._nearly, key=cost_at)
                if ties > 1:
                    slot = _most_free_cache(order[:ties], cost_at, fleet, context.rng)
                pick = Picked(slot)
                if count > 1:
                    pick.fallback_slot = order[slot == first]
            if share is not None:
                pick.hit_share = share.item(slot)
                pick.best_share = share.item(share.argmax())
            if context.trace:
                scores = -costs
                pick.trace = Trace(table.ids, [], [("cost", 1.0, scores)], scores, None, "picked", share)
        else:
            answer = super().choose(request, fleet, context)
            if isinstance(answer, Refused):
                return answer
            pick = answer
        if table.queue.item(pick.slot) >= OVERLOADED:
            pick.overloaded = bool((table.queue[table.alive] >= OVERLOADED).all())
        return pick

    def _lowest(self, costs: FloatColumn, fleet: FleetView, rng: Random) -> int:
        """The slot with the lowest cost, or one whose cost counts as equal."""
        least = costs.item(costs.argmin())
        ties = (costs <= least * self._nearly).nonzero()[0]
        return _one_of_equals(ties, costs, fleet, rng) if len(ties) > 1 else int(ties[0])


def _one_of_equals(slots: NDArray[np.intp], costs: FloatColumn, fleet: FleetView, rng: Random) -> int:
    """One of several slots whose costs count as equal. Of many, only a few are considered, drawn at random."""
    order = slots[costs[slots].argsort(kind="stable")].tolist()
    if len(order) > FEW:
        order = [order[rank] for rank in sorted(rng.sample(range(len(order)), FEW))]
    return _most_free_cache(order, costs.item, fleet, rng)


def _most_free_cache(order: list[int], cost_at: Callable[[int], float], fleet: FleetView, rng: Random) -> int:
    """The slot with the most free KV cache. `order`: slots, the lowest cost first. If several have about as much free,
    one of those that cost about the least is drawn, so that several schedulers do not herd."""
    free = fleet.table.free_cache.item
    enough = max(map(free, order)) - AS_FREE
    order = list(compress(order, map(enough.__le__, map(free, order))))
    if len(order) == 1:
        return order[0]
    least = cost_at(order[0])
    return order[int(rng.random() * bisect_right(order, least + abs(least) * _SAME, key=cost_at))]


def _tightest(keeps: BoolColumn, work: FloatColumn, ttft: FloatColumn) -> int:
    """Of the endpoints that keep the SLO with about the least prefill work, the one with the longest TTFT. An endpoint
    with more work would have to compute what others have cached: it would be busier, and hold one more copy."""
    own = np.where(keeps, work, np.inf)
    little = own <= own.min() * (1.0 + LITTLE) + LITTLE_MS
    return int(np.where(little, ttft, -np.inf).argmax())


class WithinSlo(MaxScore):
    """The lowest cost among those that keep the SLO; for batch requests the tightest fit, see `_tightest`."""

    def __init__(self, near_tie: float) -> None:
        super().__init__(MaxScoreParams(near_tie=near_tie))

    def pick(self, request: Request, fleet: FleetView, totals: FloatColumn, cycle: Cycle) -> int:
        if request.slo_ttft_ms > 0.0 or request.slo_tpot_ms > 0.0:
            terms = estimate(request, fleet, cycle)
            keeps = totals > -np.inf
            ttft = terms.ttft + fleet.predictor.memory_wait(terms)
            if request.slo_ttft_ms > 0.0:
                keeps &= ttft <= request.slo_ttft_ms
            if request.slo_tpot_ms > 0.0:
                keeps &= fleet.predictor.tpot_kappa * terms.step <= request.slo_tpot_ms
            if np.count_nonzero(keeps):
                if request.priority < 0:
                    return _tightest(keeps, terms.prefill, ttft)
                totals = np.where(keeps, totals, -np.inf)
        return super().pick(request, fleet, totals, cycle)

    def one_of(self, ties: NDArray[np.intp], totals: FloatColumn, fleet: FleetView, cycle: Cycle) -> int:
        return _one_of_equals(ties, -totals, fleet, cycle.rng)
