"""Instructions, named in the imperative: everything that `Pipeline.handle` may ask the driver to do."""

from typing import Any

from msgspec import Struct

from fairlead.core.endpoint import Endpoint
from fairlead.core.records import Column, DecisionRecord, OutcomeRecord, ShadowCase, ShadowRecord, StallRecord
from fairlead.core.request import Request


class Route(Struct, frozen=True, gc=False):
    """Send the request to this endpoint."""

    request_id: int
    endpoint: Endpoint
    #: Address of the endpoint that computes the prompt for it; empty = `endpoint` does.
    prefill: str = ""
    #: Address of the endpoint that gets the request if no connection to `endpoint` can be made; empty = none.
    fallback: str = ""
    #: Model name to write into the request's body; empty = the body stays as it is.
    target: str = ""
    #: Model name that replaces `target` in the response; empty = the response stays as it is.
    shown: str = ""
    #: The request may be evicted: follow it to its end, so that an `Evict` can end it.
    evictable: bool = False
    #: `RequestArrived.client`, here and below.
    client: Any = None
    #: It may be repeated at the fallback endpoint even after `endpoint` received it, as long as no answer has begun.
    repeatable: bool = False
    #: Milliseconds without a byte after which it may go to both endpoints, and the first byte wins; 0 = never.
    hedge_after_ms: float = 0.0
    #: If the answer to the gateway names several endpoints: their addresses, comma-separated, `endpoint` first; empty =
    #: only `endpoint`.
    destination: str = ""


class Reject(Struct, frozen=True, kw_only=True):
    """Answer the client with an error."""

    request_id: int
    status: int
    #: Machine-readable: `model_not_found`, `rejected-no-endpoints`, `rejected-saturated`, `rejected-shutting-down`, …
    reason: str
    message: str
    #: Seconds for `Retry-After`; < 0 = send none.
    retry_after_s: float = -1.0
    #: `chat`, `completions`, …: sets the format of the error body.
    api: str = "other"
    #: The parameter of the request that is wrong, e.g. `model`; `None` = none in particular.
    param: str | None = None
    client: Any = None


class Evict(Struct, frozen=True, gc=False):
    """End a routed request, so that its model server is free again, and feed `StreamLost` back."""

    #: The answer to its client, if no answer has begun.
    reject: Reject
    client: Any = None


class Hold(Struct, frozen=True, gc=False):
    """The request waits in the queue for at most `seconds`: ask its gateway to wait as long."""

    request_id: int
    seconds: float
    client: Any = None


class AskRemote(Struct, frozen=True):
    """Ask the scheduler in another process where the request should run, and feed `RemotePicked` back."""

    #: Name of the scheduler.
    remote: str
    request: Request
    #: Column over slots: estimated share of the prompt that is cached; `None` = no endpoint has any of it.
    hits: Column | None
    #: Bool column of the endpoints that it may go to (able; with room under flow control); `None` = all.
    able: Column | None
    #: Expected output tokens.
    expected_output: float
    #: Bool column of the endpoints that may compute the prompt for another one; `None` = all.
    computes: Column | None = None


class JudgeShadows(Struct, frozen=True, gc=False):
    """Let the shadow policies decide this case at any time, and feed `ShadowsJudged` back. May be skipped."""

    case: ShadowCase


class AdoptConfiguration(Struct, frozen=True, gc=False):
    """A changed configuration is in force from now on: apply it outside of the core, too."""

    #: `Reconfigured.document`.
    document: Any
    #: The `core.scheduling.Scheduling` that was built from it.
    scheduling: Any


class RefuseConfiguration(Struct, frozen=True, gc=False):
    """A changed configuration cannot be built; the former one stays in force. Report why."""

    document: Any
    problem: str


class ListAdapters(Struct, frozen=True, gc=False):
    """An endpoint answered 404 for a model, or runs an adapter that was not on its list: read its list of models and
    those of the other endpoints soon, and feed `AdaptersListed` back."""

    endpoint_id: str


class WarmUp(Struct, frozen=True, gc=False):
    """Warm the cache of this endpoint, which is empty because it is new or was restarted. May be skipped."""

    endpoint_id: str


class SetTimer(Struct, frozen=True, gc=False):
    """Feed `TimerFired(name)` back at `at` (clock seconds). A second timer of the same name replaces the first."""

    name: str
    at: float


#: Records of events for metrics, journal and logs. They never change what is done.
Record = DecisionRecord | OutcomeRecord | ShadowRecord | StallRecord

Instruction = (
    Route
    | Reject
    | Evict
    | Hold
    | AskRemote
    | JudgeShadows
    | AdoptConfiguration
    | RefuseConfiguration
    | ListAdapters
    | WarmUp
    | SetTimer
    | Record
)
