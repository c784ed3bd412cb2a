"""What the demo is meant to show, and whether a run of it did."""

from collections.abc import Mapping
from math import floor
from typing import Any

from msgspec import Struct

P50_LOWER, P95_LOWER, HIT_RATE = 10.0, 5.0, 0.8


class Goal(Struct, frozen=True):
    """One of the goals, in words, and what a run came to."""

    wanted: str
    got: str
    met: bool


def judge(summaries: Mapping[str, Mapping[str, Any]]) -> list[Goal]:
    """Hold a run against the goals. `summaries`: one of `bench.report.summarise` per policy, by the policy's name."""
    base, ours = summaries["round-robin"], summaries["default"]
    failed = sum(summary["failed"] for summary in summaries.values())
    return [
        _lower("p50", base, ours, P50_LOWER),
        _lower("p95", base, ours, P95_LOWER),
        _hits(ours["prefix_hit_rate"]),
        Goal("no failed request", f"{failed:,}", failed == 0),
    ]


def _lower(quantile: str, base: Mapping[str, Any], ours: Mapping[str, Any], times: float) -> Goal:
    wanted = f"TTFT {quantile} at least {times:g}× lower than round robin's"
    theirs, mine = base["ttft_ms"][quantile], ours["ttft_ms"][quantile]
    if not theirs or not mine:
        return Goal(wanted, "not measured", False)
    ratio = theirs / mine
    return Goal(wanted, f"{_cut(ratio)}×", ratio >= times)


def _hits(rate: float | None) -> Goal:
    wanted = f"prefix hit rate at least {HIT_RATE:.0%}"
    if rate is None:
        return Goal(wanted, "not measured", False)
    return Goal(wanted, f"{_cut(rate * 100)}%", rate >= HIT_RATE)


def _cut(value: float) -> str:
    """One decimal, never rounded up: a goal that is missed must not read as if it was met."""
    return f"{floor(value * 10) / 10:g}"
