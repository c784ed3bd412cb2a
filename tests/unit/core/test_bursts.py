"""However much is over at once: a call does a bounded part of it, and every request is answered exactly once."""

from collections import Counter
from math import inf
from random import Random
from typing import Any

import pytest
from waiting_rules import AbleRules

from fairlead.core import events as ev
from fairlead.core import scheduler
from fairlead.core.binding import PairBinder
from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.fairness import Charge, StartTimeFair
from fairlead.core.fleet import Fleet
from fairlead.core.flow import Limit, Limits, Times
from fairlead.core.flow_control import REFUSALS, FlowControl, FlowController
from fairlead.core.gates import LedgerGate
from fairlead.core.instructions import Instruction, Reject, Route, SetTimer
from fairlead.core.policy import Context, Picked, Refused
from fairlead.core.queues import Queues
from fairlead.core.records import OutcomeRecord
from fairlead.core.request import Request, Usage
from fairlead.core.scheduler import EXPIRY_TIMER, Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.plugins.flow_control import LeastWork
from fairlead.testing import SimClock


class ToTheFirst:
    name = "to-the-first"

    def choose(self, request, fleet: Fleet, context: Context) -> Picked | Refused:
        slots = fleet.table.slots()
        return Picked(slots[0][0]) if slots else Refused("rejected-no-endpoints")


class World:
    """A pipeline whose timers fire one a turn, as in an event loop. `last` is what the last call said."""

    def __init__(self, flow: bool = True) -> None:
        self.clock = SimClock()
        self.fleet = Fleet()
        queues = Queues(lambda priority: (StartTimeFair(), LeastWork()), Limits(total=Limit(10_000)))
        control = FlowControl(queues, LedgerGate(1e9, requests=8), PairBinder(AbleRules()), Times(ttl=30.0))
        flow_controller = FlowController(control) if flow else None
        self.pipeline = Pipeline(
            self.clock, Random(1), self.fleet, ToTheFirst(), TokenEstimator(), flow_controller=flow_controller
        )
        self.timers: dict[str, float] = {}
        self.answers: Counter[int] = Counter()
        self.reasons: Counter[str] = Counter()
        self.ended: Counter[tuple[int, str]] = Counter()
        self.last: list[Instruction] = []
        self._ids = 0

    def feed(self, event: ev.Event) -> list[Instruction]:
        self.last = self.pipeline.handle(event)
        for instruction in self.last:
            if isinstance(instruction, SetTimer):
                self.timers[instruction.name] = instruction.at
            elif isinstance(instruction, Route | Reject):
                self.answers[instruction.request_id] += 1
                self.reasons[getattr(instruction, "reason", "routed")] += 1
            elif isinstance(instruction, OutcomeRecord):
                self.ended[instruction.request.id, instruction.cause] += 1
        self.pipeline.validate()
        return self.last

    def arrive(self, count: int) -> list[int]:
        first = self._ids + 1
        for _ in range(count):
            self._ids += 1
            tenant = f"t{self._ids % 7}"
            request = Request(
                id=self._ids, arrived=self.clock.time(), fairness_id=tenant, prompt_tokens=2000, stream=True
            )
            self.feed(ev.RequestArrived(request))
        return list(range(first, self._ids + 1))

    def turn(self) -> bool:
        """Fire the timer that is due first; False = none is."""
        due = [name for name, at in self.timers.items() if at <= self.clock.time()]
        if not due:
            return False
        name = min(due, key=lambda name: self.timers[name])
        del self.timers[name]
        self.feed(ev.TimerFired(name))
        return True

    def count(self, kind: type) -> int:
        return sum(isinstance(instruction, kind) for instruction in self.last)


def crowded(waiting: int) -> tuple[World, list[int], list[int]]:
    """One endpoint. Returns those that run and those that wait."""
    world = World()
    world.feed(ev.EndpointUp(Endpoint("e0", "10.0.0.1:80")))
    running = []
    while not len(world.pipeline.flow_controller):
        running += world.arrive(1)
    first = running.pop()
    return world, running, [first, *world.arrive(waiting - 1)]


def test_all_times_to_live_end_at_once() -> None:
    world, _, waiting = crowded(3 * REFUSALS + 5)
    world.clock.advance(30.0)
    told = []
    while world.turn():
        told.append(world.count(Reject))
    assert [count for count in told if count] == [REFUSALS, REFUSALS, REFUSALS, 5]
    assert all(world.answers[number] == 1 for number in waiting)
    assert world.reasons["rejected-ttl-expired"] == len(waiting)


def test_nobody_goes_while_others_are_to_be_told_that_their_time_is_over() -> None:
    world, running, waiting = crowded(REFUSALS + 5)
    world.clock.advance(30.0)
    (late,) = world.arrive(1)
    world.turn()
    for number in running:  # everything is open now
        world.feed(ev.ResponseEnded(request_id=number, status=200))
        assert world.count(Route) == 0
    while world.turn():
        pass
    assert world.reasons["rejected-ttl-expired"] == len(waiting)
    assert world.answers[late] == 1 and world.reasons["routed"] == len(running) + 1


def test_those_that_leave_meanwhile_hold_nobody_up() -> None:
    world, running, waiting = crowded(REFUSALS + 5)
    world.clock.advance(30.0)
    (late,) = world.arrive(1)
    world.turn()
    for number in waiting:
        world.feed(ev.StreamLost(number))
    world.feed(ev.ResponseEnded(request_id=running[0], status=200))
    assert world.answers[late] == 1


def test_a_drain_tells_everybody_that_waits() -> None:
    world, _, waiting = crowded(2 * REFUSALS + 3)
    world.feed(ev.StopAsked())
    told = [world.count(Reject)]
    (late,) = world.arrive(1)
    while world.turn():
        told.append(world.count(Reject))
    assert told == [REFUSALS, REFUSALS, 3]
    assert all(world.answers[number] == 1 for number in [*waiting, late])
    assert world.reasons["rejected-shutting-down"] == len(waiting) + 1


def alone(leases: int) -> World:
    """Without flow control: one endpoint that runs so many."""
    world = World(flow=False)
    world.feed(ev.EndpointUp(Endpoint("e0", "10.0.0.1:80")))
    for number in world.arrive(leases):
        world.feed(ev.FirstTokenSeen(number))
        world.feed(ev.UsageReported(number, Usage(prompt_tokens=9)))
    return world


MANY = 2 * scheduler.MOST + 7


@pytest.mark.parametrize("cause", ["endpoint-gone", "expired", "reconciled"])
def test_thousands_of_leases_are_over_at_once(cause: str) -> None:
    world = alone(MANY)
    if cause == "endpoint-gone":
        world.feed(ev.EndpointDown("e0"))
        assert len(world.fleet.ledger) == 0, "its load is nobody's any more"
        while world.turn():
            assert not world.count(OutcomeRecord), "it may answer all the same"
        world.clock.advance(world.fleet.ledger.ttl)
        world.feed(ev.TimerFired(EXPIRY_TIMER))
    elif cause == "expired":
        world.clock.advance(world.fleet.ledger.ttl)
        world.feed(ev.TimerFired(EXPIRY_TIMER))
    else:
        for _ in range(3):
            world.clock.advance(3.0)
            world.feed(ev.MetricsSampled("e0", world.clock.time(), Sample(waiting=0.0, running=0.0)))
    ended = [world.count(OutcomeRecord)]
    while world.turn():
        ended.append(world.count(OutcomeRecord))
    assert [count for count in ended if count] == [scheduler.MOST, scheduler.MOST, 7]
    assert world.timers.get(EXPIRY_TIMER, inf) > world.clock.time()
    assert world.ended == {(number, cause): 1 for number in range(1, MANY + 1)}
    assert len(world.fleet.ledger) == 0


def test_who_ends_before_its_turn_ends_once() -> None:
    world = alone(MANY)
    world.clock.advance(world.fleet.ledger.ttl)
    world.feed(ev.TimerFired(EXPIRY_TIMER))
    world.feed(ev.ResponseEnded(request_id=MANY, status=200))
    while world.turn():
        pass
    assert len(world.ended) == sum(world.ended.values()) == MANY
    assert world.ended[MANY, "natural"] == 1


@pytest.mark.parametrize("turned", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize(
    ("end", "status", "cause"),
    [
        (
            ev.ResponseEnded(
                request_id=1, status=200, usage=Usage(prompt_tokens=9, completion_tokens=40), duration_ms=70.0
            ),
            200,
            "natural",
        ),
        (ev.ResponseEnded(request_id=1, status=503), 503, "natural"),
        (ev.ResponseEnded(request_id=1, status=200, upstream_reset=True), 200, "endpoint-gone"),
        (ev.ResponseEnded(request_id=1, status=200, client_gone=True, upstream_reset=True), 200, "client-disconnect"),
        (ev.StreamLost(1), 0, "stream-lost"),
    ],
)
def test_a_request_whose_endpoint_left_ends_as_it_is_heard(
    turned: bool, end: ev.ResponseEnded | ev.StreamLost, status: int, cause: str
) -> None:
    """It changes nothing for the endpoint that came after."""
    world = World()
    world.feed(ev.EndpointUp(Endpoint("e0", "10.0.0.1:80")))
    world.arrive(3)
    world.feed(ev.FirstTokenSeen(1))
    world.feed(ev.EndpointDown("e0"))
    while turned and world.turn():
        pass
    world.feed(ev.EndpointUp(Endpoint("e1", "10.0.0.2:80")))
    before = world.fleet.table.floats.copy()
    for event in (ev.FirstTokenSeen(1), ev.UsageReported(1, Usage(prompt_tokens=9, completion_tokens=30)), end):
        world.feed(event)
    (record,) = [record for record in world.last if isinstance(record, OutcomeRecord)]
    assert (record.status, record.cause, record.endpoint) == (status, cause, "e0")
    assert record.completion_tokens == (40 if isinstance(end, ev.ResponseEnded) and end.usage else 30)
    world.feed(end)
    assert not world.count(OutcomeRecord) and (world.fleet.table.floats == before).all()
    while world.turn():
        pass
    world.clock.advance(world.fleet.ledger.ttl + 1.0)
    world.feed(ev.TimerFired(EXPIRY_TIMER))
    assert world.ended[1, cause] == 1 and sum(world.ended.values()) == 3


def test_another_tenant_makes_many_requests_in_flight_be_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not each time that it comes back."""
    monkeypatch.setattr(scheduler, "COUNTED_AT_ONCE", 3)
    counted, count = list[int](), FlowControl.count

    def noted(control: FlowControl, leases: list[Any], fleet: Fleet) -> list[Charge]:
        counted.append(len(leases))
        return count(control, leases, fleet)

    monkeypatch.setattr(FlowControl, "count", noted)
    world = World()
    world.feed(ev.EndpointUp(Endpoint("e0", "10.0.0.1:80")))

    def visit(number: int, tenant: str) -> None:
        world.feed(ev.RequestArrived(Request(id=number, arrived=0.0, prompt_tokens=10, fairness_id=tenant)))

    def leave(*numbers: int) -> None:
        for number in numbers:
            world.feed(ev.ResponseEnded(request_id=number, status=200))
        world.feed(ev.TimerFired(EXPIRY_TIMER))

    for number in range(1, 6):
        visit(number, "a")
    for number in (6, 8):
        visit(number, "b")
        leave(number)
        visit(number + 1, "a")
    assert counted == [5]
    leave(1, 2, 3, 4)
    visit(10, "a")
    visit(11, "b")
    assert counted == [5, 1], "while few are in flight, those of one flow are not counted"
