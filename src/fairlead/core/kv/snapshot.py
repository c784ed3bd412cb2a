"""Saves and loads the index, so that a restarted process starts warm.

Rules
* A rank is identified by its endpoint's id, since slots change. Its blocks are saved with the sequence number and time
  stamp up to which they are valid, so that its feed can ask the engine for later events.
* Loaded blocks are provisional until events confirm them, and for longer if they were already when they were saved.
* Blocks without such a number are neither saved nor loaded: nothing would ever remove those of a dead engine.
* Damaged bytes, or those of another version or key space, raise `ValueError` and load nothing. Blocks of endpoints that
  are no longer in the pool are left out.
* Both directions work in short steps. A held rank's events wait, so its blocks are only copied meanwhile. Only decoding
  the bytes takes 20 ms per million blocks at once.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import islice

import msgspec
import numpy as np
from msgspec import Struct
from xxhash import xxh3_64, xxh3_64_digest

from fairlead.core.kv.cache import MOST_COPIES, WHOLE_PREFIX_KINDS, RankCache, Shelf, Tail
from fairlead.core.kv.index import KvIndex
from fairlead.core.kv.tiers import Tier

#: The beginnings of a snapshot without tails, and of one with tails. Former versions would ignore tails, and so predict
#: too many hits; they refuse the second.
_MAGICS = b"fairlead-kv-1\n", b"fairlead-kv-2\n"
#: Blocks loaded in one step, which takes 0.3 ms.
_STEP = 128
#: Segments copied in one step, which takes 0.3 ms.
_COPIED = 16
#: Blocks in each part of a tail.
_TAIL_PART = 1024


class Place(Struct, frozen=True):
    """The event up to which a rank's blocks are valid: sequence number (-1 = not known) and time stamp."""

    last: int = -1
    last_ts: float = 0.0
    #: Events before it are missing.
    provisional: bool = False


#: Stops a rank's events while its blocks are saved: a replay of events that were already in them would count each copy
#: twice. Within the context, the callable returns the last event, or `None` while an event is still being applied.
Hold = Callable[[RankCache], AbstractContextManager[Callable[[], Place | None]]]

#: How often a rank's last event is asked for. A rank that is still busy then is left out.
_PATIENCE = 10_000


class _ShelfPart(Struct, array_like=True):
    """Blocks of one shelf or `Tail`: columns of little-endian numbers, one entry per block."""

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
    #: Former versions did not save it.
    provisional: bool = True
    #: Whether the rank's events number adapters instead of naming them.
    numbered: bool = False
    #: All block sizes of the rank, and the fastest tier of each.
    sizes: dict[int, int] = {}
    #: If the blocks are those of a `Tail`: its `needed`, at least 1, and its block size. Blocks without a key have 0.
    needed: int = 0
    tail_size: int = 0
    #: `RankCache.sparse`.
    sparse: bool = False


class _Snapshot(Struct, array_like=True):
    space: str
    parts: list[_ShelfPart]
    adapters: list[str] = []


def save(index: KvIndex, endpoints: Mapping[int, str], hold: Hold) -> Generator[bytes, None, None]:
    """Iterate over the pieces of the snapshot, which must be joined. `endpoints`: slot → endpoint id.

    Close the iterator if it is left early: each rank is held while its blocks are copied.
    """
    parts: list[bytes] = []
    tails = False
    for cache in list(index.caches()):
        if cache.slot not in endpoints:
            continue
        copies: list[_ShelfPart] = []
        with hold(cache) as place_of:
            patience = _PATIENCE
            while (place := place_of()) is None and (patience := patience - 1):
                yield b""
            for part in _copies(endpoints[cache.slot], cache, place):
                copies.append(part)
                if len(copies) % _COPIED == 0:
                    yield b""
            dropped = cache.dropped
        for part in copies:
            tails |= part.needed > 0
            part.depths = _depths(index, part.keys)
            part.provisional |= dropped
            parts.append(msgspec.msgpack.encode(part))
            yield b""
    parts.append(msgspec.msgpack.encode(list(index.adapters)))
    head = b"\x93" + msgspec.msgpack.encode(index.space.name) + b"\xdd" + (len(parts) - 1).to_bytes(4, "big")
    checksum = xxh3_64(head)
    for content in parts:
        checksum.update(content)
        yield b""
    yield _MAGICS[tails] + checksum.digest() + head
    yield from parts


def _copies(endpoint: str, cache: RankCache, place: Place | None) -> Iterator[_ShelfPart]:
    """Iterate over the blocks of a rank by segment, still without depths."""
    if place is None or place.last < 0:
        return
    for group, tail in list(cache.tails.items()):
        yield from _tail_copies(endpoint, cache, group, tail, place)
    for shelf in list(cache.shelves.values()):
        segment = 0
        while segment < shelf.table.segments:  # blocks that wait for a parent may split a segment meanwhile
            part = _copy(endpoint, shelf, segment, place)
            if part is not None:
                yield part
            segment += 1


def _copy(endpoint: str, shelf: Shelf, segment: int, place: Place) -> _ShelfPart | None:
    hashes, positions = shelf.table.of_segment(segment)
    if not len(positions):
        return None
    part = _part(endpoint, shelf.cache, shelf.group, shelf.tier, place)
    part.hashes = hashes.astype("<u8").tobytes()
    part.keys = shelf.table.vectors[0][positions].astype("<u8").tobytes()
    part.copies = shelf.table.vectors[1][positions].astype("<u2").tobytes()
    return part


def _tail_copies(endpoint: str, cache: RankCache, group: int, tail: Tail, place: Place) -> Iterator[_ShelfPart]:
    """Iterate over the blocks of a tail, oldest first. One without blocks has a part, too: it matters for hits."""
    blocks = iter(tail.copies.items())
    first = True
    while (copies := dict(islice(blocks, _TAIL_PART))) or first:
        first = False
        part = _part(endpoint, cache, group, Tier.GPU, place)
        part.needed, part.tail_size, part.sparse = tail.needed, tail.block_size, cache.sparse
        part.hashes = np.array([*copies], "<u8").tobytes()
        part.keys = np.array([tail.key_of.get(digest, 0) for digest in copies], "<u8").tobytes()
        part.copies = np.array([min(count, MOST_COPIES) for count in copies.values()], "<u2").tobytes()
        yield part


def _part(endpoint: str, cache: RankCache, group: int, tier: Tier, place: Place) -> _ShelfPart:
    """Return a part that has no blocks yet."""
    return _ShelfPart(
        endpoint,
        cache.rank,
        cache.model,
        group,
        int(tier),
        cache.kinds.get(group, ""),
        place.last,
        place.last_ts,
        b"",
        b"",
        b"",
        b"",
        cache.block_size,
        place.provisional,
        cache.numbered,
        {size: int(tier) for size, tier in cache.sizes.items()},
    )


def _depths(index: KvIndex, keys: bytes) -> bytes:
    """Return the depths of blocks. Those that no endpoint holds any more are the deepest, and so the first to go."""
    blocks = index.blocks.table
    positions = blocks.find_many(np.frombuffer(keys, "<u8").astype(np.uint64))
    depths = np.where(positions < 0, 0xFFFF, blocks.vectors[1][positions])
    return depths.astype("<u2").tobytes()


class Shelved:
    """A snapshot whose endpoints join the pool one by one. Raises `ValueError` for an invalid snapshot."""

    def __init__(self, index: KvIndex, content: bytes) -> None:
        self._index = index
        self._parts: dict[str, list[_ShelfPart]] = {}
        for part in _read(index, content):
            self._parts.setdefault(part.endpoint, []).append(part)

    def enter(self, endpoint: str, slot: int, place: Callable[[RankCache, Place], None]) -> Iterator[int]:
        """Load the blocks of one endpoint, whose slot the index has. Yield the number of blocks loaded in each step.
        This works once per endpoint. `place` receives for each rank the event after which its feed should continue."""
        index = self._index
        for part in self._parts.pop(endpoint, []):
            if part.last < 0:
                continue
            cache = index.rank(slot, part.rank, part.model)
            cache.provisional = True
            cache.indexable(part.group, part.kind)
            cache.numbered |= part.numbered
            block_size = cache.block_size or max(part.block_size, 0)
            for size, tier in part.sizes.items():
                if size > 0 and tier in list(Tier):
                    cache.note_size(size, Tier(tier))
            cache.block_size = block_size
            cache.sparse |= part.sparse
            place(cache, Place(part.last, part.last_ts, part.provisional))
            hashes = np.frombuffer(part.hashes, "<u8").tolist()
            keys = np.frombuffer(part.keys, "<u8").tolist()
            copies = np.frombuffer(part.copies, "<u2").tolist()
            depths = np.frombuffer(part.depths, "<u2").tolist()
            tail = index.tail(cache, part.group, part.tail_size, part.needed) if part.needed else None
            shelf = index.shelf(cache, part.group, Tier(part.tier)) if tail is None else None
            for start in range(0, len(hashes), _STEP):
                for entry in range(start, min(start + _STEP, len(hashes))):
                    if tail is not None:
                        index.restore_tail(cache, tail, hashes[entry], keys[entry], copies[entry])
                    elif shelf is not None:
                        index.restore(shelf, hashes[entry], keys[entry], depths[entry], copies[entry])
                yield min(_STEP, len(hashes) - start)


def _read(index: KvIndex, content: bytes) -> list[_ShelfPart]:
    if not content.startswith(_MAGICS):
        raise ValueError("it is no snapshot of a KV index, or one of another version of Fairlead")
    start = len(_MAGICS[0]) + 8
    packed = memoryview(content)[start:]  # a copy would take as long as decoding
    if xxh3_64_digest(packed) != content[start - 8 : start]:
        raise ValueError("the snapshot of the KV index is damaged: its checksum is wrong")
    try:
        snapshot = msgspec.msgpack.decode(packed, type=_Snapshot)
    except msgspec.DecodeError as error:
        raise ValueError(f"the snapshot of the KV index is damaged: {error}") from None
    if snapshot.space != index.space.name:
        raise ValueError(f"the snapshot has keys of {snapshot.space}, this index of {index.space.name}")
    for part in snapshot.parts:
        blocks = len(part.hashes) // 8
        sizes = (len(part.hashes), len(part.keys), len(part.copies) * 4, len(part.depths) * 4)
        if set(sizes) != {blocks * 8} or part.tier not in list(Tier):
            raise ValueError("the snapshot of the KV index is damaged: columns of unequal length")
        if part.needed and (part.needed < 0 or part.tail_size < 1 or part.kind in ("", *WHOLE_PREFIX_KINDS)):
            raise ValueError("the snapshot of the KV index is damaged: an attention group that contradicts itself")
    index.know_adapters(snapshot.adapters)
    return snapshot.parts
