"""Late binding: which of the waiting requests goes now, and to which of the open endpoints.

Theory. Sending the first request to the first open endpoint is worse than not queueing at all: the prompt's cached
beginning is nearly always elsewhere. So the pair is chosen that costs the least, in milliseconds, request r at
endpoint i:

    T_i(r) + M_i(r) - A·wait     T_i(r) = P_i(r)·(1 + X·B_i) + Q_i + S_i + D·steps·S_i

    P_i: computing what of r is not cached there; B_i running; Q_i: prompts before it; S_i: a step that only decodes

Rules
* X prices the delay that r's prefill imposes on those that run; A ages: who has waited a second longer may cost
  `1000·A` ms more. Both bound how long costly requests are passed over.
* D·steps is the time that the answer itself takes there, as in the policy `cost-model`.
* M is the price of memory, as in the policy `cost-model`: where there is too little of it, all that wait there wait
  longer for each token held. In full it is charged for what is cached elsewhere (without it the headline workload at
  24 requests/s has a TTFT of 25 instead of 21 s), but for what is cached nowhere only as far as another open endpoint
  has a lower price: it takes its memory wherever it goes. Else long prompts would starve (conversations at twice
  their pace: p99 of TTFT 108 instead of 80 s).
* Waiting (delay scheduling): a pair is passed over while waiting would gain more than `PATIENCE_MS + PATIENCE·wait`.
  The bound grows with the wait, so every request goes at last. What there is to gain, in milliseconds, the most of:
  - its beginning: what another endpoint, open or not, would save of P and M;
  - load: what another endpoint that has memory to spare would save of T, less Q_i, which is worked off while one
    waits. Without it those that waited take whatever opens, however many answers run there, and pauses of answers
    cost more than the order of the queue gains: E2E is then 1.6 % (conversations) to 3.5 % (unlike servers) worse
    than if nobody waited, with it from 1.6 % better to 0.5 % worse. With Q_i who has waited least is choosiest, and a
    flood's oldest request goes in its place (two tenants: 45 instead of 50 % of the work). Of endpoints without
    memory none is worth a wait: in overload all are alike;
  - room: the time until the engine has memory for the prompt. Sent before, it stands at the head of the engine's queue
    and lets nobody in: in overload a third of all server time was spent so, and short prompts that would have fitted
    waited behind (conversations at twice their pace: mean TTFT 4.1 instead of 5.4 s, p50 0.8 instead of 1.4 s).
    Keeping 3 % of the memory back saves most preemptions, but fewer requests run: in the published benchmark's stage
    of 40/s mean TTFT was 3.4 instead of 2.0 s.
* What is known of a request (abilities, cached beginnings) is remembered while it waits: until the table's version
  rises, or for `HITS_AGE` seconds, or until a request with the same beginning was sent somewhere, a few look-ups per
  choice.
"""

from collections.abc import Callable, Sequence
from math import inf

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from fairlead.admit.control import Bound
from fairlead.admit.framework import Waiting
from fairlead.admit.pairs import ahead, memory_prices, promised, room_waits, saved_elsewhere, soonest, with_memory
from fairlead.fleet.columns import BoolColumn, FloatColumn, top
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request

#: Price of a running request's delay; useful from 0.05 to 0.3. Of the time that an answer takes.
INTERFERENCE, DECODE = 0.1, 0.03
#: Milliseconds of cost forgiven per millisecond of waiting.
AGEING = 0.1
#: What waiting must gain: milliseconds, and milliseconds per millisecond waited.
PATIENCE_MS = 50.0
PATIENCE = 0.02
#: Seconds for which a look at the prefix index is good.
HITS_AGE = 1.0
#: Requests looked up anew in one choice; the others are judged by what was known. An endpoint that joins or changes
#: makes all of them be looked up, in several choices if they are more than `LOOKUPS`.
REFRESHES, LOOKUPS = 8, 10
#: Timers and waits are floats: a look that comes an instant too early would be in vain.
_MILLISECOND = 1e-3
#: Seconds until the next look at who waits for less load or for memory, if nothing happens: scrapes tell of memory,
#: five times a second where an endpoint is busy.
LOOK_S = 0.2
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
    #: Prompt tokens that are not cached there; at least 1.
    uncached: FloatColumn = np.zeros(0)
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

    def able(self, request: Request, fleet: Fleet, now: float) -> BoolColumn | None:
        return self._able(request, fleet, now)

    def follow(self, able: Callable[[Request, Fleet, float], BoolColumn | None]) -> None:
        """Other rules about who can serve what, from now on, for those that wait too."""
        self._able = able
        self._rules += 1

    def bind(self, window: Sequence[Waiting], fleet: Fleet, opened: BoolColumn, now: float) -> Bound | float:
        slots = opened.nonzero()[0]
        self._refreshes = REFRESHES
        known = self._known_of(window, fleet, now)
        again = inf if len(known) == len(window) else now
        window = window[: len(known)]
        waits = np.array([[(now - waiting.since) * 1e3] for waiting in window])
        queue = ahead(fleet, now)
        cost, saved, better = self._judged(known, fleet, slots, queue)
        cost -= AGEING * waits
        bound = PATIENCE_MS + PATIENCE * waits
        cost[better > bound] = inf
        row, column = divmod(int(cost.argmin()), len(slots))
        if cost[row, column] < inf:
            return self._bound(window[row], known[row], int(slots[column]), slots, queue, now)
        if np.count_nonzero(saved <= bound):
            # Nobody waits for a prefix alone: load and memory change without an event of their own.
            again = min(again, now + LOOK_S)
        # The first moment at which somebody has waited long enough for what is open now.
        left = float(((better - PATIENCE_MS) / PATIENCE - waits).min())
        return min(now + max(left, 0.0) / 1e3 + _MILLISECOND, again)

    @staticmethod
    def _judged(
        known: Sequence[_Known], fleet: Fleet, slots: NDArray[np.intp], queue: FloatColumn
    ) -> tuple[FloatColumn, FloatColumn, FloatColumn]:
        """Of each pair of a request and an open slot: its cost, what the best other endpoint would save of computing
        and of memory, and the most that is gained by waiting, be it for that, for load or for memory."""
        table, predictor = fleet.table, fleet.predictor
        own = np.array([k.own for k in known])
        uncached = np.array([k.uncached for k in known])
        load = own * (1.0 + INTERFERENCE * table.active)
        load += predictor.steps() * (1.0 + DECODE * predictor.answer_steps)
        whole = load + queue
        used = promised(fleet)
        prices = memory_prices(uncached, used, fleet)
        if prices is None:
            cost = whole[:, slots]
            saved = np.array([k.saved for k in known])[:, slots]
            better = np.maximum(saved, saved_elsewhere(load, whole)[:, slots])
        else:
            copies, new = prices
            new = new[:, slots]
            load, whole = load + copies, whole + copies
            cost = whole[:, slots] + new - new.min(axis=1)[:, None]
            saved = better = saved_elsewhere(own + copies)[:, slots]
            spare = with_memory(used, table.alive)
            if np.count_nonzero(spare):
                better = np.maximum(saved, saved_elsewhere(load, np.where(spare, whole, inf))[:, slots])
        room = room_waits(uncached, used, fleet, slots)
        return cost, saved, better if room is None else np.maximum(better, room)

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
            some = np.full(len(table), max(prompt, 1.0))
        else:
            some = np.maximum(prompt - known.hits, 1.0)
        own = rates.prefill * (some * (prior.c_pf + prior.c_attn * (prompt - 0.5 * some)))
        able = table.alive if known.able is None else known.able & table.alive
        known.uncached = some
        known.own = np.where(able, own, inf)
        known.saved = saved_elsewhere(known.own[None, :])[0]

    def _bound(
        self, waiting: Waiting, known: _Known, slot: int, slots: NDArray[np.intp], queue: FloatColumn, now: float
    ) -> Bound:
        request = waiting.request
        if request.prefix.hashes:
            if len(self._departed) >= _REMEMBERED:
                self._departed.clear()
            self._departed[request.prefix.hashes[0]] = now
        other = soonest(known.own + queue, slot, slots)
        hits, prompt = known.hits, max(request.prompt_tokens, 1)
        if hits is None:
            return Bound(waiting, slot, float(prompt), second=other)
        here = float(hits[slot])
        return Bound(waiting, slot, max(prompt - here, 1.0), here / prompt, top(hits) / prompt, other)
