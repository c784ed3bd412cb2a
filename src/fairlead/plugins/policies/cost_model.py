"""`cost-model`, the default: send a request where it costs the least time, its own and everybody's. In milliseconds.

    J_i = TTFT_i + interference·B_i·P_i + decode·steps·S_i + memory·full_i·(1 + waiting_i + 0.3·B_i)·hold·u_i/capacity_i

TTFT_i, P_i and S_i (time to first token, own prefill, a decode step), and the learned speeds behind them:
`fairlead.fleet.predictor`.

* `interference·B_i·P_i`: every one of the B_i running answers pauses while this prompt is computed.
* `decode·steps·S_i`: the answer takes `steps` steps (learned), each as long as the batch there makes it.
* The last term is the price of memory, charged only where there is too little. The prompt takes u_i new tokens of the
  cache for `hold` ms (learned): the share u_i/capacity of what the endpoint can hold in that time. All that wait there
  wait that much longer, and so do those who come before it is given back: by Little's law about as many as run there
  now, but they can still go elsewhere, so each counts 0.3. This is what keeps a prompt from being copied to where it
  pushes out what others need. `full_i` rises from 0 at 75 % of the capacity to 1 at 95 %, for the running answers grow.

The candidates within 2 % of the best are equal, and one is drawn: several schedulers that see the same do not herd.
With an SLO (request headers) the best of those that keep it; a batch request (priority < 0) takes the one that keeps
it most tightly without more work than elsewhere, and leaves the fast ones to others. Where none keeps it, the best J.
"""

from collections.abc import Sequence
from math import inf
from typing import Annotated

import numpy as np
from msgspec import Meta

from fairlead.fleet.columns import BoolColumn, FloatColumn, scalar
from fairlead.fleet.fleet import Fleet
from fairlead.fleet.predictor import FULL_FROM, FULL_SLOPE, PASSING
from fairlead.model.decision import Trace
from fairlead.model.request import Request
from fairlead.plugins.params import Params
from fairlead.plugins.pickers.max_score import MaxScore, MaxScoreParams
from fairlead.plugins.policies.cost_of_few import FEW, CostOfFew
from fairlead.plugins.policies.ranked import Ranked
from fairlead.schedule.cycle import Context, Cycle
from fairlead.schedule.forecasts import estimate
from fairlead.schedule.framework import Filter, Pick, prefix_share

Weight = Annotated[float, Meta(ge=0, le=1000)]
#: Where at least this many requests wait at every endpoint, more replicas are wanted: 80 % of vLLM's batch of 256.
OVERLOADED = 200.0
#: Own prefill within this share, and so many milliseconds, of the least is about the least.
LITTLE, LITTLE_MS = 0.1, 5.0
_ZERO, _ONE, _PASSING = scalar(0.0), scalar(1.0), scalar(PASSING)


class CostModelParams(Params, frozen=True, kw_only=True):
    """The defaults suit all hardware: what is weighed is time in any case. Ablations set one to 0."""

    interference: Weight = 0.1
    decode: Weight = 0.03
    memory: Weight = 1.0
    #: Costs within this share of the best count as equal.
    near_tie: Annotated[float, Meta(ge=0, lt=1)] = 0.02


class CostModel(Ranked):
    """The lowest J, within the request's SLO if it has one."""

    type = "cost-model"
    Params = CostModelParams

    def __init__(self, params: CostModelParams | None = None, name: str = type, filters: Sequence[Filter] = ()) -> None:
        params = params or CostModelParams()
        super().__init__(params, name, filters, WithinSlo(params.near_tie))
        self._interference = scalar(params.interference)
        self._decode = params.decode
        self._memory = params.memory
        self._few = CostOfFew(params.interference, params.decode, params.memory, params.near_tie)
        own = type(self).cost is CostModel.cost and type(self).memory_price is CostModel.memory_price
        #: It does what `CostOfFew` does: no subclass and no filter changes costs.
        self._plain = own and not self._demoters

    def cost(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn:
        table, terms = fleet.table, estimate(request, fleet, cycle)
        decode = scalar(self._decode * fleet.predictor.answer_steps)
        cost = terms.ttft + terms.prefill * (self._interference * table.active) + decode * terms.step
        if terms.used[terms.used.argmax()] > FULL_FROM:
            cost = cost + self.memory_price(terms.used, terms.uncached, fleet)
        return cost

    def terms(self, request: Request, fleet: Fleet, cycle: Cycle) -> list[tuple[str, FloatColumn]]:
        """The parts of `cost` in milliseconds, for people: their sum is the cost."""
        table, terms, predictor = fleet.table, estimate(request, fleet, cycle), fleet.predictor
        prefill, queue, steps = predictor.parts(terms, cycle.now)
        memory = np.zeros(len(table))
        if terms.used[terms.used.argmax()] > FULL_FROM:
            memory = self.memory_price(terms.used, terms.uncached, fleet)
        return [
            ("prefill", prefill),
            ("queue", queue),
            ("steps", steps),
            ("interference", terms.prefill * (self._interference * table.active)),
            ("decode", scalar(self._decode * predictor.answer_steps) * terms.step),
            ("memory", memory),
        ]

    def choose(self, requests: Sequence[Request], fleet: Fleet, context: Context) -> list[Pick]:
        picks = []
        queue = fleet.table.queue
        for request in requests:
            pick = self._choose(request, fleet, context)
            if pick.slot >= 0 and queue[pick.slot] >= OVERLOADED:
                pick.overloaded = bool((queue[fleet.table.alive] >= OVERLOADED).all())
            picks.append(pick)
        return picks

    def _best(self, kept: BoolColumn | None, request: Request, fleet: Fleet, cycle: Cycle, trace: Trace | None) -> int:
        if len(fleet.table) > FEW or not self._plain or request.slo_ttft_ms > 0.0 or request.slo_tpot_ms > 0.0:
            return super()._best(kept, request, fleet, cycle, trace)
        share = prefix_share(request, fleet, cycle)
        totals = scores = self._few.scores(request.prompt_tokens, share, fleet, cycle.now)
        if kept is not None:
            totals = [score if keep else -inf for score, keep in zip(scores, kept.tolist(), strict=True)]
        if trace is not None:
            trace.scorers.append(("cost", 1.0, scores))
            trace.total, trace.candidates = totals, kept
        return self._few.pick(totals, cycle.rng)

    def memory_price(self, used: FloatColumn, tokens: FloatColumn, fleet: Fleet) -> FloatColumn:
        """Milliseconds that others wait because `tokens` more are held there, which makes `used` of the capacity."""
        table = fleet.table
        full = np.minimum(np.maximum((used - FULL_FROM) * FULL_SLOPE, _ZERO), _ONE)
        delayed = table.queue + _PASSING * table.active + _ONE
        price: FloatColumn = (
            full * delayed * (scalar(self._memory * fleet.predictor.hold_ms) * tokens * table.per_capacity)
        )
        return price


def _tightest(keeps: BoolColumn, work: FloatColumn, ttft: FloatColumn) -> int:
    """The longest TTFT among those that keep the SLO with about the least work: who has to compute the prompt first
    only because it is busy would be busier for it, and hold one more copy."""
    own = np.where(keeps, work, np.inf)
    little = own <= own.min() * (1.0 + LITTLE) + LITTLE_MS
    return int(np.where(little, ttft, -np.inf).argmax())


class WithinSlo(MaxScore):
    """The lowest cost among those that keep the SLO; for batch requests the tightest fit, see `_tightest`."""

    def __init__(self, near_tie: float) -> None:
        super().__init__(MaxScoreParams(near_tie=near_tie))

    def pick(self, request: Request, fleet: Fleet, totals: FloatColumn, cycle: Cycle) -> int:
        if request.slo_ttft_ms > 0.0 or request.slo_tpot_ms > 0.0:
            terms = estimate(request, fleet, cycle)
            keeps = totals > -np.inf
            ttft = terms.ttft + fleet.predictor.memory_wait(terms.used)
            if request.slo_ttft_ms > 0.0:
                keeps &= ttft <= request.slo_ttft_ms
            if request.slo_tpot_ms > 0.0:
                keeps &= fleet.predictor.tpot_kappa * terms.step <= request.slo_tpot_ms
            if np.count_nonzero(keeps):
                if request.priority < 0:
                    return _tightest(keeps, terms.prefill, ttft)
                totals = np.where(keeps, totals, -np.inf)
        return super().pick(request, fleet, totals, cycle)
