"""What a flow is charged for its requests, from their decision to their end."""

from random import Random

import pytest

from fairlead.compat.load import load
from fairlead.config.building import build_flow_controller
from fairlead.config.plugins import build_policy
from fairlead.core import events as ev
from fairlead.core.endpoint import Endpoint
from fairlead.core.flow import Flow
from fairlead.core.flow_control import FlowControl
from fairlead.core.instructions import Reject, Route
from fairlead.core.request import Request, Usage
from fairlead.core.scheduler import Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.testing import SimClock, builders


class Rig:
    """One endpoint, flow control with its defaults but for who waits: the gate takes one request at a time. `counted`:
    as where several tenants send."""

    def __init__(
        self, saturation: str = ", saturation: {type: concurrency-detector, maxConcurrency: 1}", counted: bool = True
    ) -> None:
        config = load(f"flowControl: {{ttl: 5s{saturation}}}", need_endpoints=False)
        policy = build_policy(config)
        self.clock, self.fleet, self._ids = SimClock(), builders.fleet("e0"), 0
        self.pipeline = Pipeline(
            self.clock, Random(1), self.fleet, policy, TokenEstimator(),
            flow_controller=build_flow_controller(config, policy),
        )  # fmt: skip
        if counted:
            self.control.count([], self.fleet)

    @property
    def control(self) -> FlowControl:
        assert self.pipeline.flow_controller is not None
        return self.pipeline.flow_controller.flow

    def feed(self, event: ev.Event) -> list[object]:
        found = self.pipeline.handle(event)
        self.pipeline.validate()
        return list(found)

    def arrive(self, tenant: str, tokens: int = 1000) -> tuple[int, bool]:
        """Its id, and whether it was routed at once."""
        self._ids += 1
        request = Request(
            id=self._ids, arrived=self.clock.time(), api="chat", model="m", fairness_id=tenant, prompt_tokens=tokens,
            prompt_bytes=4 * tokens, max_tokens=100, stream=True,
        )  # fmt: skip
        return self._ids, any(isinstance(one, Route) for one in self.feed(ev.RequestArrived(request)))

    def flow(self, tenant: str) -> Flow:
        probe = Request(id=0, arrived=0.0, model="m", fairness_id=tenant)
        return self.control.queues.of(probe, self.clock.time())[1]


def test_work_is_the_prompt_and_the_expected_answer():
    rig = Rig()
    rig.arrive("short", 10)
    rig.feed(ev.ResponseEnded(request_id=1, status=200, usage=Usage(completion_tokens=100)))
    rig.arrive("long", 1000)
    rig.feed(ev.ResponseEnded(request_id=2, status=200, usage=Usage(completion_tokens=100)))
    assert rig.flow("long").served - rig.flow("short").served == pytest.approx(990 * 0.0433, rel=0.15)
    assert rig.flow("short").served > 30, "a hundred tokens of an answer are work too"


def test_the_answers_real_length_sets_it_right():
    rig = Rig()
    rig.arrive("a", 10)
    expected = rig.flow("a").served
    rig.feed(ev.ResponseEnded(request_id=1, status=200, usage=Usage(completion_tokens=10)))
    assert rig.flow("a").served == pytest.approx(expected / 10, rel=0.2)


@pytest.mark.parametrize("status", [400, 404, 429, 503])
def test_what_a_server_refused_costs_nothing(status: int):
    rig = Rig()
    rig.arrive("a", 8_000_000)
    assert rig.flow("a").served > 1e6
    rig.feed(ev.ResponseEnded(request_id=1, status=status))
    assert rig.flow("a").served == pytest.approx(0.0, abs=1e-6)


def test_who_left_pays_for_the_time_that_the_request_was_there():
    rig = Rig()
    rig.arrive("a", 100_000)
    rig.clock.advance(0.5)
    rig.feed(ev.StreamLost(1))
    assert rig.flow("a").served == pytest.approx(500.0)


def test_who_never_went_pays_nothing():
    rig = Rig()
    rig.arrive("a")
    assert [rig.arrive("a")[1], rig.arrive("a")[1]] == [False, False]
    served = rig.flow("a").served
    rig.feed(ev.StreamLost(2))
    rig.clock.advance(6.0)
    refused = rig.feed(ev.TimerFired("queue-deadline"))
    assert any(isinstance(one, Reject) for one in refused)
    assert (rig.flow("a").served, rig.flow("a").wanted) == (served, 1)


def test_a_light_request_passes_no_limit_that_was_set_by_hand():
    rig = Rig()
    rig.arrive("many", 20_000)
    assert not rig.arrive("few", 10)[1]


def test_a_light_request_passes_a_gate_that_another_tenant_closed():
    rig = Rig(saturation="")
    rig.arrive("many", 20_000)
    for _ in range(5):
        assert not rig.arrive("many")[1]
    assert rig.arrive("few", 10)[1]
    assert not rig.arrive("some", 30_000)[1], "this one is not light"


def test_charges_end_with_their_endpoint():
    rig = Rig()
    rig.arrive("a")
    rig.feed(ev.EndpointDown("e0"))
    rig.feed(ev.EndpointUp(Endpoint("e1", "10.0.0.9:80")))
    assert rig.flow("a").wanted == 0


def test_who_is_alone_is_not_counted_until_another_comes():
    alone, beside = Rig(saturation="", counted=False), Rig(saturation="")
    for rig in alone, beside:
        assert rig.arrive("many", 500)[1] and rig.arrive("many", 500)[1]
    assert (alone.flow("many").in_flight, beside.flow("many").in_flight) == (0, 2)
    for rig in alone, beside:
        assert rig.arrive("few", 10)[1]
        assert (rig.flow("many").in_flight, rig.flow("few").in_flight) == (2, 1)
    assert alone.flow("many").wanted_ms == pytest.approx(beside.flow("many").wanted_ms)
    assert alone.control.only is None


def test_who_is_alone_and_must_wait_is_counted_and_no_more_when_it_is_over():
    rig = Rig(counted=False)
    assert rig.arrive("a")[1] and rig.control.only
    assert not rig.arrive("a")[1] and rig.control.only is None
    assert (rig.flow("a").in_flight, rig.flow("a").wanted) == (1, 2)
    rig.feed(ev.TimerFired("expire-leases"))
    assert rig.control.only is None, "one waits"
    rig.feed(ev.ResponseEnded(request_id=1, status=200))
    rig.feed(ev.TimerFired("expire-leases"))
    assert rig.control.only
    rig.feed(ev.ResponseEnded(request_id=2, status=200))
    assert rig.flow("a").wanted == 0


def test_two_that_have_requests_in_flight_are_counted():
    rig = Rig(saturation="", counted=False)
    assert rig.arrive("a", 10)[1] and rig.arrive("b", 10)[1]
    rig.feed(ev.TimerFired("expire-leases"))
    assert rig.control.only is None
    rig.feed(ev.ResponseEnded(request_id=1, status=200))
    rig.feed(ev.TimerFired("expire-leases"))
    assert rig.control.only
    assert rig.arrive("b", 10)[1] and rig.flow("b").in_flight == 1, "the first was counted, and the second is not"
