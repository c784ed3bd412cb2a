"""The segments and blocks of a journal as bytes, and (at the end) the fields that it keeps of the pipeline's records.

    segment = b"fairlead journal 1\\n" block*        a block is a few records with one checksum
    block   = sync (4 bytes) · length (u32 LE) · crc32 (u32 LE) · packing (1 byte: 0 plain, 1 zlib) · length bytes

Rules
* The checksum covers packing and content. A writer can be killed at any byte. Readers skip and count bytes that are not
  a complete, correct block, and continue at the next sync that begins a good block. So a torn end loses only the last
  block, and a bad sector only the blocks in it.
* Nothing in a file is trusted: lengths are bounded, and content never unpacks to more than `MAX_CONTENT`.
* A file may be read while it is written, so an unfinished block at the end is not an error.
"""

import struct
import zlib
from collections.abc import Iterator
from operator import attrgetter

from msgspec import Struct

from fairlead.core.records import DecisionRecord, OutcomeRecord
from fairlead.server.journal.records import Decided, Ended

MAGIC = b"fairlead journal 1\n"
SYNC = b"\xf7jB\x01"
_HEAD = struct.Struct("<4sIIB")
#: Bytes of a block before its content.
OVERHEAD = _HEAD.size
#: The most bytes of a block in the file, and unpacked. Writers make blocks of less than a hundredth of that.
MAX_BLOCK = 64 << 20
MAX_CONTENT = 256 << 20
_PLAIN, _ZLIB = 0, 1
#: zlib's level 1 takes a third of the time of the usual level 6, and packs journals almost as well.
_LEVEL = 1


class Damage(Struct, frozen=True):
    """Bytes that are no good block. `at_end`: they are at the end of the segment, so they may be a block that the
    writer has not finished."""

    offset: int
    size: int
    at_end: bool


def block(content: bytes | bytearray, pack: bool = True) -> bytes:
    """Make one block. Packing releases the interpreter lock."""
    packing = _PLAIN
    if pack:
        packed = zlib.compress(content, _LEVEL)
        if len(packed) < len(content):
            packing, content = _ZLIB, packed
    crc = zlib.crc32(content, zlib.crc32(bytes([packing])))
    return _HEAD.pack(SYNC, len(content), crc, packing) + content


def blocks(data: bytes) -> Iterator[tuple[int, bytes] | Damage]:
    """(offset, content) of every good block of a segment, in order, and the damage between them."""
    offset = len(MAGIC) if data.startswith(MAGIC) else 0
    bad = -1
    while offset < len(data):
        block = _block_at(data, offset)
        if block is None:
            bad = offset if bad < 0 else bad
            start = offset + 1
            position = data.find(SYNC, start)
            offset = len(data) if position < 0 else position
            continue
        if bad >= 0:
            yield Damage(bad, offset - bad, False)
            bad = -1
        content, end = block
        yield offset, content
        offset = end
    if bad >= 0:
        yield Damage(bad, len(data) - bad, True)


def _block_at(data: bytes, offset: int) -> tuple[bytes, int] | None:
    """(content, end offset) of the good block that begins at `offset`; `None` = there is none."""
    if len(data) - offset < OVERHEAD:
        return None
    sync, length, crc, packing = _HEAD.unpack_from(data, offset)
    start, end = offset + OVERHEAD, offset + OVERHEAD + length
    if sync != SYNC or length > MAX_BLOCK or end > len(data) or packing not in (_PLAIN, _ZLIB):
        return None
    content = memoryview(data)[start:end]
    if zlib.crc32(content, zlib.crc32(bytes([packing]))) != crc:
        return None
    if packing == _PLAIN:
        return bytes(content), end
    unpacker = zlib.decompressobj()
    try:
        plain = unpacker.decompress(content, MAX_CONTENT)
    except zlib.error:
        return None
    return (plain, end) if unpacker.eof else None


# From records of the pipeline to records of the journal.

_GOLDEN = 0x9E3779B97F4A7C15


def sampled(request_id: int, share: float) -> bool:
    """Whether the journal has the reasons of this decision. `share` (0..1) of the decisions are selected by their
    request number, the same ones in every process."""
    return share >= 1.0 or (request_id * _GOLDEN & 0xFFFFFFFFFFFFFFFF) < share * 2.0**64


#: The journal's fields in the pipeline's records, in the order of `Decided` and `Ended`.
_DECIDED = attrgetter(
    *("request.id", "endpoint", "outcome", "status", "prefill", "hit_tokens", "best_hit_tokens", "overloaded"),
    *("queued_ms", "policy", "address", "forecast", "request.target", "request.rewritten_by", "request.priority"),
    "asked_ms",
)
_ENDED = attrgetter("request.id", *Ended.__struct_fields__[1:])


def decided(record: DecisionRecord) -> Decided:
    return Decided(*_DECIDED(record))


def ended(record: OutcomeRecord) -> Ended:
    return Ended(*_ENDED(record))
