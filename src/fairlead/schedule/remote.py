"""A scheduler in another process, as a Policy across a wire.

Rules
* A request that is asked for is parked until the answer, the deadline or the loss of the connection, whichever comes
  first; the others find it gone and change nothing. So it is decided exactly once, and charged only when it is.
* Whatever a scheduler does (late, silent, gone, nonsense), its requests are decided by the built-in policy behind it.
  Only an explicit refusal reaches the client.
* Under flow control it is asked once there is room, also for requests that waited (`room`).
* A pick is believed only if the endpoint exists and can serve the request, by the filters of the built-in policy.
* Late and invalid answers count for the breaker. Losing the connection does not: while there is none nobody is asked.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct, field

from fairlead.fleet.columns import BoolColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.schedule.breaker import Breaker, BreakerRules
from fairlead.schedule.cycle import Context
from fairlead.schedule.framework import Pick, Policy

#: (request, fleet, now): where it can be served at all; `None` = everywhere.
Able = Callable[[Request, Fleet, float], BoolColumn | None]

#: The reason of a refusal that the scheduler wanted.
REFUSED = "rejected-by-scheduler"


class RemoteStats(Struct):
    """Sums over a policy's life."""

    asked: int = 0
    #: Of those, requests that had waited under flow control.
    queued: int = 0
    #: Answers that decided a request (picks and refusals).
    answered: int = 0
    refused: int = 0
    #: Answers that came when nobody waited any more.
    late: int = 0
    #: An alternative was taken because the endpoint had left.
    alternatives: int = 0
    #: Requests that the built-in policy decided, by why: `down`, `breaker`, `full`, `deadline`, `lost`, `invalid`,
    #: `gone` (the endpoint left in the meantime), `passed` (the scheduler had no opinion).
    fallbacks: dict[str, int] = field(default_factory=dict)

    def fell_back(self, why: str) -> None:
        self.fallbacks[why] = self.fallbacks.get(why, 0) + 1


class RemotePolicy:
    """`fallback` decides what the scheduler does not; `able` are its filters; `budget` in seconds."""

    def __init__(
        self, name: str, fallback: Policy, able: Able, budget: float = 0.005, breaker: BreakerRules | None = None
    ) -> None:
        self.name = name
        self.fallback = fallback
        self.able = able
        self.budget = budget
        self.breaker = Breaker(breaker)
        self.connected = False
        self.stats = RemoteStats()
        #: Told the seconds that an answer in time took.
        self.on_answer: Callable[[float], object] = lambda seconds: None

    def remote_for(self, request: Request) -> "RemotePolicy | None":
        """Policies with this method may have requests decided elsewhere."""
        return self

    def choose(self, requests: Sequence[Request], fleet: Fleet, context: Context) -> Sequence[Pick]:
        """The fallback's choice."""
        picks = self.fallback.choose(requests, fleet, context)
        for pick in picks:
            pick.by = pick.by or self.fallback.name
        return picks
