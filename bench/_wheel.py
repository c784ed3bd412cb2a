"""Timers for thousands of paced streams at the price of a few."""

import asyncio
import math
from collections.abc import Callable


class Wheel:
    """Rounds timers up to a millisecond; all that fall together share one loop timer."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._slots: dict[int, list[Callable[[], None]]] = {}

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        slot = math.ceil((self._loop.time() + seconds) * 1000)
        waiting = self._slots.get(slot)
        if waiting is None:
            waiting = self._slots[slot] = []
            self._loop.call_at(slot / 1000, self._fire, slot)
        waiting.append(callback)

    def _fire(self, slot: int) -> None:
        for callback in self._slots.pop(slot):
            callback()
