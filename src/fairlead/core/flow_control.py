"""Flow control as a whole: go at once, wait, or be refused; and who goes, or makes way, when something has changed.

    arrived ──► nobody waits, and the policy's choice is open ──► goes there at once
            └─► waits ──► dispatched: a pair (request, open endpoint) was chosen
                      ├─► refused: over a limit, out of time, shutting down
                      └─► cancelled: the client is gone

Rules
* Late: an endpoint is chosen when a request leaves the queue, never before. `PairBinder` chooses among a window of
  requests and all open endpoints; fairness says whose window it is.
* Strict between bands, but never idle: where no request of a higher band can use what is open, a lower one may.
  Room that a band's heavy requests leave to its light ones is left by lower bands, too. Two settings bend that: minimum
  shares (`shares`) let a lower band go first now and then, ceilings (`Ceiling`) keep it waiting although something is
  open.
* Driven by events: arrivals, first tokens, ends, scrapes, joining endpoints. There is no tick. One call dispatches at
  most one request; `more` then says that it is not done, so that a long queue does not hold up everybody else.
  One call refuses at most `REFUSALS` of those that wait, however many run out of time at once; while some are left
  whose time is over (`overdue`), nobody goes.
* The gate judges by our own ledger first. Where it knows nothing it says open: stale metrics never halt a pool.
* While nobody waits and all that is in flight is of one flow, there is nothing to share, and requests are not counted:
  flow control costs a request one look at the endpoint that the policy chose (`only`). What is in flight is counted
  when that ends (`count`).
* Between flows (`core.fairness.Demand`): a light one's requests go at once unless a higher band waits, also where the
  worked-out gate says closed; those of heavy ones wait where they would slow it down.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from math import ceil, inf
from typing import Any, Protocol

import numpy as np

from fairlead.core.binding import Bound, PairBinder, WaitingRules
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

#: Pairs among which one is chosen, at most, and requests, at least: one choice must not hold up everybody else.
PAIRS, FEWEST = 2048, 16
#: Requests that are taken out and told so in one call: 0.05 ms each, all in all.
REFUSALS = 16


class Gate(Protocol):
    """Soft saturation: which endpoints may be sent one more request now."""

    @property
    def name(self) -> str: ...
    @property
    def soft(self) -> bool:
        """Light requests may pass it while it is closed: a limit that was set by hand holds for all."""
        ...

    def open(self, fleet: Fleet, now: float) -> BoolColumn | None:
        """`None` = all of them."""
        ...

    def admits(self, slot: int, fleet: Fleet, now: float) -> bool:
        """Whether that one is open, worked out in less time than `open`. False = it may be."""
        ...

    def level(self, fleet: Fleet, now: float) -> float:
        """The pool's saturation: 1 = no endpoint may be sent one more, on average; above, oversubscribed."""
        ...


#: The only flow while no other has come: whoever comes first.
ANYBODY = FlowKey(0, "", "")

#: Request → expected tokens of its answer.
Expect = Callable[[Request], float]


def _nothing(request: Request) -> float:
    return 0.0


class Tally:
    """Counts, for all that wait, what they wait for: two sums of seconds and one of requests, each request by what they
    grow while it waits."""

    def __init__(self) -> None:
        self._closed_s = self._kept_s = self._looked = 0.0
        self._sent = 0
        self._open = False

    def look(self, opened: bool, now: float) -> None:
        """Whether some endpoint is open from now on, as it stands before somebody is sent there."""
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
        """Why it waited. `compared`, `passed`: as in `Waited`."""
        closed_s, kept_s, sent = (
            after - before for after, before in zip(self.counted(now), waiting.counted, strict=True)
        )
        kept_by = waiting.kept_by if kept_s > 0.0 else ""
        return Waited(closed_s * 1e3, kept_s * 1e3, int(sent), compared, passed, kept_by)


class FlowControl:
    """Owns the queues."""

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
    ) -> None:
        """`drains`: at a shutdown those that wait are sent instead of refused."""
        self.queues = queues
        self.gate = gate
        self.binder = binder
        self._times = times or Times()
        self._window = window
        self._shares = shares or Shares({})
        self._ceiling = ceiling
        self._shedding = shedding
        self._drains = drains
        self.peers = PeerQueues()
        #: Nobody is held any more.
        self.draining = False
        #: The flow whose requests are not counted, because there is no other; `None` = all are counted, by flow.
        self.only: FlowKey | None = None
        self.relax()
        #: Since when nobody may wait any more; `inf` = they may.
        self._stopped = inf
        #: Since when there is no endpoint and nobody may wait for one.
        self._deserted = inf
        self._left = False
        self.tally = Tally()
        #: The last look that found nobody to go: what was open, and the newest request then.
        self._in_vain: BoolColumn | None = None
        self._newest = (0, 0)
        #: How many others the last one that went was compared with, and how many of them stood before it.
        self._among = (0, 0)
        #: Priority → requests that a look which is not done has passed over, behind those whose turn it is.
        self._passed: dict[int, int] = {}
        #: Whether a look at the queues ended before it was done, and else the clock seconds at which one more look is
        #: worth it even if nothing happens; `inf` = never.
        self.more = False
        self.look_again = inf

    def __len__(self) -> int:
        return len(self.queues)

    # ---- one flow alone ----

    def count(self, leases: Iterable[tuple[Lease, float]], fleet: Fleet) -> list[Charge]:
        """From now on all requests are counted. `leases`: of those in flight, with the tokens of the answer expected.
        Returns their charges."""
        self.only = None
        return [
            self.sent(lease.request, lease.slot, lease.uncached_tokens, output, fleet, lease.charged_at)
            for lease, output in leases
        ]

    @property
    def uncounted(self) -> FlowKey | None:
        """The one flow whose requests go uncounted."""
        return None if self.only is ANYBODY else self.only

    def relax(self) -> None:
        """Stop counting if there is one flow at most. To be called now and then."""
        if self.only is None and self._ceiling is None and self._shedding is None and not len(self.queues):
            active = self.queues.active()
            only = active[0] if active else ANYBODY
            if len(active) < 2 and not self.peers.beside(only):
                self.only = only

    # ---- arrivals ----

    def asks(self, request: Request, fleet: Fleet, now: float) -> bool:
        """Whether `arrived` depends on the policy's choice."""
        if not fleet.table.count:
            return False
        if len(self.queues):
            return self._passes(*self.queues.of(request, now), 0.0)
        return self.queues.guarding(request.priority) or self.gate.open(fleet, now) is not None

    def _passes(self, band: Band, flow: Flow, ms: float) -> bool:
        """Whether one more request of the flow is light, and need not mind those that wait: none of its own, nobody of
        a higher band, and it is its turn."""
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
        """`None` = the policy decides at once: what it chose is open, or nobody can ever serve it. Else why it is
        refused, or that it waits, and who gave way for it. `slot`: the policy's choice, if `asks`; < 0 = none.
        `expect`: tokens of the answer."""
        if request.priority < 0 and self._shedding is not None and self._shedding.sheds(self.gate.level(fleet, now)):
            return Refused(SATURATED, "the pool is nearly saturated, and the request is sheddable", status=429)
        if fleet.table.count and self._goes(request, fleet, now, slot, expect):
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
            if len(self.queues) == 1:  # nobody has looked while nobody waited
                self._look(fleet, now)
                self.peers.reopen()
            outcome.counted = self.tally.counted(now)
        return outcome if isinstance(outcome, Refused) else (outcome, displaced)

    def _goes(self, request: Request, fleet: Fleet, now: float, slot: int, expect: Expect) -> bool:
        """Whether it goes at once, to `slot` if that is known."""
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
        """A request goes that has not waited: charge its flow, and `settle` it at the end."""
        band, flow = self.queues.of(request, now)
        charge, step_ms = self._charge(band, flow, request, slot, uncached, output, fleet, now)
        self.queues.sent(flow, charge, step_ms)
        self.tally.sent()
        return charge

    def settle(self, charge: Charge, status: int, tokens: int, duration_ms: float, now: float) -> None:
        """A request that went is over: HTTP status (0 = none came), tokens of the answer and milliseconds from its
        arrival at the gateway (both < 0 = not known)."""
        took_ms = (now - charge.since) * 1e3
        if duration_ms >= 0.0:
            took_ms = min(took_ms, duration_ms)
        self.queues.settle(charge, charge.done_ms(status, tokens, took_ms), took_ms, now)

    def _work(
        self, request: Request, slot: int, uncached: float, output: float, fleet: Fleet
    ) -> tuple[float, float, float, float]:
        """Milliseconds of an engine's time: all of the request, and its parts (`core.cost.work_ms`)."""
        prompt_ms, token_ms, step_ms = work_ms(slot, request.prompt_tokens, uncached, fleet)
        return prompt_ms + output * token_ms, prompt_ms, token_ms, step_ms

    def _charge(
        self,
        band: Band,
        flow: Flow,
        request: Request,
        slot: int,
        uncached: float,
        output: float,
        fleet: Fleet,
        now: float,
    ) -> tuple[Charge, float]:
        """With the milliseconds of a step there."""
        ms, prompt_ms, token_ms, step_ms = self._work(request, slot, uncached, output, fleet)
        light = band.fair and band.demand.light(flow, ms) and band.fairness.due(flow)
        return Charge(flow, slot, now, prompt_ms, token_ms, ms, light), step_ms

    def _ttl(self, request: Request, fleet: Fleet) -> float:
        rule = self.queues.limits.rule(request.model, request.fairness_id)
        return self._times.of(request, rule, fleet.table.count)

    def _below_ceiling(self, priority: int, fleet: Fleet, now: float) -> bool:
        """Whether a request that nobody waits in front of may go, as far as ceilings matter."""
        if self._ceiling is None:
            return True
        priorities = sorted({priority, *(band.priority for band in self.queues.bands())}, reverse=True)
        return self._ceiling.allowed(self.gate.level(fleet, now), priorities)[priorities.index(priority)]

    def _served(self, fleet: Fleet, now: float) -> tuple[Sequence[Band], bool]:
        """Bands in the order in which they may send now, and whether ceilings hold some back."""
        bands = self.queues.bands()
        if self._ceiling is None or not bands:
            return self._shares.order(bands), False
        allowed = self._ceiling.allowed(self.gate.level(fleet, now), [band.priority for band in bands])
        free = [band for band, may in zip(bands, allowed, strict=True) if may]
        return self._shares.order(free), any(band.count for band in bands if band not in free)

    def dispatch(self, fleet: Fleet, now: float) -> Bound | None:
        """Who goes now. The caller charges it to the ledger."""
        self.more = False
        bound = self._next(fleet, now)
        if bound is None:
            return None
        waiting, request = bound.waiting, bound.waiting.request
        band, flow = self.queues.of(request, now)
        charge, step_ms = self._charge(band, flow, request, bound.slot, bound.cost, waiting.output, fleet, now)
        self._shares.spent(self.queues.bands(), band.priority, charge.ms)
        self.queues.dispatch(waiting, charge, step_ms)
        if bound.trace is not None:
            bound.trace.waited = self.tally.of(waiting, now, *self._among)
        self.tally.sent()
        self.more = bool(len(self.queues))
        return bound

    def _next(self, fleet: Fleet, now: float) -> Bound | None:
        if not len(self.queues) or not fleet.table.count:
            if not self._times.no_endpoints and not fleet.table.count:
                self._deserted = min(self._deserted, now)
            self.look_again = inf  # an endpoint that joins makes us look
            self.tally.look(False, now)
            return None
        self._deserted = inf
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
        # How full the pool is, which ceilings look at, and where light requests run may change though nothing opens.
        self._in_vain, self._newest = None if held_back else opened, (self.queues.newest, fleet.table.version)
        return None

    def _calm(self, band: Band, opened: BoolColumn, table: EndpointTable, now: float) -> BoolColumn:
        """Of what is open, where heavy requests may go for the sake of others' light ones."""
        patient_until = band.oldest() + PATIENCE
        if not band.fair or patient_until <= now:
            return opened
        calm, more_at = band.demand.calm(table, now)
        if calm is None:
            return opened
        self.look_again = min(self.look_again, more_at, patient_until)
        return opened & calm

    def _usable(self, band: Band, held: BoolColumn, fleet: Fleet, now: float) -> BoolColumn:
        """Of the endpoints at which heavy requests of the band must wait, those that can serve some."""
        usable = np.zeros_like(held)
        for window in self.queues.turns(band, 1):
            usable |= held & self.binder.able(window[0], fleet, now)
            if np.array_equal(usable, held):
                break
        return usable

    def _not_heavy(self, band: Band, fleet: Fleet, opened: BoolColumn, now: float) -> Bound | None:
        """Of those that need not wait for the sake of others, whose turn it is."""
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
        """Which endpoints are open."""
        opened = self.gate.open(fleet, now)
        if opened is None:
            opened = fleet.table.alive
        self.tally.look(bool(np.count_nonzero(opened)), now)
        return opened

    def _would_be_in_vain(self, opened: BoolColumn, version: int, now: float) -> bool:
        """Nobody came, nothing opened, and nobody's patience ended since a look that found nobody to go."""
        if not np.count_nonzero(opened):
            self._in_vain = None
            self.look_again = inf
            return True
        before = self._in_vain
        if before is None or len(before) != len(opened) or self._newest != (self.queues.newest, version):
            return False
        return now < self.look_again and not np.count_nonzero(opened & ~before)

    def _of_band(self, band: Band, fleet: Fleet, opened: BoolColumn, now: float) -> Bound | None:
        """One look is two choices at most: among those whose turn it is, then among as many others. Where there are
        more, the next look goes on behind them."""
        most = min(self._window, max(PAIRS // len(fleet.table), FEWEST))
        turns = self.queues.turns(band, most)
        passed = self._passed.pop(band.priority, 0)
        windows = [next(turns, [])]
        # Whose turn it is cannot go. Among the others the best pair may: their flows pay for it all the same.
        remaining = islice(chain.from_iterable(turns), passed, passed + most)
        for window in chain(windows if not passed else [], [remaining]):
            among = list(window)
            bound = self.binder.bind(among, fleet, opened, now) if among else inf
            if isinstance(bound, Bound):
                self._among = len(among) - 1, among.index(bound.waiting)
                return bound
            self.look_again = min(self.look_again, bound)
        if len(among) == most:
            self._passed[band.priority] = passed + most
        return None

    def expire(self, fleet: Fleet, now: float) -> list[tuple[Waiting, Refused]]:
        """Those whose time is over, and what they are told: the first `REFUSALS`. For all others see `overdue`."""
        if self._stopped < inf:
            return self.stop(now)
        if fleet.table.count:
            why = Refused(EXPIRED, "the request timed out waiting for a free endpoint", status=429)
        else:
            why = Refused(NO_ENDPOINTS, "the request timed out waiting, and the pool has no endpoints")
        late = self.queues.clear(REFUSALS) if self._deserted < inf else self.queues.expire(now, REFUSALS)
        self._left = len(late) == REFUSALS
        return [(waiting, why) for waiting in late]

    def stop(self, now: float) -> list[tuple[Waiting, Refused]]:
        """Nobody may wait from now on. Takes out those that do as `expire` does, unless they are sent."""
        if self._drains:
            self.drain()
            return []
        self._stopped = min(self._stopped, now)
        self._left = True
        return [(waiting, _stopping()) for waiting in self.queues.clear(REFUSALS)]

    def drain(self, gate: Gate | None = None) -> None:
        """From now on all endpoints are open: who waits goes. `gate`: no more, this one says so again."""
        self.draining = gate is None
        self.gate = gate or PoolGate("open", lambda fleet, now: 0.0)
        self._in_vain = None

    def overdue(self, now: float) -> bool:
        """Whether some are left of those that were to be taken out, and `expire` must be called once more."""
        return self._left and self.next_deadline() <= now

    def next_deadline(self) -> float:
        over = min(self._stopped, self._deserted)
        return over if over < inf and len(self.queues) else self.queues.next_deadline()

    def oldest(self) -> float:
        """Since when the request that waits longest waits; `inf` = none does."""
        return min((band.oldest() for band in self.queues.bands()), default=inf)

    def validate(self) -> None:
        self.queues.validate()


def _stopping() -> Refused:
    return Refused(SHUTTING_DOWN, "the scheduler is shutting down; try again")


# Eviction: sheddable requests that run make way for more important ones that wait.
#
# Only requests with a priority below 0 are evicted, for requests of a strictly higher priority, and only where that
# one could run: the lowest priority first, of those the newest, which has the least to lose.
#
# Rules
# * A victim counts as gone when its lease is: the actuator closes its stream, and the gateway tells the model server,
#   which gives up its memory within 0.3 s (measured, vLLM 0.32). Until then, and for `GRACE` seconds after the
#   decision, nobody else is evicted: else one shortage would cost many victims.
# * Whose end nobody confirms within `CONFIRM` seconds is not waited for, and not evicted a second time.
# * At most `AT_ONCE` per decision.

GRACE = 0.5
CONFIRM = 10.0
AT_ONCE = 2


class Eviction:
    """`after`: seconds that a request must have waited before others make way for it. Raises `ValueError` if < 0."""

    def __init__(self, after: float = 0.25) -> None:
        if not after >= 0:
            raise ValueError("a time must not be negative")
        self._after = after
        #: Victims that are on the books still.
        self._evicting: list[Lease] = []
        self._last = -inf

    def victims(self, flow: FlowControl, fleet: Fleet, now: float) -> list[Lease]:
        """Who has to go now. The caller notes when in their leases."""
        self._evicting = [lease for lease in self._evicting if lease.held]
        if self.look_at(flow) > now or any(now < lease.evicted_at + CONFIRM for lease in self._evicting):
            return []
        for band in flow.queues.bands():
            if band.count and band.oldest() + self._after <= now:
                chosen = self._for(band, flow, fleet, now)
                if chosen:
                    self._last = now
                    self._evicting += chosen
                    return chosen
        return []

    def _for(self, band: Band, flow: FlowControl, fleet: Fleet, now: float) -> list[Lease]:
        ledger = fleet.ledger
        running = [
            lease
            for slot, _ in fleet.table.slots()
            for lease in ledger.of_slot(slot)
            if lease.request.priority < min(band.priority, 0) and lease.evicted_at < 0.0 and not lease.auxiliary
        ]
        if not running:
            return []
        able = flow.binder.able(band.longest_waiting(), fleet, now)
        running = [lease for lease in running if able[lease.slot]]
        running.sort(key=lambda lease: (lease.request.priority, -lease.charged_at, -lease.request.id))
        return running[:AT_ONCE]

    def look_at(self, flow: FlowControl) -> float:
        """Clock seconds before which nobody is evicted; `inf` = nobody waits."""
        oldest = min((band.oldest() for band in flow.queues.bands() if band.count), default=inf)
        return max(oldest + self._after, self._last + GRACE)


# The flow controller: what those that wait are told, and when they are looked at again.
#
# Rules
# * A request that waits is told so once (`Hold`): its gateway must be patient for as long as it may wait.
# * Two timers, both exact: the earliest deadline, and the moment at which a request stops waiting for the endpoint
#   that holds its prompt's beginning (or at once, when one look was not enough for all that can go).
# * Refusals carry `Retry-After`: how long those of the same or a higher priority that wait will take at the pace of
#   the last dispatches.

DEADLINE_TIMER = "queue-deadline"
DISPATCH_TIMER = "queue-dispatch"
#: Seconds that a gateway gets beyond a request's deadline, so that it hears our refusal.
MARGIN = 1.0
#: Bounds of `Retry-After`, in seconds.
RETRY = (1.0, 60.0)
#: More endpoints than so many times those that are there are never asked for at once.
GROWTH = 4.0
#: Seconds between two looks for somebody to evict, at least.
_MOMENT = 0.05
#: Weight of the newest gap between two dispatches.
_PACE = 0.05

#: (what goes where, now): charge it, and route it.
Send = Callable[[Bound, float], list[Instruction]]
#: (who has to make way, what its client is told).
Evictor = Callable[[Lease, Reject], Evict]


class FlowController:
    """One per pipeline. `policy` is the name under which its decisions are recorded, `target_s` how long requests may
    wait before more endpoints are wanted."""

    def __init__(
        self, flow: FlowControl, policy: str = "", target_s: float = 1.0, eviction: Eviction | None = None
    ) -> None:
        self.flow = flow
        self._eviction = eviction
        #: Whether requests of a priority below 0 may have to make way once they run.
        self.evicts = eviction is not None
        #: How many had to make way, by priority.
        self.evicted: dict[int, int] = {}
        self.policy = policy
        self._target_s = target_s
        self._deadline = inf
        self._look = inf
        self._gap = 0.05
        self._last = -inf

    def __len__(self) -> int:
        return len(self.flow)

    def follow(self, policy: str, rules: WaitingRules) -> None:
        """Another policy decides from now on; its rules about who can serve what hold for those that wait too."""
        self.policy = policy
        self.flow.binder.follow(rules)

    def opened(self, fleet: Fleet, now: float) -> BoolColumn | None:
        """Which endpoints may be sent one more request now; `None` = all of them."""
        return self.flow.gate.open(fleet, now)

    def dispatched(self, send: Send, evict: Evictor, fleet: Fleet, now: float) -> list[Instruction]:
        """To be called after every event while somebody waits."""
        instructions: list[Instruction] = []
        bound = None if self.flow.overdue(now) else self.flow.dispatch(fleet, now)
        if bound is not None:
            instructions += send(bound, now)
            # Time when nobody waited says nothing about the pace.
            if min(bound.waiting.since, self.flow.oldest()) <= self._last:
                self._gap += _PACE * (now - self._last - self._gap)
            self._last = now
        if self._eviction is not None and not self.flow.more:
            victims = self._eviction.victims(self.flow, fleet, now)
            for lease in victims:
                priority = lease.request.priority
                self.evicted[priority] = self.evicted.get(priority, 0) + 1
                instructions.append(evict(lease, self._answer(lease.request, EVICTED)))
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
        """A timer is due; `dispatched` follows. Returns those whose time is over: they have left their queues."""
        if name == DISPATCH_TIMER:
            self._look = inf
        if name != DEADLINE_TIMER:
            return []
        self._deadline = inf
        return self.flow.expire(fleet, now)

    def drain_s(self, priority: float = -inf) -> float:
        """Seconds until those that wait with this priority or a higher one have gone, at the pace of the last
        dispatches: how long one more of this priority would wait."""
        if priority == -inf:
            return len(self.flow) * self._gap
        return sum(band.count for band in self.flow.queues.bands() if band.priority >= priority) * self._gap

    def wanted(self, endpoints: int, now: float) -> int:
        """How many endpoints would keep the queue below `target_s` seconds, at `GROWTH` times as many at most."""
        if not len(self.flow):
            return endpoints
        delay = max(self.drain_s(), now - self.flow.oldest())
        return max(ceil(endpoints * min(max(delay / self._target_s, 1.0), GROWTH)), 1)

    def refused(
        self, request: Request, why: Refused, now: float, client: Any = None, waiting: Waiting | None = None
    ) -> list[Instruction]:
        """The answer, and the record of it. `waiting`: it waited."""
        return [self._answer(request, why, client), self.record(request, why, now, waiting)]

    def _answer(self, request: Request, why: Refused, client: Any = None) -> Reject:
        low, high = RETRY
        return Reject(
            request_id=request.id,
            status=why.status,
            reason=why.reason,
            message=why.message,
            retry_after_s=min(max(self.drain_s(request.priority), low), high),
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
