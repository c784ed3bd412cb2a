"""Single values of KV events: hashes, token ids, extra keys, as engines of different age write them."""

import re
import sys
from array import array
from typing import Any

import msgspec

_MASK = (1 << 64) - 1
_NIL = 0xC0
_INTS = msgspec.msgpack.Decoder(list[int])
_ANY = msgspec.msgpack.Decoder()
#: Up to that many bytes, token ids are decoded at once: 5,000 ids in 0.2 ms.
_AT_ONCE = 16_384
#: One non-negative integer of up to 32 bits, in any of msgpack's sizes.
_TOKEN = rb"(?:[\x00-\x7f]|\xcc.|\xcd..|\xce....|\xd2[\x00-\x7f]...|\xcf\x00\x00\x00\x00....)"
#: `re` compiles a pattern per repeat count: chunks of one size, and single ids for the rest.
_CHUNK = 2048
_CHUNK_PATTERN = re.compile(_TOKEN + b"{%d}" % _CHUNK, re.DOTALL)
_REST_PATTERN = re.compile(_TOKEN + b"{0,%d}" % _CHUNK, re.DOTALL)
_CHUNK_HEAD = b"\xdc" + _CHUNK.to_bytes(2, "big")


def hash_of(value: int | bytes) -> int:
    """A block hash as an unsigned 64-bit pattern; of byte strings the last 8 bytes, big-endian. 0 = none."""
    if isinstance(value, bytes):
        return int.from_bytes(value[-8:], "big")
    if not -1 << 63 <= value <= _MASK:
        raise ValueError(f"block hash {value} has more than 64 bits")
    return value & _MASK


def hashes_of(values: list[int | bytes]) -> list[int]:
    """`hash_of` for a list; a list of unsigned integers is returned as it is."""
    if not values:
        return []
    try:
        if min(values) >= 0:  # type: ignore[operator]
            return values  # type: ignore[return-value]
    except TypeError:
        pass
    return [hash_of(value) for value in values]


def tokens_of(raw: bytes) -> "bytes | RawTokens":
    """Token ids from their msgpack array: little-endian 32-bit integers, or, if they are many, a stream of those.

    Raises `ValueError` for what is no array of 32-bit unsigned integers; of a stream it is found out while reading.
    """
    if len(raw) > _AT_ONCE:
        return RawTokens(raw)
    return _packed(raw)


def _packed(raw: bytes) -> bytes:
    try:
        ids = array("I", _INTS.decode(raw))
    except (OverflowError, msgspec.DecodeError) as error:
        raise ValueError(f"token_ids: {error}") from None
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


class RawTokens:
    """Token ids that are decoded some thousand at a time (a million at once would take 50 ms)."""

    def __init__(self, raw: bytes) -> None:
        """`raw`: a msgpack array. Raises `ValueError` when it is none."""
        kind = raw[0]
        if kind == 0xDC:
            self._count, self._at = int.from_bytes(raw[1:3], "big"), 3
        elif kind == 0xDD:
            self._count, self._at = int.from_bytes(raw[1:5], "big"), 5
        elif kind & 0xF0 == 0x90:
            self._count, self._at = kind & 0x0F, 1
        else:
            raise ValueError("token_ids is no array")
        self._raw = raw
        self._ready = b""

    def __len__(self) -> int:
        return self._count

    def take(self, count: int) -> bytes:
        """The next `count` token ids as LE32. Raises `ValueError` when there are fewer, or something else."""
        while len(self._ready) < 4 * count:
            self._ready += self._more()
        taken, self._ready = self._ready[: 4 * count], self._ready[4 * count :]
        return taken

    def _more(self) -> bytes:
        match = _CHUNK_PATTERN.match(self._raw, self._at)
        head = _CHUNK_HEAD
        if match is None:
            match = _REST_PATTERN.match(self._raw, self._at)
            assert match is not None
            if match.end() == self._at or match.end() < len(self._raw):
                raise ValueError("token_ids: not only 32-bit token ids")
            # Less than a chunk is left. How many ids that is shows only when they are taken one by one.
            self._at = len(self._raw)
            return b"".join(_packed(b"\x91" + one) for one in re.findall(_TOKEN, match.group(), re.DOTALL))
        self._at = match.end()
        return _packed(head + match.group())


def extras_of(raw: bytes, lora: str | None) -> list[tuple[str, ...]] | None:
    """Extra keys per block, without the adapter's name, which vLLM puts first; `None` when there are none.

    Raises `ValueError` for anything but a list with one list (or nil) per block.
    """
    start = 1 if raw[0] & 0xF0 == 0x90 else 3
    if raw[0] == _NIL or raw.count(b"\xc0", start) == len(raw) - start:
        return None
    try:
        blocks = _ANY.decode(raw)
    except msgspec.DecodeError as error:
        raise ValueError(f"extra_keys: {error}") from None
    if not isinstance(blocks, list) or not all(block is None or isinstance(block, list) for block in blocks):
        raise ValueError("extra_keys is no list of lists")
    extras = []
    for block in blocks:
        entries = [_extra(entry) for entry in block or ()]
        if lora and entries and entries[0] == lora:
            del entries[0]
        extras.append(tuple(entries))
    return extras if any(extras) else None


def _extra(entry: Any) -> str:
    """An identifier: bare, or first in [identifier, offset] of older versions."""
    if isinstance(entry, list) and entry:
        entry = entry[0]
    if isinstance(entry, str):
        return entry
    if isinstance(entry, bytes):
        return entry.hex()
    if isinstance(entry, int):
        return str(entry)
    raise ValueError(f"extra_keys: {type(entry).__name__} is no identifier")
