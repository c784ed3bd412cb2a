"""The last hour of each endpoint."""

from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.fleet import Fleet
from fairlead.core.records import OutcomeRecord
from fairlead.core.request import Request
from fairlead.server.observe.endpoint_history import POINTS, STEP, EndpointHistory


def scraped(fleet: Fleet, name: str) -> None:
    fleet.up(Endpoint(name, f"{name}:1"))
    fleet.sampled(name, 0.0, 0.0, Sample(waiting=0, running=0))


def test_a_point_each_step_with_the_first_tokens_since_the_last_one():
    fleet, history = Fleet(), EndpointHistory()
    for name in ("a", "b"):
        fleet.up(Endpoint(name, f"{name}:1"))
    fleet.sampled("b", 99.0, 99.0, Sample(waiting=2, running=3, kv_usage=0.5))
    ends = [
        OutcomeRecord(request=Request(id=i, arrived=0.0, stream=i < 3), at=at, endpoint="b", ttft_ms=ttft)
        for i, (at, ttft) in enumerate([(100.0, 900.0), (101.0, 10.0), (102.0, 30.0), (103.0, 500.0), (104.0, -1.0)])
    ]
    for now in (100.0, 100.0 + STEP / 2, 100.0 + STEP):
        history.keep(fleet.table, [end for end in ends if end.at <= now], now)
    first, second = history.of(1, fleet.table, 1000.0)
    assert (first.time, first.queue, first.active, first.kv, first.ttft_ms) == (1100.0, 2.0, 3.0, 0.5, 900.0)
    assert (second.time, second.ttft_ms) == (1100.0 + STEP, 20.0)
    assert history.of(0, fleet.table, 0.0) == [], "zeros would be no measurement: it was never scraped"
    fleet.charge(Request(id=9, arrived=0.0, prompt_tokens=10), 0, 130.0, 0, 10)
    history.keep(fleet.table, [], 100.0 + 2 * STEP)
    assert [point.ttft_ms for point in history.of(0, fleet.table, 0.0)] == [None]


def test_it_is_bounded_and_another_endpoint_in_the_same_slot_begins_anew():
    fleet, history = Fleet(), EndpointHistory()
    scraped(fleet, "a")
    for i in range(POINTS + 10):
        history.keep(fleet.table, [], STEP * i)
    points = history.of(0, fleet.table, 0.0)
    assert (len(points), points[0].time, points[-1].time) == (POINTS, STEP * 10, STEP * (POINTS + 9))
    fleet.down("a")
    scraped(fleet, "b")
    scraped(fleet, "c")
    assert [history.of(slot, fleet.table, 0.0) for slot in (0, 1)] == [[], []]
    history.keep(fleet.table, [], STEP * 1000)
    assert [len(history.of(slot, fleet.table, 0.0)) for slot in (0, 1)] == [1, 1]
