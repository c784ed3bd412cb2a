"""Late binding: which of the waiting requests goes now, and to which of the open endpoints.

Theory. A request is held only while holding it is forecast to end no later than sending it. Where it would go is what
the configured policy says, with all that is before it: J_i, with the queue at endpoint i, the wait for memory there,
and those that are held for i and go first. If the endpoint with the least J is closed (`core.gates`), nothing is lost
by waiting: the engine could not begin it. And until then a shorter one can go first, or another endpoint may turn out
to be sooner. If it is open, the request goes there. So what is forecast is never worse than sending at once, and it is
the same while there is room.

Rules
* J is what the configured policy says that the pair costs (`WaitingRules`), with the user's weights; for policies
  without costs it is the cost kernel's (`core.cost`).
* Who goes first is who takes the least time of what is short (Smith's rule): computing the prompt, and, as far as
  memory is short, u/capacity of the time for which it is held. Not J: how much a prompt delays running answers is the
  same whenever it goes. A millisecond of waiting makes up for `AGEING` milliseconds of that.
* An endpoint that is open and that nobody who waits wants shows that the pool is not full. Then nobody is overtaken who
  would gain by it, and the first of them goes to its endpoint although that is closed, as without flow control.
* Room: a prompt for which the engine has no memory would stand at the head of the engine's queue and let nobody in: in
  overload a third of all server time was spent so, and short prompts that would have fitted waited behind
  (conversations at twice their pace: mean TTFT 4.1 instead of 5.4 s, p50 0.8 instead of 1.4 s). So it is held while
  the wait for room is more than `PATIENCE_MS + PATIENCE·wait`, and those that fit go first; the bound grows with the
  wait, so every request goes at last. Keeping 3 % of the memory back saves most preemptions, but fewer requests run:
  in the published benchmark's stage of 40/s mean TTFT was 3.4 instead of 2.0 s.
* What is known of a request (abilities, cached beginnings) is remembered while it waits: until the table's version
  rises, or for `HITS_AGE` seconds, or until a request with the same beginning was sent somewhere, a few look-ups per
  choice.
"""

from collections.abc import Callable, Sequence
from math import inf
from random import Random

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from fairlead.core.columns import BoolColumn, FloatColumn, top
from fairlead.core.cost import Terms, Weights, cost, memory_wait, shortage, weighed
from fairlead.core.errors import PLUGIN_FAILURES, PluginError, described
from fairlead.core.fleet import Fleet
from fairlead.core.flow import Waiting
from fairlead.core.policy import Context, CostPolicy, Policy
from fairlead.core.profile import Profile
from fairlead.core.records import ABLE, FLOW_CONTROL, Trace
from fairlead.core.request import Request
from fairlead.core.view import FleetView


class Bound(Struct, frozen=True):
    """A request and where it goes. `cost`: prompt tokens that must be computed there, predicted."""

    waiting: Waiting
    slot: int
    cost: float
    #: Share of the prompt believed to be cached there, and the best share anywhere.
    hit_share: float = 0.0
    best_share: float = 0.0
    #: Who gets it if no connection to `slot` can be made; -1 = nobody.
    fallback_slot: int = -1
    #: How it was chosen: what each endpoint would have cost, by the policy.
    trace: Trace | None = None


def memory_ms(terms: Terms, fleet: Fleet) -> FloatColumn:
    """How much longer the next ones wait for memory that each prompt takes, as far as it is short."""
    return terms.uncached * shortage(terms.used) * (fleet.predictor.hold_ms * fleet.table.per_capacity)


def memory_waits(terms: Terms, fleet: Fleet) -> FloatColumn | None:
    """Until endpoints have given back enough memory for each prompt; `None` = all have. Who runs nothing has nothing to
    give back, whatever its gauges say. A prompt that is larger than all memory of each engine waits for none: it would
    wait for as long as others come, and the engine has an answer for it (a real one refuses it as too long)."""
    if not np.count_nonzero(terms.used > 1.0):
        return None
    table = fleet.table
    waits: FloatColumn = memory_wait(terms.used, table.kv, fleet.predictor.hold_ms)
    waits[:, table.active + table.queue <= 0.0] = 0.0
    too_large = terms.uncached * table.per_capacity > 1.0
    if np.count_nonzero(too_large):
        waits[(too_large | ~table.alive).all(axis=1)] = 0.0
    return waits


def soonest(work: FloatColumn, besides: int, opened: NDArray[np.intp]) -> int:
    """The slot with the least of `work`, one row, beside one of them: an open one if there is any; -1 = none."""
    work[besides] = inf
    slot = int(opened[work[opened].argmin()])
    if work[slot] == inf:
        slot = int(work.argmin())
    return slot if work[slot] < inf else -1


# What the configured policy says about requests that wait: where they can be served, and what that would cost.
#
# Rules
# * A policy with costs (`CostPolicy`) is asked for those of all requests in question at once. Costs that are no
#   milliseconds only rank endpoints, for one request each: they are replaced by the cost kernel's, in the policy's
#   order, so that requests can be compared and waiting has a price.
# * A policy without costs has none to give: the kernel's with default weights count. So they do where a policy fails.


class WaitingRules:
    """`chain` has the filters of `policy`. Called, it says where a request can be served; `None` = everywhere."""

    def __init__(
        self, policy: Policy, chain: Profile, on_plugin_error: Callable[[PluginError], None] | None = None
    ) -> None:
        self._chain = chain
        self._name = policy.name
        self._policy = policy if isinstance(policy, CostPolicy) else None
        self.weights = Weights() if self._policy is None else self._policy.weights
        self._report = on_plugin_error
        self._rng = Random(0)

    def __call__(self, request: Request, fleet: FleetView, now: float) -> BoolColumn | None:
        return self._chain.able(request, fleet, Context(now, self._rng))

    def costs(
        self,
        requests: Sequence[Request],
        shares: FloatColumn,
        able: BoolColumn,
        terms: Terms,
        fleet: FleetView,
        now: float,
    ) -> FloatColumn:
        """Milliseconds, one row per request."""
        policy = self._policy
        if policy is None:
            return weighed(terms, self.weights, fleet)
        try:
            costs = policy.costs(requests, shares, terms, fleet, Context(now, self._rng, trace=False))
            if costs.shape != shares.shape:
                raise ValueError(
                    f"costs of shape {costs.shape} for {shares.shape[0]} requests and {shares.shape[1]} slots"
                )
            if np.isnan(costs).any():
                raise ValueError("costs that are not numbers")
        except PLUGIN_FAILURES as error:
            if self._report is not None:
                self._report(PluginError(self._name, described(error)))
            return weighed(terms, self.weights, fleet)
        return costs if policy.milliseconds else _in_that_order(costs, able, weighed(terms, self.weights, fleet))


def _in_that_order(costs: FloatColumn, able: BoolColumn, kernel: FloatColumn) -> FloatColumn:
    """The kernel's costs of each request, the lowest where the policy's is, and so on. Ties keep the kernel's order."""
    kernel = np.where(able, kernel, np.inf)
    ranks = np.lexsort((kernel, np.where(able, costs, np.inf)), axis=-1)
    reordered = np.empty_like(kernel)
    np.put_along_axis(reordered, ranks, np.sort(kernel, axis=-1), axis=-1)
    return reordered


#: Milliseconds of work forgiven per millisecond of waiting.
AGEING = 0.04
#: What waiting for memory must gain: milliseconds, and milliseconds per millisecond waited.
PATIENCE_MS = 50.0
PATIENCE = 0.02
#: Of endpoints that cost the same, one that is open is taken.
BARELY = 1.0 + 1e-9
#: Seconds for which a look at the prefix index is good.
HITS_AGE = 1.0
#: Requests looked up anew in one choice; the others are judged by what was known. An endpoint that joins or changes
#: makes all of them be looked up, in several choices if they are more than `LOOKUPS`.
REFRESHES, LOOKUPS = 8, 10
#: Seconds until the next look if nothing happens. Scrapes tell of memory five times a second where endpoints are busy.
LOOK_S = 0.2
#: Beginnings of prompts whose last departure is remembered.
_REMEMBERED = 4096


#: Why nobody goes although an endpoint is open: its engine has no memory for the prompt; it cannot serve the request.
NO_MEMORY, UNABLE = "room", "unable"


class _Known(Struct):
    """What a binder remembers of a waiting request. Columns over all slots."""

    #: Of the table, and of who may serve what.
    version: tuple[int, int] = (-1, -1)
    able: BoolColumn = np.zeros(0, dtype=np.bool_)
    looked: float = -inf
    #: Share of the prompt that is cached there, and whether any of it is anywhere.
    share: FloatColumn = np.zeros(0)
    cached: bool = False


class _Judged(Struct):
    """Of each pair of a request and a slot, in milliseconds; `inf` = cannot be."""

    #: What the policy says, and the wait for memory.
    cost: FloatColumn
    #: Whether it may go there now.
    may: BoolColumn
    #: By request: the least goes first.
    rank: FloatColumn
    #: What the policy says; computing the prompt, alone and behind those that were sent there.
    policy_cost: FloatColumn
    own_ms: FloatColumn
    prompt_ms: FloatColumn
    #: Where it waits for memory; `None` = nowhere.
    full: BoolColumn | None
    #: By slot, how much longer the next one waits for each millisecond of a prompt: engines behind one address share.
    delay: FloatColumn | None = None


def _first(judged: _Judged) -> tuple[int, int] | None:
    """Who goes now, and where. `None` = all of them lose nothing by waiting."""
    costs, may, own, full = judged.cost, judged.may, judged.own_ms, judged.full
    ahead, unwanted = np.zeros(costs.shape[1]), None
    for row in judged.rank.argsort(kind="stable").tolist():
        there = costs[row] + ahead
        slot = int(there.argmin())
        if may[row, slot]:
            return row, slot
        if there[slot] < inf and not (full is not None and full[row, slot]):
            if unwanted is None and np.count_nonzero(may[row]):
                unwanted = row, slot
            ahead[slot] += own[row, slot] * (1.0 if judged.delay is None else judged.delay[slot])
    return unwanted


def _note(window: Sequence[Waiting], judged: _Judged, opened: BoolColumn) -> None:
    """Why none of them goes: none that is open can serve it, or its engine has no room."""
    able = np.count_nonzero((judged.policy_cost < inf) & opened, axis=1)
    for waiting, count in zip(window, able.tolist(), strict=True):
        waiting.kept_by = NO_MEMORY if count else UNABLE


def _loading(requests: Sequence[Request], fleet: Fleet) -> FloatColumn | None:
    """Until each endpoint can run the adapter of each request."""
    if not fleet.table.lora:
        return None
    columns = [fleet.loading(request) for request in requests]
    nothing = np.zeros(len(fleet.table))
    return np.array([nothing if column is None else column for column in columns])


class PairBinder:
    """Chooses the pair. May keep all of them waiting although something is open: a cached prefix can be worth it.
    `rules` say where requests can be served, and what pairs cost."""

    def __init__(self, rules: WaitingRules) -> None:
        self._rules = rules
        self._changes = 0
        #: First block → when a prompt that begins with it was last sent somewhere.
        self._departed: dict[int, float] = {}
        self._refreshes = 0

    def able(self, waiting: Waiting, fleet: Fleet, now: float) -> BoolColumn:
        """Where it can be served."""
        return self._known(waiting, fleet, now).able

    def follow(self, rules: WaitingRules) -> None:
        """Other rules from now on, for those that wait too."""
        self._rules = rules
        self._changes += 1

    def bind(self, window: Sequence[Waiting], fleet: Fleet, opened: BoolColumn, now: float) -> Bound | float:
        """A pair, or the clock seconds at which to ask again even if nothing changes; `inf` = not before it does."""
        self._refreshes = REFRESHES
        known = self._known_of(window, fleet, now)
        look_at = inf if len(known) == len(window) else now
        window = window[: len(known)]
        waited = np.array([(now - waiting.since) * 1e3 for waiting in window])
        judged = self._judged(window, known, fleet, opened, waited, now)
        pair = _first(judged)
        if pair is None:
            _note(window, judged, opened)
            return min(look_at, now + LOOK_S)
        row, slot = pair
        return self._bound(window[row], known[row], slot, row, judged, opened, fleet, now)

    def _judged(
        self,
        window: Sequence[Waiting],
        known: Sequence[_Known],
        fleet: Fleet,
        opened: BoolColumn,
        waited: FloatColumn,
        now: float,
    ) -> _Judged:
        requests = [waiting.request for waiting in window]
        prompts = np.array([[float(request.prompt_tokens)] for request in requests])
        shares = np.array([k.share for k in known])
        able = np.array([k.able for k in known])
        terms = cost(prompts, shares * prompts, fleet, now, _loading(requests, fleet))
        policy_cost = np.where(able, self._rules.costs(requests, shares, able, terms, fleet, now), inf)
        own = np.where(able, terms.prefill, inf)
        costs, may, full = policy_cost, able & opened, None
        memory = memory_waits(terms, fleet)
        if memory is not None:
            costs = policy_cost + memory
            full = memory > (PATIENCE_MS + PATIENCE * waited)[:, None]
            may &= ~full
        costs = np.where(may, costs, costs * BARELY)
        rows = np.arange(len(window))
        best = costs.argmin(axis=1)
        rank = own[rows, best] + memory_ms(terms, fleet)[rows, best] - AGEING * waited
        return _Judged(costs, may, rank, policy_cost, own, own + terms.queue, full, fleet.table.per_rank)

    def look(self, request: Request, fleet: Fleet, now: float) -> tuple[float, _Known]:
        """Predicted work in uncached prompt tokens, at the endpoint that holds most (`inf` = there are endpoints, and
        none can serve it), and what to remember of it (`Waiting.known`)."""
        known = _Known()
        self._refresh(known, request, fleet, now)
        if fleet.table.count and not np.count_nonzero(known.able):
            return inf, known  # nobody can serve it
        prompt = request.prompt_tokens
        return max(prompt - prompt * top(known.share) if known.cached else prompt, 1.0), known

    def _known_of(self, window: Sequence[Waiting], fleet: Fleet, now: float) -> list[_Known]:
        """Of the first requests of the window: as many as can be looked up in one go if endpoints have changed."""
        known = []
        looked_up = 0
        for waiting in window:
            looked_up += waiting.known.version != (fleet.table.version, self._changes)
            if looked_up > LOOKUPS:
                break
            known.append(self._known(waiting, fleet, now))
        return known

    def _known(self, waiting: Waiting, fleet: Fleet, now: float) -> _Known:
        known: _Known = waiting.known
        chain = waiting.request.prefix.hashes
        if known.version != (fleet.table.version, self._changes):
            self._refresh(known, waiting.request, fleet, now)
        elif self._refreshes and (
            now - known.looked > HITS_AGE or (chain and self._departed.get(chain[0], -inf) >= known.looked)
        ):
            self._refreshes -= 1
            self._refresh(known, waiting.request, fleet, now)
        return known

    def _refresh(self, known: _Known, request: Request, fleet: Fleet, now: float) -> None:
        known.version = (fleet.table.version, self._changes)
        able = self._rules(request, fleet, now)
        known.able = fleet.table.alive if able is None else able & fleet.table.alive
        known.looked = now
        share = fleet.match(request) if request.prefix.hashes else None
        known.cached = share is not None
        known.share = np.zeros(len(fleet.table)) if share is None else share

    def _bound(
        self,
        waiting: Waiting,
        known: _Known,
        slot: int,
        row: int,
        judged: _Judged,
        opened: BoolColumn,
        fleet: Fleet,
        now: float,
    ) -> Bound:
        request = waiting.request
        if request.prefix.hashes:
            if len(self._departed) >= _REMEMBERED:
                self._departed.clear()
            self._departed[request.prefix.hashes[0]] = now
        runner_up = soonest(judged.prompt_ms[row], slot, opened.nonzero()[0])
        totals = -judged.policy_cost[row]
        candidates = opened & known.able if opened[slot] else known.able
        trace = Trace(
            endpoints=fleet.table.ids,
            filters=[(ABLE, known.able), (FLOW_CONTROL, candidates)],
            scorers=[("cost", 1.0, totals)],
            total=totals,
            candidates=candidates,
            outcome="picked",
            held=known.share if known.cached else None,
            loading=fleet.loading(request) if fleet.table.lora else None,
        )
        here = float(known.share[slot])
        prompt = request.prompt_tokens
        return Bound(waiting, slot, max(prompt - here * prompt, 1.0), here, top(known.share), runner_up, trace)
