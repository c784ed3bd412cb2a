"""Flow control as it is where the configuration says nothing of it."""

from random import Random

from fairlead.compat.load import load
from fairlead.config.building import build_pipeline
from fairlead.core import events as ev
from fairlead.core.endpoint import Endpoint
from fairlead.core.flow_control import DEADLINE_TIMER, DISPATCH_TIMER
from fairlead.core.instructions import Hold, Instruction, Reject, Route, SetTimer
from fairlead.core.request import Request
from fairlead.testing import SimClock


class Rig:
    """Carries out timers that are due at once."""

    def __init__(self, endpoints: int = 1) -> None:
        self.clock = SimClock()
        self.pipeline = build_pipeline(load("policy: default", need_endpoints=False), self.clock, Random(1))
        self._ids = 0
        for number in range(endpoints):
            self.feed(ev.EndpointUp(Endpoint(f"e{number}", f"10.0.0.{number}:80")))

    def feed(self, event: ev.Event) -> list[Instruction]:
        found, queue = [], [event]
        while queue:
            for one in self.pipeline.handle(queue.pop()):
                if isinstance(one, SetTimer) and one.at <= self.clock.time() and one.name in (
                    DEADLINE_TIMER, DISPATCH_TIMER,
                ):  # fmt: skip
                    queue.append(ev.TimerFired(one.name))
                found.append(one)
            self.pipeline.validate()
        return found

    def arrive(self, tokens: int = 20_000) -> list[Instruction]:
        self._ids += 1
        request = Request(
            id=self._ids, arrived=self.clock.time(), api="chat", model="m", prompt_tokens=tokens,
            prompt_bytes=4 * tokens, max_tokens=100, stream=True,
        )  # fmt: skip
        return self.feed(ev.RequestArrived(request))


def kinds(found: list[Instruction]) -> list[type]:
    return [type(one) for one in found if isinstance(one, Route | Reject | Hold)]


def routed(found: list[Instruction]) -> list[int]:
    return [one.request_id for one in found if isinstance(one, Route)]


def test_a_request_waits_while_the_only_endpoint_is_busy() -> None:
    rig = Rig()
    assert (kinds(rig.arrive()), kinds(rig.arrive())) == ([Route], [Hold])
    rig.clock.advance(0.9)
    assert routed(rig.feed(ev.FirstTokenSeen(1))) == [2]


def test_an_empty_pool_refuses_at_once() -> None:
    (reject,) = [one for one in Rig(endpoints=0).arrive() if isinstance(one, Reject)]
    assert (reject.status, reject.reason) == (503, "rejected-no-endpoints")


def test_those_that_wait_are_refused_when_the_last_endpoint_leaves() -> None:
    rig = Rig()
    for _ in range(40):
        rig.arrive()
    rejects = [one for one in rig.feed(ev.EndpointDown("e0")) if isinstance(one, Reject)]
    assert {one.reason for one in rejects} == {"rejected-no-endpoints"}
    assert {one.request_id for one in rejects} >= set(range(2, 41))
    rig.feed(ev.EndpointUp(Endpoint("e0", "10.0.0.0:80")))
    assert (kinds(rig.arrive()), kinds(rig.arrive())) == ([Route], [Hold])


def test_at_a_shutdown_those_that_wait_are_sent() -> None:
    rig = Rig()
    for _ in range(20):
        rig.arrive()
    assert sorted(routed(rig.feed(ev.StopAsked()))) == list(range(2, 21))
    assert kinds(rig.arrive()) == [Route]
