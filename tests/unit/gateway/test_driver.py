"""Events one after the other, and every instruction on its own: what fails harms nothing beside it."""

from random import Random
from typing import Any

import pytest

from fairlead.core import events as ev
from fairlead.core.endpoint import Endpoint
from fairlead.core.fleet import Fleet
from fairlead.core.instructions import (
    AdoptConfiguration,
    AskRemote,
    Evict,
    Hold,
    Instruction,
    JudgeShadows,
    Record,
    RefuseConfiguration,
    Reject,
    Route,
    SetTimer,
)
from fairlead.core.profile import Profile
from fairlead.core.records import ShadowCase
from fairlead.core.request import Request
from fairlead.core.scheduler import Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.gateway.driver import Driver, Handlers
from fairlead.plugins.params import NoParams
from fairlead.plugins.pickers import RoundRobin
from fairlead.testing import SimClock

ENDPOINT = Endpoint("e", "10.0.0.1:80")
REQUESTS = [Request(id=number, arrived=0.0) for number in range(4)]


class Told:
    """A client that remembers what it is told, or fails."""

    def __init__(self, failing: bool = False, hopeless: bool = False) -> None:
        self.heard: list[str] = []
        self._failing, self._hopeless = failing, hopeless

    def _hear(self, what: str) -> None:
        self.heard.append(what)
        if self._failing:
            raise RuntimeError("a broken session")

    def route(self, route: Route) -> None:
        self._hear("route")

    def reject(self, reject: Reject) -> None:
        self._hear("reject")

    def hold(self, seconds: float) -> None:
        self._hear("hold")

    def fail(self) -> None:
        self.heard.append("fail")
        if self._hopeless:
            raise RuntimeError("cannot even give up")


class Scripted:
    """A pipeline whose answers are given: by event, a list of instructions. Never entered twice at once."""

    def __init__(self, answers: dict[type, list[Instruction]]) -> None:
        self.answers, self.events = answers, list[Any]()
        self._inside = False

    def start(self) -> list[Instruction]:
        return []

    def handle(self, event: Any) -> list[Instruction]:
        assert not self._inside
        self._inside = True
        self.events.append(event)
        answer = self.answers.pop(type(event), [])
        self._inside = False
        return answer


class Observer:
    def __init__(self, failing: bool = False) -> None:
        self.failed: list[str] = []
        self.outcomes: list[int] = []
        self.durations: list[float] = []
        self._failing = failing

    def on_decision(self, record: Any, duration_s: float) -> None:
        if self._failing:
            raise RuntimeError("a broken observer")
        self.durations.append(duration_s)

    def on_outcome(self, record: Any) -> None:
        self.outcomes.append(record.request.id)

    def on_failure(self, instruction: str) -> None:
        self.failed.append(instruction)
        if self._failing:
            raise RuntimeError("a broken observer")


def driven(
    instructions: list[Instruction], observer: Observer | None = None, handlers: Handlers | None = None
) -> tuple[Driver, Scripted, SimClock]:
    clock, pipeline = SimClock(), Scripted({ev.StopAsked: instructions})
    return Driver(pipeline, clock, observer or Observer(), handlers), pipeline, clock  # type: ignore[arg-type]


def reject(number: int, client: Any = None) -> Reject:
    return Reject(request_id=number, status=503, reason="rejected", message="", client=client)


@pytest.mark.failing_instructions
def test_one_session_that_raises_costs_the_others_nothing() -> None:
    broken, well, observer = Told(failing=True), Told(), Observer()
    instructions = [Route(1, ENDPOINT, client=broken), Route(2, ENDPOINT, client=well), SetTimer("t", 1.0)]
    driver, pipeline, clock = driven(instructions, observer)
    driver.feed(ev.StopAsked())
    assert broken.heard == ["route", "fail"]
    assert well.heard == ["route"]
    assert observer.failed == ["Route"]
    clock.advance(2.0)
    assert pipeline.events == [ev.StopAsked(), ev.StreamLost(1), ev.TimerFired("t")]


def test_the_time_of_an_event_that_decides_several_requests_counts_once() -> None:
    observer = Observer()
    driver, _, _ = driven([decision(), decision(), decision()], observer)
    driver.feed(ev.StopAsked())
    first, *others = observer.durations
    assert first > 0.0 and others == [0.0, 0.0]


FAILING = Told(failing=True)
NOBODY: Any = None
KINDS: list[tuple[Instruction, list[int]]] = [
    (Route(1, ENDPOINT, client=FAILING), [1]),
    (reject(1, FAILING), [1]),
    (Evict(reject(1), FAILING), [1]),
    (Hold(1, 2.0, FAILING), [1]),
    (AskRemote("far", REQUESTS[1], None, None, 1.0), []),
    (JudgeShadows(ShadowCase(REQUESTS[1], NOBODY, NOBODY, NOBODY, NOBODY, NOBODY)), []),
    (AdoptConfiguration(NOBODY, NOBODY), []),
    (RefuseConfiguration(NOBODY, "broken"), []),
    (SetTimer("t", float("nan")), []),
    (NOBODY, []),
]


@pytest.mark.failing_instructions
@pytest.mark.parametrize(("failing", "lost"), KINDS, ids=lambda value: type(value).__name__)
def test_whatever_fails_the_rest_is_carried_out_and_its_request_ends(
    failing: Instruction, lost: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    well, observer = Told(), Observer(failing=True)
    handlers = dict.fromkeys((AskRemote, JudgeShadows, AdoptConfiguration, RefuseConfiguration), broken)
    driver, pipeline, clock = driven([failing, Route(2, ENDPOINT, client=well), SetTimer("u", 1.0)], observer, handlers)
    set_timer = clock.call_at
    clock.call_at = lambda when, *rest: set_timer(when, *rest) if when == when else broken()  # type: ignore[method-assign]
    if isinstance(failing, Record):
        pipeline.answers[ev.StopAsked][0] = decision()
    driver.feed(ev.StopAsked())
    assert well.heard == ["route"]
    assert observer.failed == [type(failing).__name__]
    assert ("request 1 is ended" if lost else "the others are carried out") in caplog.text
    assert pipeline.events[1:] == [ev.StreamLost(number) for number in lost]
    clock.advance(2.0)
    assert pipeline.events[-1] == ev.TimerFired("u")


@pytest.mark.failing_instructions
def test_a_client_that_cannot_even_give_up_is_lost_all_the_same() -> None:
    hopeless = Told(failing=True, hopeless=True)
    driver, pipeline, _ = driven([Route(1, ENDPOINT, client=hopeless)])
    driver.feed(ev.StopAsked())
    assert hopeless.heard == ["route", "fail"]
    assert pipeline.events[1:] == [ev.StreamLost(1)]


def test_what_is_fed_meanwhile_is_handled_when_the_event_is_done() -> None:
    driver, pipeline, _ = driven([])

    class Eager(Told):
        def route(self, route: Route) -> None:
            driver.feed(ev.FirstTokenSeen(route.request_id))
            seen.append((route.request_id, len(pipeline.events)))

    seen: list[tuple[int, int]] = []
    eager = Eager()
    pipeline.answers[ev.StopAsked] = [Route(1, ENDPOINT, client=eager), Route(2, ENDPOINT, client=eager)]
    driver.feed(ev.StopAsked())
    assert seen == [(1, 1), (2, 1)], "both are routed before anything else is handled"
    assert pipeline.events == [ev.StopAsked(), ev.FirstTokenSeen(1), ev.FirstTokenSeen(2)]


def test_an_eviction_tells_the_client_and_then_the_pipeline() -> None:
    evicted = Told()
    driver, pipeline, _ = driven([Evict(reject(1), evicted)])
    driver.feed(ev.StopAsked())
    assert evicted.heard == ["reject"]
    assert pipeline.events[1:] == [ev.StreamLost(1)]


def test_a_pipeline_that_raises_tells_who_fed_the_event_and_goes_on_with_the_next() -> None:
    class Broken(Scripted):
        def handle(self, event: Any) -> list[Instruction]:
            if isinstance(event, ev.RemoteUp):
                raise ValueError("a defect")
            return super().handle(event)

    pipeline = Broken({})
    driver = Driver(pipeline, SimClock(), Observer())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a defect"):
        driver.feed(ev.RemoteUp("far"))
    driver.feed(ev.StopAsked())
    assert pipeline.events == [ev.StopAsked()]


def test_events_behind_one_that_broke_the_pipeline_wait_for_nobody() -> None:
    class Broken(Scripted):
        def handle(self, event: Any) -> list[Instruction]:
            if isinstance(event, ev.RemoteUp):
                raise ValueError("a defect")
            return super().handle(event)

    class Eager(Told):
        def route(self, route: Route) -> None:
            for event in (ev.RemoteUp("far"), ev.FirstTokenSeen(1), ev.FirstTokenSeen(2)):
                driver.feed(event)

    clock, pipeline = SimClock(), Broken({ev.StopAsked: [Route(1, ENDPOINT, client=Eager())]})
    driver = Driver(pipeline, clock, Observer())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a defect"):
        driver.feed(ev.StopAsked())
    clock.advance(0.001)
    assert pipeline.events == [ev.StopAsked(), ev.FirstTokenSeen(1), ev.FirstTokenSeen(2)]


@pytest.mark.failing_instructions
def test_no_lease_is_left_of_a_request_whose_session_fails() -> None:
    clock, fleet, observer = SimClock(), Fleet(), Observer()
    profile = Profile("rr", [], [], RoundRobin(NoParams()))
    pipeline = Pipeline(clock, Random(1), fleet, profile, TokenEstimator())
    driver = Driver(pipeline, clock, observer)
    driver.feed(ev.EndpointUp(ENDPOINT))
    broken, well = Told(failing=True), Told()
    driver.feed(ev.RequestArrived(REQUESTS[1], broken))
    driver.feed(ev.RequestArrived(REQUESTS[2], well))
    pipeline.validate()
    assert observer.outcomes == [1]
    assert fleet.table.inflight.tolist() == [1.0]
    assert (broken.heard, well.heard) == (["route", "fail"], ["route"])


def decision() -> Any:
    """A decision's record, as a pipeline makes it."""
    pipeline = Pipeline(SimClock(), Random(1), Fleet(), Profile("rr", [], [], RoundRobin(NoParams())), TokenEstimator())
    pipeline.handle(ev.EndpointUp(ENDPOINT))
    records = [one for one in pipeline.handle(ev.RequestArrived(REQUESTS[3])) if isinstance(one, Record)]
    return records[0]
