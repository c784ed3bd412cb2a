"""What is added to the loop's clock to get the time of day."""

import time

import pytest

from fairlead.server.live.wiring import TimeOfDay


def test_it_is_steady_until_the_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = 1e9
    monkeypatch.setattr(time, "time", lambda: wall)
    offset = TimeOfDay(lambda: 100.0)
    wall += 0.5
    assert offset() == 1e9 - 100.0
    wall += 3600.0
    assert offset() == wall - 100.0
