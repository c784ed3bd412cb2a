"""Flow control as a whole: go at once, wait, or be refused; and who goes when something has changed.

    arrived ──► nobody waits, and the policy's choice is open ──► goes there at once
            └─► waits ──► dispatched: a pair (request, open endpoint) was chosen
                      ├─► refused: over a limit, out of time, shutting down
                      └─► cancelled: the client is gone

Rules
* Late: an endpoint is chosen when a request leaves the queue, never before. `Binder` chooses among a window of requests
  and all open endpoints; fairness says whose window it is.
* Strict between bands, but never idle: where no request of a higher band can use what is open, a lower one may.
  Two settings bend that: minimum shares (`shares`) let a lower band go first now and then, ceilings (`ceilings`) keep
  it waiting although something is open.
* Driven by events: arrivals, first tokens, ends, scrapes, joining endpoints. There is no tick. One call dispatches at
  most `batch` requests; `more` then says that it is not done, so that a long queue does not hold up everybody else.
  One call refuses at most `REFUSALS` of those that wait, however many run out of time at once; while some are left
  whose time is over (`overdue`), nobody goes.
* The gate judges by our own ledger first. Where it knows nothing it says open: stale metrics never halt a pool.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from math import inf
from typing import Any, Protocol

import numpy as np
from msgspec import Struct

from fairlead.admit.framework import EXPIRED, NO_ENDPOINTS, SATURATED, SHUTTING_DOWN, Ceiling, Refused, Waiting
from fairlead.admit.limits import Times
from fairlead.admit.queues import Band, Queues
from fairlead.admit.shares import Shares
from fairlead.admit.shedding import EarlyShedding
from fairlead.fleet.columns import BoolColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request

#: Pairs among which one is chosen, at most, and requests, at least: one choice must not hold up everybody else.
PAIRS, FEWEST = 2048, 16
#: Requests that are taken out and told so in one call: 0.05 ms each, all in all.
REFUSALS = 16


class Gate(Protocol):
    """Soft saturation: which endpoints may be sent one more request now."""

    @property
    def name(self) -> str: ...

    def open(self, fleet: Fleet, now: float) -> BoolColumn | None:
        """`None` = all of them."""
        ...

    def level(self, fleet: Fleet, now: float) -> float:
        """The pool's saturation: 1 = no endpoint may be sent one more, on average; above, oversubscribed."""
        ...


class Bound(Struct, frozen=True):
    """A request and where it goes. `cost` is what its flow is charged, in predicted uncached tokens."""

    waiting: Waiting
    slot: int
    cost: float
    #: Share of the prompt believed to be cached there, and the best share anywhere.
    hit_share: float = 0.0
    best_share: float = 0.0
    #: Who gets it if no connection to `slot` can be made; -1 = nobody.
    second: int = -1


class Binder(Protocol):
    """Chooses the pair. May keep all of them waiting although something is open: a cached prefix can be worth it."""

    def look(self, request: Request, fleet: Fleet, now: float) -> tuple[float, Any]:
        """Predicted work in uncached prompt tokens, at the endpoint that holds most (`inf` = there are endpoints, and
        none can serve it), and what to remember of it (`Waiting.known`)."""
        ...

    def bind(self, window: Sequence[Waiting], fleet: Fleet, opened: BoolColumn, now: float) -> Bound | float:
        """A pair, or the clock seconds at which to ask again even if nothing changes; `inf` = not before it does."""
        ...

    def able(self, request: Request, fleet: Fleet, now: float) -> BoolColumn | None:
        """Where it can be served; `None` = everywhere that is alive."""
        ...

    def follow(self, able: Any) -> None:
        """Other rules about where requests can be served, `able(request, fleet, now)`."""
        ...


class FlowControl:
    """Owns the queues."""

    def __init__(
        self,
        queues: Queues,
        gate: Gate,
        binder: Binder,
        times: Times | None = None,
        window: int = 256,
        batch: int = 1,
        shares: Shares | None = None,
        ceiling: Ceiling | None = None,
        shedding: EarlyShedding | None = None,
    ) -> None:
        self.queues = queues
        self.gate = gate
        self.binder = binder
        self._times = times or Times()
        self._window = window
        self._batch = batch
        self._shares = shares or Shares({})
        self._ceiling = ceiling
        self._shedding = shedding
        #: Since when nobody may wait any more; `inf` = they may.
        self._stopped = inf
        self._left = False
        #: The last look that found nobody to go: what was open, and the newest request then.
        self._in_vain: BoolColumn | None = None
        self._newest = (0, 0)
        #: Priority → requests that a look which is not done has passed over, behind those whose turn it is.
        self._passed: dict[int, int] = {}
        #: Whether a look at the queues ended before it was done, and else the clock seconds at which one more look is
        #: worth it even if nothing happens; `inf` = never.
        self.more = False
        self.look_again = inf

    def __len__(self) -> int:
        return len(self.queues)

    def asks(self, fleet: Fleet, now: float) -> bool:
        """Whether `arrived` depends on the policy's choice."""
        return not len(self.queues) and fleet.table.count > 0 and self.gate.open(fleet, now) is not None

    def arrived(
        self, request: Request, fleet: Fleet, now: float, slot: int = -1
    ) -> "Refused | tuple[Waiting, list[Waiting]] | None":
        """`None` = the policy decides at once: what it chose is open, or nobody can ever serve it. Else why it is
        refused, or that it waits, and who gave way for it. `slot`: the policy's choice, if `asks`; < 0 = none."""
        if request.priority < 0 and self._shedding is not None and self._shedding.sheds(self.gate.level(fleet, now)):
            return Refused(SATURATED, "the pool is nearly saturated, and the request is sheddable")
        if not len(self.queues) and fleet.table.count and self._below_ceiling(request.priority, fleet, now):
            opened = self.gate.open(fleet, now)
            if opened is None or (slot >= 0 and opened[slot]):
                return None
        work, known = self.binder.look(request, fleet, now)
        if work == inf:
            return None
        if self._stopped < inf:
            return _stopping()
        outcome, displaced = self.queues.put(request, now, self._ttl(request, fleet), work)
        if isinstance(outcome, Waiting):
            outcome.known = known
        return outcome if isinstance(outcome, Refused) else (outcome, displaced)

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

    def dispatch(self, fleet: Fleet, now: float) -> Iterator[Bound]:
        """Who goes now, one by one. Each must be charged to the ledger before the next is asked for."""
        self.more = False
        for _ in range(self._batch):
            bound = self._next(fleet, now)
            if bound is None:
                return
            self._shares.spent(self.queues.bands(), bound.waiting.request.priority, bound.cost)
            self.queues.dispatch(bound.waiting, now, bound.cost)
            yield bound
        self.more = bool(len(self.queues))

    def _next(self, fleet: Fleet, now: float) -> Bound | None:
        if not len(self.queues) or not fleet.table.count:
            self.look_again = inf  # an endpoint that joins makes us look
            return None
        opened = self.gate.open(fleet, now)
        if opened is None:
            opened = fleet.table.alive
        if self._would_be_in_vain(opened, fleet.table.version, now):
            return None
        self.look_again = inf
        bands, held_back = self._served(fleet, now)
        for band in bands:
            if band.count:
                bound = self._of_band(band, fleet, opened, now)
                if bound is not None:
                    self._in_vain = None
                    self._passed.clear()
                    return bound
        if self._passed:
            self.more = True
            return None
        # A ceiling looks at how full the pool is, which may change though nothing opens.
        self._in_vain, self._newest = None if held_back else opened, (self.queues.newest, fleet.table.version)
        return None

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
        rest = islice(chain.from_iterable(turns), passed, passed + most)
        for window in chain(windows if not passed else [], [rest]):
            among = list(window)
            found = self.binder.bind(among, fleet, opened, now) if among else inf
            if isinstance(found, Bound):
                return found
            self.look_again = min(self.look_again, found)
        if len(among) == most:
            self._passed[band.priority] = passed + most
        return None

    def cancel(self, request_id: int) -> Waiting | None:
        return self.queues.cancel(request_id)

    def expire(self, fleet: Fleet, now: float) -> list[tuple[Waiting, Refused]]:
        """Those whose time is over, and what they are told: the first `REFUSALS`. For all others see `overdue`."""
        if self._stopped < inf:
            return self.stop(now)
        if fleet.table.count:
            why = Refused(EXPIRED, "the request timed out waiting for a free endpoint")
        else:
            why = Refused(NO_ENDPOINTS, "the request timed out waiting, and the pool has no endpoints", 503)
        late = self.queues.expire(now, REFUSALS)
        self._left = len(late) == REFUSALS
        return [(waiting, why) for waiting in late]

    def stop(self, now: float) -> list[tuple[Waiting, Refused]]:
        """Nobody may wait from now on. Takes out those that do as `expire` does."""
        self._stopped = min(self._stopped, now)
        self._left = True
        return [(waiting, _stopping()) for waiting in self.queues.clear(REFUSALS)]

    def overdue(self, now: float) -> bool:
        """Whether some are left of those that were to be taken out, and `expire` must be called once more."""
        return self._left and self.next_deadline() <= now

    def next_deadline(self) -> float:
        return self._stopped if self._stopped < inf and len(self.queues) else self.queues.next_deadline()

    def oldest(self) -> float:
        """Since when the request that waits longest waits; `inf` = none does."""
        return min((band.oldest() for band in self.queues.bands()), default=inf)

    def validate(self) -> None:
        self.queues.validate()


def _stopping() -> Refused:
    return Refused(SHUTTING_DOWN, "the scheduler is shutting down; try again", 503)
