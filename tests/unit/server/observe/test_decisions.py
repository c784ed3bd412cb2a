"""The ring of decisions: what it keeps, what it joins, and what it shows."""

import json
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from fairlead.core.flow import LEFT
from fairlead.core.records import DecisionRecord, Forecast, OutcomeRecord, Trace
from fairlead.core.request import Request
from fairlead.server.observe.decisions import RecentDecisions, explained, prediction


def decision(number: int = 1, trace: Trace | None = None, **fields: Any) -> DecisionRecord:
    request = Request(id=number, arrived=9.75, model="m", prompt_tokens=100, external_id=f"x-{number}")
    base: dict[str, Any] = {"at": 10.0, "policy": "default", "endpoint": "b", "address": "10.0.0.2:80"}
    return DecisionRecord(request=request, trace=trace, **(base | fields))


def outcome(number: int = 1, **fields: Any) -> OutcomeRecord:
    base: dict[str, Any] = {"at": 11.0, "endpoint": "b", "status": 200}
    return OutcomeRecord(request=Request(id=number, arrived=9.75), **(base | fields))


def trace(endpoints: int = 3) -> Trace:
    names = tuple("abcdefghij"[i] if i < 10 else f"e{i}" for i in range(endpoints))
    healthy = np.arange(endpoints) != 2
    total = np.where(healthy, np.arange(endpoints) / 2, -np.inf)
    return Trace(
        endpoints=names,
        filters=[("healthy", healthy)],
        scorers=[("queue", 2.0, np.linspace(0, 1, endpoints)), ("prefix", 1.0, np.full(endpoints, np.nan))],
        total=total,
        candidates=healthy,
        outcome="picked",
    )


def test_a_decision_with_its_outcome() -> None:
    journal = RecentDecisions()
    journal.on_decisions([decision(trace=trace(), hit_tokens=40, best_hit_tokens=64)])
    journal.on_outcomes([outcome(ttft_ms=55.0, cached_tokens=32)])
    (shown,) = list(journal.each(10))
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown
    assert shown["trace"] == {
        "outcome": "picked",
        "weights": {"queue": 2.0, "prefix": 1.0},
        "left_out": 0,
        "candidates": [
            {
                "endpoint": "b",
                "chosen": True,
                "kept": True,
                "filters": {"healthy": True},
                "scores": {"queue": 0.5, "prefix": None},
                "total": 0.5,
            },
            {
                "endpoint": "a",
                "chosen": False,
                "kept": True,
                "filters": {"healthy": True},
                "scores": {"queue": 0.0, "prefix": None},
                "total": 0.0,
            },
            {
                "endpoint": "c",
                "chosen": False,
                "kept": False,
                "filters": {"healthy": False},
                "scores": {"queue": 1.0, "prefix": None},
                "total": None,
            },
        ],
    }
    assert shown["result"] == {
        "at": 11.0,
        "endpoint": "b",
        "status": 200,
        "cause": "natural",
        "ttft_ms": 55.0,
        "duration_ms": None,
        "request_bytes": 0,
        "response_bytes": None,
        "prompt_tokens": None,
        "completion_tokens": None,
        "cached_tokens": 32,
    }
    assert (shown["waited_ms"], shown["predicted_hit_tokens"], shown["best_hit_tokens"]) == (250.0, 40, 64)


@pytest.mark.parametrize(("stream", "tpot_ms"), [(True, 10.0), (False, None)])
def test_time_per_token_is_measured_of_streams_only(stream: bool, tpot_ms: float | None) -> None:
    """Of another answer the first byte comes with the last token."""
    asked = Request(id=1, arrived=9.75, stream=stream)
    made = replace(decision(forecast=Forecast(ttft_ms=50.0, tpot_ms=9.0)), request=asked)
    held = prediction(made, outcome(ttft_ms=100.0, duration_ms=190.0, completion_tokens=10))
    assert held is not None and held["tpot_ms"] == {"predicted": 9.0, "actual": tpot_ms}


def test_who_computed_the_prompt_is_shown_and_no_forecast_where_there_is_none() -> None:
    journal, made = RecentDecisions(), decision(forecast=Forecast(), prefill="p")
    journal.on_decisions([made])
    (shown,) = list(journal.each(1))
    assert (shown["prefill_endpoint"], shown["forecast"], prediction(made, outcome())) == ("p", None, None)


def test_the_newest_come_first() -> None:
    journal = RecentDecisions(size=3)
    for number in range(1, 6):
        journal.on_decisions([decision(number)])
    assert [shown["request_id"] for shown in list(journal.each(10))] == [5, 4, 3]
    assert [shown["request_id"] for shown in list(journal.each(2))] == [5, 4]
    assert list(journal.each(0)) == list(journal.each(-1)) == []


def test_a_refused_request() -> None:
    journal = RecentDecisions()
    journal.on_decisions([decision(endpoint="", address="", outcome="rejected-no-endpoints", status=503)])
    (shown,) = list(journal.each(1))
    assert (shown["endpoint"], shown["outcome"], shown["status"], shown["trace"], shown["result"]) == (
        None,
        "rejected-no-endpoints",
        503,
        None,
        None,
    )


def test_a_waiting_request_whose_stream_was_closed() -> None:
    """The gateway resets it alike when the client left and when it gave up itself, so neither is claimed."""
    made = explained(decision(endpoint="", address="", outcome=LEFT.reason, status=LEFT.status), None, None)
    assert (made["outcome"], made["status"], made["unexplained"]) == (LEFT.reason, None, LEFT.message)
    assert "the gateway closed the stream" in LEFT.message


def test_cells_are_bounded() -> None:
    journal = RecentDecisions(size=1000, max_cells=4000)
    for number in range(100):
        journal.on_decisions([decision(number, trace(100))])
        assert journal.cells <= 4000
    assert len(journal) == 10
    journal.on_decisions([decision(1000, trace(5000))])
    assert len(journal) == 1  # the newest is always kept
    journal.on_decisions([decision(1001)])
    journal.on_decisions([decision(1002)])
    assert (len(journal), journal.cells) == (2, 0)


def test_an_outcome_without_its_decision_is_ignored() -> None:
    journal = RecentDecisions(size=2)
    for number in range(5):
        journal.on_decisions([decision(number)])
    journal.on_outcomes([outcome(0)])
    journal.on_outcomes([outcome(99)])
    assert [shown["result"] for shown in list(journal.each(5))] == [None, None]
    assert len(journal._by_id) == 2


def test_only_the_first_outcome_counts() -> None:
    journal = RecentDecisions()
    journal.on_decisions([decision()])
    journal.on_outcomes([outcome(status=200)])
    journal.on_outcomes([outcome(status=500)])
    assert next(journal.each(1))["result"]["status"] == 200
    assert journal._by_id == {}


def test_a_second_decision_about_a_request() -> None:
    journal = RecentDecisions(size=2)
    journal.on_decisions([decision(1, endpoint="a")])
    journal.on_decisions([decision(1, endpoint="b")])
    journal.on_decisions([decision(2)])
    journal.on_outcomes([outcome(1)])
    assert [shown["result"] is not None for shown in list(journal.each(5))] == [False, True]


def test_many_candidates_are_cut_but_never_the_chosen_one() -> None:
    journal = RecentDecisions()
    journal.on_decisions([decision(trace=trace(500))])
    shown = next(journal.each(1, max_shown=4))["trace"]
    assert shown["left_out"] == 496
    assert [one["endpoint"] for one in shown["candidates"]] == ["b", "e499", "e498", "e497"]


def test_endpoints_that_are_gone_are_no_candidates() -> None:
    journal = RecentDecisions()
    journal.on_decisions([decision(endpoint="", trace=replace(trace(), endpoints=("", "b", "")))])
    shown = next(journal.each(1))["trace"]
    assert [(one["endpoint"], one["chosen"]) for one in shown["candidates"]] == [("b", False)]
    assert shown["left_out"] == 0


def test_columns_that_are_missing_or_do_not_fit() -> None:
    journal = RecentDecisions()
    odd = Trace(endpoints=("a", "b"), filters=[("f", np.array([True]))], scorers=[("s", 1.0, None)], total=None)
    journal.on_decisions([decision(trace=odd)])
    candidates = next(journal.each(1))["trace"]["candidates"]
    assert [(one["filters"], one["scores"], one["total"], one["kept"]) for one in candidates] == [
        ({"f": None}, {"s": None}, None, True)
    ] * 2


def test_it_needs_room() -> None:
    with pytest.raises(ValueError, match="room"):
        RecentDecisions(size=0)
