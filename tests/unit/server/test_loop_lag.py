"""Loop lag, on a loop whose time we turn."""

from typing import Any

from fairlead.server.live.memory import LoopLag


class Turned:
    """A loop whose time we turn."""

    def __init__(self) -> None:
        self.now = 10.0
        self.timers: list[tuple[float, Any]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Any) -> "Turned":
        self.timers.append((when, callback))
        return self

    def cancel(self) -> None:
        self.timers.clear()


def test_loop_lag() -> None:
    loop: Any = Turned()
    late: list[float] = []
    lag = LoopLag(loop, late.append, interval_s=0.5)
    for now in (10.5, 11.25, 11.75):
        loop.now = now
        _, fire = loop.timers.pop(0)
        fire()
    assert late == [0.0, 0.25, 0.0]
    lag.close()
    assert loop.timers == []
