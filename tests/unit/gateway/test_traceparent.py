"""The header `traceparent`, by the examples and rules of W3C Trace Context."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.gateway.traceparent import TraceParent, parse, render

GOOD = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
IDS = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7


@pytest.mark.parametrize(
    ("text", "sampled"),
    [
        (GOOD, True),
        (f"  {GOOD}\t", True),
        (GOOD[:-2] + "00", False),
        (GOOD[:-2] + "03", True),
        (GOOD[:-2] + "fe", False),
        ("cc" + GOOD[2:] + "-what-the-future-will-be-like", True),
        ("cc" + GOOD[2:], True),
    ],
)
def test_what_is_read(text: str, sampled: bool) -> None:
    assert parse(text) == TraceParent(*IDS, sampled)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        GOOD[:-1],
        GOOD.upper(),
        GOOD + "-more",
        "ff" + GOOD[2:],
        "cc" + GOOD[2:] + ".what",
        f"{GOOD},{GOOD}",
        "00-" + "0" * 32 + GOOD[35:],
        GOOD[:36] + "0" * 16 + "-01",
        GOOD.replace("4bf9", "4bg9"),
        GOOD.replace("4", "٤"),
    ],
)
def test_what_counts_as_absent(text: str) -> None:
    assert parse(text) is None


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
def test_there_and_back(trace_id: int, span_id: int, sampled: bool) -> None:
    assert parse(render(trace_id, span_id, sampled)) == TraceParent(trace_id, span_id, sampled)


@given(st.text(max_size=80))
def test_any_text(text: str) -> None:
    found = parse(text)
    assert found is None or (found.trace_id > 0 and found.span_id > 0)
