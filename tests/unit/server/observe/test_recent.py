"""Sums and percentiles of the last seconds."""

from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead.core.records import DecisionRecord, Forecast, OutcomeRecord
from fairlead.core.request import Request
from fairlead.server.observe.recent import MAX_KEYS, Recent, Window, percentiles


def request(number=1, **fields):
    return Request(**{"id": number, "arrived": 0.0, "model": "m", "prompt_tokens": 100, "stream": True} | fields)


def decision(at, number=1, endpoint="a", hit=60, **fields):
    outcome = "routed" if endpoint else "rejected-saturated"
    return DecisionRecord(
        request=request(number, **fields), at=at, policy="p", endpoint=endpoint, hit_tokens=hit, outcome=outcome
    )


def outcome(at, ttft=20.0, number=1, **fields):
    shown = {"status": 200, "duration_ms": 100.0, "forecast": Forecast(ttft_ms=10.0, low_ms=5.0, high_ms=30.0)}
    return OutcomeRecord(request=request(number), at=at, endpoint="a", ttft_ms=ttft, **(shown | fields))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.sampled_from("abc"), st.integers(1, 5)), max_size=60))
def test_a_window_holds_what_is_in_its_bins(entries):
    window = Window(10.0, 1.0, 1, "other")
    entries.sort(key=lambda entry: entry[0])
    for at, key, value in entries:
        window.add(key, at, (value,))
    last = entries[-1][0] if entries else 0.0
    window.move(last)
    expected = {}
    for at, key, value in entries:
        if int(at) > int(last) - 10:
            expected[key] = expected.get(key, 0) + value
    assert {key: row[0] for key, row in window.sums.items()} == expected
    window.move(last + 11.0)
    assert window.sums == {}


def test_a_window_knows_so_many_keys_and_merges_the_rest():
    window = Window(10.0, 1.0, 1, "other")
    for i in range(MAX_KEYS + 50):
        window.add(str(i), 0.0, (1.0,))
    assert len(window.sums) <= MAX_KEYS + 1
    assert window.sums["other"] == [50.0]
    window.move(100.0)
    assert window.sums == {}


def test_sums_per_endpoint():
    recent = Recent()
    recent.on_decision(decision(0.0))
    recent.on_decision(decision(1.0, 2, endpoint=""))
    recent.on_outcome(outcome(2.0, ttft=20.0, hit_tokens=60, cached_tokens=50))
    recent.on_outcome(outcome(2.5, ttft=40.0))
    recent.on_outcome(outcome(2.6, ttft=-1.0, status=502))
    recent.on_outcome(outcome(2.7, ttft=-1.0, unreached="b"))
    recent.move(3.0)
    sums = recent.endpoint("a")
    assert (sums.routed, sums.prompt_tokens, sums.hit_tokens) == (1, 100, 60)
    assert (sums.judged, sums.predicted_ms, sums.actual_ms, sums.inside) == (2, 20.0, 60.0, 1)
    assert (sums.predicted_hit, sums.reported_hit, sums.hit_error, sums.failed) == (60, 50, 10, 1)
    assert (recent.endpoint("b").failed, recent.endpoint("b").routed) == (1, 0), "the other one answered"
    assert recent.endpoint("nobody").records == 0
    recent.move(70.0)
    assert recent.endpoint("a").records == 0


def test_what_waited_in_the_queue_is_no_error_of_the_forecast():
    recent = Recent()
    recent.on_outcome(outcome(2.0, ttft=4020.0, queued_ms=4000.0))
    sums = recent.endpoint("a")
    assert (sums.judged, sums.predicted_ms, sums.actual_ms, sums.inside) == (1, 10.0, 20.0, 1)


def test_percentiles_are_values_that_came():
    values = [float(i) for i in range(1, 101)]
    assert percentiles(values, (0.5, 0.95, 0.99)) == [50.0, 95.0, 99.0]
    assert percentiles([7.0], (0.0, 1.0)) == [7.0, 7.0]
    assert percentiles([], (0.5,)) == [None]
