"""`prefill-decode`: decides whether another endpoint should compute the prompt, and chooses the pair, by cost.

With J as in `cost-model`, in milliseconds:

    alone   = min over d of J_d                                           d computes the prompt itself
    pair    = min over p of A_p + fixed + min over d ≠ p of D_d
    A_p     = TTFT_p + interference·B_p·P_p + memory at p of u_p tokens   prefill at p
    D_d     = per token·u_d + 1.5·S_d + decode·(steps·S_d + pauses) + memory at d of u_d tokens
              + kappa·(wait for a sequence slot and for the adapter at d) + distance of d
                                                                          transfer of what d lacks, then decode at d

The two minima are independent, so finding the best pair takes two passes over columns, not one per pair. If both are
at one endpoint, the next best is taken for one of the two stages. A pair is taken only if it saves `margin` of the
cost, because a transfer can fail. If only one of both ways is expected to keep the latency objective of the request,
that way is taken.

d must have a role that decodes (or no role), p a role that prefills. An endpoint with both abilities can be d or p.
In a pool without pure prefill endpoints no request is split, and the plain cost
model decides. The same holds while no prefill endpoint is healthy: the decode endpoint would ask one in vain, and the
request would fail.
"""

from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np
from msgspec.structs import replace
from pydantic import Field

from fairlead.core.apis import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES
from fairlead.core.columns import FloatColumn, scalar
from fairlead.core.cost import Terms, Weights, memory_price
from fairlead.core.endpoint import Endpoint
from fairlead.core.errors import PluginError
from fairlead.core.policy import Answer, Context, Cycle, Filter, Picked, Policy, Refused
from fairlead.core.profile import estimate, runner_up
from fairlead.core.records import SplitCosts
from fairlead.core.request import Request
from fairlead.core.view import FleetView
from fairlead.plugins.filters.ability import Role, RoleParams
from fairlead.plugins.filters.availability import Health
from fairlead.plugins.guarding import is_a
from fairlead.plugins.policies.cost_model import CostModel, CostModelParams

Millis = Annotated[float, Field(ge=0)]


#: APIs whose requests a decoding endpoint hands to another one for their prompts. The rest it computes itself
#: (llm-d's routing sidecar). Not `RESPONSES_STORED`: the other one does not have what is stored.
SPLIT = frozenset((CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE))


class PrefillDecodeParams(CostModelParams):
    transfer_ms: Millis = Field(default=30.0, description="Cost of moving a prompt's KV cache: the fixed part.")
    transfer_ms_per_1k_tokens: Millis = Field(
        default=10.0, description="The part per 1,000 tokens. 10 ms are 26 GB/s for a 32B model."
    )
    margin: float = Field(default=0.05, ge=0, lt=1, description="Share of the cost that a pair must save.")
    always: bool = Field(
        default=False,
        description="Take the best pair even if it saves nothing, where the next two parameters allow it.",
    )
    non_cached_tokens: int = Field(
        default=0,
        ge=0,
        description="Split only prompts with at least this many tokens that the decoding endpoint lacks.",
    )
    prompt_tokens: int = Field(default=0, ge=0, description="Split only prompts of at least this many tokens.")

    def may_split(self, api: str, prompt_tokens: int, lacking: float) -> bool:
        """Whether such a prompt may be split. `api`: empty = not known. `lacking`: its tokens that must be computed."""
        enough = prompt_tokens >= self.prompt_tokens and lacking >= self.non_cached_tokens
        return enough and (not api or api in SPLIT)


class PrefillDecode:
    """Splits a request over a prefill and a decode endpoint if that costs less than one endpoint for both."""

    type = "prefill-decode"
    Params = PrefillDecodeParams
    takes_filters = True
    milliseconds = True

    def __init__(
        self, params: PrefillDecodeParams | None = None, name: str = type, filters: Sequence[Filter] = ()
    ) -> None:
        self.name = name
        self._params = params = params or PrefillDecodeParams()
        self._alone = CostModel(params, name, filters)
        self.weights = self._alone.weights
        shared = [plugin for plugin in filters if not is_a(plugin, Role)]
        prefills = [Role(RoleParams(stage="prefill")), *shared]
        self._health = [plugin for plugin in shared if is_a(plugin, Health)]
        self._prefill = PrefillPart(params, name, prefills)
        self._decode = DecodePart(params, name, filters)

    def report_to(self, on_plugin_error: Callable[[PluginError], None] | None) -> None:
        """Set the callback for failures of filters."""
        for policy in (self._alone, self._prefill, self._decode):
            policy.report_to(on_plugin_error)

    def asks(self) -> tuple[Policy]:
        """The one whose filters the others have too."""
        return (self._alone,)

    def costs(
        self, requests: Sequence[Request], shares: FloatColumn, terms: Terms, fleet: FleetView, context: Context
    ) -> FloatColumn:
        """Return the costs of waiting requests, which are not split."""
        return self._alone.costs(requests, shares, terms, fleet, context)

    def choose(self, request: Request, fleet: FleetView, context: Context) -> Answer:
        if fleet.table.keeping(("role", "not prefill only"), _decodes) is None:
            return self._alone.choose(request, fleet, context)
        traced = Context(context.now, context.rng)  # the totals are read from traces
        alone = self._alone.choose(request, fleet, traced)
        if self._params.may_split(request.api, request.prompt_tokens, request.prompt_tokens):
            alone = self._compared(request, alone, fleet, traced)
        if not context.trace:
            alone.trace = None
        return alone

    def _compared(self, request: Request, alone: Answer, fleet: FleetView, context: Context) -> Answer:
        """Return the best pair if it is worth it, else `alone`."""
        terms = estimate(request, fleet, Cycle(context))
        handover: FloatColumn = self._decode.handover(terms) + self._params.transfer_ms
        decode = self._decode.choose(replace(request, slo_ttft_ms=0.0), fleet, context)
        if not isinstance(decode, Picked):
            return alone
        within = request.slo_ttft_ms and max(request.slo_ttft_ms - float(handover[decode.slot]), 1e-9)
        prefill = self._prefill.choose(replace(request, slo_ttft_ms=within, slo_tpot_ms=0.0), fleet, context)
        if not (isinstance(prefill, Picked) and _apart(prefill, decode, fleet)):
            return alone
        lacking = request.prompt_tokens * (1.0 - decode.hit_share)
        splittable = self._params.may_split(request.api, request.prompt_tokens, lacking)
        if not (splittable and self._healthy(prefill.slot, request, fleet, context)):
            return alone
        decode.handover_ms = float(handover[decode.slot])
        pair_ms, alone_ms = _cost(prefill) + self._params.transfer_ms + _cost(decode), _cost(alone)
        taken = pair_ms < (1.0 - self._params.margin) * alone_ms
        kept, alone_kept = (_keeps(request, *ends, terms, fleet) for ends in ((prefill, decode), (alone, alone)))
        taken = self._params.always or (taken if kept is alone_kept else kept)
        decisive = kept is not alone_kept and taken is kept
        name = fleet.table.ids[prefill.slot]
        compared = SplitCosts(_finite(alone_ms), _finite(pair_ms), name, taken, by_objective=decisive)
        if taken:
            decode.prefill_slot, decode.fallback_slot = prefill.slot, -1
            decode.hit_share, decode.best_share = prefill.hit_share, prefill.best_share
            decode.overloaded |= prefill.overloaded
            alone = decode
        if alone.trace is not None:
            alone.trace.split = compared
        return alone

    def _healthy(self, slot: int, request: Request, fleet: FleetView, context: Context) -> bool:
        """Whether no health filter removes the slot. `choose` ignores a health filter that would leave no endpoint."""
        masks = (plugin.keep(request, fleet, Cycle(context)) for plugin in self._health)
        return all(mask is None or bool(mask[slot]) for mask in masks)


class PrefillPart(CostModel):
    """The cost A_p. No answer is decoded here: the memory is free again once the prompt is handed over."""

    def __init__(self, params: PrefillDecodeParams, name: str, filters: Sequence[Filter]) -> None:
        super().__init__(params, name, filters)
        self.weights = Weights(params.interference, 0.0, params.memory)


class DecodePart(CostModel):
    """The cost D_d: moving what d lacks, then decoding there."""

    def __init__(self, params: PrefillDecodeParams, name: str, filters: Sequence[Filter]) -> None:
        super().__init__(params, name, filters)
        self._per_token = scalar(params.transfer_ms_per_1k_tokens * 1e-3)

    def handover(self, terms: Terms) -> FloatColumn:
        """Return the milliseconds from the computed prompt to the first token, without the fixed part."""
        waits = terms.kappa * (terms.slots + terms.loading)
        handover: FloatColumn = self._per_token * terms.uncached + 1.5 * terms.step + waits
        return handover

    def cost(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn:
        terms, weights = estimate(request, fleet, cycle), self.weights
        answer: FloatColumn = weights.decode * (fleet.predictor.answer_steps * terms.step + terms.pauses)
        costs: FloatColumn = self.handover(terms) + answer
        memory, table = memory_price(terms, weights, fleet), fleet.table
        for more in memory, table.distance_ms if table.distant else None:
            if more is not None:
                costs = costs + more
        return costs


def _decodes(_: int, endpoint: Endpoint) -> bool:
    return not endpoint.only_prefills


def _apart(prefill: Picked, decode: Picked, fleet: FleetView) -> bool:
    """If both picks are the same endpoint, move the one that loses less to its second best. Return whether they are
    two endpoints then."""
    if prefill.slot == decode.slot:
        moved = [(pick, slot) for pick in (prefill, decode) if (slot := runner_up(pick, fleet.table)) >= 0]
        if moved:
            pick, slot = min(moved, key=lambda each: _cost(each[0], each[1]) - _cost(each[0]))
            held = pick.trace.held if pick.trace is not None else None
            pick.slot, pick.hit_share = slot, 0.0 if held is None else float(held[slot])
    return prefill.slot != decode.slot


def _keeps(request: Request, first: Answer, then: Answer, terms: Terms, fleet: FleetView) -> bool:
    """Whether the latency objective is expected to be kept if `first` computes the prompt and `then` the answer."""
    if not (request.slo_ttft_ms or request.slo_tpot_ms):
        return True
    if not (isinstance(first, Picked) and isinstance(then, Picked)):
        return False
    learned, slot = fleet.predictor, then.slot
    ttft = float((terms.ttft + learned.memory_wait(terms))[first.slot]) + max(then.handover_ms, 0.0)
    tpot = float(learned.tpot_kappa[slot] * terms.step[slot])
    return ttft <= (request.slo_ttft_ms or np.inf) and tpot <= (request.slo_tpot_ms or np.inf)


def _cost(pick: Answer, slot: int = -1) -> float:
    """Return the cost of a pick, or of another slot, from its trace; infinite if it has none (a refusal, or the
    fallback in overload)."""
    trace = pick.trace
    if isinstance(pick, Refused) or trace is None or trace.total is None:
        return float(np.inf)
    return -float(trace.total[pick.slot if slot < 0 else slot])


def _finite(cost: float) -> float | None:
    return cost if np.isfinite(cost) else None
