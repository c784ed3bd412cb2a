"""The cost model over few endpoints, in plain floats: the numbers of `CostModel.cost` to the last bit.

Theory. Over eight endpoints a numpy operation computes for some nanoseconds and costs half a microsecond, with cold
caches several: each kind touches code and memory of its own. A loop over plain floats takes as long as a few of them,
and its code is warm from the second turn on.

Rules
* Operation by operation what `Predictor.estimate` and `CostModel.cost` do, in the same order. Both compute in IEEE
  doubles, so the results are equal to the last bit.
* Nothing is kept from one decision to the next: columns are read anew, so whoever writes them need not know of this.
"""

from collections.abc import Iterable
from itertools import repeat
from math import ceil
from random import Random

from fairlead.fleet.columns import FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.fleet.predictor import FULL_FROM, FULL_SLOPE, PASSING
from fairlead.fleet.rates import PRIOR, STEP_TOKENS

#: Slots up to which the loop is the faster one.
FEW = 16

_C_0, _C_SEQ, _C_KV, _C_PF, _C_ATTN = PRIOR.c0, PRIOR.c_seq, PRIOR.c_kv, PRIOR.c_pf, PRIOR.c_attn
_HALF_ATTN = 0.5 * _C_ATTN
_PER_STEP, _STEP_MS = 1.0 / STEP_TOKENS, _C_PF * STEP_TOKENS


class CostOfFew:
    """Weights: of interference, of steps, of memory. `near_tie`: costs within this share of the best count as equal."""

    __slots__ = ("_decode", "_interference", "_memory", "_near")

    def __init__(self, interference: float, decode: float, memory: float, near_tie: float) -> None:
        self._interference = interference
        self._decode = decode
        self._memory = memory
        self._near = near_tie

    def scores(self, prompt: int, share: FloatColumn | None, fleet: Fleet, now: float) -> list[float]:
        """The cost of a prompt of so many tokens at each slot, with a minus. `share` of it is cached there."""
        table, predictor = fleet.table, fleet.predictor
        factors, actives, queues = predictor.rates.prefill.tolist(), table.active.tolist(), table.queued_tokens.tolist()
        uncached, work = _prompt(prompt, share, len(factors))
        waits = _waits(fleet, factors, now) if any(queues) else repeat(0.0)
        interference, decode = self._interference, self._decode * predictor.answer_steps
        c_0, c_seq, c_kv, per_step = _C_0, _C_SEQ, _C_KV, _PER_STEP
        found = []
        for factor, active, queued, kv_tokens, kappa, pace, tokens, alone, wait in zip(
            factors, actives, queues, table.kv_tokens.tolist(), predictor.kappa.tolist(),
            predictor.rates.step.tolist(), uncached, work, waits, strict=False,
        ):  # fmt: skip
            prefill = factor * alone
            step = pace * (c_0 + c_seq * active + c_kv * kv_tokens)
            ttft = prefill + step * (ceil(per_step * (queued + tokens)) + 0.5) + wait
            found.append(-(kappa * ttft + prefill * (interference * active) + decode * step))
        usage, per_capacity = table.kv.tolist(), table.per_capacity.tolist()
        if max(usage) + (max(queues) + max(prompt, 1.0)) * max(per_capacity) <= FULL_FROM:  # so nobody uses more
            return found
        columns = zip(usage, queues, uncached, per_capacity, strict=False)
        used = [kv + (queued + own) * per for kv, queued, own, per in columns]
        return self._with_memory(found, used, uncached, fleet) if max(used) > FULL_FROM else found

    def _with_memory(
        self, scores: list[float], used: list[float], uncached: Iterable[float], fleet: Fleet
    ) -> list[float]:
        """With the price of memory added."""
        table, weight = fleet.table, self._memory * fleet.predictor.hold_ms
        columns = table.queue.tolist(), table.active.tolist(), table.per_capacity.tolist()
        found = []
        for score, share, tokens, waiting, active, per in zip(scores, used, uncached, *columns, strict=False):
            full = min(max((share - FULL_FROM) * FULL_SLOPE, 0.0), 1.0)
            delayed = waiting + PASSING * active + 1.0
            found.append(-(-score + full * delayed * (weight * tokens * per)))
        return found

    def pick(self, totals: list[float], rng: Random) -> int:
        """The highest total; among those that are nearly as high a random one."""
        best = max(totals)
        least = best - abs(best) * self._near
        ties = [slot for slot, total in enumerate(totals) if total >= least]
        return ties[0] if len(ties) == 1 else ties[int(rng.random() * len(ties))]


def _prompt(prompt: int, share: FloatColumn | None, slots: int) -> tuple[Iterable[float], Iterable[float]]:
    """By slot: tokens to compute, and the milliseconds that takes at the prior's speed."""
    if share is None:
        tokens = max(prompt, 1.0)
        return repeat(tokens), repeat(PRIOR.prefill_ms(prompt, tokens))
    slope = _C_PF + _C_ATTN * prompt
    tokens = max(prompt, 1.0)
    uncached = [tokens] * slots
    work = [tokens * (slope - _HALF_ATTN * tokens)] * slots
    for slot, held in enumerate(share.tolist()):
        if held:
            uncached[slot] = tokens = max(prompt - held * prompt, 1.0)
            work[slot] = tokens * (slope - _HALF_ATTN * tokens)
    return uncached, work


def _waits(fleet: Fleet, factors: list[float], now: float) -> list[float]:
    """By slot: milliseconds until the prompts that are there are computed."""
    table, now_ms = fleet.table, now * 1e3
    begun = table.prefill_since_ms.tolist()
    found = [0.0] * len(factors)
    ahead = max(begun) > now_ms  # told by another process whose clock is ahead of ours
    for slot, queued_ms in enumerate(table.queued_ms.tolist()):
        if queued_ms or ahead:
            factor = factors[slot]
            done, most = now_ms - begun[slot], _STEP_MS * factor
            wait = factor * queued_ms - (done if done < most else most)
            if wait > 0.0:
                found[slot] = wait
    return found
