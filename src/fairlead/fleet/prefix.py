"""Learned prefix knowledge: which endpoint was last sent which prompt beginnings.

Rules
* A prompt is cut into blocks whose borders depend on the offset alone, so equal beginnings give equal borders. Blocks
  grow with depth: `max(finest, offset // growth)` bytes. A 24 kB prompt has 66 blocks, a 490 kB one 165, and the match
  is never off by more than one block, that is `1/growth` of its length. Equal blocks would cost thousands of entries.
* Block i is hashed together with the hash of block i-1 (xxh3, 64 bits), the first with a hash of what scopes the
  prompt (model, salt, tools). Equal hash therefore means equal beginning. The partial tail is not hashed.
* A match is contiguous from the start; what an engine holds behind a gap is of no use to it.
* Each endpoint has a byte budget, taken from its KV capacity. Every use of a chain renews it from the tail to the
  head, so the oldest entries are tails: they are evicted first, as engines do, and no chain ever has a hole.
* Memory is bounded by `max_entries` over all endpoints, at about 240 bytes each; who holds most gives way.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

from fairlead.fleet.columns import BoolColumn, FloatColumn
from fairlead.model.request import NO_PREFIX, PrefixChain

#: Until an endpoint has told its KV capacity: 31,250 blocks of 16 tokens at about 4 bytes (the reference's default).
DEFAULT_CAPACITY = 2_000_000
#: From that many holders on a vectorised assignment beats a loop over them (2 µs against 0.2 µs each).
_FEW = 10


class ChainHasher:
    """Cuts and hashes prompts. `finest`: bytes of the first blocks; `growth`: see the module's rules."""

    def __init__(self, finest: int = 256, growth: int = 32, max_bytes: int = 4 << 20) -> None:
        if finest < 1 or growth < 1:
            raise ValueError(f"finest and growth must be positive, not {finest} and {growth}")
        self.finest = finest
        self.growth = growth
        self._borders = [0]
        self._max_bytes = max_bytes

    def borders(self, length: int) -> list[int]:
        """Block borders 0, finest, … up to `length` bytes."""
        borders = self._borders
        length = min(length, self._max_bytes)
        while borders[-1] <= length:
            last = borders[-1]
            borders.append(last + max(self.finest, last // self.growth))
        return borders[: bisect_right(borders, length)]

    def chain(self, root: bytes, segments: Sequence[bytes | memoryview]) -> PrefixChain:
        """Hash the concatenation of `segments` under `root`. O(bytes) at memory speed, no copy for one segment."""
        text = memoryview(segments[0] if len(segments) == 1 else b"".join(segments))
        length = min(len(text), self._max_bytes)
        if length < self.finest:
            return NO_PREFIX
        parent = xxh3_64_intdigest(root)
        start = 0
        hashes: list[int] = []
        ends: list[int] = []
        for end in self.borders(length)[1:]:
            parent = xxh3_64_intdigest(text[start:end], parent)
            hashes.append(parent)
            ends.append(end)
            start = end
        return PrefixChain(tuple(hashes), tuple(ends))


class PrefixIndex:
    """Block hash → set of endpoints (a bit mask over slots), with one LRU per endpoint."""

    def __init__(self, max_entries: int = 2_000_000) -> None:
        self._holders: dict[int, int] = {}
        self._lru: dict[int, OrderedDict[int, int]] = {}
        self._used: dict[int, int] = {}
        self._capacity: dict[int, int] = {}
        self._entries = 0
        self._max_entries = max_entries

    @property
    def entries(self) -> int:
        """Block copies known, over all endpoints."""
        return self._entries

    def add_slot(self, slot: int, capacity: int = DEFAULT_CAPACITY) -> None:
        self._lru[slot] = OrderedDict()
        self._used[slot] = 0
        self._capacity[slot] = capacity

    def drop_slot(self, slot: int) -> None:
        self.clear(slot)
        del self._lru[slot], self._used[slot], self._capacity[slot]

    def set_capacity(self, slot: int, capacity: int) -> None:
        """Bytes of prompt text that the endpoint's KV cache holds."""
        self._capacity[slot] = capacity
        self._trim(slot)

    def clear(self, slot: int) -> None:
        """Forget all of one endpoint: O(its blocks)."""
        for block in self._lru[slot]:
            self._unmark(block, slot)
        self._entries -= len(self._lru[slot])
        self._lru[slot].clear()
        self._used[slot] = 0

    def matches(self, chain: PrefixChain) -> Iterator[tuple[int, int]]:
        """(slot, matched bytes) of every endpoint that holds at least the first block, contiguous from the start."""
        for holders, matched in self._depths(chain):
            for slot in _bits(holders):
                yield slot, matched

    def match(self, chain: PrefixChain, slots: int) -> FloatColumn | None:
        """Matched bytes per slot as a column of length `slots`; `None` when nobody holds anything of it."""
        column: FloatColumn | None = None
        for holders, matched in self._depths(chain):
            if column is None:
                column = np.zeros(slots)
            if holders.bit_count() < _FEW:
                while holders:
                    column[holders.bit_length() - 1] = matched
                    holders &= ~(1 << holders.bit_length() - 1)
            else:
                column[_mask(holders, slots)] = matched
        return column

    def _depths(self, chain: PrefixChain) -> Iterator[tuple[int, int]]:
        """(holders of exactly that much, matched bytes), shallow first.

        Chains have no holes, so the holders of block i+1 are among those of block i, and the next block that somebody
        lacks is found by bisection: 74 blocks in 7 look-ups per distinct depth.
        """
        holders, hashes = self._holders, chain.hashes
        here = holders.get(hashes[0], 0) if hashes else 0
        depth = 0
        while here:
            low, high = depth, len(hashes)
            if holders.get(hashes[-1], 0) == here:
                low = high - 1
            while high - low > 1:
                middle = (low + high) // 2
                if holders.get(hashes[middle], 0) == here:
                    low = middle
                else:
                    high = middle
            deeper = here & holders.get(hashes[high], 0) if high < len(hashes) else 0
            yield here & ~deeper, chain.ends[low]
            here, depth = deeper, high

    def insert(self, slot: int, chain: PrefixChain) -> None:
        """`slot` was sent a prompt with this chain: it has it now, and used it last."""
        lru = self._lru[slot]
        holders = self._holders
        hashes, ends = chain.hashes, chain.ends
        bit = 1 << slot
        for i in range(len(hashes) - 1, -1, -1):
            block = hashes[i]
            if block in lru:
                lru.move_to_end(block)
            else:
                size = ends[i] - (ends[i - 1] if i else 0)
                lru[block] = size
                holders[block] = holders.get(block, 0) | bit
                self._used[slot] += size
                self._entries += 1
        self._trim(slot)
        if self._entries > self._max_entries:
            self._make_room(slot)

    def _trim(self, slot: int) -> None:
        while self._used[slot] > self._capacity[slot] and self._lru[slot]:
            self._evict_one(slot)

    def _make_room(self, newest: int) -> None:
        """Back below `max_entries`, at the cost of who has just grown and has more than its share, else of the largest.

        Looking for the largest is O(endpoints), so it is not done for every block.
        """
        share = self._max_entries // len(self._lru)
        loser = newest
        while self._entries > self._max_entries:
            if len(self._lru[loser]) <= share:
                loser = max(self._lru, key=lambda slot: len(self._lru[slot]))
            self._evict_one(loser)

    def _evict_one(self, slot: int) -> None:
        block, size = self._lru[slot].popitem(last=False)
        self._used[slot] -= size
        self._entries -= 1
        self._unmark(block, slot)

    def _unmark(self, block: int, slot: int) -> None:
        rest = self._holders[block] & ~(1 << slot)
        if rest:
            self._holders[block] = rest
        else:
            del self._holders[block]

    def validate(self) -> None:
        """Raise `AssertionError` when the two directions of the index disagree or a bound is broken."""
        assert self._entries == sum(map(len, self._lru.values())) <= self._max_entries
        marks: dict[int, int] = {}
        for slot, lru in self._lru.items():
            assert self._used[slot] == sum(lru.values())
            assert self._used[slot] <= self._capacity[slot] or not lru
            for block in lru:
                marks[block] = marks.get(block, 0) | 1 << slot
        assert marks == self._holders


def _mask(holders: int, slots: int) -> BoolColumn:
    """The same set as a bool column."""
    raw = np.frombuffer(holders.to_bytes(slots // 8 + 1, "little"), np.uint8)
    return np.unpackbits(raw, count=slots, bitorder="little").view(np.bool_)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
