"""Facts, named in the past tense. `Pipeline.handle` takes one and is the only place where state changes."""

from enum import IntEnum
from typing import Any

from msgspec import Struct

from fairlead.core.endpoint import NOT_LISTED, BaseModels, Endpoint, Sample
from fairlead.core.learned import Part
from fairlead.core.models import ModelRules, ModelSet
from fairlead.core.records import ShadowRecord
from fairlead.core.request import Request, Usage

# What travels between the pipeline and a scheduler in another process, as nouns of the pure core. The meaning of every
# field: `scheduler.proto` in `fairlead.server.remote`.


class Outcome(IntEnum):
    UNSPECIFIED = 0
    PICKED = 1
    REFUSED = 2
    PASSED = 3


class RemotePick(Struct, frozen=True, gc=False):
    """A scheduler's word on one request; not yet checked."""

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
    """A request was received whole and understood."""

    request: Request
    #: Who sent it: handed back in every instruction about the request, and never looked at. Journals leave it out.
    client: Any = None


class FirstTokenSeen(Struct, frozen=True, gc=False):
    """The first byte of the response body passed: the prefill is over."""

    request_id: int


class ResponseEnded(Struct, frozen=True, kw_only=True, gc=False):
    """The response is complete, or broke off. The last event of a routed request; a second one is ignored."""

    request_id: int
    #: HTTP status from the model server; 0 = no response came.
    status: int = 0
    usage: Usage | None = None
    #: Milliseconds from the request's first byte at the gateway to the first response body byte; < 0 = unknown.
    ttft_ms: float = -1.0
    duration_ms: float = -1.0
    response_bytes: int = -1
    #: The client went away before the response was complete.
    client_gone: bool = False
    #: The model server broke off a response that had begun. With `client_gone`: one of the two, and nobody tells which.
    upstream_reset: bool = False


class RequestMoved(Struct, frozen=True, gc=False):
    """The gateway sent the request to another endpoint as well, mostly the fallback (`Route.fallback`): the chosen one
    could not be reached, broke off before a byte of an answer, or was overdue.

    Fed when a response comes, or at the end; before `ResponseEnded` in any case."""

    request_id: int
    #: Of the endpoint that answers: another one, or after all the chosen one.
    address: str


class UsageReported(Struct, frozen=True, gc=False):
    """A response told its token counts (before it has ended, or where nobody tells us its end)."""

    request_id: int
    usage: Usage


class StreamLost(Struct, frozen=True, gc=False):
    """The gateway gave the request up before a response byte: client gone, stream reset, gateway gone."""

    request_id: int


class EndpointUp(Struct, frozen=True):
    """An endpoint joined, or its address or labels changed."""

    endpoint: Endpoint


class EndpointDown(Struct, frozen=True, gc=False):
    endpoint_id: str


class MetricsSampled(Struct, frozen=True):
    """A scrape succeeded. `started` is when it was sent: charges made since are not in it yet."""

    endpoint_id: str
    started: float
    sample: Sample


class MetricsFailed(Struct, frozen=True, gc=False):
    endpoint_id: str
    reason: str
    #: It answered, with nothing that tells its load: it is there, and may serve as well as any other.
    answered: bool = False


class AdaptersListed(Struct, frozen=True):
    """An endpoint's list of models was read: what it has loaded, whether requests use it now or not."""

    endpoint_id: str
    #: `None` = it does not tell.
    adapters: frozenset[str] | None
    base: BaseModels = NOT_LISTED


class ModelsChanged(Struct, frozen=True):
    """The definitions of models were read (again). They replace all former ones."""

    models: ModelSet
    rules: ModelRules = ModelRules()


class Reconfigured(Struct, frozen=True, gc=False):
    """The configuration changed while the scheduler runs. Answered by `AdoptConfiguration` or `RefuseConfiguration`."""

    #: The whole configuration: opaque here, read by the function that the pipeline was given to build what it says.
    document: Any


class Restored(Struct, frozen=True):
    """A part of what a scheduler had learned, `age_s` seconds ago. What is common comes before any endpoint; what is of
    an endpoint comes once that is there, its prefixes in their order."""

    part: Part
    age_s: float


class PeerHeard(Struct, frozen=True, gc=False):
    """Another scheduler of the pool told what it did since its last message (`fairlead.core.facts.Batch`). `origin`:
    whose it is, another name after each start; never our own, `to`. `lag_s`: seconds that it took, as far as that is
    known. `at_once`: whatever a peer has told is heard before the next event, however long that takes."""

    origin: str
    payload: bytes
    lag_s: float = 0.0
    to: str = ""
    at_once: bool = False


class PeerSnapshot(Struct, frozen=True, gc=False):
    """It told all that it has running (`fairlead.core.facts.Snapshot`)."""

    origin: str
    payload: bytes


class PeerLost(Struct, frozen=True, gc=False):
    """It ended, or nobody hears of it any more."""

    origin: str


class RemoteUp(Struct, frozen=True, gc=False):
    """A scheduler in another process is connected and may be asked."""

    remote: str


class RemoteDown(Struct, frozen=True, gc=False):
    """It is not connected any more: nobody waits for its answers."""

    remote: str


class RemotePicked(Struct, frozen=True, gc=False):
    """It answered. Answers that nobody waits for any more are ignored."""

    remote: str
    picks: tuple[RemotePick, ...]


class ShadowsJudged(Struct, frozen=True, gc=False):
    """Policies on trial have decided what was decided before. Changes nothing."""

    records: tuple[ShadowRecord, ...]


class StopAsked(Struct, frozen=True, gc=False):
    """The process is about to end: whoever still waits must be told now."""


class TimerFired(Struct, frozen=True, gc=False):
    """A timer asked for by `SetTimer` is due."""

    name: str


Event = (
    RequestArrived
    | FirstTokenSeen
    | RequestMoved
    | UsageReported
    | ResponseEnded
    | StreamLost
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
