"""What counts as having shown it."""

from typing import Any

import pytest

from fairlead.lab.demo import judge


def summary(p50: float | None, p95: float | None, hits: float | None = 0.1, failed: int = 0) -> dict[str, Any]:
    return {"ttft_ms": {"p50": p50, "p95": p95}, "prefix_hit_rate": hits, "failed": failed}


def met(base: dict[str, Any], ours: dict[str, Any]) -> list[bool]:
    return [goal.met for goal in judge({"round-robin": base, "default": ours})]


def test_all_are_met_at_their_bounds() -> None:
    assert met(summary(1000.0, 500.0), summary(100.0, 100.0, 0.8)) == [True, True, True, True]


@pytest.mark.parametrize(
    ("base", "ours", "missed"),
    [
        (summary(999.0, 500.0), summary(100.0, 100.0, 0.8), 0),
        (summary(1000.0, 499.0), summary(100.0, 100.0, 0.8), 1),
        (summary(1000.0, 500.0), summary(100.0, 100.0, 0.7999), 2),
        (summary(1000.0, 500.0), summary(100.0, 100.0, None), 2),
        (summary(1000.0, 500.0), summary(100.0, 100.0, 0.8, failed=1), 3),
        (summary(1000.0, 500.0, failed=1), summary(100.0, 100.0, 0.8), 3),
    ],
)
def test_each_can_be_missed_alone(base: dict[str, Any], ours: dict[str, Any], missed: int) -> None:
    assert met(base, ours) == [place != missed for place in range(4)]


def test_what_was_not_measured_is_missed() -> None:
    nothing = summary(None, None, None, failed=10)
    assert met(summary(1000.0, 500.0), nothing) == [False] * 4
    assert met(nothing, summary(100.0, 100.0, 0.8, failed=0)) == [False, False, True, False]


def test_a_near_miss_does_not_read_as_met() -> None:
    goals = judge({"round-robin": summary(999.9, 499.9), "default": summary(100.0, 100.0, 0.79999)})
    assert [goal.got for goal in goals] == ["9.9×", "4.9×", "79.9%", "0"]
