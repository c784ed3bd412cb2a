"""Late binding: which of the waiting requests goes now, and to which of the open endpoints.

Theory. A request is held only while holding it is forecast to end no later than sending it. J_i is the cost of sending
the request to endpoint i by the configured policy. It includes the queue at i, the wait for memory there, and requests
that are held for i and go first. If the endpoint with the least J is closed (`core.gates`), waiting loses nothing,
because the engine could not begin the request. Meanwhile a shorter request can go first, or another endpoint may become
better. If that endpoint is open, the request goes there. So the forecast is never worse than for sending at once, and
it is the same while endpoints have room.

Rules
* J is the configured policy's cost of the pair (`WaitingRules`), with the user's weights. For policies without costs it
  is the cost kernel's (`core.cost`).
* The request that takes the least time of the scarce resources goes first (Smith's rule). This is the time to compute
  the prompt and, as far as memory is short, u/capacity of the time for which it holds memory. J is not used for the
  order: a prompt delays running answers equally whenever it is sent. Each millisecond of waiting offsets `AGEING`
  milliseconds of that time.
* If an endpoint is open and no waiting request prefers it, the pool is not full. Then holding requests gains nothing,
  and the first of them that could use an open endpoint is sent to its best one although that is closed, as without flow
  control.
* Room: a prompt for which the engine has no memory would block the head of the engine's queue. In overload, engines
  spent a third of all time so, and short prompts that would have fitted waited behind. Holding such prompts improved
  conversations at twice their pace to a mean TTFT of 4.1 instead of 5.4 s (p50 0.8 instead of 1.4 s). So a prompt is
  held while the wait for room is more than `PATIENCE_MS + PATIENCE·wait`, and prompts that fit go first. The bound
  grows with the wait, so every request is sent in the end. Keeping 3 % of the memory back would avoid most preemptions,
  but fewer requests run: in the published benchmark's stage of 40/s the mean TTFT was 3.4 instead of 2.0 s.
* The abilities and cached beginnings of a waiting request are remembered until the table's version rises, for
  `HITS_AGE` seconds, or until a request with the same beginning was sent. Each choice refreshes only a few requests.
"""

from collections.abc import Callable, Iterable, Sequence
from math import inf
from random import Random

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from fairlead.core.columns import BoolColumn, FloatColumn, read_only, top
from fairlead.core.cost import Terms, Weights, cost, memory_wait, shortage, weighed
from fairlead.core.errors import PLUGIN_FAILURES, REST_S, PluginError, described, hung, rests_until
from fairlead.core.fleet import Fleet
from fairlead.core.flow import Waiting
from fairlead.core.policy import HIGHEST, Context, CostPolicy, Cycle, Notification, Policy, checked_column, guarded, own
from fairlead.core.profile import Profile
from fairlead.core.records import ABLE, FLOW_CONTROL, Trace
from fairlead.core.request import Request
from fairlead.core.table import EndpointTable
from fairlead.core.view import FleetView


class Bound(Struct, frozen=True):
    """A request and the endpoint that it is sent to. `cost`: predicted prompt tokens to compute there."""

    waiting: Waiting
    slot: int
    cost: float
    #: Share of the prompt believed to be cached there, and the best share anywhere.
    hit_share: float = 0.0
    best_share: float = 0.0
    #: The slot of the endpoint that gets the request if no connection to `slot` can be made; -1 = none.
    fallback_slot: int = -1
    #: The policy's cost at each endpoint, for explanations; `None` = not recorded.
    trace: Trace | None = None
    #: As in `Picked`.
    by: str = ""
    notify: Notification | None = None


def memory_ms(terms: Terms, fleet: Fleet) -> FloatColumn:
    """Return how many milliseconds longer later requests wait for memory because of each prompt; 0 unless short."""
    return terms.uncached * shortage(terms.used) * (fleet.predictor.hold_ms * fleet.table.per_capacity)


def memory_waits(terms: Terms, fleet: Fleet) -> FloatColumn | None:
    """Return the milliseconds (requests × slots) until endpoints have enough memory for each prompt; `None` = all have.

    It is 0 at an endpoint without requests, whatever its gauges say: nothing will be freed there. It is 0 for a prompt
    larger than the memory of every engine, which would wait forever: the engine refuses it as too long."""
    if not np.count_nonzero(terms.used > 1.0):
        return None
    table = fleet.table
    waits: FloatColumn = memory_wait(terms.used, table.kv, fleet.predictor.hold_ms)
    waits[:, table.active + table.queue <= 0.0] = 0.0
    too_large = terms.uncached * table.per_capacity > 1.0
    if np.count_nonzero(too_large):
        waits[(too_large | ~table.alive).all(axis=1)] = 0.0
    return waits


def bits(slots: BoolColumn) -> int:
    """Return the slots as an integer whose bit number i stands for slot i."""
    return int.from_bytes(np.packbits(slots, bitorder="little").tobytes(), "little")


def soonest(work: FloatColumn, besides: int, opened: NDArray[np.intp]) -> int:
    """Return the slot with the least `work` except `besides`, an open one if any; -1 = none. Changes `work`."""
    work[besides] = inf
    slot = int(opened[work[opened].argmin()])
    if work[slot] == inf:
        slot = int(work.argmin())
    return slot if work[slot] < inf else -1


class Pairs(Struct, frozen=True):
    """Waiting requests, and by request and slot: whether it can be served there, its prompt's cached share, and the
    cost kernel's terms."""

    requests: Sequence[Request]
    able: BoolColumn
    shares: FloatColumn
    terms: Terms

    def of(self, rows: Sequence[int]) -> "Pairs":
        """Return the pairs of some of the requests."""
        return Pairs([self.requests[row] for row in rows], self.able[rows], self.shares[rows], self.terms.of(rows))


# What the configured policy says about waiting requests: which endpoints can serve them, and at what cost.
#
# Rules
# * A policy with costs (`CostPolicy`) computes those of all requests in one call. Costs that are not milliseconds only
#   rank the endpoints for one request. They are replaced by the cost kernel's costs, reordered by the policy's ranking,
#   so that requests can be compared and waiting has a price.
# * For a policy without costs, the cost kernel's costs with default weights are used. If a policy with costs fails, the
#   cost kernel's costs with its weights are used.
# * An infinite cost means "only if all are". NaN and -inf are failures.


class WaitingRules:
    """`chain` has the filters of `policy`. Calling it returns the slots that can serve a request; `None` = all."""

    def __init__(
        self, policy: Policy, chain: Profile, on_plugin_error: Callable[[PluginError], None] | None = None
    ) -> None:
        self._chain = chain
        self._name = policy.name
        self._policy = policy if isinstance(policy, CostPolicy) else None
        self._own = own(policy)
        self.weights = Weights() if self._policy is None else self._policy.weights
        self._report = on_plugin_error
        self._rng = Random(0)
        #: Clock seconds until which the policy's costs are not asked for (`errors.rests_until`).
        self._rests_until = -inf

    def __call__(self, request: Request, fleet: FleetView, now: float) -> BoolColumn | None:
        return self._chain.able(request, fleet, Context(now, self._rng))

    def notifier(self, request: Request, now: float) -> Notification | None:
        """Return what tells the policy's plugins where the request goes; `None` = none wants to know."""
        return self._chain.notifier(Cycle(Context(now, self._rng, trace=False)))

    def by(self, request: Request) -> str:
        """The name of the policy whose costs counted for the request in the last choice; empty = the configured one."""
        return ""

    def costs(self, pairs: Pairs, fleet: FleetView, now: float) -> FloatColumn:
        """Return the costs of all pairs in milliseconds."""
        if now < self._rests_until:
            return weighed(pairs.terms, self.weights, fleet)
        try:
            return self.asked(pairs, fleet, now)
        except PLUGIN_FAILURES as error:
            failure = PluginError(self._name, described(error))
            if hung(error):
                self._rests_until = rests_until(self._rests_until, now)
            if now < self._rests_until:
                failure = failure.with_note(f"for {REST_S:.0f} s the costs of waiting requests are the cost model's")
            if self._report is not None:
                self._report(failure)
            return weighed(pairs.terms, self.weights, fleet)

    def asked(self, pairs: Pairs, fleet: FleetView, now: float) -> FloatColumn:
        """As `costs`, but raise what the policy raises."""
        policy, requests, shares, terms = self._policy, pairs.requests, pairs.shares, pairs.terms
        if policy is None:
            return weighed(terms, self.weights, fleet)
        context = Context(now, self._rng, trace=False)
        if self._own:
            costs = policy.costs(requests, shares, terms, fleet, context)
        else:
            kept = read_only(shares), terms.read_only()
            costs = guarded(fleet, policy.costs, requests, *kept, fleet, context)
        costs = checked_column(costs, shares.shape, "costs")
        if not np.isfinite(costs).all():
            costs = _only_if_all_are(costs)
        return costs if policy.milliseconds else _in_that_order(costs, pairs.able, weighed(terms, self.weights, fleet))


def _only_if_all_are(costs: FloatColumn) -> FloatColumn:
    """Replace infinite costs by the highest, as for requests that are sent at once: nowhere to go would be a wait to
    the deadline. Raise `ValueError` if other costs are no numbers."""
    wrong = np.count_nonzero(np.isnan(costs) | (costs == -inf))
    if wrong:
        raise ValueError(f"costs that are NaN or -inf for {wrong} of {costs.size} pairs of request and slot")
    return np.minimum(costs, HIGHEST)


def _in_that_order(costs: FloatColumn, able: BoolColumn, kernel: FloatColumn) -> FloatColumn:
    """Return the kernel's costs of each request, rearranged so that the endpoint with the policy's lowest cost has the
    kernel's lowest, and so on. Ties keep the kernel's order; where the kernel's costs are equal and above 0, the
    policy's order remains. Infinite costs stay as they are."""
    kernel = np.where(able, kernel, np.inf)
    ranks = np.lexsort((kernel, np.where(able, costs, np.inf)), axis=-1)
    reordered = np.empty_like(kernel)
    rising = np.sort(kernel, axis=-1) * (1.0 + _HARDLY * np.arange(kernel.shape[-1]))
    np.put_along_axis(reordered, ranks, rising, axis=-1)
    return np.where(costs < HIGHEST, reordered, HIGHEST)


#: Milliseconds of work deducted per millisecond of waiting when requests are ranked.
AGEING = 0.04
#: A request is held for memory while that wait exceeds this many milliseconds, plus this share of its time queued.
PATIENCE_MS = 50.0
PATIENCE = 0.02
#: Factor on the cost of closed endpoints, so that of endpoints with equal costs an open one is taken.
BARELY = 1.0 + 1e-9
#: By how much equal costs differ after they were ordered as the policy's are. Thousands of such steps are less than
#: `BARELY`.
_HARDLY = 1e-13
#: Seconds after which the cached share of a waiting request is looked up again.
HITS_AGE = 1.0
#: In one choice, the cached shares of at most `REFRESHES` requests are looked up again. If an endpoint joined or
#: changed, all requests must be looked up; a choice is then limited to `LOOKUPS` of them.
REFRESHES, LOOKUPS = 8, 10
#: Seconds until the next choice if no event causes one. Busy endpoints are scraped five times a second.
LOOK_S = 0.2
#: Number of first blocks of prompts for which the last dispatch is remembered.
_REMEMBERED = 4096


#: Why a request was kept while endpoints were open: none of these had memory for it; none of these could serve it.
NO_MEMORY, UNABLE = "room", "unable"


class _Known(Struct):
    """What a binder remembers of a waiting request. Columns over all slots."""

    #: The table's version and the count of changed rules for which this holds.
    version: tuple[int, int] = (-1, -1)
    able: BoolColumn = np.zeros(0, dtype=np.bool_)
    #: `able` as bits.
    able_bits: int = 0
    #: Clock seconds of the last look-up.
    looked: float = -inf
    #: Share of the prompt that each endpoint has cached; whether any endpoint has any of it.
    share: FloatColumn = np.zeros(0)
    cached: bool = False


class _Judged(Struct):
    """The values for all pairs of requests and slots (requests × slots), in milliseconds; `inf` = cannot be served."""

    #: The policy's cost plus the wait for memory.
    cost: FloatColumn
    #: Whether the request may be sent there now.
    may: BoolColumn
    #: One entry per request; the lowest goes first.
    rank: FloatColumn
    #: The policy's cost; time to compute the prompt alone, and behind the queue there.
    policy_cost: FloatColumn
    own_ms: FloatColumn
    prompt_ms: FloatColumn
    #: The wait for memory, and whether the request must be held for it; `None` = no request waits.
    memory: FloatColumn | None
    full: BoolColumn | None
    #: By slot: how much the next request waits per prompt millisecond, < 1 if engines share the address; `None` = 1.
    delay: FloatColumn | None = None


def _first(judged: _Judged) -> tuple[int, int] | None:
    """Return (row of the request, slot) to send now; `None` = no request loses anything by waiting."""
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
    """Note for each request why it was not sent: no open endpoint can serve it, or none has memory for it."""
    able = np.count_nonzero((judged.policy_cost < inf) & opened, axis=1)
    for waiting, count in zip(window, able.tolist(), strict=True):
        waiting.kept_by = NO_MEMORY if count else UNABLE


def _loading(requests: Sequence[Request], fleet: Fleet) -> FloatColumn | None:
    """Return the ms (requests × slots) until each endpoint can run each request's adapter; `None` = no waits."""
    if not fleet.table.lora:
        return None
    nothing, columns = np.zeros(len(fleet.table)), dict[str, FloatColumn]()
    for request in requests:
        if request.target_model not in columns:
            column = fleet.loading(request)
            columns[request.target_model] = nothing if column is None else column
    return np.array([columns[request.target_model] for request in requests])


class PairBinder:
    """Chooses the pair of request and endpoint. It may keep all requests waiting although an endpoint is open, because
    a cached prefix elsewhere can be worth the wait. `rules`: where requests can be served, and the costs of pairs."""

    def __init__(self, rules: WaitingRules) -> None:
        self._rules = rules
        self._changes = 0
        #: First block of a prompt → clock seconds when a prompt with it was last sent.
        self._departed: dict[int, float] = {}
        self._refreshes = 0
        #: Columns that waiting requests share, or each would keep its own: the slots that can serve them, by bits, in
        #: this version; and the shares of prompts of which nothing is cached.
        self._version = (-1, -1)
        self._ables: dict[int, tuple[int, BoolColumn]] = {}
        self._uncached: FloatColumn = np.zeros(0)

    def able(self, waiting: Waiting, fleet: Fleet, now: float) -> BoolColumn:
        """Return the slots that can serve the request."""
        return self._known_of((waiting,), fleet, now)[0].able

    def version(self, table: EndpointTable) -> tuple[int, int]:
        """Return the table's version and the count of changed rules: what was looked up holds while both are equal."""
        return table.version, self._changes

    def able_bits(self, waiting: Waiting, table: EndpointTable) -> int:
        """Return the slots that can serve the request as bits, without a look-up; -1 = not known any more."""
        known: _Known = waiting.known
        return known.able_bits if known.version == self.version(table) else -1

    @staticmethod
    def reach(waiting: Iterable[Waiting], slots: BoolColumn) -> int:
        """Those of these slots (see `bits`) that can serve one that waits, as far as the last look-ups say."""
        reached, wanted = 0, bits(slots)
        for each in waiting:
            reached |= each.known.able_bits & wanted
            if reached == wanted:  # soon, and thousands may wait
                break
        return reached

    def follow(self, rules: WaitingRules) -> None:
        """Use other rules from now on, also for requests that wait already."""
        self._rules = rules
        self._changes += 1

    def bind(self, window: Sequence[Waiting], fleet: Fleet, opened: BoolColumn, now: float) -> Bound | float:
        """Return a request of the window and its slot, or the clock seconds to try again; `inf` = after an event."""
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
        pairs = Pairs(requests, able, shares, terms)
        policy_cost = np.where(able, self._rules.costs(pairs, fleet, now), inf)
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
        return _Judged(costs, may, rank, policy_cost, own, own + terms.queue, memory, full, fleet.table.per_rank)

    def look(self, request: Request, fleet: Fleet, now: float) -> tuple[float, _Known]:
        """Return the predicted work in uncached prompt tokens at the endpoint that has cached most of it, at least 1
        (`inf` = there are endpoints, but none can serve it); and the value for `Waiting.known`."""
        known = _Known()
        self._refresh(known, request, fleet, now)
        if fleet.table.count and not np.count_nonzero(known.able):
            return inf, known
        prompt = request.prompt_tokens
        return max(prompt - prompt * top(known.share) if known.cached else prompt, 1.0), known

    def _known_of(self, window: Sequence[Waiting], fleet: Fleet, now: float) -> list[_Known]:
        """Return what is known of the first requests of the window: all of them, unless more than `LOOKUPS` must be
        looked up because endpoints or rules changed."""
        version, departed, looked_up = self.version(fleet.table), self._departed, 0
        all_known: list[_Known] = []
        for waiting in window:  # hundreds for each that is sent
            known: _Known = waiting.known
            if known.version != version:
                looked_up += 1
                if looked_up > LOOKUPS:
                    break
                self._refresh(known, waiting.request, fleet, now)
            elif self._refreshes:
                chain = waiting.request.prefix.hashes
                if now - known.looked > HITS_AGE or (chain and departed.get(chain[0], -inf) >= known.looked):
                    self._refreshes -= 1
                    self._refresh(known, waiting.request, fleet, now)
            all_known.append(known)
        return all_known

    def _refresh(self, known: _Known, request: Request, fleet: Fleet, now: float) -> None:
        table, known.version = fleet.table, self.version(fleet.table)
        if known.version != self._version or len(self._ables) >= _REMEMBERED:
            self._version, self._ables = known.version, {}
            if len(self._uncached) != len(table):
                self._uncached = np.zeros(len(table))
                self._uncached.setflags(write=False)
        able = self._rules(request, fleet, now)
        able = table.alive if able is None else able & table.alive
        able_bits = bits(able)
        known.able_bits, known.able = self._ables.setdefault(able_bits, (able_bits, able))
        known.looked = now
        fleet.settle_prompts(now)
        share = fleet.match(request) if request.prefix.hashes else None
        known.cached = share is not None
        known.share = self._uncached if share is None else share

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
        scorers: list[tuple[str, float, FloatColumn]] = [("cost", 1.0, totals)]
        if judged.memory is not None and np.count_nonzero(judged.memory[row]):
            scorers.append(("memory-wait", 1.0, -judged.memory[row]))
            totals = totals - judged.memory[row]
        candidates = opened & known.able if opened[slot] else known.able
        trace = Trace(
            endpoints=fleet.table.ids,
            filters=[(ABLE, known.able), (FLOW_CONTROL, candidates)],
            scorers=scorers,
            total=totals,
            candidates=candidates,
            outcome="picked",
            held=known.share if known.cached else None,
            loading=fleet.loading(request) if fleet.table.lora else None,
        )
        here = float(known.share[slot])
        prompt = request.prompt_tokens
        work = max(prompt - here * prompt, 1.0)
        by, notify = self._rules.by(request), self._rules.notifier(request, now)
        return Bound(waiting, slot, work, here, top(known.share), runner_up, trace, by, notify)
