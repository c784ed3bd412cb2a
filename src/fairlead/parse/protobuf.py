"""Reading protobuf messages of which only few fields matter, field by field, without building anything.

Unlike a generated class it takes both layouts of a message that changed its field numbers, and skips tensors of any
size for nothing. `wire` has a reader too, for the gateway's messages: that one keeps lists of all fields, here the peer
is a client, and a message of 64 MB may have 32 million of them.
"""

from collections.abc import Iterator
from typing import NamedTuple

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_MASK = (1 << 64) - 1
#: Fields looked at in one message, those inside of others included: about 30 ms. Lists of numbers are packed into one
#: field by every code generator.
MAX_FIELDS = 65536
#: Deletes the bytes that do not end a varint.
_CONTINUED = bytes(range(0x80, 0x100))


class Malformed(Exception):
    """These bytes are no message."""


class Budget:
    """How many fields may still be looked at. One for a whole message and all that is in it."""

    __slots__ = ("left",)

    def __init__(self, left: int = MAX_FIELDS) -> None:
        self.left = left


class Field(NamedTuple):
    number: int
    kind: int
    #: Of a varint: its value. Of bytes: nothing. Of the others: 0.
    value: int
    #: Where the content stands in the data.
    start: int
    end: int


def walk(data: bytes, budget: Budget, start: int = 0, end: int | None = None) -> Iterator[Field]:
    """The fields of the message `data[start:end]`, one by one. Raises `Malformed`."""
    end = len(data) if end is None else end
    while start < end:
        budget.left -= 1
        if budget.left < 0:
            raise Malformed(f"more than {MAX_FIELDS} fields")
        tag, start = varint(data, start, end)
        number, kind = tag >> 3, tag & 7
        if not number or tag >= 1 << 32:
            raise Malformed("a bad tag")
        value, begin = 0, start
        if kind == VARINT:
            value, stop = varint(data, start, end)
        elif kind == BYTES:
            size, begin = varint(data, start, end)
            stop = begin + size
        elif kind in (FIXED64, FIXED32):
            stop = start + (8 if kind == FIXED64 else 4)
        else:
            raise Malformed(f"wire type {kind}")
        if stop > end:
            raise Malformed("a field runs past its message")
        yield Field(number, kind, value, begin, stop)
        start = stop


def varint(data: bytes, start: int, end: int) -> tuple[int, int]:
    """(value, position behind it). Raises `Malformed`."""
    value = shift = 0
    while start < end and shift < 70:
        byte = data[start]
        start += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _MASK, start
        shift += 7
    raise Malformed("a bad varint")


def packed(data: bytes, start: int, end: int) -> int:
    """How many varints are packed into `data[start:end]`. Raises `Malformed`."""
    if start < end and data[end - 1] >= 0x80:
        raise Malformed("a packed list breaks off")
    return len(data[start:end].translate(None, _CONTINUED))
