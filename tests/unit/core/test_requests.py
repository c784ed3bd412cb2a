"""A request's states: the table says what happens, and it is what happens."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from waiting_rules import AbleRules

from fairlead.core import events as ev
from fairlead.core.binding import PairBinder
from fairlead.core.events import Outcome, RemotePick
from fairlead.core.fairness import Strict
from fairlead.core.flow_control import FlowControl, FlowController
from fairlead.core.gates import LedgerGate
from fairlead.core.instructions import Instruction, Record
from fairlead.core.parking import TIMER
from fairlead.core.queues import Queues
from fairlead.core.remote import RemotePolicy
from fairlead.core.request import Request, Usage
from fairlead.core.requests import HOLDS, OF_REQUEST, TRANSITIONS, Requests, RequestState, Trigger
from fairlead.core.scheduler import EXPIRY_TIMER, MOST, Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.plugins.flow_control import Fcfs
from fairlead.plugins.policies.by_load import LeastRequests
from fairlead.testing import SimClock, builders

S, T = RequestState, Trigger
#: A request is in the first state only while it is decided.
LATER = [state for state in S if state is not S.ARRIVED]


class Rig:
    """A request (number 1) is in the state that the test wants."""

    def __init__(self, flow: bool = False, remote: bool = False) -> None:
        self.clock = SimClock()
        self.fleet = builders.fleet("e0", "e1")
        policy: Any = LeastRequests()
        parts: dict[str, Any] = {}
        if flow:
            queues = Queues(lambda priority: (Strict(), Fcfs()))
            control = FlowControl(queues, LedgerGate(requests=1), PairBinder(AbleRules()))
            parts["flow_controller"] = FlowController(control)
        if remote:
            policy = RemotePolicy("remote", policy, lambda *_: None)
            parts["remotes"] = {"remote": policy}
        self.pipeline = Pipeline(self.clock, Random(1), self.fleet, policy, TokenEstimator(), **parts)

    def feed(self, event: ev.Event) -> list[Instruction]:
        found = self.pipeline.handle(event)
        self.pipeline.validate()
        return found

    def arrive(self, number: int) -> None:
        self.feed(ev.RequestArrived(Request(id=number, arrived=0.0, prompt_tokens=5000, stream=True)))

    @property
    def state(self) -> RequestState:
        entry = self.pipeline.requests.get(1)
        return S.ENDED if entry is None else entry.state


def queued() -> Rig:
    rig = Rig(flow=True)
    for number in (100, 101, 1):
        rig.arrive(number)
    return rig


def asked_elsewhere() -> Rig:
    rig = Rig(remote=True)
    rig.feed(ev.RemoteUp("remote"))
    rig.arrive(1)
    return rig


def routed() -> Rig:
    rig = Rig()
    rig.arrive(1)
    return rig


def answering() -> Rig:
    rig = routed()
    rig.feed(ev.FirstTokenSeen(1))
    return rig


def ending() -> Rig:
    rig = Rig()
    for number in range(2, 2 * MOST + 4):
        rig.arrive(number)
    rig.arrive(1)
    entry = rig.pipeline.requests.get(1)
    assert entry is not None and entry.lease is not None
    rig.feed(ev.EndpointDown(entry.lease.endpoint_id))
    return rig


def ended() -> Rig:
    rig = routed()
    rig.feed(ev.ResponseEnded(request_id=1, status=200))
    return rig


IN: dict[RequestState, Callable[[], Rig]] = {
    S.QUEUED: queued,
    S.ASKED_ELSEWHERE: asked_elsewhere,
    S.ROUTED: routed,
    S.ANSWERING: answering,
    S.ENDING: ending,
    S.ENDED: ended,
}
EVENTS: list[ev.Event] = [
    ev.FirstTokenSeen(1),
    ev.ResponseBegan(1),
    ev.RequestMoved(1, "10.0.0.0:8000"),
    ev.RequestMoved(1, "10.0.0.1:8000"),
    ev.UsageReported(1, Usage(prompt_tokens=9)),
    ev.ResponseEnded(request_id=1, status=200),
    ev.ResponseEnded(request_id=1, client_gone=True),
    ev.StreamLost(1),
    ev.RemotePicked("remote", (RemotePick(1, Outcome.PICKED, "e0"),)),
    ev.RemotePicked("remote", (RemotePick(1, Outcome.REFUSED),)),
    ev.RemotePicked("remote", (RemotePick(1, Outcome.PASSED),)),
]


@pytest.mark.parametrize("state", LATER)
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_every_event_does_in_every_state_what_the_table_says(state: RequestState, event: ev.Event) -> None:
    rig = IN[state]()
    assert rig.state is state
    following = TRANSITIONS[state][type(event)]
    before = rig.fleet.table.floats.copy()
    found = rig.feed(event)
    if following:
        assert rig.state in following
    else:
        assert (rig.state, found) == (state, []), "late: it changes nothing"
        assert (rig.fleet.table.floats == before).all()


def test_time_and_the_fleet_move_requests_as_the_table_says() -> None:
    rig = queued()
    rig.feed(ev.ResponseEnded(request_id=100, status=200))
    assert rig.state is S.ROUTED in TRANSITIONS[S.QUEUED][T.DISPATCHED]
    rig = queued()
    rig.feed(ev.StopAsked())
    assert rig.state is S.ENDED in TRANSITIONS[S.QUEUED][T.STOPPED]
    rig = queued()
    rig.clock.advance(61.0)
    rig.feed(ev.TimerFired("queue-deadline"))
    assert rig.state is S.ENDED in TRANSITIONS[S.QUEUED][T.TIMED_OUT]
    for event in (ev.TimerFired(TIMER), ev.RemoteDown("remote")):
        rig = asked_elsewhere()
        rig.clock.advance(1.0)
        rig.feed(event)
        assert rig.state is S.ROUTED
    for make in (routed, answering, ending):
        rig = make()
        for _ in range(3):
            rig.feed(ev.TimerFired("endings"))
        rig.clock.advance(rig.fleet.ledger.ttl + 1.0)
        found = rig.feed(ev.TimerFired(EXPIRY_TIMER))
        for _ in range(3):
            found += rig.feed(ev.TimerFired("endings"))
        assert rig.state is S.ENDED and any(isinstance(one, Record) for one in found)


def test_the_table_is_complete() -> None:
    assert set(TRANSITIONS) == set(S)
    for state in LATER:
        assert {*OF_REQUEST, ev.RemotePicked} <= set(TRANSITIONS[state]), state
        assert state in HOLDS or state is S.ENDED
    reached = {S.ARRIVED} | {to for row in TRANSITIONS.values() for following in row.values() for to in following}
    assert reached == set(S)


def test_what_the_table_does_not_have_must_not_happen() -> None:
    requests = Requests()
    entry = requests.add(Request(id=1, arrived=0.0))
    with pytest.raises(AssertionError, match="arrives once"):
        requests.add(Request(id=1, arrived=0.0))
    with pytest.raises(AssertionError):
        requests.move(entry, ev.RequestArrived, S.ANSWERING)
    requests.move(entry, ev.RequestArrived, S.QUEUED)
    with pytest.raises(AssertionError, match="holds"):
        requests.validate()


def test_a_request_that_is_known_must_not_arrive_again() -> None:
    rig = routed()
    with pytest.raises(AssertionError, match="arrives once"):
        rig.arrive(1)


def diagram() -> str:
    """`TRANSITIONS` as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", "    [*] --> arrived"]
    for state, row in TRANSITIONS.items():
        targets: dict[RequestState, list[str]] = {}
        for trigger, following in row.items():
            for target in following:
                if target is not state:
                    targets.setdefault(target, []).append(trigger if isinstance(trigger, Trigger) else trigger.__name__)
        for target, names in targets.items():
            end = "[*]" if target is S.ENDED else _node(target)
            lines.append(f"    {_node(state)} --> {end}: {', '.join(names)}")
    return "\n".join(lines) + "\n"


def _node(state: RequestState) -> str:
    return state.name.lower()


def test_the_page_shows_the_table() -> None:
    page = (Path(__file__).parents[3] / "docs" / "architecture.md").read_text()
    assert f"```mermaid\n{diagram()}```" in page, "write diagram() into the page"
