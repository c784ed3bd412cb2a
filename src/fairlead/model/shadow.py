"""What policies on trial would have done, beside what was done."""

from typing import Any

from msgspec import Struct

from fairlead.model.request import Request
from fairlead.model.snapshot import Snapshot


class ShadowCase(Struct, frozen=True, gc=False):
    """One decision, as it is handed to shadows: everything in it is a copy, or never changes."""

    request: Request
    #: Where it went.
    slot: int
    endpoint: str
    #: The fleet as it was before the request was charged.
    snapshot: Snapshot
    #: Column over slots: share of the prompt that each was believed to hold; `None` = nobody any of it.
    held: Any
    expected_output: float = 0.0


class ShadowVerdict(Struct, frozen=True, gc=False):
    """What one shadow would have done. Milliseconds are the reference cost's forecasts, never measured ones."""

    shadow: str
    #: Where it would have sent the request; empty = nowhere.
    endpoint: str = ""
    agrees: bool = False
    #: Reference cost there, above the lowest anywhere.
    regret_ms: float = 0.0
    #: Forecast of the time to the first token where the request went, less that where the shadow would have sent it.
    gain_ms: float = 0.0
    #: What deciding took.
    took_us: float = 0.0
    #: Why there is no choice; empty = there is one.
    error: str = ""


class ShadowRecord(Struct, frozen=True, gc=False):
    request_id: int
    #: Clock seconds of the decision.
    at: float
    #: Where the request went, and the reference cost there above the lowest anywhere.
    endpoint: str
    regret_ms: float = 0.0
    verdicts: tuple[ShadowVerdict, ...] = ()
