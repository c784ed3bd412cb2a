"""One request as the scheduler sees it: what it asks for and what it will probably cost, never its text."""

from msgspec import Struct

#: The learned-prefix identity of a prompt: parallel tuples, see `fairlead.fleet.prefix`.


class PrefixChain(Struct, frozen=True, gc=False):
    """Chained hashes of a prompt's leading blocks. `hashes[i]` covers bytes 0..`ends[i]` of the prompt."""

    hashes: tuple[int, ...] = ()
    #: End offset of each block in bytes, strictly increasing; same length as `hashes`.
    ends: tuple[int, ...] = ()


NO_PREFIX = PrefixChain()


class Request(Struct, frozen=True, kw_only=True):
    """A request that wants an endpoint."""

    #: Internal, unique in the process. Never taken from a client.
    id: int
    #: Clock seconds.
    arrived: float
    #: Which API it speaks: `chat`, `completions`, or `other` (passed through unread, still scheduled).
    api: str = "other"
    path: str = ""
    #: The model the client named; empty when it named none.
    model: str = ""
    stream: bool = False
    #: Size of the whole body, in bytes.
    body_bytes: int = 0
    #: Size of the part of the body that becomes the prompt, in bytes.
    prompt_bytes: int = 0
    #: Estimated (or, with a tokeniser, counted) prompt tokens.
    prompt_tokens: int = 0
    #: Output limit the client set; 0 = none.
    max_tokens: int = 0
    prefix: PrefixChain = NO_PREFIX
    #: Session id for affinity; empty = none given.
    session: str = ""
    #: Higher goes first; below 0 may be shed.
    priority: int = 0
    fairness_id: str = ""
    #: Addresses (`ip`, `ip:port`) the gateway allows; `None` = no restriction, empty = none allowed.
    subset: frozenset[str] | None = None
    slo_ttft_ms: float = 0.0
    slo_tpot_ms: float = 0.0
    #: The client's x-request-id, for logs and records only.
    external_id: str = ""


class Usage(Struct, frozen=True, kw_only=True):
    """Token counts that the model server reported. `-1` = not reported."""

    prompt_tokens: int = -1
    completion_tokens: int = -1
    cached_tokens: int = -1
