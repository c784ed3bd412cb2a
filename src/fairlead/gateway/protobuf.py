"""Enough protobuf for frequent messages: the fields of a message, and google.protobuf.Struct, read and written.

The messages are small and have a fixed shape. Walking them by hand costs a third of a generated parser and reads only
the fields that are needed. Malformed messages raise `ProtocolError`; unknown fields are skipped.
"""

import struct

from fairlead.core.errors import ProtocolError

#: Wire types (protobuf encoding specification): varint, 64-bit, length-delimited, 32-bit.
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
#: Ten bytes can hold 70 bits, of which only 64 count.
_MASK = (1 << 64) - 1


def varint(value: int) -> bytes:
    """Encode a non-negative integer."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, payload: bytes) -> bytes:
    """Encode a length-delimited field: string, bytes or submessage."""
    return varint(number << 3 | BYTES) + varint(len(payload)) + payload


def number(number: int, value: int) -> bytes:
    """Encode a varint field, even if it is 0."""
    return varint(number << 3) + varint(value)


def read_varint(data: bytes, pos: int, end: int) -> tuple[int, int]:
    """Read a varint; return its value and the offset behind it."""
    if end - pos > 1:  # nearly all varints have one or two bytes
        value, more = data[pos], data[pos + 1]
        if value < 0x80:
            return value, pos + 1
        if more < 0x80:
            return value & 0x7F | more << 7, pos + 2
    value = shift = 0
    while pos < end:
        byte = data[pos]
        pos += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _MASK, pos
        shift += 7
        if shift > 63:
            break
    raise ProtocolError("malformed protobuf: bad varint")


def walk(data: bytes, pos: int, end: int) -> list[tuple[int, int, int]]:
    """(field number, start, end) of the length-delimited fields of a message. Other fields are skipped."""
    return [part for part in fields(data, pos, end) if part[2] >= 0]


def fields(data: bytes, pos: int = 0, end: int | None = None) -> list[tuple[int, int, int]]:
    """Walk a message: (field number, start, end) for length-delimited fields, (number, value, -1) for others.

    Returns a list, not a generator: these messages have few fields, and resuming costs more than appending.
    """
    if end is None:
        end = len(data)
    out: list[tuple[int, int, int]] = []
    while pos < end:
        tag = data[pos]
        pos += 1
        if tag > 0x7F:
            tag, pos = read_varint(data, pos - 1, end)
        if not 8 <= tag < 1 << 32:
            raise ProtocolError("malformed protobuf: bad tag")
        kind = tag & 7
        if kind == BYTES:
            if pos >= end:
                raise ProtocolError("malformed protobuf: truncated")
            size = data[pos]
            pos += 1
            if size > 0x7F:
                size, pos = read_varint(data, pos - 1, end)
            stop = pos + size
            if stop > end:
                raise ProtocolError("malformed protobuf: a field runs past its message")
            out.append((tag >> 3, pos, stop))
            pos = stop
        elif kind == VARINT:
            value, pos = read_varint(data, pos, end)
            out.append((tag >> 3, value, -1))
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
            if pos + size > end:
                raise ProtocolError("malformed protobuf: truncated")
            out.append((tag >> 3, int.from_bytes(data[pos : pos + size], "little"), -1))
            pos += size
        else:
            raise ProtocolError(f"malformed protobuf: wire type {kind}")
    return out


#: The values of google.protobuf.Struct that are read and written.
Json = str | float | bool | None | list["Json"] | dict[str, "Json"]

#: Deeper nesting is refused. Hints and attributes need two levels.
MAX_DEPTH = 16


def read_struct(data: bytes, pos: int, end: int, depth: int = 0) -> dict[str, Json]:
    """Decode google.protobuf.Struct."""
    if depth > MAX_DEPTH:
        raise ProtocolError("a Struct is nested too deeply")
    out: dict[str, Json] = {}
    for _, start, stop in fields(data, pos, end):
        if stop < 0:
            continue
        key, value = "", None
        for number_, a, b in fields(data, start, stop):
            if number_ == 1 and b >= 0:
                key = data[a:b].decode("utf-8", "replace")
            elif number_ == 2 and b >= 0:
                value = _read_value(data, a, b, depth)
        out[key] = value
    return out


def _read_value(data: bytes, pos: int, end: int, depth: int) -> Json:
    for number_, a, b in fields(data, pos, end):
        if number_ == 2 and b < 0:  # double, little-endian bits
            return float(struct.unpack("<d", a.to_bytes(8, "little"))[0])
        if number_ == 3 and b >= 0:
            return data[a:b].decode("utf-8", "replace")
        if number_ == 4 and b < 0:
            return bool(a)
        if number_ == 5 and b >= 0:
            return read_struct(data, a, b, depth + 1)
        if number_ == 6 and b >= 0:
            if depth > MAX_DEPTH:
                raise ProtocolError("a list is nested too deeply")
            return [_read_value(data, x, y, depth + 1) for n, x, y in fields(data, a, b) if n == 1 and y >= 0]
    return None


def string_struct(entries: dict[str, bytes]) -> bytes:
    """Encode a Struct whose values are all strings (UTF-8 bytes)."""
    return b"".join(field(1, field(1, key.encode()) + field(2, field(3, value))) for key, value in entries.items())


def nested_struct(key: str, inner: bytes) -> bytes:
    """Encode a Struct with one key, whose value is an encoded Struct."""
    return field(1, field(1, key.encode()) + field(2, field(5, inner)))
