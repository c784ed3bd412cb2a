"""Requests that end without an event of their own: their endpoint left or no longer has them, or their lease expired.

Thousands can end at once, and each takes 6 µs to release, record and count. They are therefore ended in batches, each
in its own turn of the event loop, so that other requests are served in between.
"""

from collections import deque
from collections.abc import Callable, Iterable

from fairlead.core.clock import Clock
from fairlead.core.instructions import Instruction, SetTimer
from fairlead.core.requests import RequestEntry, Trigger

TIMER = "endings"
#: Requests ended in one call.
MOST = 64


class Endings:
    """Requests that still have to be ended, in order. `end` ends one of them unless it has ended meanwhile."""

    def __init__(self, clock: Clock, end: Callable[[RequestEntry, Trigger], list[Instruction]]) -> None:
        self._clock = clock
        self._end = end
        self._left: deque[tuple[deque[RequestEntry], Trigger]] = deque()
        #: Requests that an endpoint which left may still answer → clock seconds until which to wait for their end.
        self.orphans: dict[RequestEntry, float] = {}

    def add(self, entries: Iterable[RequestEntry], why: Trigger) -> list[Instruction]:
        """End these requests after those already waiting. More than `MOST` are left to later calls of `end_some`."""
        batch = deque(entries)
        if not batch:
            return []
        self._left.append((batch, why))
        return [self._timer()] if len(batch) > MOST else self.end_some()

    def end_some(self) -> list[Instruction]:
        """End the first `MOST`. If any are left, the returned instructions include a timer for them."""
        instructions: list[Instruction] = []
        for _ in range(MOST):
            if not self._left:
                return instructions
            batch, why = self._left[0]
            entry = batch.popleft()
            if not batch:
                self._left.popleft()
            instructions += self._end(entry, why)
        if self._left:
            instructions.append(self._timer())
        return instructions

    def _timer(self) -> SetTimer:
        return SetTimer(TIMER, self._clock.time())
