"""A circuit breaker: who fails again and again is left alone for a while, then tried with one request.

closed ── failures in a row ──► open ── cooldown ──► half-open ── one success ──► closed
                                 ▲                       │
                                 └────── one failure ────┘
"""

from msgspec import Struct

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half-open"
STATES = (CLOSED, OPEN, HALF_OPEN)


class BreakerRules(Struct, frozen=True, kw_only=True):
    #: Failures in a row.
    failures: int = 5
    #: Seconds.
    cooldown: float = 1.0


class Breaker:
    """Times are clock seconds, handed in."""

    __slots__ = ("_failed", "_opened_at", "_probing", "opened", "rules", "state")

    def __init__(self, rules: BreakerRules | None = None) -> None:
        self.rules = rules or BreakerRules()
        self.state = CLOSED
        #: How often it opened.
        self.opened = 0
        self._failed = 0
        self._opened_at = 0.0
        self._probing = False

    def ready(self, now: float) -> bool:
        """Whether one more may be tried now; half open that is one at a time."""
        if self.state == OPEN:
            return now - self._opened_at >= self.rules.cooldown
        return self.state == CLOSED or not self._probing

    def allows(self, now: float) -> bool:
        """The same, and it is tried: `succeeded`, `failed` or `dropped` follows."""
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
        """One that was tried ended without a verdict."""
        self._probing = False
