"""The interface of clocks. An asyncio event loop is a `Clock`, and so is the simulator's heap of timers."""

from collections.abc import Callable
from typing import Any, Protocol


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
