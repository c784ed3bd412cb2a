"""Leases that are over though nobody said so one by one: their endpoint left, or does not have them, or they expired.

Thousands can be over at once, and each is taken off the books, written down and counted: 6 µs. So a few at a time are,
in turns of the event loop of their own, and others are served in between.
"""

from collections import deque
from collections.abc import Callable, Iterable

from fairlead.fleet.lease import Lease
from fairlead.model.clock import Clock
from fairlead.model.events import ResponseEnded
from fairlead.model.instructions import Instruction, Record, SetTimer

TIMER = "endings"
#: Leases ended in one call.
MOST = 64


class Endings:
    """Those that are not ended yet, in order. `ended` makes the record of a lease that is off the books; `give_up`
    takes a request's lease off them first, and does nothing where it has none."""

    def __init__(
        self,
        clock: Clock,
        ended: Callable[[Lease, ResponseEnded, str], Record],
        give_up: Callable[[int, str], list[Instruction]],
    ) -> None:
        self._clock = clock
        self._ended = ended
        self._give_up = give_up
        self._left: deque[tuple[deque[Lease | int], str]] = deque()

    def __contains__(self, request_id: int) -> bool:
        """Whether a lease that is off the books waits here. O(those that wait)."""
        return any(isinstance(one, Lease) and one.request.id == request_id for batch, _ in self._left for one in batch)

    def add(self, leases: Iterable[Lease | int], cause: str) -> list[Instruction]:
        """End these behind those that wait already; many only in the calls that follow. A number is the request of a
        lease that is on the books."""
        batch = deque(leases)
        if not batch:
            return []
        self._left.append((batch, cause))
        return [self._timer()] if len(batch) > MOST else self.some()

    def some(self) -> list[Instruction]:
        """End the first `MOST`. The timer is for the others."""
        instructions: list[Instruction] = []
        for _ in range(MOST):
            if not self._left:
                return instructions
            batch, cause = self._left[0]
            one = batch.popleft()
            if not batch:
                self._left.popleft()
            if isinstance(one, int):
                instructions += self._give_up(one, cause)
            else:
                instructions.append(self._ended(one, ResponseEnded(request_id=one.request.id), cause))
        if self._left:
            instructions.append(self._timer())
        return instructions

    def _timer(self) -> SetTimer:
        return SetTimer(TIMER, self._clock.time())
