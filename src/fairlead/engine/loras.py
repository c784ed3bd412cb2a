"""Which adapters are in the running batch, and whether one more may join it."""

from collections.abc import Iterable

from fairlead.engine.request import EngineRequest


class LoraSlots:
    """`limit` adapters at a time; the base model needs no slot."""

    __slots__ = ("_running", "changed", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        #: Requests per adapter, in the order in which the adapters became active.
        self._running: dict[str, int] = {}
        #: The set of active adapters changed since somebody last cleared this: deferred requests may get in now.
        self.changed = False

    def admits(self, lora: str) -> bool:
        return not lora or lora in self._running or len(self._running) < self.limit

    def enter(self, lora: str) -> None:
        if lora:
            count = self._running.get(lora, 0)
            self._running[lora] = count + 1
            self.changed |= count == 0

    def leave(self, lora: str) -> None:
        if lora:
            count = self._running[lora] - 1
            if count:
                self._running[lora] = count
            else:
                del self._running[lora]
                self.changed = True

    def running(self) -> tuple[str, ...]:
        return tuple(self._running)


def adapters_of(requests: Iterable[EngineRequest]) -> tuple[str, ...]:
    """Their adapters without repetition, in order."""
    return tuple(dict.fromkeys(request.lora for request in requests if request.lora))
