"""Which form of the metrics page an Accept header asks for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.server.observe.exposition import wants_openmetrics

#: What Prometheus 2.42 sends.
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        (PROMETHEUS, True),
        ("application/openmetrics-text", True),
        ("Application/OpenMetrics-Text; version=1.0.0; charset=utf-8", True),
        ("text/plain;q=0.3, application/openmetrics-text;q=0.3", True),
        ("", False),
        ("*/*", False),
        ("text/html,application/xhtml+xml,*/*;q=0.8", False),
        ("text/plain;version=0.0.4", False),
        ("application/openmetrics-text;q=0.2,text/plain;q=0.3", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=high", False),
        ("application/openmetrics-text;q=0.2,*/*", False),
    ],
)
def test_negotiation(accept: str, wanted: bool) -> None:
    assert wants_openmetrics(accept) is wanted


@given(st.text(max_size=60))
def test_any_header(text: str) -> None:
    assert wants_openmetrics(text) is (wants_openmetrics(text.lower()))
    assert "openmetrics-text" in text.lower() or not wants_openmetrics(text)
