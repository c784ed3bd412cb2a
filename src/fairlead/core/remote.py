"""A scheduler in another process as a policy, with its circuit breaker.

Rules
* A request that the scheduler is asked about is parked until the answer, the deadline or the loss of the connection,
  whichever is first; later ones find it gone and change nothing. So it is decided exactly once, and charged only then.
* If a scheduler is late, silent, gone or gives invalid answers, the fallback policy behind it decides its requests.
  Only an explicit refusal reaches the client.
* Under flow control it is asked once there is room, also for requests that waited (`core.parking`).
* A pick is accepted only if the endpoint exists and can serve the request by the filters of the fallback policy. The
  same holds for the endpoint that computes the prompt, whatever its role.
* Late and invalid answers count for the breaker. Losing the connection does not: without a connection the scheduler is
  not asked.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

from msgspec import Struct, field

from fairlead.core.policy import Able, Answer, Context, Policy
from fairlead.core.request import Request
from fairlead.core.view import FleetView

# A circuit breaker: a scheduler that fails repeatedly is not asked for a while, then tried with one request.
#
# closed ── failures in a row ──► open ── cooldown ──► half-open ── one success ──► closed
#                                  ▲                       │
#                                  └────── one failure ────┘

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half-open"
STATES = (CLOSED, OPEN, HALF_OPEN)


class BreakerRules(Struct, frozen=True, kw_only=True):
    #: Failures in a row that open it.
    failures: int = 5
    #: Seconds that it stays open.
    cooldown: float = 1.0


class Breaker(Struct, eq=False):
    """A circuit breaker. Times are clock seconds and are passed in."""

    rules: BreakerRules = BreakerRules()
    state: str = CLOSED
    #: How often it opened.
    opened: int = 0
    _failed: int = 0
    _opened_at: float = 0.0
    _probing: bool = False

    def ready(self, now: float) -> bool:
        """Whether another request may be tried now; if half-open, only one at a time."""
        if self.state == OPEN:
            return now - self._opened_at >= self.rules.cooldown
        return self.state == CLOSED or not self._probing

    def allows(self, now: float) -> bool:
        """Return `ready`; if True, the request is tried, and `succeeded`, `failed` or (if half-open) `dropped` must
        follow."""
        if not self.ready(now):
            return False
        if self.state != CLOSED:
            self.state = HALF_OPEN
            self._probing = True
        return True

    def succeeded(self) -> None:
        self.state = CLOSED
        self._failed = 0
        self._probing = False

    def failed(self, now: float) -> None:
        self._failed += 1
        if self.state == HALF_OPEN or (self.state == CLOSED and self._failed >= self.rules.failures):
            self.state = OPEN
            self.opened += 1
            self._opened_at = now

    def dropped(self) -> None:
        """The request that was tried while half-open ended without success or failure."""
        self._probing = False


#: The reason of a refusal by the scheduler.
REFUSED = "rejected-by-scheduler"


class RemoteStats(Struct):
    """Counts over a policy's life."""

    asked: int = 0
    #: The part of `asked` that had waited under flow control.
    queued: int = 0
    #: Answers that decided a request (picks and refusals).
    answered: int = 0
    refused: int = 0
    #: Answers that arrived when the request no longer waited.
    late: int = 0
    #: Answers of which an alternative was taken, because the chosen endpoint had left.
    alternatives: int = 0
    #: Requests that the fallback policy decided, by reason: `down`, `breaker`, `full`, `deadline`, `lost`, `invalid`,
    #: `gone` (the endpoint left in the meantime), `passed` (the scheduler had no opinion).
    fallbacks: dict[str, int] = field(default_factory=dict)

    def fell_back(self, why: str) -> None:
        self.fallbacks[why] = self.fallbacks.get(why, 0) + 1


class AsksElsewhere(ABC):
    """A policy that may ask a scheduler in another process."""

    @abstractmethod
    def remote_for(self, request: Request) -> "RemotePolicy | None":
        """Return the scheduler to ask for this request; `None` = it is decided here."""


class RemotePolicy(AsksElsewhere):
    """A scheduler in another process. `fallback` decides if it does not; `able`: the fallback's filters; `computes`:
    those without roles, for the prompt; `budget` in seconds. `on_answer` receives the seconds that each answer in time
    took."""

    def __init__(
        self,
        name: str,
        fallback: Policy,
        able: Able,
        budget: float = 0.005,
        breaker: BreakerRules = BreakerRules(),  # noqa: B008 frozen
        on_answer: Callable[[float], object] = lambda seconds: None,
        computes: Able = lambda request, fleet, now: None,
    ) -> None:
        self.name = name
        self.fallback = fallback
        self.able = able
        self.computes = computes
        self.budget = budget
        self.breaker = Breaker(breaker)
        self.connected = False
        self.stats = RemoteStats()
        self.on_answer = on_answer

    def behind(self, fallback: Policy, able: Able, computes: Able) -> "RemotePolicy":
        """Return the same scheduler with another fallback policy. Breaker and counts are shared with this one; whether
        it is connected is copied."""
        made = RemotePolicy(self.name, fallback, able, self.budget, on_answer=self.on_answer, computes=computes)
        made.breaker, made.stats, made.connected = self.breaker, self.stats, self.connected
        return made

    def asks(self) -> tuple[Policy]:
        return (self.fallback,)

    def remote_for(self, request: Request) -> "RemotePolicy | None":
        return self

    def choose(self, request: Request, fleet: FleetView, context: Context) -> Answer:
        """Return the fallback policy's choice."""
        pick = self.fallback.choose(request, fleet, context)
        pick.by = pick.by or self.fallback.name
        return pick
