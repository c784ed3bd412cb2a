"""Orders, named in the imperative: all that `Pipeline.handle` may ask of the world outside."""

from typing import Any

from msgspec import Struct

from fairlead.core.endpoint import Endpoint
from fairlead.core.records import Column, DecisionRecord, OutcomeRecord, ShadowCase, ShadowRecord, StallRecord
from fairlead.core.request import Request


class Route(Struct, frozen=True, gc=False):
    """Send the request to this endpoint."""

    request_id: int
    endpoint: Endpoint
    #: Address of the endpoint that computes the prompt for it; empty = it does so itself.
    prefill: str = ""
    #: Address of the endpoint that gets it when no connection to the first can be made; empty = none.
    fallback: str = ""
    #: The model's name that goes into the request's body; empty = the body stays as it is.
    target: str = ""
    #: Where that name stands in the response, the client reads this one instead; empty = the response stays as it is.
    shown: str = ""
    #: It may have to make way: follow it to its end, so that an `Evict` can end it.
    evictable: bool = False
    #: `RequestArrived.client`, here and below.
    client: Any = None
    #: The fallback endpoint may have it also after the first one has, as long as no byte of an answer came.
    repeatable: bool = False
    #: Milliseconds without a byte after which both may have it, and the first byte wins; 0 = never.
    hedge_after_ms: float = 0.0
    #: Where the answer names several: their addresses, comma-separated, `endpoint` first; empty = it alone.
    destination: str = ""


class Reject(Struct, frozen=True, kw_only=True):
    """Answer the client yourself."""

    request_id: int
    status: int
    #: Machine-readable: `model_not_found`, `rejected-no-endpoints`, `rejected-saturated`, `rejected-shutting-down`, …
    reason: str
    message: str
    #: Seconds for `Retry-After`; < 0 = send none.
    retry_after_s: float = -1.0
    #: `chat`, `completions`, … : the shape of the error body.
    api: str = "other"
    #: What in the request it is about, e.g. `model`; `None` = nothing in particular.
    param: str | None = None
    client: Any = None


class Evict(Struct, frozen=True, gc=False):
    """End a request that was routed, free its model server, and feed `StreamLost` back."""

    #: What its client is told, if it can still be told anything.
    told: Reject
    client: Any = None


class Hold(Struct, frozen=True, gc=False):
    """The request waits in a queue, for at most so many seconds: ask its gateway to be patient."""

    request_id: int
    seconds: float
    client: Any = None


class AskRemote(Struct, frozen=True):
    """Ask the scheduler in another process where the request runs, and feed `RemotePicked` back."""

    #: Which one.
    remote: str
    request: Request
    #: Column over slots: share of the prompt believed to be cached; `None` = nowhere any of it.
    hits: Column | None
    #: Bool column of the endpoints where it may go (able, with room under flow control); `None` = all.
    able: Column | None
    #: Output tokens that are expected.
    expected_output: float


class JudgeShadows(Struct, frozen=True, gc=False):
    """Have the policies on trial decide this too, at leisure, and feed `ShadowsJudged` back. May be left undone."""

    case: ShadowCase


class AdoptConfiguration(Struct, frozen=True, gc=False):
    """A changed configuration decides from now on: let what stands around the core follow it."""

    #: Of `Reconfigured`.
    document: Any
    #: The `core.scheduling.Scheduling` that was built of it.
    scheduling: Any


class RefuseConfiguration(Struct, frozen=True, gc=False):
    """A changed configuration cannot be built; the former one stays in force. Tell people why."""

    document: Any
    problem: str


class ListAdapters(Struct, frozen=True, gc=False):
    """An endpoint answered 404 for a model, or runs an adapter that was not on its list: read soon what it has loaded,
    and the others, and feed `AdaptersListed`."""

    endpoint_id: str


class WarmUp(Struct, frozen=True, gc=False):
    """The cache of this endpoint is empty: it is new, or was restarted. May be left undone."""

    endpoint_id: str


class SetTimer(Struct, frozen=True, gc=False):
    """Feed `TimerFired(name)` back at `at` (clock seconds). A second one of the same name replaces the first."""

    name: str
    at: float


#: Something worth counting happened: for metrics, journal and logs. Never changes what is done.
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
