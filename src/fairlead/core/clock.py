"""The interface of clocks, and virtual time. An asyncio event loop is a `Clock` too."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any, Protocol

from msgspec import Struct


class TimerHandle(Protocol):
    def cancel(self) -> None:
        """Cancel the timer. Harmless after it fired."""


class Clock(Protocol):
    def time(self) -> float:
        """Return the seconds on a monotonic clock with an arbitrary origin; never wall-clock time."""
        ...

    def call_at(self, when: float, callback: Callable[..., object], /, *args: Any) -> TimerHandle:
        """Call `callback(*args)` at `when` (seconds on this clock)."""
        ...


class Timer(Struct, eq=False):
    """A timer set by `VirtualClock.call_at`. Cancelling it after it fired does nothing."""

    callback: Callable[..., object] | None
    args: tuple[Any, ...]

    @property
    def cancelled(self) -> bool:
        return self.callback is None

    def cancel(self) -> None:
        self.callback = None


class VirtualClock:
    """Virtual time in seconds. Timers of the same moment fire in the order of setting, so a run is reproducible."""

    def __init__(self, start: float = 0.0) -> None:
        self.now = start
        self._order = count()
        self._heap: list[tuple[float, int, Timer]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[..., object], /, *args: Any) -> Timer:
        timer = Timer(callback, args)
        heapq.heappush(self._heap, (when, next(self._order), timer))
        return timer

    def run(self, going: Callable[[], bool], until: float) -> bool:
        """Fire timers while `going()`; False if `until` or the last timer was reached first."""
        heap = self._heap
        while going():
            if not heap or heap[0][0] > until:
                return False
            when, _, timer = heapq.heappop(heap)
            callback = timer.callback
            if callback is not None:
                # A timer set for a past moment fires now, because time never goes backwards.
                self.now = max(self.now, when)
                callback(*timer.args)
        return True
