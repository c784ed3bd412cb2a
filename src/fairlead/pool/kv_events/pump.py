"""One drain for all publishers: the event loop is never held longer than a set time, however many of them speak.

Every socket that becomes readable only puts its work into a queue. One callback takes from that queue in turn until the
time is up, then lets the loop serve others, then goes on. A callback per socket would add up: a hundred of them with
half a millisecond each hold the loop for fifty.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Protocol

#: Steps of one worker before the next has its turn.
_TURN = 16
#: Upper bounds of the classes in which hold times are counted, in seconds.
HOLD_BOUNDS = (0.0001, 0.00025, 0.0005, 0.00075, 0.001, 0.002, 0.005, 0.01, 0.1)


class Worker(Protocol):
    """Does work in steps of some 0.1 ms."""

    def step(self, now: float) -> bool:
        """Do one; False: nothing to do until woken again. `now`: the loop's time."""
        ...


class Pump:
    """`hold`: seconds; `tend`: background work of the same kind as a worker's, done when no worker has any."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        hold: float,
        tend: Callable[[float], bool],
        timer: Callable[[], float] = perf_counter,
    ) -> None:
        self._loop = loop
        self._timer = timer
        self._hold = hold
        self._tend = tend
        self._ready: deque[Worker] = deque()
        self._queued: set[Worker] = set()
        self._scheduled: asyncio.Handle | None = None
        self._closed = False
        #: Times the loop was held, by `HOLD_BOUNDS` and beyond; the longest; all together, in seconds.
        self.holds = [0] * (len(HOLD_BOUNDS) + 1)
        self.longest = 0.0
        self.busy = 0.0

    def wake(self, worker: Worker) -> None:
        """A worker has, or may have, something to do."""
        if worker not in self._queued and not self._closed:
            self._queued.add(worker)
            self._ready.append(worker)
            self._schedule()

    def poke(self) -> None:
        """There may be background work."""
        if not self._closed:
            self._schedule()

    def close(self) -> None:
        self._closed = True
        self._ready.clear()
        self._queued.clear()
        if self._scheduled is not None:
            self._scheduled.cancel()

    def _schedule(self) -> None:
        if self._scheduled is None:
            self._scheduled = self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = None
        started = self._timer()
        now = self._loop.time()
        until = started + self._hold
        more = True
        while more and self._timer() < until:
            more = self._turn(now, until) if self._ready else self._tend(now)
        self._note(self._timer() - started)
        if more:
            self._schedule()

    def _turn(self, now: float, until: float) -> bool:
        worker = self._ready.popleft()
        for _ in range(_TURN):
            if not worker.step(now):
                self._queued.discard(worker)
                break
            if self._timer() >= until:
                self._ready.append(worker)
                break
        else:
            self._ready.append(worker)
        return True

    def _note(self, held: float) -> None:
        self.busy += held
        self.longest = max(self.longest, held)
        for place, bound in enumerate(HOLD_BOUNDS):
            if held <= bound:
                self.holds[place] += 1
                return
        self.holds[-1] += 1
