"""The index as bytes, so that a restarted process starts warm.

Rules
* A rank is named by its endpoint's id, since slots change. With its blocks go the sequence number and time stamp up to
  which they are true, so that its feed can ask the engine for what came after.
* What is loaded is provisional until events confirm it.
* Damaged bytes, or those of another version or key space, raise `ValueError` and load nothing. Blocks of endpoints that
  are not there any more are left out.
* Neither direction takes long at a time: one step saves or loads one segment (at most 1,024 blocks).
"""

from collections.abc import Callable, Iterator, Mapping

import msgspec
import numpy as np
from msgspec import Struct
from xxhash import xxh3_64_digest

from fairlead.core.kv.cache import RankCache, Shelf
from fairlead.core.kv.index import KvIndex
from fairlead.core.kv.tiers import Tier

_MAGIC = b"fairlead-kv-1\n"
#: Blocks that are entered at once: 0.3 ms.
_STEP = 128


class Place(Struct, frozen=True):
    """Up to where a rank's blocks are true."""

    last: int = -1
    last_ts: float = 0.0


class _ShelfPart(Struct, array_like=True):
    """Some blocks of one shelf: columns of little-endian numbers, one entry per block."""

    endpoint: str
    rank: int
    model: str
    group: int
    tier: int
    kind: str
    last: int
    last_ts: float
    hashes: bytes
    keys: bytes
    copies: bytes
    depths: bytes
    #: Tokens per block; 0 = not known.
    block_size: int = 0


class _Snapshot(Struct, array_like=True):
    space: str
    parts: list[_ShelfPart]


def save(index: KvIndex, endpoints: Mapping[int, str], places: Callable[[RankCache], Place]) -> Iterator[bytes]:
    """The snapshot, in pieces to be joined. `endpoints`: slot to endpoint id; `places`: where a rank's feed stands.

    Ranks that change while this goes on are saved partly as before and partly as after; their replay repairs it, since
    their place is taken before their blocks.
    """
    yield _MAGIC
    parts: list[bytes] = []
    for cache in list(index.caches()):
        if cache.slot not in endpoints:
            continue
        place = places(cache)
        for shelf in list(cache.shelves.values()):
            for segment in range(shelf.table.segments):
                part = _part(index, endpoints[cache.slot], shelf, segment, place)
                if part is not None:
                    parts.append(msgspec.msgpack.encode(part))
                    yield b""
    head = msgspec.msgpack.encode(index.space.name)
    content = b"\x92" + head + b"\xdd" + len(parts).to_bytes(4, "big") + b"".join(parts)
    yield xxh3_64_digest(content)
    yield content


def _part(index: KvIndex, endpoint: str, shelf: Shelf, segment: int, place: Place) -> _ShelfPart | None:
    hashes, positions = shelf.table.of_segment(segment)
    if not len(positions):
        return None
    keys = shelf.table.vectors[0][positions]
    cache = shelf.cache
    depths = index.blocks.table.vectors[1][index.blocks.table.find_many(keys)]
    return _ShelfPart(
        endpoint,
        cache.rank,
        cache.model,
        shelf.group,
        int(shelf.tier),
        cache.kinds.get(shelf.group, ""),
        place.last,
        place.last_ts,
        hashes.astype("<u8").tobytes(),
        keys.astype("<u8").tobytes(),
        shelf.table.vectors[1][positions].astype("<u2").tobytes(),
        depths.astype("<u2").tobytes(),
        shelf.cache.block_size,
    )


def load(
    index: KvIndex, content: bytes, slots: Mapping[str, int], place: Callable[[RankCache, Place], None]
) -> Iterator[int]:
    """Enter a snapshot into an index that has the slots. Yields blocks entered per step.

    `place` is told for each rank where its feed should go on. Raises `ValueError` before the first step.
    """
    parts = _read(index, content)
    return _enter(index, parts, slots, place)


class Shelved:
    """A snapshot whose endpoints come one by one. Raises `ValueError` for bytes that are none."""

    def __init__(self, index: KvIndex, content: bytes) -> None:
        self._index = index
        self._parts: dict[str, list[_ShelfPart]] = {}
        for part in _read(index, content):
            self._parts.setdefault(part.endpoint, []).append(part)

    def enter(self, endpoint: str, slot: int, place: Callable[[RankCache, Place], None]) -> Iterator[int]:
        """`load` for one endpoint, which can be done once."""
        return _enter(self._index, self._parts.pop(endpoint, []), {endpoint: slot}, place)


def _read(index: KvIndex, content: bytes) -> list[_ShelfPart]:
    start = len(_MAGIC) + 8
    if not content.startswith(_MAGIC):
        raise ValueError("no snapshot of a KV index, or one of another version")
    if xxh3_64_digest(content[start:]) != content[len(_MAGIC) : start]:
        raise ValueError("the snapshot of the KV index is damaged: its checksum is wrong")
    try:
        snapshot = msgspec.msgpack.decode(content[start:], type=_Snapshot)
    except msgspec.DecodeError as error:
        raise ValueError(f"the snapshot of the KV index is damaged: {error}") from None
    if snapshot.space != index.space.name:
        raise ValueError(f"the snapshot has keys of {snapshot.space}, this index of {index.space.name}")
    for part in snapshot.parts:
        blocks = len(part.hashes) // 8
        sizes = (len(part.hashes), len(part.keys), len(part.copies) * 4, len(part.depths) * 4)
        if set(sizes) != {blocks * 8} or part.tier not in list(Tier):
            raise ValueError("the snapshot of the KV index is damaged: columns of unequal length")
    return snapshot.parts


def _enter(
    index: KvIndex, parts: list[_ShelfPart], slots: Mapping[str, int], place: Callable[[RankCache, Place], None]
) -> Iterator[int]:
    for part in parts:
        slot = slots.get(part.endpoint)
        if slot is None:
            continue
        cache = index.rank(slot, part.rank, part.model)
        cache.provisional = True
        cache.indexable(part.group, part.kind)
        cache.block_size = cache.block_size or max(part.block_size, 0)
        place(cache, Place(part.last, part.last_ts))
        shelf = index.shelf(cache, part.group, Tier(part.tier))
        hashes = np.frombuffer(part.hashes, "<u8").tolist()
        keys = np.frombuffer(part.keys, "<u8").tolist()
        copies = np.frombuffer(part.copies, "<u2").tolist()
        depths = np.frombuffer(part.depths, "<u2").tolist()
        for start in range(0, len(hashes), _STEP):
            for entry in range(start, min(start + _STEP, len(hashes))):
                index.restore(shelf, hashes[entry], keys[entry], depths[entry], copies[entry])
            yield min(_STEP, len(hashes) - start)
