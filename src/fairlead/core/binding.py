"""Late binding: which of the waiting requests goes now, and to which of the open endpoints.

Theory. Sending the first request to the first open endpoint is worse than not queueing at all: the prompt's cached
beginning is nearly always elsewhere. So the pair is chosen that costs the least, in milliseconds, request r at
endpoint i:

    J_i(r) - F(r) - A·wait

Rules
* J is what the configured policy says that the pair costs (`PairCosts`), with the user's weights; for policies
  without costs it is the cost kernel's (`core.cost`).
* A ages: who has waited a second longer may cost `1000·A` ms more, which bounds how long costly requests are passed
  over.
* F forgives: for tokens that are cached nowhere the price of memory is charged only as far as another open endpoint
  has a lower one: a request takes its memory wherever it goes. Else long prompts would starve (conversations at
  twice their pace: p99 of TTFT 108 instead of 80 s). For what is cached elsewhere it is charged in full (without it
  the headline workload at 24 requests/s has a TTFT of 25 instead of 21 s).
* Waiting (delay scheduling): a pair is passed over while waiting would gain more than `PATIENCE_MS + PATIENCE·wait`.
  The bound grows with the wait, so every request goes at last. What there is to gain, in milliseconds, the most of:
  - its beginning: what another endpoint, open or not, would save of computing and of memory;
  - load: what another endpoint that has memory to spare would save of J, less the queue here, which is worked off
    while one waits. Without it those that waited take whatever opens, however many answers run there, and pauses of
    answers cost more than the order of the queue gains: E2E is then 1.6 % (conversations) to 3.5 % (unlike servers)
    worse than if nobody waited, with it from 1.6 % better to 0.5 % worse. With that queue who has waited least is
    choosiest, and a flood's oldest request goes in its place (two tenants: 45 instead of 50 % of the work). Of
    endpoints without memory none is worth a wait: in overload all are alike;
  - room: the time until the engine has memory for the prompt. Sent before, it stands at the head of the engine's
    queue and lets nobody in: in overload a third of all server time was spent so, and short prompts that would have
    fitted waited behind (conversations at twice their pace: mean TTFT 4.1 instead of 5.4 s, p50 0.8 instead of 1.4
    s). Keeping 3 % of the memory back saves most preemptions, but fewer requests run: in the published benchmark's
    stage of 40/s mean TTFT was 3.4 instead of 2.0 s.
* What is known of a request (abilities, cached beginnings) is remembered while it waits: until the table's version
  rises, or for `HITS_AGE` seconds, or until a request with the same beginning was sent somewhere, a few look-ups per
  choice.
"""

from collections.abc import Callable, Sequence
from math import inf
from random import Random
from typing import Protocol, runtime_checkable

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from fairlead.core.columns import BoolColumn, FloatColumn, top
from fairlead.core.cost import FULL_FROM, Terms, Weights, cost, memory_price_per_token, memory_wait, weighed
from fairlead.core.errors import PluginError
from fairlead.core.fleet import Fleet
from fairlead.core.flow import Waiting
from fairlead.core.flow_control import Bound
from fairlead.core.policy import Context, CostPolicy, Policy
from fairlead.core.profile import Profile
from fairlead.core.records import ABLE, FLOW_CONTROL, Trace
from fairlead.core.request import Request
from fairlead.core.view import FleetView

# What is asked of pairs of waiting requests and endpoints. Rows are requests, columns slots, values milliseconds.
#
# `inf` means that the endpoint cannot serve the request.


@runtime_checkable
class PairCosts(Protocol):
    """What the configured policy says that pairs cost, and how it weighs others' time."""

    weights: Weights

    def costs(
        self, requests: Sequence[Request], shares: FloatColumn, able: BoolColumn, terms: Terms, fleet: Fleet, now: float
    ) -> FloatColumn:
        """Milliseconds, one row per request. `shares` of the prompts are cached, `able` endpoints can serve them."""
        ...


class DefaultCosts:
    """Those of the cost kernel with its default weights, for policies that define none."""

    weights = Weights()

    def costs(
        self, requests: Sequence[Request], shares: FloatColumn, able: BoolColumn, terms: Terms, fleet: Fleet, now: float
    ) -> FloatColumn:
        return weighed(terms, self.weights, fleet)


def memory_prices(terms: Terms, weights: Weights, fleet: Fleet) -> tuple[FloatColumn, FloatColumn] | None:
    """What others wait because a request's tokens are held there: those that are cached elsewhere, and those that are
    nowhere. `None` = there is memory everywhere."""
    per_token = memory_price_per_token(terms.used, weights, fleet)
    if per_token is None:
        return None
    least = terms.uncached.min(axis=1)[:, None]
    return (terms.uncached - least) * per_token, least * per_token


def with_memory(fleet: Fleet) -> BoolColumn:
    """Endpoints where memory has no price yet, by what is in use or will be for prompts that are there."""
    table = fleet.table
    return (table.kv + table.queued_tokens * table.per_capacity < FULL_FROM) & table.alive


def memory_waits(terms: Terms, fleet: Fleet, slots: NDArray[np.intp]) -> FloatColumn | None:
    """Until these endpoints have given back enough memory for each prompt; `None` = all have. Who runs nothing has
    nothing to give back, whatever its gauges say."""
    used, table = terms.used[:, slots], fleet.table
    if not np.count_nonzero(used > 1.0):
        return None
    waits: FloatColumn = memory_wait(used, table.kv[slots], fleet.predictor.hold_ms)
    waits[:, table.active[slots] + table.queue[slots] <= 0.0] = 0.0
    return waits


def saved_elsewhere(own: FloatColumn, rivals: FloatColumn | None = None) -> FloatColumn:
    """How much less than `own` the best other slot takes, by `rivals` (else also `own`); negative = more, `inf` where
    `own` is."""
    elsewhere = least_elsewhere(own if rivals is None else rivals)
    saved: FloatColumn = np.subtract(own, elsewhere, out=np.full(own.shape, np.inf), where=own < np.inf)
    return saved


def least_elsewhere(own: FloatColumn) -> FloatColumn:
    """For each slot the least of the other slots' values, row by row; `inf` where there is no other."""
    if own.shape[1] < 2:
        return np.full(own.shape, np.inf)
    rows = np.arange(len(own))
    best = own.argmin(axis=1)
    without_best = own.copy()
    without_best[rows, best] = np.inf
    elsewhere = np.repeat(own[rows, best][:, None], own.shape[1], axis=1)
    elsewhere[rows, best] = without_best.min(axis=1)
    return elsewhere


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
                raise ValueError("costs that are no numbers")
        except Exception as error:
            if self._report is not None:
                self._report(PluginError(self._name, f"{type(error).__name__}: {error}"))
            return weighed(terms, self.weights, fleet)
        return costs if policy.milliseconds else _in_that_order(costs, able, weighed(terms, self.weights, fleet))


def _in_that_order(costs: FloatColumn, able: BoolColumn, kernel: FloatColumn) -> FloatColumn:
    """The kernel's costs of each request, the lowest where the policy's is, and so on. Ties keep the kernel's order."""
    kernel = np.where(able, kernel, np.inf)
    ranks = np.lexsort((kernel, np.where(able, costs, np.inf)), axis=-1)
    reordered = np.empty_like(kernel)
    np.put_along_axis(reordered, ranks, np.sort(kernel, axis=-1), axis=-1)
    return reordered


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


#: Why a request waits although an endpoint is open; the last: it cannot be served there.
REASONS = "beginning", "load", "room", "unable"
#: (request, fleet, now): where it can be served; `None` = everywhere that is alive.
Able = Callable[[Request, Fleet, float], BoolColumn | None]


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
    """Of each pair of a request and an open slot, in milliseconds; `inf` = cannot be."""

    cost: FloatColumn
    #: What the best other endpoint would save of computing the prompt and of memory.
    saved: FloatColumn
    #: Likewise for load, and for memory.
    load: FloatColumn
    memory: FloatColumn
    #: The most of these: what is gained by waiting.
    better: FloatColumn
    #: Of all slots: what the policy says, and computing the prompt behind those before it.
    policy_cost: FloatColumn
    prompt_ms: FloatColumn


def _note(window: Sequence[Waiting], judged: _Judged) -> None:
    """Why none of them goes: what each would gain the most of by waiting, where that is least."""
    rows = np.arange(len(window))
    least = judged.better.argmin(axis=1)
    gains = np.array([gain[rows, least] for gain in (judged.saved, judged.load, judged.memory)])
    reasons = np.where(judged.cost[rows, least] < inf, gains.argmax(axis=0), len(gains))
    for waiting, reason in zip(window, reasons.tolist(), strict=True):
        waiting.kept_by = REASONS[reason]


def _loading(requests: Sequence[Request], fleet: Fleet) -> FloatColumn | None:
    """Until each endpoint can run the adapter of each request."""
    if not fleet.table.lora:
        return None
    columns = [fleet.loading(request) for request in requests]
    nothing = np.zeros(len(fleet.table))
    return np.array([nothing if column is None else column for column in columns])


class PairBinder:
    """Where requests can be served is `able`'s word; what pairs cost is too, where it says (`PairCosts`)."""

    name = "pair"

    def __init__(self, able: Able) -> None:
        self._rules = 0
        #: First block → when a prompt that begins with it was last sent somewhere.
        self._departed: dict[int, float] = {}
        self._refreshes = 0
        self._follow(able)

    def _follow(self, able: Able) -> None:
        self._able = able
        self._costs: PairCosts = able if isinstance(able, PairCosts) else DefaultCosts()

    def able(self, request: Request, fleet: Fleet, now: float) -> BoolColumn | None:
        return self._able(request, fleet, now)

    def follow(self, able: Able) -> None:
        """Other rules about who can serve what, and what it costs, from now on, for those that wait too."""
        self._follow(able)
        self._rules += 1

    def bind(self, window: Sequence[Waiting], fleet: Fleet, opened: BoolColumn, now: float) -> Bound | float:
        slots = opened.nonzero()[0]
        self._refreshes = REFRESHES
        known = self._known_of(window, fleet, now)
        look_at = inf if len(known) == len(window) else now
        window = window[: len(known)]
        waits = np.array([[(now - waiting.since) * 1e3] for waiting in window])
        judged = self._judged(window, known, fleet, slots, now)
        bound = PATIENCE_MS + PATIENCE * waits
        cost = np.where(judged.better > bound, inf, judged.cost - AGEING * waits)
        row, column = divmod(int(cost.argmin()), len(slots))
        if cost[row, column] < inf:
            return self._bound(window[row], known[row], int(slots[column]), row, judged, opened, fleet, now)
        _note(window, judged)
        if np.count_nonzero(judged.saved <= bound):
            # Nobody waits for a prefix alone: load and memory change without an event of their own.
            look_at = min(look_at, now + LOOK_S)
        # The first moment at which somebody has waited long enough for what is open now.
        left = float(((judged.better - PATIENCE_MS) / PATIENCE - waits).min())
        return min(now + max(left, 0.0) / 1e3 + _MILLISECOND, look_at)

    def _judged(
        self, window: Sequence[Waiting], known: Sequence[_Known], fleet: Fleet, slots: NDArray[np.intp], now: float
    ) -> _Judged:
        requests = [waiting.request for waiting in window]
        prompts = np.array([[float(request.prompt_tokens)] for request in requests])
        shares = np.array([k.share for k in known])
        able = np.array([k.able for k in known])
        terms = cost(prompts, shares * prompts, fleet, now, _loading(requests, fleet))
        policy_cost = np.where(able, self._costs.costs(requests, shares, able, terms, fleet, now), inf)
        own = np.where(able, terms.prefill, inf)
        costs = rivals = policy_cost
        open_cost = policy_cost[:, slots]
        prices = memory_prices(terms, self._costs.weights, fleet)
        if prices is not None:
            copies, new = prices
            open_new = new[:, slots]
            open_cost = open_cost - open_new.min(axis=1)[:, None]
            costs = rivals = policy_cost - new
            own_and_copies = own + copies
            spare = with_memory(fleet)
            rivals = np.where(spare, costs, inf) if np.count_nonzero(spare) else np.full(costs.shape, inf)
        else:
            own_and_copies = own
        saved = saved_elsewhere(own_and_copies)[:, slots]
        load = saved_elsewhere(costs - terms.kappa * terms.queue, rivals)[:, slots]
        better = np.maximum(saved, load)
        memory = memory_waits(terms, fleet, slots)
        if memory is None:
            memory = np.zeros(better.shape)
        else:
            better = np.maximum(better, memory)
        return _Judged(open_cost, saved, load, memory, better, policy_cost, own + terms.queue)

    def look(self, request: Request, fleet: Fleet, now: float) -> tuple[float, _Known]:
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
            looked_up += waiting.known.version != (fleet.table.version, self._rules)
            if looked_up > LOOKUPS:
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
        able = self._able(request, fleet, now)
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
        trace = Trace(
            endpoints=fleet.table.ids,
            filters=[(ABLE, known.able), (FLOW_CONTROL, opened)],
            scorers=[("cost", 1.0, totals)],
            total=totals,
            candidates=opened & known.able,
            outcome="picked",
            held=known.share if known.cached else None,
            loading=fleet.loading(request) if fleet.table.lora else None,
        )
        here = float(known.share[slot])
        prompt = request.prompt_tokens
        return Bound(waiting, slot, max(prompt - here * prompt, 1.0), here, top(known.share), runner_up, trace)
