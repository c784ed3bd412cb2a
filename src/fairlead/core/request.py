"""One request as the scheduler sees it: what it asks for and what it will probably cost, never its text."""

from typing import Any

from msgspec import Struct

#: The learned-prefix identity of a prompt: parallel tuples, see `fairlead.core.prefix`.


class PrefixChain(Struct, frozen=True, gc=False):
    """Chained hashes of a prompt's leading blocks. `hashes[i]` covers bytes 0..`ends[i]` of the prompt."""

    hashes: tuple[int, ...] = ()
    #: End offset of each block in bytes, strictly increasing; same length as `hashes`.
    ends: tuple[int, ...] = ()


NO_PREFIX = PrefixChain()
#: What ids of conversations begin with that were recognised by their prompts (`fairlead.gateway.understand`). Clients
#: that name their sessions rarely use it.
RECOGNISED = "~"


class Request(Struct, frozen=True, gc=False):
    """A request that wants an endpoint."""

    #: Internal, unique in the process. Never taken from a client.
    id: int
    #: Clock seconds.
    arrived: float
    #: Which API it speaks, see `fairlead.core.apis`; `other` is passed through unread, and still scheduled.
    api: str = "other"
    path: str = ""
    #: The model the client named; empty when it named none.
    model: str = ""
    #: The model its endpoint is asked for, where manifests or a header say another one; see `target_model`.
    target: str = ""
    #: Another target, and the name of an objective, as the client's headers have them; empty = not given.
    rewrite: str = ""
    objective: str = ""
    #: The InferenceModelRewrite (`namespace/name`) that decided the target.
    rewritten_by: str = ""
    stream: bool = False
    #: Size of the whole body, in bytes.
    body_bytes: int = 0
    #: Size of the part of the body that becomes the prompt, in bytes.
    prompt_bytes: int = 0
    #: Estimated (or, with a tokeniser, counted) prompt tokens.
    prompt_tokens: int = 0
    #: Output limit the client set, of each sequence; 0 = none.
    max_tokens: int = 0
    prefix: PrefixChain = NO_PREFIX
    #: Images, sounds, videos and files in the prompt.
    media: int = 0
    #: Why the body was not read (see `fairlead.apis.parsed.ParsedRequest.unread`); empty = it was.
    unread: str = ""
    #: Session id for affinity: the client's, or one that begins with `RECOGNISED`; empty = none.
    session: str = ""
    #: Higher goes first; below 0 may be shed.
    priority: int = 0
    fairness_id: str = ""
    #: Addresses (`ip`, `ip:port`) the gateway allows; `None` = no restriction, empty = none allowed.
    subset: frozenset[str] | None = None
    slo_ttft_ms: float = 0.0
    slo_tpot_ms: float = 0.0
    #: Seconds that it may wait in a queue; 0 = as configured.
    ttl_s: float = 0.0
    #: The client's x-request-id, for logs and records only.
    external_id: str = ""
    #: The gateway shows nothing of its response before the end.
    blind: bool = False
    #: Sequences that it becomes in the engine: `n` answers to each of its prompts. They share their prompt's prefill.
    sequences: int = 1
    #: What exact prefix knowledge keeps of the tokenised prompt: hashes of its blocks. Opaque to all others, and in no
    #: record, log or journal.
    blocks: Any = None
    #: The span of a request that is traced (`fairlead.server.observe.tracing`), as opaque.
    trace: Any = None

    @property
    def target_model(self) -> str:
        """The name that the endpoint must know: what filters and scorers look at."""
        return self.target or self.model


class Usage(Struct, frozen=True, kw_only=True):
    """Token counts that the model server reported. `-1` = not reported."""

    prompt_tokens: int = -1
    completion_tokens: int = -1
    cached_tokens: int = -1
