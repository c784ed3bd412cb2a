"""Messages of `fairlead.scheduler.v1` as values; the contract is `proto/fairlead/scheduler/v1/scheduler.proto`.

`scheduler_ask` and `scheduler_answer` turn them into bytes and back.
"""

import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from fairlead.core.errors import ProtocolError
from fairlead.core.events import RemotePick
from fairlead.core.request import Request
from fairlead.gateway.protobuf import field as protobuf_field
from fairlead.gateway.protobuf import fields, read_varint, varint

VERSION = 1
#: gRPC path of the stream.
PATH = "/fairlead.scheduler.v1.Scheduler/Schedule"

Floats = NDArray[np.float64]
Slots = NDArray[np.intp]

#: Columns of `Load` by field number; names as in `fleet.table`, the last four as in `fleet.predictor`.
COLUMNS: Mapping[int, str] = {
    2: "waiting",
    3: "running",
    4: "kv",
    5: "queue",
    6: "active",
    7: "inflight",
    8: "pending",
    9: "pending_tokens",
    10: "queued_tokens",
    11: "queued_ms",
    12: "prefill_since_ms",
    13: "kv_tokens",
    14: "growth_tokens",
    15: "sampled_at",
    16: "failures",
    17: "errors",
    18: "ejected_until",
    19: "max_adapters",
    20: "capacity_tokens",
    21: "prefill_factor",
    22: "step_factor",
    23: "ttft_factor",
    24: "tpot_factor",
}
#: Highest slot that is taken from a peer: columns are as long as the highest one.
MAX_SLOT = 65_535

_NO_SLOTS: Slots = np.zeros(0, dtype=np.intp)


class Hello(Struct, frozen=True, kw_only=True):
    version: int = VERSION
    gateway: str = ""
    pool: str = ""
    budget_us: int = 0


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
    #: Slots whose columns changed, and those columns by field number, parallel to it.
    slots: Slots = field(default_factory=lambda: _NO_SLOTS)
    columns: dict[int, Floats] = field(default_factory=dict)
    settled: int = 0
    speeds: Speeds | None = None


class Forecast(Struct, kw_only=True):
    """One entry per slot, milliseconds; `used` is a share of the KV memory."""

    ttft_ms: Floats
    prefill_ms: Floats
    step_ms: Floats
    used: Floats


class Asked(Struct, kw_only=True):
    """One request of a batch, with what is known about it at endpoints."""

    request: Request
    expected_output: float = 0.0
    hit_slots: Slots = field(default_factory=lambda: _NO_SLOTS)
    hit_shares: Floats = field(default_factory=lambda: np.zeros(0))
    #: `None` = every endpoint can serve it.
    candidates: Slots | None = None
    forecast: Forecast | None = None


class Batch(Struct, kw_only=True):
    number: int = 0
    now: float = 0.0
    requests: list[Asked] = field(default_factory=list)


class Ask(Struct, kw_only=True):
    hello: Hello | None = None
    state: State | None = None
    batch: Batch | None = None


class Welcome(Struct, frozen=True, kw_only=True):
    version: int = VERSION
    scheduler: str = ""
    policy: str = ""
    wants_forecasts: bool = False


class Picks(Struct, frozen=True, kw_only=True):
    batch: int = 0
    picks: tuple[RemotePick, ...] = ()


class Answer(Struct, frozen=True, kw_only=True):
    welcome: Welcome | None = None
    picks: Picks | None = None


def as_floats(values: Any) -> Floats:
    """A column of doubles as protobuf packs them."""
    return np.ascontiguousarray(values, dtype="<f8")


# Scalar and packed fields of `fairlead.scheduler.v1`, on top of `gateway.protobuf`.
#
# Encoders leave defaults out, as proto3 does. Decoders take packed and unpacked lists, as the specification asks,
# refuse what cannot be meant (NaN where a number must order things is the receiver's matter), and never allocate more
# than the message has bytes.

#: One field as `protobuf.fields` gives it.
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
    """A packed list; nothing for an empty one."""
    return protobuf_field(number, as_floats(values).tobytes()) if len(values) else b""


def slots(number: int, values: Iterable[int]) -> bytes:
    packed = b"".join([varint(value) for value in values])
    return protobuf_field(number, packed) if packed else b""


def read_text(data: bytes, part: Part) -> str:
    """Raises `ProtocolError` for another kind of field and for what is not UTF-8, as proto3 asks."""
    _, start, end = part
    if end < 0:
        raise ProtocolError("a text field is not a text")
    try:
        return data[start:end].decode()
    except UnicodeDecodeError:
        raise ProtocolError("a text field is not UTF-8") from None


def read_integer(part: Part, highest: int = (1 << 64) - 1) -> int:
    if part[2] >= 0 or part[1] > highest:
        raise ProtocolError("an integer field is out of range")
    return part[1]


def read_double(part: Part) -> float:
    """A finite or infinite number; NaN is refused."""
    if part[2] >= 0:
        raise ProtocolError("a number field is not a number")
    value: float = _DOUBLE.unpack(part[1].to_bytes(8, "little"))[0]
    if value != value:
        raise ProtocolError("a number field is not a number")
    return value


def read_doubles(data: bytes, part: Part, before: Floats | None) -> Floats:
    """A packed run, or one entry, put behind what came before."""
    _, start, end = part
    if end < 0:
        values = np.array([read_double(part)])
    elif (end - start) % 8:
        raise ProtocolError("a packed list of doubles is cut off")
    else:
        values = np.frombuffer(data, "<f8", (end - start) // 8, start)
        if np.isnan(values).any():
            raise ProtocolError("a column has entries that are no numbers")
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
    """Where a sub-message stands."""
    if part[2] < 0:
        raise ProtocolError("a message field is not a message")
    return part[1], part[2]


# `Answer`: what a scheduler says. It comes from anybody: everything is bounded, nothing is believed yet.

#: Alternatives of one pick that are kept.
MAX_ALTERNATIVES = 16
#: Characters of a reason that are kept.
MAX_REASON = 200
_UINT32 = (1 << 32) - 1


def encode_answer(answer: Answer) -> bytes:
    parts = []
    if answer.welcome is not None:
        welcome = answer.welcome
        parts.append(
            protobuf_field(
                1,
                integer(1, welcome.version)
                + text(2, welcome.scheduler)
                + text(3, welcome.policy)
                + integer(4, welcome.wants_forecasts),
            )
        )
    if answer.picks is not None:
        picks = [protobuf_field(2, _pick(pick)) for pick in answer.picks.picks]
        parts.append(protobuf_field(2, integer(1, answer.picks.batch) + b"".join(picks)))
    return b"".join(parts)


def _pick(pick: RemotePick) -> bytes:
    parts = [
        integer(1, pick.request_id),
        integer(2, pick.outcome),
        text(3, pick.endpoint),
        double(4, pick.score),
        text(5, pick.reason),
        *(protobuf_field(6, text(1, name) + double(2, score)) for name, score in pick.alternatives),
        text(7, pick.prefill),
    ]
    return b"".join(parts)


def decode_answer(data: bytes) -> Answer:
    """Raises `ProtocolError` for anything malformed; unknown fields and outcomes are kept out."""
    welcome: Welcome | None = None
    picks: Picks | None = None
    for part in fields(data):
        if part[0] == 1:
            welcome = _read_welcome(data, *sub(part))
        elif part[0] == 2:
            if picks is not None:
                raise ProtocolError("an Answer with two Picks")
            picks = _read_picks(data, *sub(part))
    return Answer(welcome=welcome, picks=picks)


def _read_welcome(data: bytes, pos: int, end: int) -> Welcome:
    version, scheduler, policy, wants = 0, "", "", False
    for part in fields(data, pos, end):
        if part[0] == 1:
            version = read_integer(part, _UINT32)
        elif part[0] == 2:
            scheduler = read_text(data, part)
        elif part[0] == 3:
            policy = read_text(data, part)
        elif part[0] == 4:
            wants = bool(read_integer(part))
    return Welcome(version=version, scheduler=scheduler, policy=policy, wants_forecasts=wants)


def _read_picks(data: bytes, pos: int, end: int) -> Picks:
    batch = 0
    picks: list[RemotePick] = []
    for part in fields(data, pos, end):
        if part[0] == 1:
            batch = read_integer(part)
        elif part[0] == 2:
            picks.append(_read_pick(data, *sub(part)))
    return Picks(batch=batch, picks=tuple(picks))


def _read_pick(data: bytes, pos: int, end: int) -> RemotePick:
    request = outcome = 0
    endpoint = reason = prefill = ""
    score = 0.0
    alternatives: list[tuple[str, float]] = []
    for part in fields(data, pos, end):
        number = part[0]
        if number == 1:
            request = read_integer(part)
        elif number == 2:
            outcome = read_integer(part)
        elif number == 3:
            endpoint = read_text(data, part)
        elif number == 4:
            score = read_double(part)
        elif number == 5:
            reason = read_text(data, part)[:MAX_REASON]
        elif number == 6 and len(alternatives) < MAX_ALTERNATIVES:
            alternatives.append(_read_alternative(data, *sub(part)))
        elif number == 7:
            prefill = read_text(data, part)
    return RemotePick(request, outcome, endpoint, score, reason, tuple(alternatives), prefill)


def _read_alternative(data: bytes, pos: int, end: int) -> tuple[str, float]:
    name, score = "", 0.0
    for part in fields(data, pos, end):
        if part[0] == 1:
            name = read_text(data, part)
        elif part[0] == 2:
            score = read_double(part)
    return name, score
