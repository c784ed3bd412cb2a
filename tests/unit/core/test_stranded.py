"""Requests that wait while the last endpoint of their model leaves."""

from random import Random
from typing import Any

import pytest

from fairlead.compat.load import load
from fairlead.config.building import build_pipeline
from fairlead.core import events as ev
from fairlead.core.binding import LOOKUPS, PairBinder
from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.flow_control import DEADLINE_TIMER, DISPATCH_TIMER, GAP, JUDGED, TEST_GAP, TEST_GROWTH, TEST_S
from fairlead.core.instructions import Evict, Hold, Instruction, Reject, Route, SetTimer
from fairlead.core.request import Request
from fairlead.core.scheduler import EXPIRY_TIMER
from fairlead.testing import SimClock

FLOW = "flowControl: {{ttl: 590s, noEndpointTtl: {ttl}, saturation: {{type: concurrency-detector, maxConcurrency: 1}}}}"
A, B = (Endpoint(name, f"10.0.0.{number}:80", labels={"model-id": name}) for number, name in enumerate("ab"))


class Rig:
    """One endpoint of each of two models; both are busy."""

    def __init__(self, document: str) -> None:
        self.clock = SimClock()
        self.pipeline = build_pipeline(load(document, need_endpoints=False), self.clock, Random(1))
        self._timer = float("inf")
        self._ids = 0
        for endpoint in (A, B):
            self.feed(ev.EndpointUp(endpoint))
            assert self.arrive(endpoint.id) == [Route]

    def feed(self, event: ev.Event) -> list[Instruction]:
        found = self.pipeline.handle(event)
        self.pipeline.validate()
        for one in found:
            if isinstance(one, SetTimer) and one.name == DEADLINE_TIMER:
                self._timer = one.at
        return [one for one in found if isinstance(one, Route | Reject | Hold)]

    def arrive(self, model: str) -> list[type]:
        self._ids += 1
        request = Request(
            id=self._ids, arrived=self.clock.time(), api="chat", model=model, prompt_tokens=20_000, prompt_bytes=80_000,
            max_tokens=100,
        )  # fmt: skip
        return [type(one) for one in self.feed(ev.RequestArrived(request))]

    def pass_time(self, seconds: float) -> list[Instruction]:
        """Let the time pass in steps of half a second, with a scrape in each; the timer fires when it is due."""
        found: list[Instruction] = []
        for _ in range(round(seconds * 2)):
            self.clock.advance(0.5)
            found += self.feed(ev.MetricsSampled("b", self.clock.time(), Sample(waiting=0.0, running=1.0)))
            while self._timer <= self.clock.time():
                self._timer = float("inf")
                found += self.feed(ev.TimerFired(DEADLINE_TIMER))
        return found


@pytest.mark.parametrize(("ttl", "wait"), [("0s", GAP), ("1m", 60.0)])
def test_requests_of_a_model_without_a_server_do_not_wait_until_their_deadline(ttl: str, wait: float) -> None:
    rig = Rig(FLOW.format(ttl=ttl))
    for model in "aab":
        assert rig.arrive(model) == [Hold]
    rig.feed(ev.EndpointDown("a"))
    assert rig.pass_time(wait - 2.0) == []
    refused = rig.pass_time(4.0)
    assert [(one.request_id, one.status, one.reason) for one in refused if isinstance(one, Reject)] == [
        (3, 503, "rejected-no-endpoints"), (4, 503, "rejected-no-endpoints"),
    ]  # fmt: skip
    assert all(isinstance(one, Reject) and "no endpoint can serve it" in one.message for one in refused)
    assert len(rig.pipeline.flow_controller or ()) == 1, "the other model's request waits on"


def test_a_server_that_is_replaced_refuses_none_of_those_that_wait() -> None:
    rig = Rig(FLOW.format(ttl="0s"))
    rig.arrive("a"), rig.arrive("a")
    for _ in range(3):
        rig.feed(ev.EndpointDown("a"))
        assert rig.pass_time(GAP - 5.0) == []
        rig.feed(ev.EndpointUp(A))
        rig.pass_time(3.0)
    assert not rig.pipeline.flow_controller or len(rig.pipeline.flow_controller) <= 1


def test_a_pass_looks_at_few_of_many_models(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(FLOW.format(ttl="0s"))
    rig.feed(ev.EndpointUp(Endpoint("any", "10.0.0.9:80")))
    assert rig.arrive("m0") == [Route]
    for number in range(200):
        assert rig.arrive(f"m{number}") == [Hold]
    rig.pass_time(5.0)
    looks: list[int] = []
    look = PairBinder.look

    def counted(binder: PairBinder, *of: Any) -> Any:
        looks.append(1)
        return look(binder, *of)

    monkeypatch.setattr(PairBinder, "look", counted)
    rig.feed(ev.EndpointDown("any"))
    assert 0 < len(looks) <= LOOKUPS + JUDGED
    monkeypatch.undo()
    refused = rig.pass_time(GAP + 20.0)
    assert len([one for one in refused if isinstance(one, Reject)]) == 200, "all the same"


def test_a_stranded_request_whose_client_leaves_leaves_no_deadline() -> None:
    rig = Rig(FLOW.format(ttl="0s"))
    assert rig.arrive("a") == [Hold]
    rig.feed(ev.EndpointDown("a"))
    rig.pass_time(5.0)
    rig.feed(ev.StreamLost(3))
    controller = rig.pipeline.flow_controller
    assert controller is not None and controller.flow.next_deadline() == float("inf")
    assert rig.pass_time(GAP) == []


def test_in_an_empty_pool_nobody_is_stranded_before_all_are() -> None:
    """Otherwise the deadline of the stranded model is over and ends nothing, so its timer would fire all the time."""
    rig = Rig(FLOW.format(ttl="30s"))
    assert (rig.arrive("a"), rig.arrive("b")) == ([Hold], [Hold])
    rig.feed(ev.EndpointDown("a"))
    rig.pass_time(20.0)
    rig.feed(ev.EndpointDown("b"))
    rig.clock.advance(15.0)
    assert rig.feed(ev.TimerFired(DEADLINE_TIMER)) == []
    controller = rig.pipeline.flow_controller
    assert controller is not None and controller.flow.next_deadline() > rig.clock.time()
    refused = [one for one in rig.pass_time(20.0) if isinstance(one, Reject)]
    assert [(one.request_id, one.status) for one in refused] == [(3, 503), (4, 503)]


class Outage:
    """Two endpoints that stop answering, after a request that failed there."""

    def __init__(self, ttl: str, status: int = 503, more: str = "") -> None:
        flow = f"flowControl: {{ttl: 590s, noEndpointTtl: {ttl}{more}}}"
        self.clock = SimClock()
        self.pipeline = build_pipeline(load(flow, need_endpoints=False), self.clock, Random(1))
        self._ids = 0
        for endpoint in (A, B):
            self.feed(ev.EndpointUp(Endpoint(endpoint.id, endpoint.address)))
            self.answers(endpoint.id)
        assert self.arrive() == [Route]
        self.clock.advance(1.0)
        self.feed(ev.ResponseEnded(request_id=1, status=status))
        for _ in range(3):
            self.fails("a", "b")

    def feed(self, event: ev.Event) -> list[Instruction]:
        found = self.pipeline.handle(event)
        self.pipeline.validate()
        return [one for one in found if isinstance(one, Route | Reject | Hold | Evict)]

    def arrive(self, priority: int = 0) -> list[type]:
        self._ids += 1
        request = Request(
            id=self._ids, arrived=self.clock.time(), api="chat", prompt_tokens=10, max_tokens=10, stream=True,
            priority=priority,
        )  # fmt: skip
        return [type(one) for one in self.feed(ev.RequestArrived(request))]

    def answers(self, name: str) -> list[Instruction]:
        return self.feed(ev.MetricsSampled(name, self.clock.time(), Sample(waiting=0.0, running=0.0)))

    def fails(self, *names: str) -> list[Instruction]:
        self.clock.advance(0.5)
        return [one for name in names for one in self.feed(ev.MetricsFailed(name, "refused"))]

    def fires(self, name: str) -> list[Instruction]:
        return self.feed(ev.TimerFired(name))


def test_requests_wait_for_servers_that_all_refuse() -> None:
    pool = Outage("1m")
    assert [pool.arrive() for _ in range(4)] == [[Hold]] * 4
    assert pool.fails("a", "b") == []
    back = pool.answers("b") + [one for _ in range(3) for one in pool.fires(DISPATCH_TIMER)]
    assert [(one.request_id, one.endpoint.id) for one in back if isinstance(one, Route)] == [
        (number, "b") for number in (2, 3, 4, 5)
    ]
    assert pool.arrive() == [Route]


def test_requests_wait_also_after_a_while_in_which_none_came() -> None:
    pool = Outage("1m")
    pool.fires(EXPIRY_TIMER)
    assert pool.arrive() == [Hold]


@pytest.mark.parametrize(
    "event",
    [ev.EndpointDown("a"), ev.EndpointUp(Endpoint("a", "10.0.0.8:80")), ev.EndpointUp(Endpoint("c", "10.0.0.9:80"))],
    ids=["leaves", "moves", "comes"],
)
def test_while_no_server_answers_one_that_comes_or_leaves_ends_no_wait(event: ev.Event) -> None:
    pool = Outage("1m")
    assert [pool.arrive() for _ in range(4)] == [[Hold]] * 4
    assert pool.feed(event) == pool.fires(DISPATCH_TIMER) == []
    names = [endpoint.id for _, endpoint in pool.pipeline.fleet.table.slots()]
    back = pool.answers(names[-1]) + [one for _ in range(3) for one in pool.fires(DISPATCH_TIMER)]
    assert [one.endpoint.id for one in back if isinstance(one, Route)] == names[-1:] * 4


@pytest.mark.parametrize("waited", [True, False])
def test_those_that_wait_in_an_empty_pool_are_sent_once_its_first_server_answers(waited: bool) -> None:
    pool = Outage("1m", status=200)
    pool.feed(ev.EndpointDown("a")), pool.feed(ev.EndpointDown("b"))
    assert [pool.arrive() for _ in range(4 * waited)] == [[Hold]] * (4 * waited)
    pool.clock.advance(TEST_S)
    tested = pool.feed(ev.EndpointUp(A)) + pool.feed(ev.EndpointUp(B))
    assert [type(one) for one in tested] == [Route] * waited, "one is a test"
    assert pool.arrive() == [Hold if waited else Route], "whom nobody waited for is taken for reachable"
    sent = pool.answers("b") + [one for _ in range(3) for one in pool.fires(DISPATCH_TIMER)]
    assert [one.endpoint.id for one in sent if isinstance(one, Route)] == ["b"] * (4 * waited)


def test_a_request_that_another_server_answers_keeps_nobody_waiting() -> None:
    pool = Outage("1m", status=200)
    assert pool.arrive() == [Route]
    (lease,) = pool.pipeline.fleet.ledger
    pool.feed(ev.RequestMoved(2, (B if lease.endpoint_id == "a" else A).address, first_token=True))
    pool.fails("a", "b")
    assert pool.arrive() == [Route]


def test_servers_whose_pages_alone_fail_get_requests() -> None:
    pool = Outage("1m", status=200)
    assert pool.arrive() == [Route]
    pool.feed(ev.ResponseEnded(request_id=2, status=503))
    pool.fails("a")
    assert [pool.arrive(), pool.arrive()] == [[Hold]] * 2
    pool.clock.advance(TEST_S)
    (tested,) = pool.fires(DISPATCH_TIMER)
    assert isinstance(tested, Route) and tested.request_id == 3 and pool.fires(DISPATCH_TIMER) == []
    pool.clock.advance(0.1)
    assert len(pool.feed(ev.FirstTokenSeen(request_id=3))) == 1, "a good answer ends the wait when it begins"
    pool.feed(ev.ResponseEnded(request_id=3, status=200))
    assert pool.arrive() == [Route]


def test_no_answer_is_cut_off_for_requests_that_wait_until_servers_answer() -> None:
    pool = Outage("1m", status=200, more=", eviction: {}")
    assert pool.arrive(priority=-1) == [Route]
    pool.feed(ev.FirstTokenSeen(request_id=2))
    pool.clock.advance(0.1)
    assert pool.arrive() == [Route]
    pool.feed(ev.ResponseEnded(request_id=3, status=503))
    assert pool.arrive() == [Hold]
    pool.clock.advance(0.5)
    assert pool.fires(DISPATCH_TIMER) == []


def test_an_outage_is_tested_like_the_first_although_nobody_waited_when_that_was_over() -> None:
    pool = Outage("1m")
    assert pool.arrive() == [Hold]
    pool.clock.advance(TEST_S)
    pool.fires(DISPATCH_TIMER)
    pool.feed(ev.ResponseEnded(request_id=2, status=503))
    pool.clock.advance(3600.0)
    pool.answers("a")
    assert pool.arrive() == [Route]
    pool.clock.advance(1.0)
    pool.feed(ev.ResponseEnded(request_id=3, status=503))
    for _ in range(3):
        pool.fails("a", "b")
    assert pool.arrive() == [Hold] and pool.fires(DISPATCH_TIMER) == []
    pool.clock.advance(TEST_S)
    assert len(pool.fires(DISPATCH_TIMER)) == 1


def test_a_failure_before_the_last_page_keeps_nobody_waiting() -> None:
    pool = Outage("1m")
    pool.answers("a")
    for _ in range(4):
        pool.fails("a", "b")
    assert pool.arrive() == [Route]


def test_servers_that_failed_often_before_they_refuse_are_waited_for() -> None:
    pool = Outage("1m")
    pool.answers("a")
    for number in range(2, 10):
        assert pool.arrive() == [Route]
        pool.feed(ev.ResponseEnded(request_id=number, status=500))
    for _ in range(4):
        pool.fails("a", "b")
    assert pool.arrive() == [Route]
    pool.feed(ev.ResponseEnded(request_id=10, status=503))
    pool.fails("a")
    assert pool.arrive() == [Hold]


def test_servers_that_refuse_for_too_long_refuse_those_that_wait() -> None:
    pool = Outage("1m")
    assert [pool.arrive() for _ in range(7)] == [[Hold]] * 7
    began, tests = pool.clock.time(), []
    for _ in range(118):
        for tested in pool.fails("a"):
            assert isinstance(tested, Route)
            tests.append(pool.clock.time() - began)
            pool.feed(ev.ResponseEnded(request_id=tested.request_id, status=503))
    growing = [TEST_S * TEST_GROWTH**power for power in range(3)]
    assert tests == [*growing, growing[-1] + TEST_GAP, growing[-1] + 2 * TEST_GAP]
    pool.clock.advance(2.0)
    refused = pool.fires(DEADLINE_TIMER)
    assert [(one.request_id, one.status, one.reason, one.message) for one in refused if isinstance(one, Reject)] == [
        (number, 503, "rejected-no-endpoints", "the request timed out waiting, and no endpoint answers")
        for number in (7, 8)
    ]


def test_without_a_time_for_it_nobody_waits_for_servers_that_refuse() -> None:
    assert Outage("0s").arrive() == [Route]
