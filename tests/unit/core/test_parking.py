"""Requests that a scheduler in another process decides, through the pipeline's door, in virtual time."""

from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest
from driver_clients import Clients

from fairlead.compat.load import load
from fairlead.config.building import build_flow_controller, build_pipeline
from fairlead.core import parking
from fairlead.core.canary import Canary
from fairlead.core.endpoint import ROLE_LABEL, Endpoint
from fairlead.core.events import (
    EndpointDown,
    EndpointUp,
    Outcome,
    RemoteDown,
    RemotePick,
    RemotePicked,
    RemoteUp,
    RequestArrived,
    ResponseEnded,
    StreamLost,
)
from fairlead.core.flow_control import FlowController
from fairlead.core.instructions import AskRemote, Route
from fairlead.core.records import DecisionRecord
from fairlead.core.remote import REFUSED, BreakerRules, RemotePolicy
from fairlead.core.request import Request
from fairlead.core.scheduler import EXPIRY_PERIOD, Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.gateway.driver import Driver
from fairlead.plugins.policies.by_load import LeastRequests
from fairlead.testing import SimClock, builders

BUDGET = 0.005


class Rig:
    """A pipeline of three endpoints whose scheduler is this test."""

    def __init__(self, able: Any = None, flow_controller: FlowController | None = None) -> None:
        self.clock = SimClock()
        self.fleet = builders.fleet("e0", "e1", "e2")
        able = able or (lambda request, fleet, now: None)
        rules = BreakerRules(failures=3, cooldown=1.0)
        self.policy = RemotePolicy("remote", LeastRequests(), able, BUDGET, rules)
        self.pipeline = Pipeline(
            self.clock,
            Random(1),
            self.fleet,
            self.policy,
            TokenEstimator(),
            flow_controller=flow_controller,
            remotes={"remote": self.policy},
        )
        assert self.pipeline.parking is not None
        self.parking = self.pipeline.parking
        self.driver = Driver(self.pipeline, self.clock, self, {AskRemote: self._asked})
        self.asked: list[AskRemote] = []
        self.clients = Clients()
        self.routed, self.rejected = self.clients.routed, self.clients.rejected
        self.records: list[Any] = []
        self.driver.start()
        self.driver.feed(RemoteUp("remote"))

    def _asked(self, question: AskRemote) -> None:
        self.asked.append(question)

    def on_decision(self, record: Any, duration_s: float) -> None:
        self.records.append(record)

    def on_outcome(self, record: Any) -> None:
        self.records.append(record)

    def arrive(self, **fields: Any) -> Request:
        request = builders.request("hello", **fields)
        self.driver.feed(RequestArrived(request, self.clients.of(request)))
        self.pipeline.validate()
        return request

    def pick(self, request: Request, endpoint: str = "e2", **fields: Any) -> None:
        pick = RemotePick(request.id, fields.pop("outcome", Outcome.PICKED), endpoint, **fields)
        self.driver.feed(RemotePicked("remote", (pick,)))
        self.pipeline.validate()

    @property
    def fallbacks(self) -> dict[str, int]:
        return self.policy.stats.fallbacks


def test_its_pick_is_routed_charged_and_recorded_under_its_name() -> None:
    rig = Rig()
    request = rig.arrive()
    assert rig.routed == {} and len(rig.parking) == 1 and len(rig.fleet.ledger) == 0
    assert [question.request.id for question in rig.asked] == [request.id]
    rig.pick(request)
    assert rig.routed == {request.id: "e2"} and rig.records[-1].policy == "remote"
    assert rig.fleet.table.inflight.tolist() == [0.0, 0.0, 1.0]
    assert rig.policy.stats.answered == 1 and rig.fallbacks == {}
    rig.clock.advance(1.0)
    assert len(rig.records) == 1, "the deadline found nobody"


def test_without_an_answer_the_built_in_policy_decides_at_the_deadline_and_the_answer_is_late() -> None:
    rig = Rig()
    request = rig.arrive()
    rig.clock.advance(BUDGET - 1e-4)
    assert rig.routed == {}
    rig.clock.advance(2e-4)
    assert request.id in rig.routed and rig.records[-1].policy == "least-requests"
    first = rig.routed[request.id]
    rig.pick(request, "e1" if first != "e1" else "e0")
    assert rig.routed[request.id] == first and rig.policy.stats.late == 1
    assert len(rig.fleet.ledger) == 1 and rig.fallbacks == {"deadline": 1}


@pytest.mark.parametrize("answers", [True, False])
def test_the_time_of_the_question_is_not_that_of_the_model_server(answers: bool) -> None:
    rig = Rig()
    request = rig.arrive(stream=True)
    rig.clock.advance(0.004)
    if answers:
        rig.pick(request)
    else:
        rig.driver.feed(RemoteDown("remote"))
    decision = rig.records[-1]
    rig.clock.advance(0.010)
    end = ResponseEnded(request_id=request.id, status=200, ttft_ms=10.0, duration_ms=14.0)
    lease = next(iter(rig.fleet.ledger))
    rig.driver.feed(end)
    outcome = rig.records[-1]
    assert (decision.asked_ms, decision.queued_ms) == (pytest.approx(4.0), 0.0)
    assert (outcome.sent_ttft_ms, outcome.queued_ms) == (pytest.approx(6.0), pytest.approx(4.0))
    assert lease.first_token_at - lease.charged_at == pytest.approx(0.006), "what the forecasts learn from"


def test_each_request_has_a_deadline_of_its_own() -> None:
    rig = Rig()
    first = rig.arrive()
    rig.clock.advance(0.003)
    second = rig.arrive()
    rig.clock.advance(0.0021)
    assert first.id in rig.routed and second.id not in rig.routed
    rig.clock.advance(0.003)
    assert second.id in rig.routed


def test_losing_the_connection_decides_all_that_wait_and_nobody_is_asked_until_it_is_back() -> None:
    rig = Rig()
    waiting = [rig.arrive() for _ in range(5)]
    rig.driver.feed(RemoteDown("remote"))
    assert {*rig.routed} == {one.id for one in waiting}
    assert {*rig.routed.values()} == {"e0", "e1", "e2"}, "each saw the charges of those before it"
    rig.arrive()
    assert rig.fallbacks == {"lost": 5, "down": 1} and len(rig.asked) == 5
    rig.driver.feed(RemoteUp("remote"))
    rig.arrive()
    assert len(rig.asked) == 6


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        ("nobody", {}),
        ("", {}),
        ("e2", {"outcome": Outcome.UNSPECIFIED}),
        ("e2", {"outcome": 77}),
        ("nobody", {"alternatives": (("nor-me", 1.0),)}),
    ],
)
def test_nonsense_is_decided_here_and_counts_for_the_breaker(endpoint: str, fields: dict[str, Any]) -> None:
    rig = Rig()
    for _ in range(3):
        rig.pick(rig.arrive(), endpoint, **fields)
    assert rig.fallbacks == {"invalid": 3} and len(rig.routed) == 3
    rig.arrive()
    assert rig.fallbacks["breaker"] == 1 and len(rig.routed) == 4 and rig.policy.breaker.state == "open"


def test_a_pick_that_cannot_serve_the_request_is_not_believed() -> None:
    def able(request: Request, fleet: Any, now: float) -> Any:
        return fleet.table.mask(("only",), lambda slot, one: one.id == "e1")

    rig = Rig(able)
    request = rig.arrive()
    assert rig.asked[0].able.tolist() == [False, True, False]
    rig.pick(request, "e0")
    assert rig.fallbacks == {"invalid": 1}
    request = rig.arrive()
    rig.pick(request, "e0", alternatives=(("e2", 2.0), ("e1", 1.0)))
    assert rig.routed[request.id] == "e1" and rig.policy.stats.alternatives == 1


def test_a_prompt_goes_only_where_the_filters_allow_it() -> None:
    config = load(
        """
        policy: cost-model
        scheduler: {address: "127.0.0.1:4", breaker: {failures: 9}}
        filters: [{type: role}, {type: label-selector, matchLabels: {pool: main}}]
        """,
        need_endpoints=False,
    )
    clock = SimClock()
    pipeline = build_pipeline(config, clock, Random(1))
    for name, role, pool in (("a", "decode", "main"), ("b", "prefill", "other"), ("c", "prefill", "main")):
        labels = {"pool": pool, ROLE_LABEL: role}
        pipeline.handle(EndpointUp(Endpoint(id=name, address=f"{name}:1", labels=labels)))
    parking = pipeline.parking
    assert parking is not None
    (remote,) = parking.remotes
    pipeline.handle(RemoteUp(remote))
    sent = []
    for prefill in ("c", "b", "nobody"):
        request = builders.request("hello")
        asked = pipeline.handle(RequestArrived(request))[0]
        assert isinstance(asked, AskRemote) and asked.computes is not None
        assert asked.computes.tolist() == [True, False, True]
        pick = RemotePick(request.id, endpoint="a", prefill=prefill)
        record = pipeline.handle(RemotePicked(remote, (pick,)))[1]
        assert isinstance(record, DecisionRecord)
        sent.append(record.prefill)
    assert sent == ["c", "", ""]
    assert parking.remotes[remote].stats.fallbacks == {"invalid": 2}


@pytest.mark.parametrize(
    ("fields", "second"),
    [
        ({"alternatives": (("e0", 2.0), ("e1", 1.0))}, "e0"),
        ({"alternatives": (("nobody", 2.0), ("e2", 2.0), ("e1", 1.0))}, "e1"),
        ({"alternatives": (("e0", 2.0), ("e1", 1.0)), "prefill": "e0"}, "e1"),
        ({}, None),
    ],
)
def test_its_alternatives_are_the_fallback_endpoint(fields: dict[str, Any], second: str | None) -> None:
    rig = Rig()
    request = rig.arrive()
    rig.pick(request, "e2", **fields)
    addresses = {endpoint.id: endpoint.address for _, endpoint in rig.fleet.table.slots()}
    assert (rig.routed[request.id], rig.clients.fallbacks[request.id]) == ("e2", addresses[second] if second else "")


def test_an_alternative_that_cannot_serve_the_request_is_no_fallback_endpoint() -> None:
    rig = Rig(lambda request, fleet, now: fleet.table.mask(("two",), lambda slot, one: one.id != "e0"))
    request = rig.arrive()
    rig.pick(request, "e2", alternatives=(("e0", 2.0),))
    assert (rig.routed[request.id], rig.clients.fallbacks[request.id]) == ("e2", "")


def test_where_nobody_is_able_it_is_not_even_asked() -> None:
    rig = Rig(lambda request, fleet, now: fleet.table.mask(("none",), lambda slot, one: False))
    rig.arrive()
    assert rig.asked == [] and len(rig.records) == 1


def test_an_endpoint_that_left_meanwhile_is_nobodys_fault() -> None:
    rig = Rig()
    request = rig.arrive()
    rig.driver.feed(EndpointDown("e2"))
    rig.driver.feed(EndpointUp(builders.endpoint("e9")))  # at the slot of e2
    rig.pick(request, "e2")
    assert rig.fallbacks == {"gone": 1} and rig.policy.breaker.state == "closed"
    request = rig.arrive()
    rig.driver.feed(EndpointDown("e9"))
    rig.pick(request, "e9", alternatives=(("e1", 0.0),))
    assert rig.routed[request.id] == "e1"


def test_it_may_refuse_and_may_have_no_opinion() -> None:
    rig = Rig()
    request = rig.arrive(api="chat")
    rig.pick(request, "", outcome=Outcome.REFUSED, reason="not today")
    reject = rig.rejected[request.id]
    assert (reject.status, reject.reason, reject.message) == (503, REFUSED, "not today")
    assert rig.records[-1].outcome == REFUSED and len(rig.fleet.ledger) == 0
    request = rig.arrive()
    rig.pick(request, "", outcome=Outcome.PASSED)
    assert request.id in rig.routed and rig.fallbacks == {"passed": 1} and rig.policy.breaker.state == "closed"


def test_a_client_that_leaves_is_forgotten() -> None:
    rig = Rig()
    request = rig.arrive()
    rig.driver.feed(StreamLost(request.id))
    rig.pick(request)
    rig.clock.advance(1.0)
    assert len(rig.fleet.ledger) == 0 and rig.routed == {} and len(rig.parking) == 0


def test_a_scheduler_cannot_answer_for_another_one() -> None:
    rig = Rig()
    request = rig.arrive()
    rig.driver.feed(RemotePicked("somebody", (RemotePick(request.id, Outcome.PICKED, "e2"),)))
    assert rig.routed == {} and len(rig.parking) == 1


def test_no_more_than_so_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parking.MAX_PARKED == 4096
    monkeypatch.setattr(parking, "MAX_PARKED", 500)
    rig = Rig()
    for _ in range(503):
        rig.arrive()
    assert len(rig.parking) == 500 and rig.fallbacks == {"full": 3} and len(rig.routed) == 3
    rig.clock.advance(1.0)
    assert len(rig.parking) == 0 and len(rig.routed) == 503


def test_hits_count_as_predicted_where_it_picked() -> None:
    rig = Rig()
    known = builders.request("word " * 2000)
    builders.holds(rig.fleet, "e1", known)
    request = builders.request("word " * 2000)
    rig.driver.feed(RequestArrived(request))
    rig.pick(request, "e1")
    assert rig.records[-1].hit_tokens > 0.9 * request.prompt_tokens


def test_a_canary_may_be_a_scheduler() -> None:
    rig = Rig()
    rig.pipeline.policy = canary = Canary(LeastRequests(), rig.policy, 25.0)
    for i in range(400):
        request = rig.arrive(session=f"s{i % 100}")
        if canary.takes(request):
            rig.pick(request, "e0")
    assert 60 <= len(rig.asked) <= 140
    assert {one.request.session for one in rig.asked} == {f"s{i}" for i in range(100) if canary.takes(
        builders.request("", session=f"s{i}"))}  # fmt: skip
    assert len(rig.routed) == 400
    assert Counter(record.policy for record in rig.records) == {
        "remote": len(rig.asked),
        "least-requests": 400 - len(rig.asked),
    }


def test_a_canary_that_fails_is_replaced_by_the_primary() -> None:
    class Broken:
        name = "broken"

        def choose(self, request: Any, fleet: Any, context: Any) -> Any:
            raise RuntimeError("no")

    class Worse(LeastRequests):
        def cost(self, request: Any, fleet: Any, cycle: Any) -> Any:
            raise RuntimeError("no")

    for policy in (Broken(), Worse(name="broken")):
        told: list[Any] = []
        rig = Rig()
        rig.pipeline.policy = Canary(LeastRequests(), policy, 100.0, told.append)
        request = rig.arrive()
        assert request.id in rig.routed and rig.records[-1].policy == "least-requests"
        assert [error.plugin for error in told] == ["broken"]
        assert str(told[0]).startswith("plugin broken: RuntimeError: no")


def test_with_flow_control_those_that_go_at_once_are_asked_and_those_that_waited_are_bound_late() -> None:
    config = load("flowControl: {saturation: {type: concurrency-detector, maxConcurrency: 2}}", need_endpoints=False)
    rig = Rig(flow_controller=build_flow_controller(config, LeastRequests()))
    first = [rig.arrive(stream=True) for _ in range(6)]
    for request in first:
        rig.pick(request, f"e{request.id % 3}")
    waiting = [rig.arrive() for _ in range(5)]
    assert len(rig.asked) < len(first) + len(waiting)
    for request in first:
        rig.driver.feed(ResponseEnded(request_id=request.id, status=200))
        rig.clock.advance(0.05)
    for request in waiting:
        if request.id in rig.routed:
            rig.driver.feed(ResponseEnded(request_id=request.id, status=200))
    rig.clock.advance(100.0)
    assert {*rig.routed, *rig.rejected} == {one.id for one in (*first, *waiting)}
    rig.clock.advance(2000.0)
    assert len(rig.parking) == 0 and len(rig.fleet.ledger) == 0


def test_with_flow_control_those_that_go_at_once_are_charged_to_their_flows() -> None:
    rig = Rig(flow_controller=build_flow_controller(load("flowControl: {}", need_endpoints=False), LeastRequests()))
    for tenant in ("a", "b"):
        asked = rig.arrive(fairness_id=tenant)
        rig.pick(asked, "e1")
        entry = rig.pipeline.requests.get(asked.id)
        assert entry is not None and entry.charge is not None and entry.charge.ms > 0.0


def test_a_client_that_leaves_an_old_question_admits_no_second_probe() -> None:
    rig = Rig()
    rig.policy.budget = 5.0
    old = rig.arrive()
    for _ in range(3):
        rig.pick(rig.arrive(), "nowhere")
    assert rig.policy.breaker.state == "open"
    rig.clock.advance(1.0)
    probe = rig.arrive()
    rig.driver.feed(StreamLost(old.id))
    rig.arrive()
    assert rig.asked[-1].request.id == probe.id, "one at a time"
    rig.driver.feed(StreamLost(probe.id))
    following = rig.arrive()
    assert rig.asked[-1].request.id == following.id


def test_without_remote_schedulers_nothing_is_kept_for_questions_once_the_last_one_is_over() -> None:
    rig = Rig()
    rig.parking.remotes = {}
    rig.clock.advance(EXPIRY_PERIOD)
    assert rig.pipeline.parking is None
    rig = Rig()
    rig.clock.advance(EXPIRY_PERIOD)
    assert rig.pipeline.parking is rig.parking


def test_being_late_again_and_again_opens_the_breaker_and_one_good_answer_closes_it() -> None:
    rig = Rig()
    for _ in range(3):
        rig.arrive()
        rig.clock.advance(2 * BUDGET)
    assert rig.policy.breaker.state == "open" and rig.fallbacks == {"deadline": 3}
    rig.arrive()
    assert rig.fallbacks["breaker"] == 1 and len(rig.asked) == 3
    rig.clock.advance(1.0)
    probe, other = rig.arrive(), rig.arrive()
    assert [question.request.id for question in rig.asked[3:]] == [probe.id]
    assert other.id in rig.routed
    rig.pick(probe)
    assert rig.policy.breaker.state == "closed"
    rig.arrive()
    assert len(rig.asked) == 5


def test_a_caller_that_takes_several_endpoints_gets_all_that_were_named() -> None:
    rig = Rig(able=lambda request, fleet, now: np.array([True, True, True, False]))
    rig.driver.feed(EndpointUp(builders.endpoint("e3")))
    rig.pipeline.alternatives = 3
    request = rig.arrive()
    names = (("e3", 3.0), ("e0", 2.0), ("gone", 1.0), ("e1", 0.0))
    pick = RemotePick(request.id, Outcome.PICKED, "e2", alternatives=names)
    route, *_ = rig.pipeline.handle(RemotePicked("remote", (pick,)))
    assert isinstance(route, Route)
    assert route.destination == "10.0.0.2:8000,10.0.0.0:8000,10.0.0.1:8000" and route.fallback == "10.0.0.0:8000"
