"""Orders, named in the imperative: all that `Pipeline.handle` may ask of the world outside."""

from msgspec import Struct

from fairlead.model.decision import DecisionRecord, OutcomeRecord
from fairlead.model.endpoint import Endpoint


class Route(Struct, frozen=True):
    """Send the request to this endpoint."""

    request_id: int
    endpoint: Endpoint


class Reject(Struct, frozen=True, kw_only=True):
    """Answer the client yourself."""

    request_id: int
    status: int
    #: Machine-readable: `rejected-no-endpoints`, `rejected-saturated`, `rejected-shutting-down`, …
    reason: str
    message: str
    #: Seconds for `Retry-After`; < 0 = send none.
    retry_after_s: float = -1.0
    #: `chat`, `completions`, … : the shape of the error body.
    api: str = "other"


class SetTimer(Struct, frozen=True, gc=False):
    """Feed `TimerFired(name)` back at `at` (clock seconds). A second one of the same name replaces the first."""

    name: str
    at: float


class Record(Struct, frozen=True):
    """Something worth counting happened: for metrics, journal and logs. Never changes what is done."""

    record: DecisionRecord | OutcomeRecord


Instruction = Route | Reject | SetTimer | Record
