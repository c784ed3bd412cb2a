"""Flow control and a scheduler in another process together: who is asked, when, and what is kept meanwhile."""

from collections.abc import Iterable
from random import Random
from typing import Any

import pytest
from driver_clients import Clients

from fairlead.compat.load import load
from fairlead.config.building import build_flow_controller
from fairlead.core.endpoint import Endpoint
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
    StopAsked,
    StreamLost,
)
from fairlead.core.fleet import Fleet
from fairlead.core.instructions import AskRemote
from fairlead.core.ledger import Account, Lease
from fairlead.core.remote import REFUSED, BreakerRules, RemotePolicy
from fairlead.core.request import Request
from fairlead.core.scheduler import Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.gateway.driver import Driver
from fairlead.plugins.policies.by_load import LeastRequests
from fairlead.testing import SimClock, builders

BUDGET = 0.005


class Counted(LeastRequests):
    asked = 0

    def choose(self, request: Any, fleet: Any, context: Any) -> Any:
        self.asked += 1
        return super().choose(request, fleet, context)


class AtMost:
    """Open while fewer than `limit` requests are there."""

    name = "at-most"
    limit = 1

    def admits(self, slot: int, fleet: Fleet, now: float) -> bool:
        return bool(fleet.table.inflight[slot] < self.limit)

    def open(self, fleet: Fleet, now: float) -> Any:
        mask = (fleet.table.inflight < self.limit) & fleet.table.alive
        return None if mask.sum() == fleet.table.count else mask

    def level(self, fleet: Fleet, now: float) -> float:
        return float(fleet.table.inflight.sum()) / (self.limit * max(fleet.table.count, 1))


class Rig:
    """Two endpoints, each with room for one request; the scheduler is this test."""

    def __init__(self, ttl: str = "30s", *, connected: bool = True) -> None:
        self.clock = SimClock()
        self.fleet = builders.fleet("e0", "e1")
        self.builtin = Counted()
        self.policy = RemotePolicy("remote", self.builtin, lambda *_: None, BUDGET, BreakerRules(failures=3))
        flow_controller = build_flow_controller(
            load(f"flowControl: {{ttl: {ttl}}}", need_endpoints=False), self.builtin
        )
        assert flow_controller is not None
        flow_controller.flow.gate = AtMost()
        self.flow_controller, remotes = flow_controller, {"remote": self.policy}
        self.pipeline = Pipeline(
            self.clock,
            Random(1),
            self.fleet,
            self.policy,
            TokenEstimator(),
            flow_controller=flow_controller,
            remotes=remotes,
        )
        assert self.pipeline.parking is not None
        self.parking = self.pipeline.parking
        self.asked: list[AskRemote] = []
        self.driver = Driver(self.pipeline, self.clock, self, {AskRemote: self.asked.append})
        self.clients = Clients()
        self.routed, self.rejected = self.clients.routed, self.clients.rejected
        self.records: list[Any] = []
        self.driver.start()
        if connected:
            self.driver.feed(RemoteUp("remote"))

    def on_decision(self, record: Any, duration_s: float) -> None:
        self.records.append(record)

    def on_outcome(self, record: Any) -> None:
        """Not looked at."""

    def arrive(self, **fields: Any) -> Request:
        request = builders.request("hello", **fields)
        self.feed(RequestArrived(request, self.clients.of(request)))
        return request

    def feed(self, event: Any) -> None:
        self.driver.feed(event)
        self.pipeline.validate()

    def pick(self, request: Request, endpoint: str, outcome: int = Outcome.PICKED, **fields: Any) -> None:
        self.feed(RemotePicked("remote", (RemotePick(request.id, outcome, endpoint, **fields),)))

    def end(self, request: Request) -> None:
        self.feed(ResponseEnded(request_id=request.id, status=200))

    def full(self) -> list[Request]:
        """Both endpoints are busy."""
        found = []
        for name in ("e0", "e1"):
            found.append(self.arrive())
            self.pick(found[-1], name)
        return found

    def candidates(self) -> list[list[str]]:
        every = self.fleet.table.ids
        return [[name for slot, name in enumerate(every) if one.able is None or one.able[slot]] for one in self.asked]

    @property
    def charged(self) -> list[float]:
        return [float(count) for count in self.fleet.table.inflight]


def test_one_that_goes_at_once_is_put_to_the_scheduler_alone() -> None:
    rig = Rig()
    first = rig.arrive()
    assert rig.charged == [1.0, 0.0], "its room is kept"
    rig.pick(first, "e1")
    assert rig.charged == [0.0, 1.0] and not rig.fleet.ledger.reserved
    second = rig.arrive()
    assert rig.candidates() == [["e0", "e1"], ["e0"]], "it may choose among those that have room"
    rig.pick(second, "e0")
    assert rig.routed == {first.id: "e1", second.id: "e0"} and rig.builtin.asked == 0
    rig.arrive()
    assert rig.builtin.asked == 0 and len(rig.flow_controller) == 1, "without room it waits, and nobody is asked"


def test_a_burst_that_is_being_asked_for_takes_no_more_than_there_is() -> None:
    rig = Rig()
    burst = [rig.arrive() for _ in range(5)]
    assert len(rig.asked) == 2 and len(rig.flow_controller) == 3 and rig.charged == [1.0, 1.0]
    rig.clock.advance(2 * BUDGET)
    assert {*rig.routed} == {burst[0].id, burst[1].id} and {*rig.routed.values()} == {"e0", "e1"}


def test_one_that_waited_is_asked_for_when_there_is_room() -> None:
    rig = Rig()
    first, second = rig.full()
    waiting = rig.arrive()
    assert len(rig.asked) == 2
    rig.clock.advance(1.0)
    rig.end(second)
    assert [one.request.id for one in rig.asked[2:]] == [waiting.id] and rig.candidates()[2] == ["e1"]
    assert rig.charged == [1.0, 1.0] and waiting.id not in rig.routed and len(rig.flow_controller) == 0
    rig.end(first)
    rig.pick(waiting, "e1")
    assert rig.routed[waiting.id] == "e1" and rig.records[-1].policy == "remote"
    assert rig.records[-1].queued_ms == pytest.approx(1000.0)
    assert (rig.policy.stats.asked, rig.policy.stats.queued, rig.builtin.asked) == (3, 1, 0)


def test_its_room_is_not_given_to_another_one_meanwhile() -> None:
    rig = Rig()
    first, _ = rig.full()
    waiting = [rig.arrive() for _ in range(2)]
    rig.end(first)
    assert len(rig.asked) == 3 and len(rig.flow_controller) == 1
    newcomer = rig.arrive()
    assert len(rig.flow_controller) == 2 and newcomer.id not in rig.routed
    rig.pick(waiting[0], "e0")
    assert len(rig.asked) == 3, "it has only moved in"
    rig.end(waiting[0])
    assert len(rig.asked) == 4


def test_where_it_does_not_go_another_one_may() -> None:
    rig = Rig()
    first, second = rig.full()
    for _ in range(3):
        rig.arrive()
    rig.end(first)
    rig.end(second)
    assert rig.candidates()[2:] == [["e0"], ["e1"]], "each release sees what is kept for those before it"
    rig.pick(rig.asked[2].request, "", outcome=Outcome.REFUSED, reason="no")
    assert rig.rejected[rig.asked[2].request.id].reason == REFUSED
    assert rig.candidates()[4:] == [["e0"]], "what was kept for it is free"


def test_at_the_end_of_the_budget_late_binding_has_decided_and_late_answers_open_the_breaker() -> None:
    rig = Rig()
    running = rig.full()
    waiting = [rig.arrive() for _ in range(4)]
    for turn in range(3):
        rig.end(running[turn])
        assert len(rig.asked) == 3 + turn
        rig.clock.advance(2 * BUDGET)
        running.append(waiting[turn])
    assert rig.policy.stats.fallbacks == {"deadline": 3} and rig.policy.breaker.state == "open"
    assert {record.policy for record in rig.records[-3:]} == {"least-requests"} and rig.builtin.asked == 0
    assert all(record.queued_ms > 0 for record in rig.records[-3:])
    rig.end(waiting[1])
    assert waiting[3].id in rig.routed and rig.policy.stats.fallbacks["breaker"] == 1, "nobody is asked any more"
    assert rig.charged == [1.0, 1.0]


def test_who_remembers_picks_hears_of_the_kept_endpoint_where_the_policys_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[tuple[int, str]] = []

    def choose(self: Counted, *given: Any) -> Any:
        pick = LeastRequests.choose(self, *given)
        pick.slot = 1  # type: ignore[union-attr]
        return pick

    def chosen(self: Counted, request: Request, slot: int, fleet: Any, cycle: Any) -> None:
        heard.append((request.id, fleet.table.ids[slot]))

    monkeypatch.setattr(Counted, "choose", choose)
    monkeypatch.setattr(Counted, "chosen", chosen, raising=False)
    rig = Rig()
    undecided, decided = rig.arrive(), rig.arrive()
    rig.pick(decided, "e1")
    rig.clock.advance(2 * BUDGET)
    assert rig.routed == {decided.id: "e1", undecided.id: "e0"}
    assert heard == [(undecided.id, "e0")]


def test_losing_the_connection_sends_all_to_what_is_kept_for_them() -> None:
    rig = Rig()
    for request in rig.full():
        rig.arrive()
        rig.end(request)
    assert len(rig.parking) == 2
    rig.feed(RemoteDown("remote"))
    assert sorted(rig.routed.values()) == ["e0", "e0", "e1", "e1"] and rig.charged == [1.0, 1.0]
    assert rig.policy.stats.fallbacks == {"lost": 2}


def test_without_a_connection_nothing_is_different() -> None:
    rig = Rig(connected=False)
    first, second = rig.arrive(), rig.arrive()
    assert rig.builtin.asked == 2 and {*rig.routed} == {first.id, second.id}
    waiting = rig.arrive()
    rig.end(first)
    assert waiting.id in rig.routed and rig.policy.stats.fallbacks == {"down": 3}


@pytest.mark.parametrize("waited", [False, True])
def test_a_client_that_leaves_while_it_is_asked_for_frees_the_room(waited: bool) -> None:
    rig = Rig()
    if waited:
        running = rig.full()
        request = rig.arrive()
        rig.clock.advance(1.0)
        rig.end(running[0])
        rig.end(running[1])
    else:
        request = rig.arrive()
    assert rig.charged == [1.0, 0.0]
    rig.feed(StreamLost(request.id))
    assert rig.charged == [0.0, 0.0] and len(rig.fleet.ledger) == 0 and len(rig.parking) == 0
    assert rig.records[-1].outcome == "rejected-context-cancelled"
    assert rig.records[-1].queued_ms == pytest.approx(1000.0 if waited else 0.0)
    rig.pick(request, "e0")
    assert request.id not in rig.routed


def test_its_own_time_ends_the_question_and_is_not_held_against_the_scheduler() -> None:
    rig = Rig(ttl="100ms")
    for _ in range(4):
        running = rig.full()
        waiting = rig.arrive()
        rig.clock.advance(0.098)
        rig.end(running[0])
        assert len(rig.parking) == 1
        rig.clock.advance(0.0021)
        assert waiting.id in rig.routed and len(rig.parking) == 0
        for request in (running[1], waiting):
            rig.end(request)
    assert rig.policy.stats.fallbacks == {"deadline": 4} and rig.policy.breaker.state == "closed"
    assert rig.rejected == {} and len(rig.fleet.ledger) == 0


def test_an_endpoint_that_leaves_takes_the_kept_room_with_it() -> None:
    rig = Rig()
    running = rig.full()
    waiting = rig.arrive()
    rig.end(running[0])
    rig.feed(EndpointDown("e0"))
    assert not rig.fleet.ledger.reserved and len(rig.parking) == 1
    rig.clock.advance(2 * BUDGET)
    assert rig.routed[waiting.id] == "e1" and rig.builtin.asked == 1, "the policy decides: the pair is gone"


@pytest.mark.parametrize(
    ("picked", "alternatives", "second"),
    [
        ("e0", (), "e1"),  # where late binding would have sent it, and whom it had in mind
        ("e0", (("e1", 1.0),), "e1"),
        (None, (), "e1"),  # late binding decides
    ],
)
def test_one_that_waited_has_a_fallback_endpoint(picked: str | None, alternatives: Any, second: str) -> None:
    rig = Rig()
    running = rig.full()
    waiting = rig.arrive()
    rig.end(running[0])
    if picked is None:
        rig.clock.advance(2 * BUDGET)
    else:
        rig.pick(waiting, picked, alternatives=alternatives)
    addresses = {endpoint.id: endpoint.address for _, endpoint in rig.fleet.table.slots()}
    assert (rig.routed[waiting.id], rig.clients.fallbacks[waiting.id]) == ("e0", addresses[second])


def test_the_fallback_endpoint_is_not_who_has_left_meanwhile() -> None:
    rig = Rig()
    running = rig.full()
    waiting = rig.arrive()
    rig.end(running[0])
    rig.feed(EndpointDown("e1"))
    rig.feed(EndpointUp(builders.endpoint("e9")))  # at the slot of e1
    rig.clock.advance(2 * BUDGET)
    assert (rig.routed[waiting.id], rig.clients.fallbacks[waiting.id]) == ("e0", "")


def test_those_that_are_asked_for_are_answered_although_the_process_ends() -> None:
    rig = Rig()
    running = rig.full()
    asked, queued = rig.arrive(), rig.arrive()
    rig.end(running[0])
    rig.feed(StopAsked())
    assert rig.rejected[queued.id].reason == "rejected-shutting-down" and asked.id not in rig.rejected
    rig.clock.advance(2 * BUDGET)
    assert asked.id in rig.routed
    for request in (running[1], asked):
        rig.end(request)
    assert len(rig.fleet.ledger) == 0


def test_a_policy_that_wants_what_has_no_room_is_not_followed() -> None:
    class Always(Counted):
        def choose(self, request: Any, fleet: Any, context: Any) -> Any:
            return type(super().choose(request, fleet, context))(0)

    rig = Rig()
    rig.policy.fallback = Always()
    rig.pick(rig.arrive(), "e0")
    second = rig.arrive()
    rig.clock.advance(2 * BUDGET)
    assert rig.routed[second.id] == "e1"


def test_who_is_asked_does_not_see_what_is_kept() -> None:
    rig = Rig()
    fleet, ledger = rig.fleet, rig.fleet.ledger
    running = rig.full()
    rig.arrive()
    rig.end(running[0])
    before, now = fleet.table.floats.copy(), fleet.table.inflight
    with ledger.without_reserved():
        assert rig.charged == [0.0, 1.0] and fleet.table.queued_tokens[0] == 0.0
    assert (fleet.table.floats == before).all() and now.tolist() == [1.0, 1.0]
    rig.pipeline.validate()


def test_each_reservation_is_taken_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if many endpoints have some: a batch of questions to a slow scheduler must not hold the loop."""
    fleet = Fleet()
    for number in range(8):
        fleet.up(Endpoint(f"e{number}", f"10.0.0.{number}:80"))
    for number in range(40):
        request = Request(id=number, arrived=0.0, prompt_tokens=100)
        fleet.charge(request, number % 8, 0.0, 0, 10.0, reserved=number % 2 == 0)
    taken = list[Lease]()
    without = Account.without

    def counted(account: Account, leases: Iterable[Lease]) -> Account:
        taken.extend(leases)
        return without(account, leases)

    monkeypatch.setattr(Account, "without", counted)
    before = fleet.table.floats.copy()
    with fleet.ledger.without_reserved():
        assert fleet.table.inflight.tolist() == [0.0, 5.0] * 4
    assert (fleet.table.floats == before).all()
    assert sorted(lease.request.id for lease in taken) == list(range(0, 40, 2))
