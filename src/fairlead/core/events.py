"""Events: facts, named in the past tense. Only `Pipeline.handle`, which takes one event, changes state."""

from enum import IntEnum
from typing import Any

from msgspec import Struct

from fairlead.core.endpoint import NOT_LISTED, BaseModels, Endpoint, Sample
from fairlead.core.learned import Part
from fairlead.core.models import ModelRules, ModelSet
from fairlead.core.records import ShadowRecord
from fairlead.core.request import Request, Usage

# What a scheduler in another process answers, without the wire format. `scheduler.proto` in `fairlead.server.remote`
# documents every field.


class Outcome(IntEnum):
    UNSPECIFIED = 0
    PICKED = 1
    REFUSED = 2
    PASSED = 3


class RemotePick(Struct, frozen=True, gc=False):
    """A remote scheduler's answer for one request; not yet checked."""

    request_id: int
    outcome: int = Outcome.PICKED
    #: Endpoint ids.
    endpoint: str = ""
    score: float = 0.0
    reason: str = ""
    #: (endpoint id, score), the best first.
    alternatives: tuple[tuple[str, float], ...] = ()
    prefill: str = ""


class RequestArrived(Struct, frozen=True, gc=False, omit_defaults=True):
    """A request was received completely, and its body was read."""

    request: Request
    #: The driver's handle of the request's session. The core never looks at it and hands it back in every instruction
    #: about the request. Journals leave it out.
    client: Any = None


class FirstTokenSeen(Struct, frozen=True, gc=False):
    """The first part of the answer passed the gateway: the prefill is over."""

    request_id: int


class ResponseBegan(Struct, frozen=True, gc=False):
    """Bytes of a streamed response passed that come before its first token, such as SSE comments: the time of its first
    byte is not that of the token."""

    request_id: int


class ResponseEnded(Struct, frozen=True, kw_only=True, gc=False):
    """The response is complete or broke off. This is the last event of a routed request; a second one is ignored."""

    request_id: int
    #: HTTP status from the model server; 0 = no response came.
    status: int = 0
    usage: Usage | None = None
    #: Milliseconds from the request's first byte at the gateway to the first byte of the response body, and to the end.
    #: Here and below, < 0 = unknown.
    ttft_ms: float = -1.0
    duration_ms: float = -1.0
    response_bytes: int = -1
    #: The client went away before the response was complete.
    client_gone: bool = False
    #: The model server broke off a response that had begun. If `client_gone` is set too, only one of the two happened,
    #: and it is unknown which.
    upstream_reset: bool = False
    #: The gateway could not send the request to any endpoint, and answered by itself.
    unsent: bool = False


class RequestMoved(Struct, frozen=True, gc=False):
    """The gateway sent the request to a second endpoint as well, usually `Route.fallback`, because the chosen endpoint
    could not be reached, answered 5xx, broke off before the first byte of an answer, or was overdue.

    It is fed with the first token or at the end, and always before `ResponseEnded`."""

    request_id: int
    #: Address of the endpoint that answers. It may still be the chosen one.
    address: str
    #: It is fed with the first token.
    first_token: bool = False


class UsageReported(Struct, frozen=True, gc=False):
    """A response contained its token counts. Fed before the response ends, or if its end is not reported at all."""

    request_id: int
    usage: Usage


class StreamLost(Struct, frozen=True, gc=False):
    """The gateway gave up the request before the first response byte: the client left, the stream was reset, or the
    gateway itself is gone."""

    request_id: int


class GatewayAnswered(Struct, frozen=True, gc=False):
    """All Envoys of the embedded gateway are alive. Fed twice a second while they are."""


class EndpointUp(Struct, frozen=True):
    """An endpoint joined the pool, or its address or labels changed."""

    endpoint: Endpoint
    #: Whether `AdaptersListed` will follow, with a list or without.
    listing: bool = False


class EndpointDown(Struct, frozen=True, gc=False):
    endpoint_id: str


class MetricsSampled(Struct, frozen=True):
    """A scrape succeeded. `started`: clock seconds when it was sent; it does not include leases charged later."""

    endpoint_id: str
    started: float
    sample: Sample


class MetricsFailed(Struct, frozen=True, gc=False):
    endpoint_id: str
    reason: str
    #: The endpoint answered, but without its load, or it could not be asked. So it does not count as failing.
    answered: bool = False


class AdaptersListed(Struct, frozen=True):
    """An endpoint's list of models was read: all that it has loaded, in use or not. Or the first attempt failed."""

    endpoint_id: str
    #: `None` = the server does not provide a list.
    adapters: frozenset[str] | None
    base: BaseModels = NOT_LISTED


class ModelsChanged(Struct, frozen=True):
    """The definitions of models were read or changed. They replace all former ones."""

    models: ModelSet
    rules: ModelRules = ModelRules()


class Reconfigured(Struct, frozen=True, gc=False):
    """The configuration changed while the scheduler runs. Answered by `AdoptConfiguration` or `RefuseConfiguration`."""

    #: The whole configuration. Opaque to the core; `Pipeline` passes it to its `build` function.
    document: Any


class Restored(Struct, frozen=True):
    """A part of the state file: what a scheduler had learned `age_s` seconds ago. The common part comes first.
    The parts of an endpoint come after it joined, its prefixes in order. `instead`: of a scheduler that served until
    now, in place of what is known here."""

    part: Part
    age_s: float
    instead: bool = False


class PeerHeard(Struct, frozen=True, gc=False):
    """Another scheduler of the pool reported what it did since its last message (`fairlead.core.facts.Batch`).

    `origin`: the sender's name, a new one after each start. `to`: our own name. `lag_s`: seconds that the message took,
    0 if unknown. `at_once`: the transport delivers all messages of peers before the next event, so a decision knows of
    all earlier ones."""

    origin: str
    payload: bytes
    lag_s: float = 0.0
    to: str = ""
    at_once: bool = False


class PeerSnapshot(Struct, frozen=True, gc=False):
    """Another scheduler reported all its running requests (`fairlead.core.facts.Snapshot`)."""

    origin: str
    payload: bytes


class PeerLost(Struct, frozen=True, gc=False):
    """Another scheduler ended, or stopped sending messages."""

    origin: str


class RemoteUp(Struct, frozen=True, gc=False):
    """A scheduler in another process is connected and may be asked."""

    remote: str


class RemoteDown(Struct, frozen=True, gc=False):
    """A scheduler in another process is no longer connected. Its open questions are decided without it."""

    remote: str


class RemotePicked(Struct, frozen=True, gc=False):
    """A scheduler in another process answered. Answers to questions that are no longer open are ignored."""

    remote: str
    picks: tuple[RemotePick, ...]


class ShadowsJudged(Struct, frozen=True, gc=False):
    """Shadow policies decided copies of earlier requests. The event changes nothing."""

    records: tuple[ShadowRecord, ...]


class StopAsked(Struct, frozen=True, gc=False):
    """The process is about to end: requests that still wait must be answered now."""


class TimerFired(Struct, frozen=True, gc=False):
    """A timer asked for by `SetTimer` is due."""

    name: str


Event = (
    RequestArrived
    | FirstTokenSeen
    | ResponseBegan
    | RequestMoved
    | UsageReported
    | ResponseEnded
    | StreamLost
    | GatewayAnswered
    | EndpointUp
    | EndpointDown
    | MetricsSampled
    | MetricsFailed
    | AdaptersListed
    | ModelsChanged
    | Reconfigured
    | Restored
    | PeerHeard
    | PeerSnapshot
    | PeerLost
    | RemoteUp
    | RemoteDown
    | RemotePicked
    | ShadowsJudged
    | StopAsked
    | TimerFired
)
