"""Scalar and packed fields of `fairlead.scheduler.v1`, on top of `wire.protobuf`.

Encoders leave defaults out, as proto3 does. Decoders take packed and unpacked lists, as the specification asks, refuse
what cannot be meant (NaN where a number must order things is the receiver's matter), and never allocate more than the
message has bytes.
"""

import struct
from collections.abc import Iterable

import numpy as np

from fairlead.model.errors import ProtocolError
from fairlead.wire.protobuf import field, read_varint, varint
from fairlead.wire.scheduler import MAX_SLOT, Floats, Slots, as_floats

#: One field as `protobuf.fields` gives it.
Part = tuple[int, int, int]
_DOUBLE = struct.Struct("<d")


def text(number: int, value: str) -> bytes:
    return field(number, value.encode("utf-8", "replace")) if value else b""


def integer(number: int, value: int) -> bytes:
    """A non-negative integer."""
    return varint(number << 3) + varint(value) if value else b""


def double(number: int, value: float) -> bytes:
    return varint(number << 3 | 1) + _DOUBLE.pack(value) if value else b""


def doubles(number: int, values: Floats) -> bytes:
    """A packed list; nothing for an empty one."""
    return field(number, as_floats(values).tobytes()) if len(values) else b""


def slots(number: int, values: Iterable[int]) -> bytes:
    packed = b"".join([varint(value) for value in values])
    return field(number, packed) if packed else b""


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
        found = np.array([read_double(part)])
    elif (end - start) % 8:
        raise ProtocolError("a packed list of doubles is cut off")
    else:
        found = np.frombuffer(data, "<f8", (end - start) // 8, start)
        if np.isnan(found).any():
            raise ProtocolError("a column has entries that are no numbers")
    return found if before is None else np.concatenate((before, found))


def read_slots(data: bytes, part: Part, before: Slots | None) -> Slots:
    _, start, end = part
    if end < 0:
        found = [start]
    else:
        found = []
        while start < end:
            value = data[start]
            start += 1
            if value > 0x7F:
                value, start = read_varint(data, start - 1, end)
            found.append(value)
    if found and max(found) > MAX_SLOT:
        raise ProtocolError(f"slot {max(found)} is above {MAX_SLOT}")
    column = np.array(found, dtype=np.intp)
    return column if before is None else np.concatenate((before, column))


def sub(part: Part) -> tuple[int, int]:
    """Where a sub-message stands."""
    if part[2] < 0:
        raise ProtocolError("a message field is not a message")
    return part[1], part[2]
