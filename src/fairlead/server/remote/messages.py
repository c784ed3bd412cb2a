"""Messages of `fairlead.scheduler.v1` as values, and their encoding and decoding.

The contract is `proto/fairlead/scheduler/v1/scheduler.proto`. Columns are sent as they are in memory.
"""

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace
from numpy.typing import NDArray

from fairlead.core.errors import ProtocolError
from fairlead.core.events import RemotePick
from fairlead.core.records import OutcomeRecord
from fairlead.core.request import Request
from fairlead.gateway.protobuf import field as protobuf_field
from fairlead.gateway.protobuf import fields, read_varint, varint

VERSION = 1
#: gRPC path of the stream.
PATH = "/fairlead.scheduler.v1.Scheduler/Schedule"

T = TypeVar("T")
Floats = NDArray[np.float64]
Slots = NDArray[np.intp]
Load = tuple[Slots, dict[int, Floats]]

#: Learned factors, as in `fleet.predictor`, by field number.
_FACTORS = ("prefill_factor", "step_factor", "ttft_factor", "tpot_factor", "load_factor")
FACTORS: Mapping[int, str] = dict(enumerate(_FACTORS, 21))
_LOAD = (
    "waiting", "running", "kv", "queue", "active", "inflight", "pending", "pending_tokens", "queued_tokens",
    "queued_ms", "prefill_since_ms", "kv_tokens", "growth_tokens", "sampled_at", "failures", "errors",
    "ejected_until", "max_adapters", "capacity_tokens",
)  # fmt: skip
_MORE_LOAD = ("max_seqs", "head_ms", "free_cache", "ranks", "long_until_ms")
#: Columns of `Load` by field number, named as in `fleet.table`; the learned factors come last.
COLUMNS: Mapping[int, str] = {**dict(enumerate(_LOAD, 2)), **dict(enumerate(_MORE_LOAD, 26)), **FACTORS}
#: The highest slot that is accepted from a peer: columns are as long as the highest slot.
MAX_SLOT = 65_535

_NO_SLOTS: Slots = np.zeros(0, dtype=np.intp)
_NO_SHARES: Floats = np.zeros(0)


class Hello(Struct, frozen=True, kw_only=True):
    version: int = VERSION
    gateway: str = ""
    pool: str = ""
    budget_us: int = 0
    max_endpoints: int = 0


class EndpointState(Struct, frozen=True, kw_only=True):
    slot: int
    id: str
    address: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    #: `None` = not reported.
    adapters: tuple[str, ...] | None = None


class Speeds(Struct, frozen=True, kw_only=True):
    c0: float = 0.0
    c_pf: float = 0.0
    c_attn: float = 0.0
    c_seq: float = 0.0
    c_kv: float = 0.0
    hold_ms: float = 0.0
    answer_steps: float = 0.0


class State(Struct, kw_only=True):
    version: int = 0
    full: bool = False
    endpoints: list[EndpointState] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    #: Slots whose columns changed, and those columns by field number, parallel to `slots`.
    slots: Slots = field(default_factory=lambda: _NO_SLOTS)
    columns: dict[int, Floats] = field(default_factory=dict)
    settled: int = 0
    speeds: Speeds | None = None

    @property
    def load(self) -> Load:
        return self.slots, self.columns


class Forecast(Struct, kw_only=True):
    """Columns with one entry per slot, in milliseconds; `used` is a share of the KV memory."""

    ttft_ms: Floats
    prefill_ms: Floats
    step_ms: Floats
    used: Floats


class Asked(Struct, kw_only=True):
    """One request of a batch, with what is known about it at endpoints."""

    request: Request
    expected_output: float = 0.0
    hit_slots: Slots = field(default_factory=lambda: _NO_SLOTS)
    hit_shares: Floats = field(default_factory=lambda: _NO_SHARES)
    #: `None` = every endpoint can serve it.
    candidates: Slots | None = None
    forecast: Forecast | None = None
    #: Who may compute the prompt for another endpoint; `None` = every endpoint.
    prefill_candidates: Slots | None = None


class Batch(Struct, kw_only=True):
    number: int = 0
    now: float = 0.0
    requests: list[Asked] = field(default_factory=list)


class Ask(Struct, kw_only=True):
    hello: Hello | None = None
    state: State | None = None
    batch: Batch | None = None
    ended: Sequence[OutcomeRecord] = ()


class Welcome(Struct, frozen=True, kw_only=True):
    version: int = VERSION
    scheduler: str = ""
    policy: str = ""
    wants_forecasts: bool = False
    wants_outcomes: bool = False


class Picks(Struct, frozen=True, kw_only=True):
    batch: int = 0
    picks: tuple[RemotePick, ...] = ()


class Answer(Struct, frozen=True, kw_only=True):
    welcome: Welcome | None = None
    picks: Picks | None = None


# Scalar and packed fields of `fairlead.scheduler.v1`, on top of `gateway.protobuf`.
#
# Encoders leave out default values, as proto3 does. Decoders accept packed and unpacked lists, as the specification
# demands. They refuse invalid values, NaN included, and allocate memory only in proportion to the message's size.

#: One field as `protobuf.fields` returns it.
Part = tuple[int, int, int]
_DOUBLE = struct.Struct("<d")


def text(number: int, value: str) -> bytes:
    return protobuf_field(number, value.encode("utf-8", "replace")) if value else b""


def integer(number: int, value: int) -> bytes:
    """A non-negative integer."""
    return varint(number << 3) + varint(value) if value else b""


def double(number: int, value: float) -> bytes:
    return varint(number << 3 | 1) + _DOUBLE.pack(value) if value else b""


def doubles(number: int, values: Floats) -> bytes:
    """A packed list; empty bytes for an empty list."""
    return protobuf_field(number, np.ascontiguousarray(values, dtype="<f8").tobytes()) if len(values) else b""


def slots(number: int, values: Iterable[int]) -> bytes:
    packed = b"".join([varint(value) for value in values])
    return protobuf_field(number, packed) if packed else b""


def read_text(data: bytes, part: Part, before: object = None) -> str:
    """A text. Raises `ProtocolError` for another kind of field, and for text that is not UTF-8, as proto3 demands."""
    _, start, end = part
    if end < 0:
        raise ProtocolError("a text field is not a text")
    try:
        return data[start:end].decode()
    except UnicodeDecodeError:
        raise ProtocolError("a text field is not UTF-8") from None


def read_integer(data: bytes, part: Part, before: object = None, highest: int = (1 << 64) - 1) -> int:
    if part[2] >= 0 or part[1] > highest:
        raise ProtocolError("an integer field is out of range")
    return part[1]


def read_double(data: bytes, part: Part, before: object = None) -> float:
    """A finite or infinite number; NaN is refused."""
    if part[2] >= 0:
        raise ProtocolError("a number field is not a number")
    value: float = _DOUBLE.unpack(part[1].to_bytes(8, "little"))[0]
    if value != value:
        raise ProtocolError("a number field is not a number")
    return value


def read_doubles(data: bytes, part: Part, before: Floats | None) -> Floats:
    """The entries of a packed list, or a single entry, appended to `before` (`None` = no entries so far)."""
    _, start, end = part
    if end < 0:
        values = np.array([read_double(data, part)])
    elif (end - start) % 8:
        raise ProtocolError("a packed list of doubles is cut off")
    else:
        values = np.frombuffer(data, "<f8", (end - start) // 8, start)
        if np.isnan(values).any():
            raise ProtocolError("a column has entries that are not numbers")
    return values if before is None else np.concatenate((before, values))


def read_slots(data: bytes, part: Part, before: Slots | None) -> Slots:
    _, start, end = part
    if end < 0:
        slots = [start]
    else:
        slots = []
        while start < end:
            value = data[start]
            start += 1
            if value > 0x7F:
                value, start = read_varint(data, start - 1, end)
            slots.append(value)
    if slots and max(slots) > MAX_SLOT:
        raise ProtocolError(f"slot {max(slots)} is above {MAX_SLOT}")
    column = np.array(slots, dtype=np.intp)
    return column if before is None else np.concatenate((before, column))


def sub(part: Part) -> tuple[int, int]:
    """The offsets where a sub-message begins and ends."""
    if part[2] < 0:
        raise ProtocolError("a message field is not a message")
    return part[1], part[2]


class Form(NamedTuple):
    """How a field is encoded. `write(number, value)` returns nothing for a default value. `read(data, part, before)`
    also receives the value so far (`None` = the field's first occurrence)."""

    write: Callable[[int, Any], bytes]
    read: Callable[[bytes, Part, Any], Any]


class Message(Generic[T]):
    """A kind of message. `forms`: its fields by name, numbered from 1. `make` makes a value from the fields that are
    present, by name; `parts` returns the values of all fields."""

    def __init__(
        self, make: Callable[..., T], parts: Callable[[Any], Iterable[Any]] | None = None, /, **forms: Form
    ) -> None:
        self._make, self._parts = make, parts or attrgetter(*forms)
        self._writers = [(number, form.write) for number, form in enumerate(forms.values(), 1)]
        self._readers = {number: (name, forms[name].read) for number, name in enumerate(forms, 1)}

    def encode(self, value: T) -> bytes:
        values = self._parts(value)
        return b"".join([write(number, part) for (number, write), part in zip(self._writers, values, strict=True)])

    def decode(self, data: bytes, pos: int = 0, end: int | None = None) -> T:
        """Raises `ProtocolError` for anything malformed; unknown fields are skipped."""
        values: dict[str, Any] = {}
        for part in fields(data, pos, end):
            known = self._readers.get(part[0])
            if known is not None:
                name, read = known
                values[name] = read(data, part, values.get(name))
        return self._make(**values)


def _inner(message: "Message[Any]") -> Form:
    def write(number: int, value: Any) -> bytes:
        return b"" if value is None else protobuf_field(number, message.encode(value))

    return Form(write, lambda data, part, _: message.decode(data, *sub(part)))


def _inner_list(message: "Message[Any]", most: int = 1 << 32) -> Form:
    """A repeated message. Entries beyond `most` are skipped."""

    def write(number: int, values: Iterable[Any]) -> bytes:
        return b"".join([protobuf_field(number, message.encode(value)) for value in values])

    def read(data: bytes, part: Part, before: list[Any] | None) -> list[Any]:
        before = [] if before is None else before
        if len(before) < most:
            before.append(message.decode(data, *sub(part)))
        return before

    return Form(write, read)


_UINT32 = (1 << 32) - 1
_TEXT, _INTEGER, _REAL = Form(text, read_text), Form(integer, read_integer), Form(double, read_double)
_INTEGER32 = Form(integer, partial(read_integer, highest=_UINT32))
_SLOT = Form(integer, partial(read_integer, highest=MAX_SLOT))
#: A count; larger values than the field can hold become its largest value.
_COUNT = Form(lambda number, value: integer(number, min(value, _UINT32)), _INTEGER.read)
_SEQUENCES = Form(lambda number, value: integer(number, value) if value > 1 else b"", _COUNT.read)
_BOOL = Form(integer, lambda data, part, _: bool(read_integer(data, part)))
_DOUBLES = Form(doubles, read_doubles)
_SLOTS = Form(lambda number, value: slots(number, value.tolist()), read_slots)


def _zigzag(data: bytes, part: Part, before: Any) -> int:
    coded = read_integer(data, part)
    return coded >> 1 ^ -(coded & 1)


_SIGNED = Form(lambda number, value: integer(number, value << 1 if value >= 0 else ~(value << 1)), _zigzag)


# ---- `Ask`: what Fairlead sends to a scheduler ----

_HELLO = Message(
    lambda version=0, **values: Hello(version=version, **values),
    version=_INTEGER32, gateway=_TEXT, pool=_TEXT, budget_us=_INTEGER32, max_endpoints=_INTEGER32,
)  # fmt: skip


def _write_labels(number: int, labels: Mapping[str, str]) -> bytes:
    return b"".join([protobuf_field(number, text(1, key) + text(2, value)) for key, value in labels.items()])


def _read_labels(data: bytes, part: Part, before: dict[str, str] | None) -> dict[str, str]:
    pair = {inner[0]: read_text(data, inner) for inner in fields(data, *sub(part)) if inner[0] in (1, 2)}
    return {**(before or {}), pair.get(1, ""): pair.get(2, "")}


def _write_adapters(number: int, names: tuple[str, ...] | None) -> bytes:
    if names is None:
        return b""
    # Not `text`: it leaves out empty values, but here an empty name is an entry.
    return protobuf_field(number, b"".join([protobuf_field(1, name.encode("utf-8", "replace")) for name in names]))


def _read_adapters(data: bytes, part: Part, before: tuple[str, ...] | None) -> tuple[str, ...]:
    names = [read_text(data, inner) for inner in fields(data, *sub(part)) if inner[0] == 1]
    return *(before or ()), *names


def _endpoint(slot: int = 0, id: str = "", **values: Any) -> EndpointState:
    if not id:
        raise ProtocolError("an endpoint without an id")
    return EndpointState(slot=slot, id=id, **values)


_LABELS, _ADAPTERS = Form(_write_labels, _read_labels), Form(_write_adapters, _read_adapters)
_ENDPOINT = Message(_endpoint, slot=_SLOT, id=_TEXT, address=_TEXT, labels=_LABELS, adapters=_ADAPTERS)


def _write_load(number: int, load: Load) -> bytes:
    where, columns = load
    if not len(where):
        return b""
    parts = [slots(1, where.tolist()), *(doubles(column, values) for column, values in columns.items())]
    return protobuf_field(number, b"".join(parts))


def _read_load(data: bytes, part: Part, before: Load | None) -> Load:
    where: Slots | None = before[0] if before else None
    columns: dict[int, Floats] = {}
    for inner in fields(data, *sub(part)):
        number = inner[0]
        if number == 1:
            where = read_slots(data, inner, where)
        elif number in COLUMNS:
            columns[number] = read_doubles(data, inner, columns.get(number))
    where = _NO_SLOTS if where is None else where
    for number, column in columns.items():
        if len(column) != len(where):
            raise ProtocolError(f"column {COLUMNS[number]} has {len(column)} entries for {len(where)} slots")
    return where, columns


_GONE = Form(slots, lambda data, part, before: [*(before or ()), *read_slots(data, part, None).tolist()])
_STATE = Message(
    lambda load=(_NO_SLOTS, {}), **values: State(slots=load[0], columns=load[1], **values),
    version=_INTEGER, full=_BOOL, endpoints=_inner_list(_ENDPOINT), gone=_GONE, load=Form(_write_load, _read_load),
    settled=_INTEGER, speeds=_inner(Message(Speeds, **dict.fromkeys(Speeds.__struct_fields__, _REAL))),
)  # fmt: skip


def _forecast(**columns: Floats) -> Forecast:
    columns = {name: columns.get(name, np.zeros(0)) for name in Forecast.__struct_fields__}
    if len({len(column) for column in columns.values()}) != 1:
        raise ProtocolError("the columns of a forecast are not parallel")
    return Forecast(**columns)


def _asked(**values: Any) -> Asked:
    about = {name: values.pop(name) for name in _OF_ASKED if name in values}
    values["sequences"] = values.get("sequences") or 1
    asked = Asked(request=Request(**{"id": 0, "api": "", "arrived": 0.0, **values}), **about)
    if len(asked.hit_slots) != len(asked.hit_shares):
        raise ProtocolError("hit_slots and hit_shares are not parallel")
    return asked


_OF_REQUEST: dict[str, Form] = {
    "id": _INTEGER, "api": _TEXT, "model": _TEXT, "stream": _BOOL, "prompt_tokens": _COUNT, "prompt_bytes": _INTEGER,
    "max_tokens": _COUNT, "priority": _SIGNED, "session": _TEXT, "fairness_id": _TEXT, "slo_ttft_ms": _REAL,
    "slo_tpot_ms": _REAL, "media": _COUNT,
}  # fmt: skip
_CANDIDATES = _inner(Message(lambda slots=_NO_SLOTS: slots, lambda slots: (slots,), slots=_SLOTS))
_OF_ASKED: dict[str, Form] = {
    "expected_output": _REAL, "hit_slots": _SLOTS, "hit_shares": _DOUBLES,
    "candidates": _CANDIDATES,
    "forecast": _inner(Message(_forecast, **dict.fromkeys(Forecast.__struct_fields__, _DOUBLES))),
    "prefill_candidates": _CANDIDATES,
}  # fmt: skip
_REQUEST = Message(
    _asked,
    attrgetter(
        *(f"request.{name}".replace(".model", ".target_model") for name in _OF_REQUEST), *_OF_ASKED, "request.sequences"
    ),
    **_OF_REQUEST,
    **_OF_ASKED,
    sequences=_SEQUENCES,
)


def _batch(now: float = 0.0, requests: Iterable[Asked] = (), **values: int) -> Batch:
    arrived = [replace(asked, request=replace(asked.request, arrived=now)) for asked in requests]
    return Batch(now=now, requests=arrived, **values)


_BATCH = Message(_batch, number=_INTEGER, now=_REAL, requests=_inner_list(_REQUEST))

_OF_ENDED: dict[str, Form] = {
    "endpoint": _TEXT, "status": _INTEGER32, "cause": _TEXT, "at": _REAL, "ttft_ms": _REAL, "duration_ms": _REAL,
    "queued_ms": _REAL, "response_bytes": _SIGNED, "prompt_tokens": _SIGNED, "completion_tokens": _SIGNED,
    "cached_tokens": _SIGNED, "hit_tokens": _INTEGER, "unreached": _TEXT,
}  # fmt: skip
#: Values of fields that are left out, where a record has others.
_NOTHING: dict[str, Any] = {
    "endpoint": "", "cause": "", "at": 0.0, "ttft_ms": 0.0, "duration_ms": 0.0, "response_bytes": 0, "prompt_tokens": 0,
    "completion_tokens": 0, "cached_tokens": 0,
}  # fmt: skip
_VALUES_OF_ENDED = attrgetter(*_OF_ENDED)


def _ended(request: Asked | None = None, **values: Any) -> OutcomeRecord:
    values = _NOTHING | values
    arrived = values["at"] - max(values["duration_ms"], 0.0) / 1e3
    return OutcomeRecord(request=replace((request or _asked()).request, arrived=arrived), **values)


def _parts_of_ended(outcome: OutcomeRecord) -> Iterable[Any]:
    return Asked(request=outcome.request), *_VALUES_OF_ENDED(outcome)


_ENDED = Message(_ended, _parts_of_ended, request=_inner(_REQUEST), **_OF_ENDED)
_ASK = Message(Ask, hello=_inner(_HELLO), state=_inner(_STATE), batch=_inner(_BATCH), ended=_inner_list(_ENDED))
#: `decode_ask` raises `ProtocolError`.
encode_ask, decode_ask = _ASK.encode, _ASK.decode


# ---- `Answer`: what a scheduler sends. The sender is not trusted: everything is bounded and checked ----

#: At most this many alternatives of one pick are kept.
MAX_ALTERNATIVES = 16
#: At most this many characters of a reason are kept.
MAX_REASON = 200


def _pick(
    request_id: int = 0, outcome: int = 0, reason: str = "", alternatives: Iterable[Any] = (), **values: Any
) -> RemotePick:
    return RemotePick(request_id, outcome, reason=reason[:MAX_REASON], alternatives=tuple(alternatives), **values)


def _read_picks(data: bytes, part: Part, before: Picks | None) -> Picks:
    if before is not None:
        raise ProtocolError("an Answer with two Picks")
    picks: Picks = _PICKS.decode(data, *sub(part))
    return picks


_WELCOME = Message(
    lambda version=0, **values: Welcome(version=version, **values),
    version=_INTEGER32, scheduler=_TEXT, policy=_TEXT, wants_forecasts=_BOOL, wants_outcomes=_BOOL,
)  # fmt: skip
_ALTERNATIVE = Message(lambda name="", score=0.0: (name, score), lambda pair: pair, name=_TEXT, score=_REAL)
_PICK = Message(
    _pick, request_id=_INTEGER, outcome=_INTEGER, endpoint=_TEXT, score=_REAL, reason=_TEXT,
    alternatives=_inner_list(_ALTERNATIVE, MAX_ALTERNATIVES), prefill=_TEXT,
)  # fmt: skip
_PICKS = Message(
    lambda batch=0, picks=(): Picks(batch=batch, picks=tuple(picks)), batch=_INTEGER, picks=_inner_list(_PICK)
)
_ANSWER = Message(Answer, welcome=_inner(_WELCOME), picks=Form(_inner(_PICKS).write, _read_picks))
#: `decode_answer` raises `ProtocolError`.
encode_answer, decode_answer = _ANSWER.encode, _ANSWER.decode
