"""What stands in a block: records of (kind, clock seconds, body), as msgpack.

    segment   the first record of every segment: whose it is, and what a replay that begins there needs
    an event  by its class name (`RequestArrived`, …): what the pipeline was fed, in order
    decided   what the pipeline answered: one per decision, always
    detail    why: verdicts, scores and the numbers they were made from; of sampled decisions
    ended     what came of a routed request
    policy    the policy was exchanged while it ran
    lost      so many records are missing here, because the disk was too slow or full

Rules
* A kind that is not known here is passed over, and so are fields: older programs read newer journals.
* A text that is no Unicode (half a surrogate pair in a model's name) is written with its escapes.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import Any, get_args

import msgspec
from msgspec import Struct

from fairlead.model.endpoint import Endpoint
from fairlead.model.events import Event, ModelsChanged
from fairlead.model.forecast import Forecast

SEGMENT, DECIDED, DETAIL, ENDED, POLICY, LOST = "segment", "decided", "detail", "ended", "policy", "lost"
VERSION = 1
_ARRAY = struct.Struct(">BI")

Item = tuple[str, float, Any]


class Segment(Struct, frozen=True, kw_only=True):
    """The head of a segment."""

    version: int = VERSION
    #: Of the process: the beginning of its decision ids.
    run: str
    #: 0 = the first of its run: a replay that begins there repeats the very decisions.
    number: int = 0
    #: Seconds since 1970 at clock 0.
    epoch: float = 0.0
    #: See `fairlead.config.recorded`.
    scheduling: Any = None
    #: Of the random generator, before anything was decided.
    chance: Any = None
    #: Who was there, and what was defined of model names, when the segment began.
    endpoints: tuple[Endpoint, ...] = ()
    models: ModelsChanged | None = None
    #: What decides beside the recorded policy and events, in words: a replay cannot be exact then.
    beside: tuple[str, ...] = ()
    #: Share of the decisions that have a detail.
    sample: float = 1.0


class Decided(Struct, frozen=True, array_like=True):
    """A decision in short. `endpoint` is empty when the request was refused."""

    request_id: int
    endpoint: str = ""
    outcome: str = "routed"
    status: int = 200
    prefill: str = ""
    hit_tokens: int = 0
    best_hit_tokens: int = 0
    overloaded: bool = False
    queued_ms: float = 0.0
    policy: str = ""
    address: str = ""
    forecast: Forecast | None = None
    #: The model it was sent for, where that is another one than asked for, and who said so.
    target: str = ""
    rewritten_by: str = ""
    priority: int = 0


class Ended(Struct, frozen=True, array_like=True):
    """The end of a routed request. -1 = unknown."""

    request_id: int
    endpoint: str = ""
    status: int = 0
    cause: str = "natural"
    ttft_ms: float = -1.0
    duration_ms: float = -1.0
    response_bytes: int = -1
    prompt_tokens: int = -1
    completion_tokens: int = -1
    cached_tokens: int = -1


class Lost(Struct, frozen=True):
    records: int


class Unknown(Struct, frozen=True):
    """A record that this program cannot read."""

    kind: str
    problem: str = ""


EVENTS: dict[str, type[Struct]] = {kind.__name__: kind for kind in get_args(Event)}
_BODIES: dict[str, Any] = {**EVENTS, SEGMENT: Segment, DECIDED: Decided, DETAIL: dict, ENDED: Ended, LOST: Lost}
_DECODERS = {kind: msgspec.msgpack.Decoder(body) for kind, body in _BODIES.items()}
_ANYTHING = msgspec.msgpack.Decoder()
_ROWS = msgspec.msgpack.Decoder(list[tuple[str, float, msgspec.Raw]])
_ENCODER = msgspec.msgpack.Encoder()


def encode(item: Item) -> bytes:
    """One record. Raises `ValueError`, `OverflowError` or `TypeError` when a body holds what msgpack cannot."""
    try:
        return _ENCODER.encode(item)
    except UnicodeEncodeError:
        return _ENCODER.encode(_escaped(msgspec.to_builtins(item)))


def joined(encoded: Iterable[bytes], count: int) -> bytearray:
    """The content of a block of so many records."""
    content = bytearray(_ARRAY.pack(0xDD, count))
    for one in encoded:
        content += one
    return content


def decode(content: bytes) -> Iterator[Item]:
    """The records of a block; bodies that cannot be read come as `Unknown`. Raises `msgspec.DecodeError` when the block
    as a whole is none."""
    for kind, at, raw in _ROWS.decode(content):
        try:
            yield kind, at, _DECODERS.get(kind, _ANYTHING).decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            yield kind, at, Unknown(kind, str(error))


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_escaped(key): _escaped(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(one) for one in value]
    return value
