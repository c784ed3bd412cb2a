"""A request as the scheduler sees it: what it asks for and its size, never its text."""

from typing import Any

from msgspec import Struct


class PrefixChain(Struct, frozen=True, gc=False):
    """Identifies a prompt in the learned index (`fairlead.core.prefix`): chained hashes of its leading blocks.
    `hashes[i]` covers bytes 0..`ends[i]` of the prompt."""

    hashes: tuple[int, ...] = ()
    #: End offset of each block in bytes, strictly increasing; same length as `hashes`.
    ends: tuple[int, ...] = ()


NO_PREFIX = PrefixChain()
#: Prefix of the session ids of conversations that were recognised by their prompts (`fairlead.gateway.understand`).
#: Clients that name their sessions rarely use it.
RECOGNISED = "~"


class Request(Struct, frozen=True, gc=False):
    """A request that needs an endpoint."""

    #: Internal id, unique in the process. Never taken from a client.
    id: int
    #: Clock seconds.
    arrived: float
    #: The API that it uses, see `fairlead.core.apis`; `other` is passed through unread, and still scheduled.
    api: str = "other"
    path: str = ""
    #: The model that the client named; empty = none.
    model: str = ""
    #: The model that the endpoint is asked for, if manifests or a header name another one than `model`; empty = none.
    target: str = ""
    #: Another target model, from the client's headers; empty = not given.
    rewrite: str = ""
    #: The name of an objective, from the client's headers; empty = not given.
    objective: str = ""
    #: The InferenceModelRewrite (`namespace/name`) that decided the target.
    rewritten_by: str = ""
    #: Whether the answer is streamed.
    stream: bool = False
    #: Size of the whole body, in bytes.
    body_bytes: int = 0
    #: Size of the part of the body that becomes the prompt, in bytes.
    prompt_bytes: int = 0
    #: Prompt tokens: estimated, or counted if there is a tokeniser.
    prompt_tokens: int = 0
    #: The client's limit on the output tokens of each sequence; 0 = none.
    max_tokens: int = 0
    #: Hashes of the prompt's leading blocks.
    prefix: PrefixChain = NO_PREFIX
    #: Number of images, sounds, videos and files in the prompt.
    media: int = 0
    #: Why the body was not read (see `fairlead.apis.parsed.ParsedRequest.unread`); empty = it was read.
    unread: str = ""
    #: Session id for affinity: the client's, or one that begins with `RECOGNISED`; empty = none.
    session: str = ""
    #: Higher goes first. A request below 0 may be shed.
    priority: int = 0
    #: The tenant; empty = all without one share a flow.
    fairness_id: str = ""
    #: Addresses (`ip`, `ip:port`) that the gateway allows; `None` = no restriction, empty = none allowed.
    subset: frozenset[str] | None = None
    #: The latencies that the client asks for, in milliseconds; 0 = none.
    slo_ttft_ms: float = 0.0
    #: The same for the time per output token.
    slo_tpot_ms: float = 0.0
    #: Seconds that the request may wait in the queue; 0 = as configured.
    ttl_s: float = 0.0
    #: The client's x-request-id, for logs and records only.
    external_id: str = ""
    #: The gateway does not report the response before it is complete, so the first token is not seen.
    blind: bool = False
    #: Sequences that it becomes in the engine: `n` answers to each of its prompts. They share their prompt's prefill.
    sequences: int = 1
    #: The engine computes the whole prompt even if it is cached. Afterwards the prompt is cached like any other.
    recomputed: bool = False
    #: What the conversation begins with, as a session id; empty = unknown, or nothing depends on it.
    opening: str = ""
    #: Block hashes of the tokenised prompt, for the exact index. Opaque to all other code, and never in a record, log
    #: or journal.
    blocks: Any = None
    #: The span of a traced request (`fairlead.server.observe.tracing`), also opaque.
    trace: Any = None

    @property
    def target_model(self) -> str:
        """The model name that the endpoint must know. Filters and scorers use it."""
        return self.target or self.model

    @property
    def lasting_session(self) -> str:
        """What all requests of a session have in common, from the first one on; empty = nothing. A recognised
        conversation has a session id only from its second turn on, and only where the first one was seen, so its
        opening is better."""
        session = self.session
        return session if session and session[0] != RECOGNISED else self.opening or session


class Usage(Struct, frozen=True, kw_only=True):
    """Token counts reported by the model server. `-1` = not reported."""

    prompt_tokens: int = -1
    completion_tokens: int = -1
    cached_tokens: int = -1
