"""Flow control: whether a request is sent at once, waits or is refused; which waiting request is sent next; eviction.

    arrived ──► no request waits, and the policy's choice is open ──► sent there at once
            └─► waits ──► dispatched: a pair (request, open endpoint) was chosen
                      ├─► refused: over a limit, out of time, shutting down
                      └─► cancelled: the client is gone

Rules
* Late binding: an endpoint is chosen when a request leaves the queue, never before. `PairBinder` chooses among a window
  of requests and all open endpoints; fairness determines whose window it is.
* Bands are strict, but no endpoint stays idle: if no request of a higher band can use an open endpoint, a lower band
  may. Lower bands also leave the room that a band's heavy requests leave to its light ones. Two settings change that:
  minimum shares (`shares`) let a lower band go first now and then, and ceilings (`Ceiling`) keep a band waiting
  although an endpoint is open.
* Driven by events: arrivals, first tokens, ends, scrapes, joining endpoints. There is no tick. One call dispatches at
  most one request; `more` then says that another call is needed, so that a long queue does not delay other events.
  One call refuses at most `REFUSALS` waiting requests, however many run out of time at once. While expired requests are
  left (`overdue`), no request is dispatched.
* The gate judges by our own ledger first. If it knows nothing, endpoints are open: stale metrics never halt a pool.
* While no request waits and all requests in flight belong to one flow, there is nothing to share and requests are not
  counted. Flow control then only checks the endpoint that the policy chose (`only`). When that state ends, the requests
  in flight are counted (`count`).
* Between flows (`core.fairness.Demand`): requests of a light flow are sent at once unless a higher band waits, even if
  the `ledger` gate is closed. Requests of a heavy flow wait where they would slow down a light one.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from itertools import chain, islice, takewhile
from math import ceil, inf
from typing import Any, Protocol

import numpy as np
from msgspec import Struct, field

from fairlead.core.apis import OTHER, WITHOUT_MODEL
from fairlead.core.binding import LOOKUPS, Bound, PairBinder, WaitingRules, bits
from fairlead.core.columns import BoolColumn
from fairlead.core.cost import work_ms
from fairlead.core.fairness import PATIENCE, Charge
from fairlead.core.fleet import Fleet
from fairlead.core.flow import (
    EVICTED,
    EXPIRED,
    NO_ENDPOINTS,
    SATURATED,
    SHUTTING_DOWN,
    Ceiling,
    Flow,
    FlowKey,
    Times,
    Waiting,
)
from fairlead.core.gates import EarlyShedding, PoolGate
from fairlead.core.instructions import Evict, Instruction, Reject, SetTimer
from fairlead.core.ledger import Lease
from fairlead.core.peer_queues import PeerQueues
from fairlead.core.policy import Refused
from fairlead.core.queues import Band, Queues, Shares
from fairlead.core.records import DecisionRecord, Trace, Waited
from fairlead.core.request import Request
from fairlead.core.table import EndpointTable

#: Limits of one choice, so that it delays no other events: at most `PAIRS` pairs, but at least `FEWEST` requests.
PAIRS, FEWEST = 2048, 16
#: Waiting requests that one pass looks at in search of one for an idle endpoint; each takes 2 µs.
SEARCHED = 1000
#: Waiting requests that one call refuses at most; each takes 0.05 ms in total.
REFUSALS = 16
#: Seconds that requests wait at least for an endpoint that can serve them, after the last one has gone, so that the
#: replacement of a server refuses none. And the least seconds between two looks for models without one.
GAP, STRANDED_S = 30.0, 1.0
#: Models judged in one pass. To give up requests, one call looks at this many more than it may give up. Each look takes
#: 0.08 ms.
JUDGED = 8
#: Seconds after which one of the requests that wait for an unreachable pool is sent, to see whether it is: its pages
#: alone may be unreachable. After each further one that fails, this factor of the whole time, but at most so many
#: seconds later.
TEST_S, TEST_GROWTH, TEST_GAP = 1.0, 4.0, 16.0


class Gate(Protocol):
    """Soft saturation: which endpoints may be sent one more request now."""

    @property
    def name(self) -> str: ...
    @property
    def soft(self) -> bool:
        """Whether light requests may pass while the gate is closed. False for a limit that was set by hand."""
        ...

    def open(self, fleet: Fleet, now: float) -> BoolColumn | None:
        """Return the open slots; `None` = all."""
        ...

    def admits(self, slot: int, fleet: Fleet, now: float) -> bool:
        """Whether the slot is surely open. Faster than `open`; False = unknown."""
        ...

    def level(self, fleet: Fleet, now: float) -> float:
        """Return the pool's saturation: 1 = on average no endpoint may be sent another request; above, overloaded."""
        ...


#: Value of `FlowControl.only` before the first request: any flow may become the only one.
ANYBODY = FlowKey(0, "", "")

#: Request → expected tokens of its answer.
Expect = Callable[[Request], float]


def _nothing(request: Request) -> float:
    return 0.0


def _unhindered(request: Request) -> bool:
    """Whether an endpoint answers it however busy its engine is: health checks, token counts, what is stored."""
    return request.api in WITHOUT_MODEL or (request.api == OTHER and request.unread == "empty")


class WaitReasons:
    """Counts why requests wait: the seconds in which no endpoint was open, the seconds in which one was, and the
    requests sent. A waiting request notes the three sums when it is queued; their growth explains its wait."""

    def __init__(self) -> None:
        self._closed_s = self._kept_s = self._looked = 0.0
        self._sent = 0
        self._open = False

    def look(self, opened: bool, now: float) -> None:
        """Note whether an endpoint is open from now on, before the next request is sent."""
        if self._open:
            self._kept_s += now - self._looked
        else:
            self._closed_s += now - self._looked
        self._open, self._looked = opened, now

    def counted(self, now: float) -> tuple[float, float, int]:
        self.look(self._open, now)
        return self._closed_s, self._kept_s, self._sent

    def sent(self) -> None:
        self._sent += 1

    def of(self, waiting: Waiting, now: float, compared: int = 0, passed: int = 0) -> Waited:
        """Return why a request waited. `compared`, `passed`: as in `Waited`."""
        closed_s, kept_s, sent = (
            after - before for after, before in zip(self.counted(now), waiting.counted, strict=True)
        )
        kept_by = waiting.kept_by if kept_s > 0.0 else ""
        return Waited(closed_s * 1e3, kept_s * 1e3, int(sent), compared, passed, kept_by)


class _Search(Struct):
    """A search for requests that can use one of the open slots `free` (bits). It goes on from pass to pass."""

    version: tuple[int, int] = (-1, -1)
    free: int = 0
    #: Numbers of the requests that this round has not looked at, and the number of the last request of the round.
    remaining: deque[int] = field(default_factory=deque)
    newest: int = 0
    #: Another round is needed: for some requests it was not known, or not asked, whether they can use one.
    incomplete: bool = False
    #: Numbers of those that can use one.
    candidates: list[int] = []


class FlowControl:
    """Decides about waiting requests. Owns the queues."""

    def __init__(
        self,
        queues: Queues,
        gate: Gate,
        binder: PairBinder,
        times: Times | None = None,
        window: int = 256,
        shares: Shares | None = None,
        ceiling: Ceiling | None = None,
        shedding: EarlyShedding | None = None,
        drains: bool = False,
        priorities: Collection[int] = (),
    ) -> None:
        """`window`: most requests in one choice. `drains`: at a shutdown, waiting requests are sent, not refused.
        `priorities`: those of the configured bands."""
        self.queues = queues
        self.gate = gate
        self.binder = binder
        self._times = times or Times()
        self._window = window
        self._shares = shares or Shares({})
        self._ceiling = ceiling
        self._priorities = frozenset(priorities)
        self._shedding = shedding
        self._drains = drains
        self.peers = PeerQueues()
        #: No request is kept waiting any more: all endpoints count as open.
        self.draining = False
        #: The flow whose requests are not counted, because there is no other; `None` = all are counted, by flow.
        self.only: FlowKey | None = None
        self.relax()
        #: Clock seconds since when no request may wait, because of a shutdown; `inf` = requests may wait.
        self._stopped = inf
        #: Clock seconds since when the pool has no endpoints, as far as a waiting request was affected; `inf` = it has.
        self._deserted = inf
        #: The last time (clock seconds) that an unreachable pool was sent a request.
        self._tested = -inf
        #: Target models of which requests wait although no endpoint can serve them, and the clock seconds since when;
        #: what that was judged by, and the clock seconds before which it is not judged again.
        self._stranded: dict[str, float] = {}
        self._judged = ((-1, -1), -inf)
        #: The longest-waiting request of each model that is still to be judged.
        self._unjudged: dict[str, Waiting] = {}
        #: The last `expire` or `stop` may have left requests that must be refused too.
        self._left = False
        self.tally = WaitReasons()
        #: The last pass that dispatched nothing: the open slots, the number of the newest request, the table's version.
        self._in_vain: BoolColumn | None = None
        self._newest = (0, 0)
        #: How many others the last dispatched request was compared with, and how many of them were ahead of it.
        self._among = (0, 0)
        #: Priority → number of requests, after those whose turn it is, that an unfinished pass has already considered.
        self._passed: dict[int, int] = {}
        #: Priority → the last search for requests beside those in turn.
        self._searches: dict[int, _Search] = {}
        #: Whether the pass over the queues is unfinished. Clock seconds of the next pass without an event; inf = none.
        self.more = False
        self.look_again = inf

    def __len__(self) -> int:
        return len(self.queues)

    @property
    def holds(self) -> bool:
        """Whether requests may wait while the pool has no endpoints."""
        return self._times.no_endpoints > 0.0

    def deserted(self, fleet: Fleet) -> bool:
        """Whether requests can be sent to nobody: the pool has no endpoints, or they wait until it is up again."""
        return not fleet.table.count or (self.holds and fleet.unreachable)

    # ---- one flow alone ----

    def count(self, leases: Iterable[tuple[Lease, float]], fleet: Fleet) -> list[Charge]:
        """Count all requests by flow from now on. `leases`: those in flight, with the expected tokens of their answers.
        Return their charges, in the same order."""
        self.only = None
        return [
            self.sent(lease.request, lease.slot, lease.computed, output, fleet, lease.charged_at)
            for lease, output in leases
        ]

    @property
    def uncounted(self) -> FlowKey | None:
        """The one flow whose requests are not counted; `None` = there is none."""
        return None if self.only is ANYBODY else self.only

    def relax(self) -> None:
        """Stop counting if there is at most one flow. Called periodically."""
        if self.only is None and self._ceiling is None and self._shedding is None and not len(self.queues):
            active = self.queues.active()
            only = active[0] if active else ANYBODY
            if len(active) < 2 and not self.peers.beside(only):
                self.only = only

    # ---- arrivals ----

    def asks(self, request: Request, fleet: Fleet, now: float) -> bool:
        """Whether `arrived` needs the policy's choice."""
        if _unhindered(request) or self.deserted(fleet):
            return False
        if len(self.queues):
            return self._passes(*self.queues.of(request, now), 0.0)
        return self.queues.guarding(request.priority) or self.gate.open(fleet, now) is not None

    def _passes(self, band: Band, flow: Flow, ms: float) -> bool:
        """Whether another request of the flow is light and may go before waiting requests: its flow has none waiting,
        no higher band has any, and it is the flow's turn. `ms`: milliseconds of its work."""
        return (
            band.fair
            and not len(flow)
            and band.demand.light(flow, ms)
            and not any(higher.count for higher in self.queues.bands() if higher.priority > band.priority)
            and band.fairness.due(flow)
        )

    def arrived(
        self, request: Request, fleet: Fleet, now: float, slot: int = -1, expect: Expect = _nothing
    ) -> "Refused | tuple[Waiting, list[Waiting]] | None":
        """Decide about an arriving request. `None` = it goes to the policy at once: the policy's choice is open, it may
        not wait, or no endpoint can ever serve it. Else return its refusal, or the waiting request and those that it
        displaced. `slot`: the policy's choice, if `asks`; < 0 = none. `expect`: returns the expected tokens."""
        if request.priority < 0 and self._shedding is not None and self._shedding.sheds(self.gate.level(fleet, now)):
            return Refused(SATURATED, "the pool is nearly saturated, and the request is sheddable", status=429)
        deserted = self.deserted(fleet)
        if not deserted and (_unhindered(request) or self._goes(request, fleet, now, slot, expect)):
            return None
        work, known = self.binder.look(request, fleet, now)
        ttl = self._ttl(request, fleet)
        if work == inf or not ttl:
            return None
        if self._stopped < inf:
            return _stopping()
        output = expect(request)
        slot = slot if slot >= 0 else next((slot for slot, _ in fleet.table.slots()), -1)
        ms = self._work(request, slot, work, output, fleet)[0] if slot >= 0 else work
        outcome, displaced = self.queues.put(request, now, ttl, work, output, ms)
        if isinstance(outcome, Waiting):
            outcome.known = known
            if len(self.queues) == 1:  # the tally is not kept up to date while no request waits
                self._look(fleet, now)
                self.peers.reopen()
            outcome.counted = self.tally.counted(now)
        return outcome if isinstance(outcome, Refused) else (outcome, displaced)

    def _goes(self, request: Request, fleet: Fleet, now: float, slot: int, expect: Expect) -> bool:
        """Whether the request is sent at once; to `slot` if that is not negative."""
        free = not len(self.queues)
        if request.priority < self.peers.top:
            return False
        if not (free or slot >= 0) or not self._below_ceiling(request.priority, fleet, now):
            return False
        opened = self.gate.open(fleet, now)
        goes = opened is None or (slot >= 0 and bool(opened[slot]) and not self.peers.ahead(request.priority, now))
        if slot < 0:
            return goes
        band, flow = self.queues.of(request, now)
        ms = self._work(request, slot, request.prompt_tokens, expect(request), fleet)[0]
        if self._passes(band, flow, ms):
            return goes or (self.gate.soft and band.demand.fits(ms))
        held = band.fair and band.demand.heavy(flow, ms) and band.demand.held(slot, fleet.table, now) > now
        return free and goes and not held

    def sent(self, request: Request, slot: int, uncached: float, output: float, fleet: Fleet, now: float) -> Charge:
        """Charge the flow of a request that is sent without waiting. The caller must `settle` the charge at its end."""
        charge, step_ms = self._charge(request, slot, uncached, output, fleet, now)
        self.queues.sent(charge, step_ms)
        self.tally.sent()
        return charge

    def settle(self, charge: Charge, status: int, tokens: int, duration_ms: float, now: float) -> None:
        """Settle the charge of a request that ended. `status`: HTTP status, 0 = none came. `tokens`: of the answer.
        `duration_ms`: from its arrival at the gateway. Negative = unknown."""
        took_ms = (now - charge.since) * 1e3
        if duration_ms >= 0.0:
            took_ms = min(took_ms, duration_ms)
        self.queues.settle(charge, charge.done_ms(status, tokens, took_ms), took_ms, now)

    def _work(
        self, request: Request, slot: int, uncached: float, output: float, fleet: Fleet
    ) -> tuple[float, float, float, float]:
        """Return the milliseconds of an engine's time for the whole request, and the three of `core.cost.work_ms`."""
        prompt_ms, token_ms, step_ms = work_ms(slot, request.prompt_tokens, uncached, fleet)
        return prompt_ms + output * token_ms, prompt_ms, token_ms, step_ms

    def _charge(
        self, request: Request, slot: int, uncached: float, output: float, fleet: Fleet, now: float
    ) -> tuple[Charge, float]:
        """Return the charge, and the milliseconds of a decode-only step at the slot."""
        band, flow = self.queues.of(request, now)
        ms, prompt_ms, token_ms, step_ms = self._work(request, slot, uncached, output, fleet)
        light = band.fair and band.demand.light(flow, ms) and band.fairness.due(flow)
        return Charge(flow, slot, now, prompt_ms, token_ms, ms, light), step_ms

    def _ttl(self, request: Request, fleet: Fleet) -> float:
        rule = self.queues.limits.rule(request.model, request.fairness_id)
        return self._times.of(request, rule, fleet.table.count)

    def _below_ceiling(self, priority: int, fleet: Fleet, now: float) -> bool:
        """Whether the ceilings let the band of this priority send a request now."""
        if self._ceiling is None:
            return True
        return self._allowed(self._ceiling, {priority}, fleet, now)[priority]

    def _allowed(self, ceiling: Ceiling, more: Set[int], fleet: Fleet, now: float) -> dict[int, bool]:
        """Return which bands the ceiling lets send now, by priority: those that are configured or had a request, and
        `more`. Configured bands count before their first request, so that there is room for it."""
        seen = (band.priority for band in self.queues.bands())
        priorities = sorted({*self._priorities, *more, *seen}, reverse=True)
        return dict(zip(priorities, ceiling.allowed(self.gate.level(fleet, now), priorities), strict=True))

    def _served(self, fleet: Fleet, now: float) -> tuple[Sequence[Band], bool]:
        """Return the bands in the order in which they may send now, and whether ceilings hold back waiting requests."""
        bands = self.queues.bands()
        if self._ceiling is None or not bands:
            return self._shares.order(bands), False
        allowed = self._allowed(self._ceiling, frozenset(), fleet, now)
        free = [band for band in bands if allowed[band.priority]]
        return self._shares.order(free), any(band.count for band in bands if band not in free)

    def dispatch(self, fleet: Fleet, now: float) -> Bound | None:
        """Return the request to send now and its endpoint; `None` = none. The caller charges it to the ledger."""
        self.more = False
        bound = self._next(fleet, now)
        if bound is None:
            return None
        waiting = bound.waiting
        charge, step_ms = self._charge(waiting.request, bound.slot, bound.cost, waiting.output, fleet, now)
        self._shares.spent(self.queues.bands(), charge.flow.key.priority, charge.ms)
        self.queues.dispatch(waiting, charge, step_ms)
        if bound.trace is not None:
            bound.trace.waited = self.tally.of(waiting, now, *self._among)
        self.tally.sent()
        self.more = bool(len(self.queues))
        return bound

    def _next(self, fleet: Fleet, now: float) -> Bound | None:
        deserted = self.deserted(fleet)
        if not deserted or self._deserted < fleet.good_at:  # nobody may have waited when the last time was over
            self._deserted = inf
        if deserted:
            self._deserted = min(self._deserted, now)
        if not len(self.queues) or (deserted and not self._tests(fleet, now)):
            # An endpoint that joins or answers causes the next pass.
            self.look_again = self._test_at if fleet.table.count else inf
            self.tally.look(False, now)
            return None
        self._find_stranded(fleet, now)
        opened = self._look(fleet, now)
        if self._would_be_in_vain(opened, fleet.table.version, now):
            return None
        self.look_again = inf
        bands, held_back = self._served(fleet, now)
        kept: list[tuple[Band, BoolColumn]] = []
        for band in bands:
            if band.count:
                left, more_at = self.peers.left(band.priority, band.oldest(), opened, fleet.table, now)
                self.look_again = min(self.look_again, more_at)
                held_back = held_back or left is not opened
                for higher, held in kept:
                    if higher.priority > band.priority:
                        left = left & ~self._usable(higher, held, fleet, now)
                among = self._calm(band, left, fleet.table, now)
                bound = self._of_band(band, fleet, among, now) if np.count_nonzero(among) else None
                if among is not left:
                    held_back = True
                    bound = bound or self._not_heavy(band, fleet, left, now)
                    kept.append((band, left & ~among))
                if bound is not None:
                    self._in_vain = None
                    self._passed.clear()
                    return bound
        if self._passed:
            self.more = True
            return None
        # If ceilings, peers or light requests held a band back, the next pass may succeed although no endpoint opens.
        self._in_vain, self._newest = None if held_back else opened, (self.queues.newest, fleet.table.version)
        return None

    @property
    def _test_at(self) -> float:
        gap = min((TEST_GROWTH - 1.0) * (self._tested - self._deserted), TEST_GAP)
        return max(self._tested + gap, self._deserted + TEST_S)

    def _tests(self, fleet: Fleet, now: float) -> bool:
        """Whether to send a request to an unreachable pool now."""
        tests = fleet.table.count > 0 and self._test_at <= now
        if tests:
            self._tested = now
        return tests

    def _calm(self, band: Band, opened: BoolColumn, table: EndpointTable, now: float) -> BoolColumn:
        """Return the open slots to which heavy requests of the band may go without slowing down light ones."""
        patient_until = band.oldest() + PATIENCE
        if not band.fair or patient_until <= now:
            return opened
        calm, more_at = band.demand.calm(table, now)
        if calm is None:
            return opened
        self.look_again = min(self.look_again, more_at, patient_until)
        return opened & calm

    def _usable(self, band: Band, held: BoolColumn, fleet: Fleet, now: float) -> BoolColumn:
        """Return the slots of `held`, where heavy requests of the band must wait, that can serve some of them."""
        usable = np.zeros_like(held)
        for window in self.queues.turns(band, 1):
            usable |= held & self.binder.able(window[0], fleet, now)
            if np.array_equal(usable, held):
                break
        return usable

    def _not_heavy(self, band: Band, fleet: Fleet, opened: BoolColumn, now: float) -> Bound | None:
        """Dispatch a request of the first flow in turn that is not heavy; `None` = none can be sent."""
        for window in self.queues.turns(band, FEWEST):
            flow = window[0].flow
            if flow is not None and not band.demand.heavy(flow, 0.0) and band.fairness.due(flow):
                bound = self.binder.bind(window, fleet, opened, now)
                if isinstance(bound, Bound):
                    self._among = len(window) - 1, window.index(bound.waiting)
                    return bound
                self.look_again = min(self.look_again, bound)
                break
        return None

    def _look(self, fleet: Fleet, now: float) -> BoolColumn:
        """Return the open slots as a mask, and update the tally."""
        opened = self.gate.open(fleet, now)
        if opened is None:
            opened = fleet.table.alive
        self.tally.look(bool(np.count_nonzero(opened)), now)
        return opened

    def _would_be_in_vain(self, opened: BoolColumn, version: int, now: float) -> bool:
        """Whether a pass would dispatch nothing: no endpoint is open; or since a pass that dispatched nothing no
        request came, no endpoint opened, and `look_again` has not passed."""
        if not np.count_nonzero(opened):
            self._in_vain = None
            self.look_again = inf
            return True
        before = self._in_vain
        if before is None or len(before) != len(opened) or self._newest != (self.queues.newest, version):
            return False
        return now < self.look_again and not np.count_nonzero(opened & ~before)

    def _of_band(self, band: Band, fleet: Fleet, opened: BoolColumn, now: float) -> Bound | None:
        """Return a pair of the band. One pass makes at most three choices, each among one of `_windows`."""
        for among in self._windows(band, fleet.table, opened):
            bound = self.binder.bind(among, fleet, opened, now) if among else inf
            if isinstance(bound, Bound):
                self._among = len(among) - 1, among.index(bound.waiting)
                return bound
            self.look_again = min(self.look_again, bound)
        return None

    def _windows(self, band: Band, table: EndpointTable, opened: BoolColumn) -> Iterator[list[Waiting]]:
        """Iterate over the window whose turn it is, then as many requests after it, of other flows, which are charged
        all the same. If there are more, the next pass continues behind them; at the end come those of `_besides`."""
        most = min(self._window, max(PAIRS // len(table), FEWEST))
        turns = self.queues.turns(band, most)
        passed = self._passed.pop(band.priority, 0)
        first = next(turns, [])
        if not passed:
            yield first
        remaining = list(islice(chain.from_iterable(turns), passed, passed + most))
        yield remaining
        if len(remaining) == most:
            self._passed[band.priority] = passed + most
        else:
            yield self._besides(band, most, table, opened, passed + len(remaining))

    def _besides(self, band: Band, most: int, table: EndpointTable, opened: BoolColumn, passed: int) -> list[Waiting]:
        """Return up to `most` requests that can use an open endpoint which none of those in turn can use, for example
        because it serves another model. Without them, it would stay idle while thousands wait for others. One pass
        looks at `SEARCHED` more; if there are more, the next one continues behind those in turn, which are `passed`."""
        able, free = self.binder.able_bits, bits(opened)
        for window in self.queues.turns(band, most):
            for waiting in window:
                free &= ~able(waiting, table)
                if not free:
                    return []
        search, besides = self._search(band, free, table), dict[int, Waiting]()
        left = SEARCHED + len(search.candidates)
        search.remaining.extendleft(reversed(search.candidates))
        unknown = LOOKUPS + 1  # more than a choice looks up, so that the next pass continues at once
        while search.remaining and left and len(besides) < most:
            member = band.members.get(search.remaining.popleft())
            if member is None:
                continue
            left -= 1
            if (places := able(member, table)) & free:
                if places > 0 or unknown:
                    unknown -= places < 0
                    besides[member.number] = member
                else:
                    search.incomplete = True
        search.candidates = list(besides)
        unfinished = search.remaining or search.incomplete or search.newest < band.last().number
        if len(besides) < most and unfinished:
            self._passed[band.priority] = max(passed, 1)
        return list(besides.values())

    def _search(self, band: Band, free: int, table: EndpointTable) -> _Search:
        """Return the search that the last pass left, made ready to go on for the slots `free`. Only a finished round is
        followed by another, so that no request is passed over however often the pool changes."""
        search, version = self._searches.setdefault(band.priority, _Search()), self.binder.version(table)
        search.incomplete |= search.version != version or bool(free & ~search.free)
        search.version, search.free = version, free
        if not search.remaining:
            newer = takewhile(search.newest.__lt__, reversed(band.members))
            search.remaining.extend(band.members if search.incomplete else reversed(list(newer)))
            search.newest, search.incomplete = band.last().number, False
        return search

    def _find_stranded(self, fleet: Fleet, now: float) -> None:
        """Note the models whose longest-waiting request no endpoint can serve any more. Only a change of the table or
        the rules strands one: a request that none can serve at its arrival does not wait."""
        version, before, first = self.binder.version(fleet.table), self._judged, self._unjudged
        if before[0] != version and now >= before[1]:
            self._judged = (version, now + STRANDED_S)
            first.clear()
            for waiting in chain.from_iterable(band.members.values() for band in self.queues.bands()):
                first.setdefault(waiting.request.target_model, waiting)
                if len(first) == len(self.queues.models):  # soon, and thousands may wait
                    break
            self._stranded = {model: since for model, since in self._stranded.items() if model in first}
        for model in list(islice(first, JUDGED)):
            waiting = first.pop(model)
            if self.binder.look(waiting.request, fleet, now)[0] == inf:
                self._stranded[model] = max(self._stranded.get(model, now), waiting.since)
            else:
                self._stranded.pop(model, None)

    @property
    def _patience(self) -> float:
        """Seconds that requests wait for an endpoint that can serve them, while there are others."""
        return max(self._times.no_endpoints, GAP)

    def _given_up(self, most: int, fleet: Fleet, now: float) -> list[Waiting]:
        """Take out up to `most` requests that no endpoint can serve, of models that had none for too long. It looks at
        the first of these models' requests only."""
        over = {model for model, since in self._stranded.items() if since + self._patience <= now}
        waiting = chain.from_iterable(band.members.values() for band in self.queues.bands()) if over else ()
        lost = (each for each in waiting if each.request.target_model in over)
        looked_at = islice(lost, most + JUDGED)
        given_up = [each for each in looked_at if self.binder.look(each.request, fleet, now)[0] == inf][:most]
        for each in given_up:
            self.queues.remove(each)
        if len(given_up) < most:
            self._stranded = {model: since for model, since in self._stranded.items() if model not in over}
        return given_up

    def expire(self, fleet: Fleet, now: float) -> list[tuple[Waiting, Refused]]:
        """Take out the first `REFUSALS` requests whose time is over, and return them with their refusals. If `overdue`
        is true afterwards, more are left."""
        if self._stopped < inf:
            return self.stop(now)
        late = self.queues.expire(now, REFUSALS)
        if not self.deserted(fleet):
            self._deserted = inf
            late += self._given_up(REFUSALS - len(late), fleet, now)
        elif self._deserted + self._times.no_endpoints <= now:
            late += self.queues.clear(REFUSALS - len(late), now, self._times.no_endpoints)
        self._left = len(late) == REFUSALS
        return [(waiting, self._why_late(waiting, fleet, now)) for waiting in late]

    def _why_late(self, waiting: Waiting, fleet: Fleet, now: float) -> Refused:
        if not fleet.table.count:
            return Refused(NO_ENDPOINTS, "the request timed out waiting, and the pool has no endpoints")
        if self.deserted(fleet):
            return Refused(NO_ENDPOINTS, "the request timed out waiting, and no endpoint answers")
        if not np.count_nonzero(self.binder.able(waiting, fleet, now)):
            return Refused(NO_ENDPOINTS, "the request timed out waiting, and no endpoint can serve it")
        return Refused(EXPIRED, "the request timed out waiting for a free endpoint", status=429)

    def stop(self, now: float) -> list[tuple[Waiting, Refused]]:
        """Let no request wait from now on. With `drains`, the waiting requests are sent. Otherwise take out and refuse
        the first `REFUSALS`, as `expire` does."""
        if self._drains:
            self.drain()
            return []
        self._stopped = min(self._stopped, now)
        self._left = True
        return [(waiting, _stopping()) for waiting in self.queues.clear(REFUSALS)]

    def drain(self, gate: Gate | None = None) -> None:
        """Treat all endpoints as open from now on, so that waiting requests are sent. With a `gate`: use it again."""
        self.draining = gate is None
        self.gate = gate or PoolGate("open", lambda fleet, now: 0.0)
        self._in_vain = None

    def overdue(self, now: float) -> bool:
        """Whether expired requests are left, so that `expire` must be called again."""
        return self._left and self.next_deadline() <= now

    def next_deadline(self) -> float:
        if self._stopped < inf and len(self.queues):
            return self._stopped
        first = self.queues.next_deadline()
        if self._deserted < inf:  # `expire` looks at no model then
            return min(first, max(self._deserted, self.oldest()) + self._times.no_endpoints)
        stranded = (since for model, since in self._stranded.items() if model in self.queues.models)
        return min(first, min(stranded, default=inf) + self._patience)

    def oldest(self) -> float:
        """Return the clock seconds since when the longest-waiting request waits; `inf` = none waits."""
        return min((band.oldest() for band in self.queues.bands()), default=inf)

    def validate(self) -> None:
        self.queues.validate()


def _stopping() -> Refused:
    return Refused(SHUTTING_DOWN, "the scheduler is shutting down; try again")


# Eviction: running sheddable requests are ended to make room for more important ones that wait.
#
# Only requests with a priority below 0 are evicted, for requests of a strictly higher priority, and only at endpoints
# that can serve these. Requests that need no model, such as token counts, make no room. The lowest priority goes first,
# and among equals the newest, which loses the least.
#
# Rules
# * A victim is gone when its lease is released. The driver closes its stream, and the gateway tells the model server,
#   which frees its memory within 0.3 s (measured, vLLM 0.32). Until then, and for `GRACE` seconds after the decision,
#   no other request is evicted: otherwise one shortage would cost many victims.
# * A victim whose end is not confirmed within `CONFIRM` seconds is no longer waited for, and not evicted again.
# * At most `AT_ONCE` victims per decision.
# * After a search that found none, the next one is `_MOMENT` later: it looks at all leases, and follows every event.

#: Seconds, seconds, and requests; see above.
GRACE = 0.5
CONFIRM = 10.0
AT_ONCE = 2


class Eviction:
    """`after`: seconds that a request must have waited before others are evicted for it. Raises `ValueError` if < 0."""

    def __init__(self, after: float = 0.25) -> None:
        if not after >= 0:
            raise ValueError("a time must not be negative")
        self._after = after
        #: Victims whose leases are still held.
        self._evicting: list[Lease] = []
        #: When the last victims were chosen, and when none were found.
        self._last = self._in_vain = -inf

    def victims(self, flow: FlowControl, fleet: Fleet, now: float) -> list[Lease]:
        """Return the leases to evict now. The caller sets their `evicted_at`."""
        self._evicting = [lease for lease in self._evicting if lease.held]
        if max(self.look_at(flow), self._in_vain + _MOMENT) > now or any(
            now < lease.evicted_at + CONFIRM for lease in self._evicting
        ):
            return []
        for band in flow.queues.bands():
            if band.count and band.oldest() + self._after <= now:
                chosen = self._for(band, flow, fleet, now)
                if chosen:
                    self._last = now
                    self._evicting += chosen
                    return chosen
        self._in_vain = now
        return []

    def _for(self, band: Band, flow: FlowControl, fleet: Fleet, now: float) -> list[Lease]:
        running = [
            lease
            for lease in fleet.ledger
            if lease.request.priority < min(band.priority, 0)
            and lease.evicted_at < 0.0
            and not (lease.auxiliary or _unhindered(lease.request))
        ]
        if not running:
            return []
        able = flow.binder.able(band.longest_waiting(), fleet, now)
        running = [lease for lease in running if able[lease.slot]]
        running.sort(key=lambda lease: (lease.request.priority, -lease.charged_at, -lease.request.id))
        return running[:AT_ONCE]

    def look_at(self, flow: FlowControl) -> float:
        """Return the clock seconds before which no request is evicted; `inf` = no request waits."""
        return max(flow.oldest() + self._after, self._last + GRACE)


# The flow controller: turns decisions about waiting requests into instructions, and sets the timers.
#
# Rules
# * The gateway is told once that a request waits (`Hold`), so that it waits for an answer as long as the request may.
# * Two timers, both exact: one for the earliest deadline, and one for the next pass over the queues. The latter is set
#   for example when a request stops waiting for the endpoint that has cached its prompt, or if a pass is unfinished.
# * Refusals have a `Retry-After`: the time until the waiting requests of the same model, and of the same or a higher
#   priority, are dispatched, at the present pace (`core.queues`). With a 503 it is the least: a queue that is given up,
#   or whose pool is empty, has no pace.

DEADLINE_TIMER = "queue-deadline"
DISPATCH_TIMER = "queue-dispatch"
#: Seconds that a gateway waits beyond a request's deadline, so that it receives our refusal.
MARGIN = 1.0
#: Bounds of `Retry-After`, in seconds.
RETRY = (1.0, 60.0)
#: `FlowController.wanted` is at most this multiple of the present endpoints.
GROWTH = 4.0
#: Requests with which a pace must be measured before more endpoints are wanted for it. They are not quickly given back.
_MEASURED = 8.0
#: Least seconds until the next check for requests to evict.
_MOMENT = 0.05

#: (the request and its endpoint, now) → the instructions that send it. Also charges it.
Send = Callable[[Bound, float], list[Instruction]]
#: (the lease of the victim, the answer to its client) → the instruction that evicts it.
Evictor = Callable[[Lease, Reject], Evict]


class FlowController:
    """One per pipeline. `policy`: the name under which its decisions are recorded. `target_s`: seconds that requests
    may wait before more endpoints are wanted. `eviction`: `None` = no request is evicted."""

    def __init__(
        self, flow: FlowControl, policy: str = "", target_s: float = 1.0, eviction: Eviction | None = None
    ) -> None:
        self.flow = flow
        self._eviction = eviction
        #: Whether running requests of a priority below 0 may be evicted.
        self.evicts = eviction is not None
        #: Number of evicted requests by priority.
        self.evicted: dict[int, int] = {}
        self.policy = policy
        self._target_s = target_s
        self._deadline = inf
        self._look = inf

    def __len__(self) -> int:
        return len(self.flow)

    def follow(self, policy: str, rules: WaitingRules) -> None:
        """Follow another policy from now on. Its rules (`WaitingRules`) also apply to requests that wait already."""
        self.policy = policy
        self.flow.binder.follow(rules)

    def opened(self, fleet: Fleet, now: float) -> BoolColumn | None:
        """Return the slots that may be sent another request now; `None` = all."""
        return self.flow.gate.open(fleet, now)

    def dispatched(self, send: Send, evict: Evictor, fleet: Fleet, now: float) -> list[Instruction]:
        """Dispatch at most one request, evict, and set timers. Call it after every event while requests wait."""
        instructions: list[Instruction] = []
        bound = None if self.flow.overdue(now) else self.flow.dispatch(fleet, now)
        if bound is not None:
            instructions += send(bound, now)
        if self._eviction is not None and not self.flow.more and not self.flow.deserted(fleet):
            victims = self._eviction.victims(self.flow, fleet, now)
            for lease in victims:
                priority = lease.request.priority
                self.evicted[priority] = self.evicted.get(priority, 0) + 1
                instructions.append(evict(lease, self._answer(lease.request, EVICTED, now)))
        return instructions + self._timers(now)

    def _timers(self, now: float) -> list[Instruction]:
        timers: list[Instruction] = []
        deadline = self.flow.next_deadline()
        if deadline != self._deadline:
            self._deadline = deadline
            if deadline < inf:
                timers.append(SetTimer(DEADLINE_TIMER, max(deadline, now)))
        look = now if self.flow.more else max(self.flow.look_again, now)
        if self._eviction is not None:
            look = min(look, max(self._eviction.look_at(self.flow), now + _MOMENT))
        if len(self.flow) and look < inf and (look < self._look or self._look <= now):
            self._look = look
            timers.append(SetTimer(DISPATCH_TIMER, look))
        return timers

    def fired(self, name: str, fleet: Fleet, now: float) -> list[tuple[Waiting, Refused]]:
        """Handle a timer; the caller then calls `dispatched`. Return the requests whose time is over, which have left
        their queues, with their refusals."""
        if name == DISPATCH_TIMER:
            self._look = inf
        if name != DEADLINE_TIMER:
            return []
        self._deadline = inf
        return self.flow.expire(fleet, now)

    def wanted(self, slots: BoolColumn, now: float) -> int:
        """Return how many endpoints would keep the wait below `target_s`: these slots, and for each that can serve what
        waits as many more as the longest wait of such a model asks for, at most `GROWTH` times as many in all."""
        count = int(np.count_nonzero(slots))
        queues, by_model = self.flow.queues, dict[str, list[Waiting]]()
        for waiting in chain.from_iterable(band.members.values() for band in queues.bands()):
            by_model.setdefault(waiting.request.target_model, []).append(waiting)
        delays = queues.model_drains_s(now, _MEASURED)
        for model, members in by_model.items():
            delays[model] = max(delays[model], now - min(waiting.since for waiting in members))
        reached, more = 0, 0.0
        for model in sorted(delays, key=delays.__getitem__, reverse=True):
            further = self.flow.binder.reach(by_model[model], slots) & ~reached
            reached |= further
            more += further.bit_count() * self._more(delays[model])
        if not reached:  # it is not known which can serve it
            more = count * self._more(max(delays.values(), default=0.0))
        return max(count + ceil(more), 1) if delays else count

    def _more(self, delay_s: float) -> float:
        return min(max(delay_s / self._target_s, 1.0), GROWTH) - 1.0

    def refused(
        self, request: Request, why: Refused, now: float, client: Any = None, waiting: Waiting | None = None
    ) -> list[Instruction]:
        """Return the answer to a refused request, and its record. `waiting`: if it waited."""
        return [self._answer(request, why, now, client), self.record(request, why, now, waiting)]

    def _answer(self, request: Request, why: Refused, now: float, client: Any = None) -> Reject:
        low, high = RETRY
        drain_s = 0.0 if why.status == 503 else self.flow.queues.drain_s(now, request.priority, request.target_model)
        return Reject(
            request_id=request.id,
            status=why.status,
            reason=why.reason,
            message=why.message,
            retry_after_s=min(max(drain_s, low), high),
            api=request.api,
            client=client,
        )

    def record(
        self, request: Request, why: Refused, now: float, waiting: Waiting | None = None, queued_ms: float = 0.0
    ) -> DecisionRecord:
        trace = None
        if waiting is not None:
            queued_ms = (now - waiting.since) * 1e3
            trace = Trace(outcome="none", waited=self.flow.tally.of(waiting, now))
        return DecisionRecord(
            request=request,
            at=now,
            policy=self.policy,
            outcome=why.reason,
            status=why.status,
            queued_ms=queued_ms,
            trace=trace,
        )

    def validate(self) -> None:
        self.flow.validate()
        assert self._deadline <= self.flow.next_deadline()
