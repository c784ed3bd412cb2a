"""A reload turns flow control on and off; nobody who waits is lost."""

from random import Random

import pytest

from fairlead.compat.load import load
from fairlead.config.building import build_pipeline
from fairlead.core import events as ev
from fairlead.core.endpoint import Endpoint
from fairlead.core.instructions import AdoptConfiguration, Hold, Instruction, Reject, Route, SetTimer
from fairlead.core.request import Request
from fairlead.testing import SimClock

ON, OFF = "policy: default", "policy: default\nflowControl: {enabled: false}"
TENANTS = "policy: default\nflowControl: {limits: {band: {requests: 100}}}"


class Rig:
    """Carries out timers that are due at once."""

    def __init__(self, text: str) -> None:
        self.clock = SimClock()
        self.pipeline = build_pipeline(load(text, need_endpoints=False), self.clock, Random(1))
        self._ids = 0
        self.feed(ev.EndpointUp(Endpoint("e0", "10.0.0.1:80")))

    def feed(self, event: ev.Event) -> list[Instruction]:
        found, queue = [], [event]
        while queue:
            for one in self.pipeline.handle(queue.pop()):
                if isinstance(one, SetTimer) and one.at <= self.clock.time():
                    queue.append(ev.TimerFired(one.name))
                found.append(one)
            self.pipeline.validate()
        return found

    def arrive(self, tenant: str = "") -> list[Instruction]:
        self._ids += 1
        now = self.clock.time()
        request = Request(id=self._ids, arrived=now, prompt_tokens=20_000, fairness_id=tenant, stream=True)
        return self.feed(ev.RequestArrived(request))

    def reload(self, text: str) -> list[Instruction]:
        found = self.feed(ev.Reconfigured(load(text, need_endpoints=False)))
        assert any(isinstance(one, AdoptConfiguration) for one in found)
        return found


def kinds(found: list[Instruction]) -> list[type]:
    return [type(one) for one in found if isinstance(one, Route | Reject | Hold)]


@pytest.mark.parametrize("on", [ON, TENANTS])
def test_turned_off_it_sends_those_that_wait_and_holds_nobody_any_more(on: str) -> None:
    rig = Rig(on)
    found = [kinds(rig.arrive(tenant)) for tenant in "aabab"]
    assert found[0] == [Route] and sum(map(len, found)) == 5
    waiting = sum(kind == [Hold] for kind in found)
    assert waiting > 1
    assert kinds(rig.reload(OFF)) == [Route] * waiting
    assert rig.pipeline.flow_controller is None
    assert kinds(rig.arrive("a")) == [Route]
    for number in range(1, 7):
        rig.feed(ev.FirstTokenSeen(number))
        rig.feed(ev.ResponseEnded(request_id=number, status=200))
    assert not len(rig.pipeline.requests)


def test_turned_on_it_counts_those_that_are_on_their_way() -> None:
    rig = Rig(OFF)
    assert [kinds(rig.arrive(tenant)) for tenant in "ab"] == [[Route]] * 2
    rig.reload(TENANTS)
    assert kinds(rig.arrive("a")) == [Hold]
    assert rig.pipeline.flow_controller is not None
    for number in (1, 2):
        rig.feed(ev.FirstTokenSeen(number))
        rig.feed(ev.ResponseEnded(request_id=number, status=200))
    assert rig.pipeline.requests.get(3).lease is not None, "it goes once there is room"


def test_a_reload_of_other_things_leaves_those_that_wait_where_they_are() -> None:
    rig = Rig(ON)
    rig.arrive()
    assert kinds(rig.arrive()) == [Hold]
    before = rig.pipeline.flow_controller
    assert kinds(rig.reload(ON + "\nledger: {leaseTtl: 60s}")) == []
    assert rig.pipeline.flow_controller is before


def test_turned_off_and_on_again_before_all_have_gone_it_holds_again() -> None:
    rig = Rig(ON)
    rig.arrive()
    rig.arrive()
    flow = rig.pipeline.flow_controller
    assert flow is not None
    for text in (OFF, ON):
        rig.pipeline.handle(ev.Reconfigured(load(text, need_endpoints=False)))
    assert kinds(rig.arrive()) == [Hold]
