"""The states of a request, what may happen in each, and the one registry of requests.

    arrived → (queued) → (asked elsewhere) → routed → answering → ended

Rules
* A request is in exactly one state. The first begins with `RequestArrived`, and is left in the same call of `handle`.
  What comes before is the session's (`gateway.session.SessionState`).
* `TRANSITIONS` lists what may happen in each state and which states may follow. An empty tuple means that the trigger
  is late or a duplicate and changes nothing. A trigger that is not listed for a state is a bug, and raises.
* A request acquires what `HOLDS` names on entering a state, and releases it on leaving. Nothing else refers to requests
  by their id: the entry holds the objects of the other parts (`Waiting`, `Question`, `Lease`).
* `ending`: the endpoint left the pool and the load is released. The endpoint may still answer, for example while it
  drains, or the gateway may repeat the request elsewhere. The request ends with its response, or when its lease would
  have expired.
"""

from collections.abc import Iterator
from enum import IntEnum, StrEnum
from typing import Any

from msgspec import Struct

from fairlead.core import events as ev
from fairlead.core.fairness import Charge
from fairlead.core.flow import Waiting
from fairlead.core.ledger import Lease
from fairlead.core.parking import Question
from fairlead.core.request import Request, Usage


class RequestState(IntEnum):
    ARRIVED = 0
    QUEUED = 1
    ASKED_ELSEWHERE = 2
    ROUTED = 3
    ANSWERING = 4
    ENDING = 5
    ENDED = 6

    @property
    def label(self) -> str:
        return self.name.lower().replace("_", " ")


class Trigger(StrEnum):
    """What may happen to a request, other than the events that name it."""

    DISPATCHED = "endpoint open"
    TIMED_OUT = "deadline"
    DISPLACED = "displaced"
    STOPPED = "shut down"
    EVICTED = "evicted"
    EXPIRED = "expired"
    RECONCILED = "reconciled"
    ENDPOINT_GONE = "endpoint-gone"


S, T = RequestState, Trigger
_LATE: tuple[RequestState, ...] = ()
_ALL_LATE: dict[type | Trigger, tuple[RequestState, ...]] = {
    ev.FirstTokenSeen: _LATE, ev.ResponseBegan: _LATE, ev.RequestMoved: _LATE, ev.UsageReported: _LATE,
    ev.ResponseEnded: _LATE, ev.StreamLost: _LATE, ev.RemotePicked: _LATE, T.EXPIRED: _LATE, T.RECONCILED: _LATE,
}  # fmt: skip

TRANSITIONS: dict[RequestState, dict[type | Trigger, tuple[RequestState, ...]]] = {
    S.ARRIVED: {
        ev.RequestArrived: (S.QUEUED, S.ASKED_ELSEWHERE, S.ROUTED, S.ENDED),
        ev.StreamLost: (S.ENDED,),  # if a bug in the pipeline stopped the decision
    },
    S.QUEUED: {
        T.DISPATCHED: (S.ASKED_ELSEWHERE, S.ROUTED),
        T.TIMED_OUT: (S.ENDED,),
        T.DISPLACED: (S.ENDED,),
        T.STOPPED: (S.ENDED,),
        ev.StreamLost: (S.ENDED,),
        ev.FirstTokenSeen: _LATE, ev.ResponseBegan: _LATE, ev.RequestMoved: _LATE, ev.UsageReported: _LATE,
        ev.ResponseEnded: _LATE, ev.RemotePicked: _LATE,
    },
    S.ASKED_ELSEWHERE: {
        ev.RemotePicked: (S.ROUTED, S.ENDED),
        ev.RemoteDown: (S.ROUTED, S.ENDED),
        T.TIMED_OUT: (S.ROUTED, S.ENDED),
        ev.StreamLost: (S.ENDED,),
        ev.FirstTokenSeen: _LATE, ev.ResponseBegan: _LATE, ev.RequestMoved: _LATE, ev.UsageReported: _LATE,
        ev.ResponseEnded: _LATE,
    },
    S.ROUTED: {
        ev.FirstTokenSeen: (S.ANSWERING,),
        ev.ResponseBegan: (S.ROUTED,),
        ev.RequestMoved: (S.ROUTED, S.ANSWERING),
        ev.UsageReported: (S.ROUTED,),
        ev.ResponseEnded: (S.ENDED,),
        ev.StreamLost: (S.ENDED,),
        T.EVICTED: (S.ROUTED,),
        T.EXPIRED: (S.ENDED,),
        T.RECONCILED: (S.ENDED,),
        T.ENDPOINT_GONE: (S.ENDING,),
        ev.RemotePicked: _LATE,
    },
    S.ANSWERING: {
        ev.RequestMoved: (S.ANSWERING,),
        ev.UsageReported: (S.ANSWERING,),
        ev.ResponseEnded: (S.ENDED,),
        ev.StreamLost: (S.ENDED,),
        T.EVICTED: (S.ANSWERING,),
        T.EXPIRED: (S.ENDED,),
        T.RECONCILED: (S.ENDED,),
        T.ENDPOINT_GONE: (S.ENDING,),
        ev.FirstTokenSeen: _LATE, ev.ResponseBegan: _LATE, ev.RemotePicked: _LATE,
    },
    S.ENDING: {
        **_ALL_LATE,
        ev.ResponseBegan: (S.ENDING,),
        ev.RequestMoved: (S.ENDING, S.ANSWERING),
        ev.UsageReported: (S.ENDING,),
        ev.ResponseEnded: (S.ENDED,),
        ev.StreamLost: (S.ENDED,),
        T.EXPIRED: (S.ENDED,),
    },
    S.ENDED: _ALL_LATE,
}  # fmt: skip

#: The field of `RequestEntry` that is set in each state; none in the states not listed.
HOLDS: dict[RequestState, str] = {
    S.QUEUED: "waiting",
    S.ASKED_ELSEWHERE: "question",
    S.ROUTED: "lease",
    S.ANSWERING: "lease",
    S.ENDING: "lease",
}
#: Events about one request that arrived earlier.
OF_REQUEST = (
    ev.FirstTokenSeen, ev.RequestMoved, ev.UsageReported, ev.ResponseEnded, ev.StreamLost, ev.ResponseBegan,
)  # fmt: skip


class RequestEntry(Struct, eq=False):
    """One request and what is held for it."""

    request: Request
    #: `RequestArrived.client`: handed back in every instruction about the request, and never looked at.
    client: Any = None
    state: RequestState = S.ARRIVED
    #: Its place in a queue of flow control.
    waiting: Waiting | None = None
    #: The question to a scheduler in another process, with the reservation held until it is answered.
    question: Question | None = None
    #: Its load on the endpoint. `Lease.prefill` is the load on another endpoint that computes the prompt.
    lease: Lease | None = None
    #: Token counts reported so far; `None` = none yet.
    usage: Usage | None = None
    #: What its flow is charged for it, from the moment that the request leaves the queue.
    charge: Charge | None = None


class Requests:
    """The registry: id → entry of every request that has arrived and has not ended."""

    def __init__(self) -> None:
        self._entries: dict[int, RequestEntry] = {}
        self.get = self._entries.get

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[RequestEntry]:
        """In the order of their arrival."""
        return iter(self._entries.values())

    def add(self, request: Request, client: Any = None) -> RequestEntry:
        """Register an arrived request. The caller moves or ends it in the same call of `handle`, so the entry is in the
        state `arrived` only while the request is decided."""
        assert request.id not in self._entries, "a request arrives once"
        entry = self._entries[request.id] = RequestEntry(request, client)
        return entry

    def move(self, entry: RequestEntry, trigger: type | Trigger, state: RequestState) -> None:
        """Move the request to its next state, except the last. The caller acquires and releases what `HOLDS` names."""
        assert state in TRANSITIONS[entry.state][trigger], f"{entry.state.label}: {trigger} → {state.label}"
        entry.state = state

    def end(self, entry: RequestEntry, trigger: type | Trigger) -> None:
        """Move the request to its last state, and remove it from the registry."""
        assert S.ENDED in TRANSITIONS[entry.state][trigger], f"{entry.state.label}: {trigger} → ended"
        entry.state = S.ENDED
        del self._entries[entry.request.id]

    def validate(self) -> None:
        """Raise `AssertionError` unless each entry holds exactly what `HOLDS` names for its state."""
        for number, entry in self._entries.items():
            assert number == entry.request.id
            assert entry.state in HOLDS, f"request {number} is left in the state {entry.state.label}"
            parts = {"waiting": entry.waiting, "question": entry.question, "lease": entry.lease}
            held = {name for name, part in parts.items() if part is not None}
            assert held == {HOLDS[entry.state]}, f"{entry.state.label} holds {held}"
            assert entry.usage is None or HOLDS[entry.state] == "lease"
