"""Process the batches of all publishers, and never hold the event loop longer than a set time.

A readable socket only queues its worker. One callback serves the queue in turn until its time is up, lets the loop run
other callbacks, and continues. With one callback per socket, the times would add up: a hundred callbacks of half a
millisecond would hold the loop for 50 ms. After a turn with a long step, which a publisher's batches may need again and
again, the next turn waits for as long: other callbacks need many turns of the loop.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from time import perf_counter, thread_time
from typing import Protocol

log = logging.getLogger(__name__)

#: Steps of a worker before the next worker's turn.
_TURN = 16
#: A turn that used so many times the permitted time is followed by a pause.
_LONG = 2.0


class Worker(Protocol):
    """Does work in steps of about 0.1 ms."""

    def step(self, now: float) -> bool:
        """Do a step; return false if there is nothing to do until the next wake-up. `now`: the loop's time."""
        ...


class Pump:
    """Runs workers. `hold`: the longest time to hold the loop, in seconds. `tend`: a step of background work, done when
    no worker has work. `worked`: the clock for pauses, which does not count the work of other processes."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        hold: float,
        tend: Callable[[float], bool],
        timer: Callable[[], float] = perf_counter,
        worked: Callable[[], float] = thread_time,
    ) -> None:
        self._loop = loop
        self._timer = timer
        self._worked = worked
        #: No turn before this time of the loop's clock.
        self._pause_until = 0.0
        self._hold = hold
        self._tend = tend
        self._ready: deque[Worker] = deque()
        self._queued: set[Worker] = set()
        self._scheduled: asyncio.Handle | None = None
        self._closed = False

    def wake(self, worker: Worker) -> None:
        """Queue a worker that may have work."""
        if worker not in self._queued and not self._closed:
            self._queued.add(worker)
            self._ready.append(worker)
            self._schedule()

    def poke(self) -> None:
        """Run soon, because there may be background work."""
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
            if self._loop.time() < self._pause_until:
                self._scheduled = self._loop.call_at(self._pause_until, self._run)
            else:
                self._scheduled = self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._scheduled, began = None, self._worked()
        now, until = self._loop.time(), self._timer() + self._hold
        more = True
        while more and self._timer() < until:
            more = self._turn(now, until) if self._ready else self._tend(now)
        spent = self._worked() - began
        if spent > _LONG * self._hold:
            self._pause_until = self._loop.time() + spent
        if more:
            self._schedule()

    def _turn(self, now: float, until: float) -> bool:
        worker = self._ready.popleft()
        for _ in range(_TURN):
            if not self._stepped(worker, now):
                self._queued.discard(worker)
                break
            if self._timer() >= until:
                self._ready.append(worker)
                break
        else:
            self._ready.append(worker)
        return True

    def _stepped(self, worker: Worker, now: float) -> bool:
        """`step`. A worker that fails waits for its next wake-up, and stops no other."""
        try:
            return worker.step(now)
        except Exception:
            log.exception("processing KV events failed; continuing with the next ones")
            return False
