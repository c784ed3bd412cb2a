"""The simple way to write a scheduler: one method that gets plain objects. `SimplePolicy` makes a `Policy` of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from msgspec import Struct

from fairlead.core.cost import cost
from fairlead.core.policy import Answer, Context, OutcomeObserver, Picked, Refused
from fairlead.core.request import Request
from fairlead.core.view import FleetView

#: The id of an endpoint, or several ids, the best first; `None` or an empty value = no opinion.
Choice = str | Sequence[str] | None

#: The value of `Refused.reason` that means "no opinion".
PASSED = "passed"


class RefusedRequest(Exception):
    """Raise this in `pick` if no endpoint may serve the request; the client receives the text."""


class EndpointView(Struct, frozen=True):
    """What is known about one endpoint that can serve the request."""

    id: str
    address: str
    labels: Mapping[str, str]
    #: Requests before their first token.
    queue: float
    #: Requests past it.
    active: float
    #: Share of the KV memory in use (0..1).
    kv: float
    #: Prompt tokens of the request that the endpoint is believed to have cached.
    hit_tokens: float
    #: Milliseconds to the request's first token at this endpoint, as Fairlead predicts them.
    ttft_ms: float


@runtime_checkable
class Scheduler(Protocol):
    """What `fairlead scheduler serve` accepts, in addition to any `Policy`."""

    def pick(self, request: Request, endpoints: Sequence[EndpointView]) -> Choice:
        """Return the id of one of the endpoints, or several ids, the best first. The second endpoint gets the request
        if the first has left or cannot be reached. `None` or an empty value = no opinion: Fairlead's policy decides.

        May raise `RefusedRequest`. Any other exception counts as no opinion, and is logged.
        """
        ...


class SimplePolicy:
    """A `Policy` that asks a `Scheduler`, or a function with the same arguments."""

    def __init__(self, pick: Callable[[Request, Sequence[EndpointView]], Choice], name: str) -> None:
        self.name = name
        self._pick = pick

    def choose(self, request: Request, fleet: FleetView, context: Context) -> Answer:
        try:
            chosen = self._pick(request, views(request, fleet, context.now))
        except RefusedRequest as why:
            return Refused(reason="refused", message=str(why))
        names = [chosen] if isinstance(chosen, str) else chosen
        if names is not None and not isinstance(names, Sequence):
            raise TypeError(f"pick returned {chosen!r}, expected the id of an endpoint, or several ids")
        if not names:
            return Refused(reason=PASSED)
        slot, *behind = map(fleet.table.slot, names)
        if slot is None:
            raise ValueError(f"pick returned {names[0]!r}, which is not an endpoint")
        alternatives = tuple(alternative for alternative in behind if alternative not in (slot, None))
        return Picked(slot, fallback_slot=alternatives[0] if alternatives else -1, alternatives=alternatives)


class LearningPolicy(SimplePolicy):
    """One whose `Scheduler` hears how requests ended."""

    def __init__(self, scheduler: Scheduler, learner: OutcomeObserver, name: str) -> None:
        super().__init__(scheduler.pick, name)
        self.ended = learner.ended


def views(request: Request, fleet: FleetView, now: float) -> list[EndpointView]:
    """Views of the endpoints that can serve the request. `now`: clock seconds."""
    table = fleet.table
    share = fleet.match(request)
    hits = np.zeros(len(table)) if share is None else share * request.prompt_tokens
    terms = cost(request.prompt_tokens, None if share is None else hits, fleet, now)
    ttft = np.broadcast_to(terms.ttft, (len(table),))
    return [
        EndpointView(
            endpoint.id,
            endpoint.address,
            endpoint.labels,
            float(table.queue[slot]),
            float(table.active[slot]),
            float(table.kv[slot]),
            float(hits[slot]),
            float(ttft[slot]),
        )
        for slot, endpoint in table.slots()
        if request.subset is None or endpoint.address in request.subset
    ]
