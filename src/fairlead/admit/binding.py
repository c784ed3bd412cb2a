"""Late binding: which of the waiting requests goes now, and to which of the open endpoints.

Theory. Sending the first request to the first open endpoint is worse than not queueing at all: the prompt's cached
beginning is nearly always elsewhere. So the pair is chosen that costs the least, in milliseconds, request r at
endpoint i:

    P_i(r)·(1 + X·B_i) + c_pf·W_i + S_i + D·steps·S_i + M_i(r) - A·wait    P_i: computing what of r is not cached
                                                                           B_i running, W_i queued tokens there
                                                                           S_i: a step that only decodes
Rules
* X prices the delay that r's prefill imposes on those that run; A ages: who has waited a second longer may cost
  `1000·A` ms more. Both bound how long costly requests are passed over.
* D·steps is the time that the answer itself takes there, as in the policy `cost-model`.
* M is the price of memory, as in the policy `cost-model`: where there is too little of it, all that wait there wait
  longer for each token held. In full it is charged for what is cached elsewhere (without it the headline workload at
  24 requests/s has a TTFT of 25 instead of 21 s), but for what is cached nowhere only as far as another open endpoint
  has a lower price: it takes its memory wherever it goes. Else long prompts would starve (conversations at twice
  their pace: p99 of TTFT 108 instead of 80 s).
* Locality wait (delay scheduling): a pair is passed over while another endpoint, open or not, would save it more of P
  and M than `PATIENCE_MS + PATIENCE·wait`. The bound grows with the wait, so every request goes at last.
* What is known of a request (abilities, cached beginnings) is remembered while it waits: until the table's version
  rises, or for `HITS_AGE` seconds, or until a request with the same beginning was sent somewhere, a few look-ups per
  choice.
"""

from collections.abc import Callable, Sequence
from math import inf

import numpy as np
from msgspec import Struct

from fairlead.admit.control import Bound
from fairlead.admit.framework import Waiting
from fairlead.fleet.columns import BoolColumn, FloatColumn, top
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request

#: Share of the KV capacity from which memory has a price, the inverse of the range over which it rises, and how much a
#: request that is still to come counts beside one that waits; as in the policy `cost-model`.
FULL_FROM, FULL_SLOPE, PASSING = 0.75, 5.0, 0.3
#: Price of a running request's delay; useful from 0.05 to 0.3. Of the time that an answer takes.
INTERFERENCE, DECODE = 0.1, 0.03
#: Milliseconds of cost forgiven per millisecond of waiting.
AGEING = 0.1
#: What an endpoint elsewhere must save to be waited for: milliseconds, and milliseconds per millisecond waited.
PATIENCE_MS = 50.0
PATIENCE = 0.02
#: Seconds for which a look at the prefix index is good.
HITS_AGE = 1.0
#: Requests looked up anew in one choice; the others are judged by what was known. An endpoint that joins or changes
#: makes all of them be looked up, in several choices if they are more than `LOOKUPS`.
REFRESHES, LOOKUPS = 8, 16
#: Timers and waits are floats: a look that comes an instant too early would be in vain.
_MILLISECOND = 1e-3
#: Beginnings of prompts whose last departure is remembered.
_REMEMBERED = 4096


class _Known(Struct):
    """What a binder remembers of a waiting request. Columns over all slots, in milliseconds and tokens."""

    #: Of the table, and of who may serve what.
    version: tuple[int, int] = (-1, -1)
    able: BoolColumn | None = None
    looked: float = -inf
    hits: FloatColumn | None = None
    #: Computing what is not cached there; `inf` where unable.
    own: FloatColumn = np.zeros(0)
    #: What the best other endpoint would save of that; `inf` where unable.
    saved: FloatColumn = np.zeros(0)


class PairBinder:
    """`able(request, fleet, now)`: where the request can be served at all; `None` = everywhere that is alive."""

    name = "pair"

    def __init__(self, able: Callable[[Request, Fleet, float], BoolColumn | None]) -> None:
        self._able = able
        self._rules = 0
        #: First block → when a prompt that begins with it was last sent somewhere.
        self._departed: dict[int, float] = {}
        self._refreshes = 0

    def follow(self, able: Callable[[Request, Fleet, float], BoolColumn | None]) -> None:
        """Other rules about who can serve what, from now on, for those that wait too."""
        self._able = able
        self._rules += 1

    def bind(self, window: Sequence[Waiting], fleet: Fleet, opened: BoolColumn, now: float) -> Bound | float:
        table, rates = fleet.table, fleet.predictor.rates
        prior = rates.prior
        slots = opened.nonzero()[0]
        self._refreshes = REFRESHES
        known = self._known_of(window, fleet, now)
        again = inf if len(known) == len(window) else now
        window = window[: len(known)]
        every = np.array([k.own for k in known])
        own = every[:, slots]
        waits = np.array([[(now - waiting.since) * 1e3] for waiting in window])
        running = table.active[slots]
        there = rates.prefill[slots] * (prior.c_pf * table.queued_tokens[slots])
        step = rates.step[slots] * (prior.c0 + prior.c_seq * running + prior.c_kv * table.kv_tokens[slots])
        there += step * (1.0 + DECODE * fleet.predictor.answer_steps)
        cost = own * (1.0 + INTERFERENCE * running) + there - AGEING * waits
        prices = _memory_prices(window, known, fleet)
        if prices is None:
            saved = np.array([k.saved for k in known])[:, slots]
        else:
            copies, new = prices
            new = new[:, slots]
            cost += copies[:, slots] + new - new.min(axis=1)[:, None]
            every = every + copies
            rivals = _elsewhere_each(every)[:, slots]
            every = every[:, slots]
            saved = np.subtract(every, rivals, out=np.full(every.shape, inf), where=every < inf)
        cost[saved > PATIENCE_MS + PATIENCE * waits] = inf
        row, column = divmod(int(cost.argmin()), len(slots))
        if cost[row, column] == inf:
            # The first moment at which somebody has waited long enough for what is open now.
            left = float(((saved - PATIENCE_MS) / PATIENCE - waits).min())
            return min(now + max(left, 0.0) / 1e3 + _MILLISECOND, again)
        return self._bound(window[row], known[row], int(slots[column]), now)

    def look(self, request: Request, fleet: Fleet, now: float) -> tuple[float, _Known]:
        known = _Known()
        self._refresh(known, request, fleet, now)
        if fleet.table.count and top(-known.own) == -inf:
            return inf, known  # nobody can serve it
        hits = known.hits
        return max(request.prompt_tokens - (0.0 if hits is None else top(hits)), 1.0), known

    def _known_of(self, window: Sequence[Waiting], fleet: Fleet, now: float) -> list[_Known]:
        """Of the first requests of the window: as many as can be looked up in one go if endpoints have changed."""
        known = []
        anew = 0
        for waiting in window:
            anew += waiting.known.version != (fleet.table.version, self._rules)
            if anew > LOOKUPS:
                break
            known.append(self._known(waiting, fleet, now))
        return known

    def _known(self, waiting: Waiting, fleet: Fleet, now: float) -> _Known:
        known: _Known = waiting.known
        chain = waiting.request.prefix.hashes
        if known.version != (fleet.table.version, self._rules):
            self._refresh(known, waiting.request, fleet, now)
        elif self._refreshes and (
            now - known.looked > HITS_AGE or (chain and self._departed.get(chain[0], -inf) >= known.looked)
        ):
            self._refreshes -= 1
            self._refresh(known, waiting.request, fleet, now)
        return known

    def _refresh(self, known: _Known, request: Request, fleet: Fleet, now: float) -> None:
        known.version = (fleet.table.version, self._rules)
        known.able = self._able(request, fleet, now)
        known.looked = now
        share = fleet.match(request) if request.prefix.hashes else None
        known.hits = None if share is None else share * float(request.prompt_tokens)
        self._price(known, float(request.prompt_tokens), fleet)

    @staticmethod
    def _price(known: _Known, prompt: float, fleet: Fleet) -> None:
        rates, prior, table = fleet.predictor.rates, fleet.predictor.rates.prior, fleet.table
        if known.hits is None:
            uncached = max(prompt, 1.0)
            own = rates.prefill * (uncached * (prior.c_pf + prior.c_attn * (prompt - 0.5 * uncached)))
        else:
            some = np.maximum(prompt - known.hits, 1.0)
            own = rates.prefill * (some * (prior.c_pf + prior.c_attn * (prompt - 0.5 * some)))
        able = table.alive if known.able is None else known.able & table.alive
        known.own = np.where(able, own, inf)
        known.saved = np.subtract(known.own, _elsewhere(known.own), out=np.full(len(able), inf), where=able)

    def _bound(self, waiting: Waiting, known: _Known, slot: int, now: float) -> Bound:
        request = waiting.request
        if request.prefix.hashes:
            if len(self._departed) >= _REMEMBERED:
                self._departed.clear()
            self._departed[request.prefix.hashes[0]] = now
        hits, prompt = known.hits, max(request.prompt_tokens, 1)
        if hits is None:
            return Bound(waiting, slot, float(prompt))
        here = float(hits[slot])
        return Bound(waiting, slot, max(prompt - here, 1.0), here / prompt, top(hits) / prompt)


def _memory_prices(
    window: Sequence[Waiting], known: Sequence[_Known], fleet: Fleet
) -> tuple[FloatColumn, FloatColumn] | None:
    """Milliseconds that others wait because a request's tokens are held there, per request and slot: those that are
    cached elsewhere, and those that are nowhere. `None` = there is room everywhere."""
    table = fleet.table
    used = table.kv + table.queued_tokens * table.per_capacity
    full = np.clip((used - FULL_FROM) * FULL_SLOPE, 0.0, 1.0)
    if not np.count_nonzero(full):
        return None
    delayed = full * (table.queue + PASSING * table.active + 1.0) * (fleet.predictor.hold_ms * table.per_capacity)
    prompts = np.array([[float(max(waiting.request.prompt_tokens, 1))] for waiting in window])
    if all(k.hits is None for k in known):
        return np.zeros((len(window), len(table))), prompts * delayed
    nothing = np.zeros(len(table))
    hits = np.array([nothing if k.hits is None else k.hits for k in known])
    best = hits.max(axis=1)[:, None]
    return (best - hits) * delayed, np.maximum(prompts - best, 1.0) * delayed


def _elsewhere(own: FloatColumn) -> FloatColumn:
    """For each slot the least of the other slots' values; `inf` where there is no other."""
    if len(own) < 2:
        return np.full(len(own), inf)
    best = int(own.argmin())
    least = own[best]
    others = own.copy()
    others[best] = inf
    elsewhere = np.full(len(own), least)
    elsewhere[best] = others.min()
    return elsewhere


def _elsewhere_each(own: FloatColumn) -> FloatColumn:
    """The same for every row, in one go."""
    if own.shape[1] < 2:
        return np.full(own.shape, inf)
    rows = np.arange(len(own))
    best = own.argmin(axis=1)
    others = own.copy()
    others[rows, best] = inf
    elsewhere = np.repeat(own[rows, best][:, None], own.shape[1], axis=1)
    elsewhere[rows, best] = others.min(axis=1)
    return elsewhere
