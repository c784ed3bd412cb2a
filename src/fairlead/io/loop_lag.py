"""How late the event loop fires its timers: the one number that tells whether something blocks it."""

import asyncio
from collections.abc import Callable


class LoopLag:
    """Calls `observe(seconds late)` each `interval_s` until closed."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, observe: Callable[[float], object], interval_s: float = 0.5
    ) -> None:
        self._loop = loop
        self._observe = observe
        self._interval = interval_s
        self._due = loop.time() + interval_s
        self._timer = loop.call_at(self._due, self._fired)

    def close(self) -> None:
        self._timer.cancel()

    def _fired(self) -> None:
        now = self._loop.time()
        self._observe(max(now - self._due, 0.0))
        self._due = now + self._interval
        self._timer = self._loop.call_at(self._due, self._fired)
