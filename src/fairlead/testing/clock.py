"""Virtual time: a `Clock` whose timers fire when the test says so."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any


class _Timer:
    __slots__ = ("args", "callback", "cancelled")

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.callback = callback
        self.args = args
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class SimClock:
    """Starts at 1,000,000 s, so that code which mixes it up with another clock fails visibly.

    Timers due at the same moment fire in the order in which they were set.
    """

    def __init__(self, start: float = 1_000_000.0) -> None:
        self._now = start
        self._order = count()
        self._heap: list[tuple[float, int, _Timer]] = []

    def time(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[..., object], /, *args: Any) -> _Timer:
        timer = _Timer(callback, args)
        heapq.heappush(self._heap, (when, next(self._order), timer))
        return timer

    def advance(self, seconds: float) -> None:
        """Let time pass; fire what is due, each at its own moment."""
        until = self._now + seconds
        while self._heap and self._heap[0][0] <= until:
            when, _, timer = heapq.heappop(self._heap)
            if not timer.cancelled:
                self._now = max(self._now, when)
                timer.callback(*timer.args)
        self._now = until
