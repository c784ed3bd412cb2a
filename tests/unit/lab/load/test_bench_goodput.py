"""Goodput: the share of all requests, failed ones too, that were served within both levels."""

import io
from typing import Any

import pytest
from rich.console import Console

from fairlead.lab.load.report import summarise, table
from fairlead.lab.load.spec import Record, RunResult


def served(index: int, ttft: float, gap: float, tokens: int = 11) -> Record:
    first = index + ttft
    last = first + gap * (tokens - 1)
    return Record(
        index, float(index), sent=float(index), headers=first, first_data=first, last_data=last, end=last,
        completion_tokens=tokens,
    )  # fmt: skip


RUN = RunResult(
    records=[
        served(0, 0.1, 0.01),
        served(1, 0.1, 0.05),
        served(2, 0.9, 0.01),
        served(3, 0.1, 0.0, tokens=1),
        Record(4, 4.0, end=4.001, error="status_503"),
    ],
    duration_s=2.0,
    time_ratio=10.0,
)


@pytest.mark.parametrize(
    ("levels", "share"),
    [
        ({}, 0.8),
        ({"slo_ttft_ms": 500}, 0.6),
        ({"slo_tpot_ms": 20}, 0.6),
        ({"slo_ttft_ms": 500, "slo_tpot_ms": 20}, 0.4),
        ({"slo_ttft_ms": 500, "slo_tpot_ms": 20, "time": "model"}, 0.0),
        ({"slo_ttft_ms": 5000, "slo_tpot_ms": 200, "time": "model"}, 0.4),
    ],
)
def test_share_within_the_levels(levels: dict[str, Any], share: float) -> None:
    summary = summarise(RUN, **levels)
    assert summary["goodput"] == pytest.approx(share)
    seconds = 20.0 if levels.get("time") == "model" else 2.0
    assert summary["good_requests_per_s"] == pytest.approx(share * 5 / seconds)
    assert summary["slo"] == {"ttft_ms": levels.get("slo_ttft_ms"), "tpot_ms": levels.get("slo_tpot_ms")}


def test_no_request_has_no_goodput() -> None:
    assert summarise(RunResult(records=[]), slo_ttft_ms=1)["goodput"] is None


def show(*summaries: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(table(summaries))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return next(row for row in text.splitlines() if "goodput" in row)


def test_the_table_names_the_levels_and_shows_nothing_without_them() -> None:
    both = show(summarise(RUN, slo_ttft_ms=500, slo_tpot_ms=20))
    assert "goodput (TTFT 500 ms, TPOT 20 ms)" in both and "40 %" in both
    assert "goodput (TPOT 20 ms)" in show(summarise(RUN, slo_tpot_ms=20))
    assert "%" not in show(summarise(RUN))
    assert "%" not in show(summarise(RUN, slo_tpot_ms=20), summarise(RUN, slo_tpot_ms=30))
