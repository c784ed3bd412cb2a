"""Questions to an indexer and its answers: the bodies of its HTTP API, as JSON or, with the same fields, as msgpack.

    POST /query {"prompt_hash": [123, 456, 789], "pods": ["pod1", "pod2"]}
    {"total": 3, "pods": {"pod1": {"matched": 2, "hit_rate": 0.667, "tiers": {"gpu": 2}}, "pod2": {...}}}

A prompt is given in one of five ways: the engine's block hashes (`prompt_hash`), our own keys, token ids, a text, or
messages. In JSON, bytes are base64. `StateAnswer` is the state of the index, which schedulers need too.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, DecodeError, Struct, UnsetType, ValidationError
from msgspec.structs import asdict

from fairlead.core.kv.answered import RankState
from fairlead.core.kv.tiers import Tier

T = TypeVar("T")

JSON, MSGPACK = "application/json", "application/msgpack"
#: Limits of one question: blocks of its prompt (a million tokens in blocks of 16), token ids, and pods.
MOST_BLOCKS, MOST_TOKENS, MOST_PODS = 65_536, 1 << 20, 10_000
#: Names of tiers in answers.
TIERS = {Tier.GPU: "gpu", Tier.HOST: "cpu", Tier.DISK: "disk", Tier.OTHER: "other"}
#: A question has exactly one of these fields.
PROMPTS = ("prompt_hash", "keys", "token_ids", "prompt", "messages")


class Query(Struct, kw_only=True, forbid_unknown_fields=True):
    """A question. `block_size`: tokens per block, needed with `keys`."""

    prompt_hash: list[int | str] | None = None
    #: Our own keys (`core.kv.keys`), little-endian 64-bit integers.
    keys: bytes | None = None
    block_size: int = 0
    token_ids: list[int] | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    #: Selects the tokeniser and chat template. If it is an adapter's name, the blocks are those of the adapter.
    model: str = ""
    cache_salt: str = ""
    #: Ids, names or addresses of endpoints; absent = all.
    pods: list[str] | None = None
    #: Whether unknown pods are an error.
    strict: bool = False
    #: Whether pods that hold nothing are left out.
    hits_only: bool = False


class PodAnswer(Struct, frozen=True, kw_only=True, gc=False):
    """One endpoint. `matched`: blocks from the prompt's beginning that it holds; `tiers`: these blocks by tier.
    `hit_rate`: their share of the prompt (0..1). `ranks`: the blocks of each rank, if it has several. `total`,
    `block_size`: present only if the endpoint's block size is not that of the answer."""

    matched: int
    hit_rate: float
    tiers: dict[str, int] = {}
    ranks: list[int] | UnsetType = UNSET
    total: int | UnsetType = UNSET
    block_size: int | UnsetType = UNSET


class Answer(Struct, frozen=True, kw_only=True):
    """`total`: blocks of the prompt. `block_size`: tokens per block; 0 = unknown. `unknown`: requested names that are
    no endpoints."""

    total: int
    pods: dict[str, PodAnswer]
    block_size: int = 0
    unknown: list[str] = []


class PodState(Struct, frozen=True, kw_only=True):
    """The address of an endpoint and the state of its ranks, as the indexer knows them."""

    address: str = ""
    ranks: list[RankState] = []


class StateAnswer(Struct, frozen=True, kw_only=True):
    """`space`: names how keys are made, which must be the same in scheduler and indexer. `index_size`: block copies in
    the index. `pods`: endpoints by id. `adapters`: names of the adapters that the indexer has seen."""

    space: str
    index_size: int
    pods: dict[str, PodState] = {}
    adapters: list[str] = []
    #: Block sizes of engines, in tokens.
    block_sizes: list[int] = []


class QueryError(ValueError):
    """A refused question. `status`: the HTTP status. The message says what is wrong and how to correct it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


_json = msgspec.json.Decoder(Query)
_msgpack = msgspec.msgpack.Decoder(Query)
_answer = msgspec.msgpack.Decoder(Answer)
_state = msgspec.json.Decoder(StateAnswer)


def read_query(body: bytes, content_type: str = JSON) -> Query:
    """Read the question in a body. Raises `QueryError`: 400 if it is invalid, 413 if it exceeds a limit."""
    if not body:
        raise QueryError(400, 'the body is empty; expected {"prompt_hash": [...], "pods": [...]}')
    try:
        query = _msgpack.decode(body) if content_type == MSGPACK else _json.decode(body)
    except (DecodeError, ValidationError) as error:
        raise QueryError(400, f"the body cannot be read: {error}") from None
    except (UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise QueryError(400, f"the body cannot be read: {type(error).__name__}") from None
    _check(query)
    return query


def _check(query: Query) -> None:
    values = asdict(query)
    given = [name for name in PROMPTS if values[name] is not None]
    if len(given) != 1:
        named = "none of them" if not given else " and ".join(given)
        raise QueryError(400, f"give exactly one of {', '.join(PROMPTS)}; got {named}")
    if query.keys is not None:
        if len(query.keys) % 8:
            raise QueryError(400, f"keys are 8 bytes each; {len(query.keys)} bytes are not a whole number of keys")
        if not 1 <= query.block_size <= 1 << 20:
            raise QueryError(400, "keys need block_size, the tokens of each block")
    blocks = len(query.prompt_hash or ()) or len(query.keys or b"") // 8
    for what, count, most in (
        ("blocks", blocks, MOST_BLOCKS),
        ("token ids", len(query.token_ids or ()), MOST_TOKENS),
        ("pods", len(query.pods or ()), MOST_PODS),
    ):
        if count > most:
            raise QueryError(413, f"{count} {what} are more than {most}")


def write(answer: Any, content_type: str = JSON) -> bytes:
    """The answer as bytes. Raises `UnicodeEncodeError` or `msgspec.MsgspecError` for a name of invalid Unicode."""
    if content_type == MSGPACK:
        return msgspec.msgpack.encode(answer)
    return msgspec.json.encode(answer)


def read_answer(body: bytes) -> Answer:
    """An answer from msgpack. Raises `ValueError`."""
    return _read("an answer", _answer.decode, body)


def read_state(body: bytes) -> StateAnswer:
    """A state from JSON. Raises `ValueError`."""
    return _read("a state", _state.decode, body)


def _read(what: str, decode: Callable[[bytes], T], body: bytes) -> T:
    try:
        return decode(body)
    except (DecodeError, ValidationError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ValueError(f"{what} that cannot be read: {error}") from None
