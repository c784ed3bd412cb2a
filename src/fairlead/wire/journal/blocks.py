"""A segment is a magic line and blocks; a block is a few records under one checksum.

    segment = b"fairlead journal 1\\n" block*
    block   = sync (4 bytes) · length (u32 LE) · crc32 (u32 LE) · packing (1 byte: 0 plain, 1 zlib) · length bytes

Rules
* The checksum covers packing and content. A writer can be killed at any byte: what is not whole and right is skipped,
  counted, and reading goes on at the next sync that begins a good block. So a torn end costs the last block, and a bad
  sector costs the blocks that it touches.
* Nothing in a file is believed: lengths are bounded, and content never unpacks to more than `MAX_CONTENT`.
* A reader may come while a writer is at work: an unfinished block at the end is not damage, it is not there yet.
"""

import struct
import zlib
from collections.abc import Iterator

from msgspec import Struct

MAGIC = b"fairlead journal 1\n"
SYNC = b"\xf7jB\x01"
_HEAD = struct.Struct("<4sIIB")
#: Bytes of a block before its content.
OVERHEAD = _HEAD.size
#: Of a block as it stands in the file, and unpacked. What writers make is a hundredth of that.
MAX_BLOCK = 64 << 20
MAX_CONTENT = 256 << 20
_PLAIN, _ZLIB = 0, 1
#: Fast: 1 costs a third of the usual 6 and packs journals almost as well.
_LEVEL = 1


class Damage(Struct, frozen=True):
    """Bytes that hold no good block. At the very end of a segment: a writer's last, unfinished one."""

    offset: int
    size: int
    at_end: bool


def block(content: bytes | bytearray, pack: bool = True) -> bytes:
    """One block. Releases the interpreter's lock while it packs."""
    packing = _PLAIN
    if pack:
        packed = zlib.compress(content, _LEVEL)
        if len(packed) < len(content):
            packing, content = _ZLIB, packed
    crc = zlib.crc32(content, zlib.crc32(bytes([packing])))
    return _HEAD.pack(SYNC, len(content), crc, packing) + content


def blocks(data: bytes) -> Iterator[tuple[int, bytes] | Damage]:
    """(offset, content) of every good block of a segment, in order, and the damage between them."""
    at = len(MAGIC) if data.startswith(MAGIC) else 0
    bad = -1
    while at < len(data):
        found = _block_at(data, at)
        if found is None:
            bad = at if bad < 0 else bad
            at = _next_sync(data, at + 1)
            continue
        if bad >= 0:
            yield Damage(bad, at - bad, False)
            bad = -1
        content, end = found
        yield at, content
        at = end
    if bad >= 0:
        yield Damage(bad, len(data) - bad, True)


def _next_sync(data: bytes, start: int) -> int:
    found = data.find(SYNC, start)
    return len(data) if found < 0 else found


def _block_at(data: bytes, at: int) -> tuple[bytes, int] | None:
    """(content, where it ends) of the good block that begins here."""
    if len(data) - at < OVERHEAD:
        return None
    sync, length, crc, packing = _HEAD.unpack_from(data, at)
    start, end = at + OVERHEAD, at + OVERHEAD + length
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
