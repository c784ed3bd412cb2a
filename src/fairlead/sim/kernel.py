"""The heap of timers that drives a simulation: a `Clock` on which things happen instead of being waited for."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any


class Timer:
    """Set by `Kernel.call_at`. Harmless to cancel after it fired."""

    __slots__ = ("args", "callback")

    def __init__(self, callback: Callable[..., object] | None, args: tuple[Any, ...]) -> None:
        self.callback = callback
        self.args = args

    def cancel(self) -> None:
        self.callback = None


class Kernel:
    """Virtual seconds. Timers of the same moment fire in the order in which they were set, so a run is reproducible."""

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
        """Fire timers while `going()`; False when `until` or the last timer was reached first."""
        heap = self._heap
        while going():
            if not heap or heap[0][0] > until:
                return False
            when, _, timer = heapq.heappop(heap)
            callback = timer.callback
            if callback is not None:
                # A timer set for a past moment fires now: time never runs backwards.
                self.now = max(self.now, when)
                callback(*timer.args)
        return True
