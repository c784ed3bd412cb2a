"""The learned index: which beginnings of prompts each endpoint has cached, learned from our own decisions.

Rules
* A prompt is cut into blocks whose borders depend on the offset alone, so equal beginnings give equal borders. Blocks
  grow with depth: `max(finest, offset // growth)` bytes. A 24 kB prompt has 66 blocks, a 490 kB one 165, and the match
  is off by at most one: `finest` bytes, or `1/growth` of its length. Equal blocks would cost thousands of entries.
* Block i is hashed together with the hash of block i-1 (xxh3, 64 bits), the first one with a hash of the prompt's scope
  (model, salt, tools). Equal hash therefore means equal beginning. The partial tail is not hashed.
* A match is contiguous from the start; an engine cannot use blocks behind a gap.
* Each endpoint has a byte budget, derived from its KV capacity. Every use of a chain renews it from the tail to the
  head, so the oldest entries are tails: they are evicted first, as engines do, and no chain ever has a hole.
* Memory is bounded by `max_entries` over all endpoints, at about 240 bytes each. Beyond it, entries of the endpoint
  with the most entries are evicted.
* No operation delays a decision. Blocks are spread over many dicts: a single dict of 1.4 million takes 280 ms to grow
  or to be compacted, one of the parts less than 1 ms. Removing 32,000 blocks at once takes 8 ms, so the blocks of an
  endpoint that left are masked at once and removed in small steps, or all at once if its slot is reused soon.
* An endpoint may come back, so its blocks are first set aside: they match nothing, and go before all others when memory
  is short.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from operator import sub

import numpy as np
from xxhash import xxh3_64_intdigest

from fairlead.core.columns import BoolColumn, FloatColumn
from fairlead.core.request import NO_PREFIX, PrefixChain

#: Bytes of a cache until its KV capacity is reported: 31,250 blocks of 16 tokens of 4 bytes (the reference's default).
DEFAULT_CAPACITY = 2_000_000
#: From this number of holders, a vectorised assignment is faster than a loop (2 µs in total against 0.2 µs each).
_FEW = 10
#: Number of dicts that share the blocks. Odd, because a dict itself uses the lowest bits of a hash.
_PARTS = 251
#: Blocks of endpoints that left, removed with each inserted prompt: 0.25 µs each.
_SWEEP = 64
#: Shares of free cache that differ by at most this count as equal.
AS_FREE = 1 / 128


class ChainHasher:
    """Cuts and hashes prompts. `finest`: bytes of the first blocks; `growth`: see the module's rules."""

    def __init__(self, finest: int = 256, growth: int = 32, max_bytes: int = 4 << 20) -> None:
        if finest < 1 or growth < 1:
            raise ValueError(f"finest and growth must be positive, not {finest} and {growth}")
        self.finest = finest
        self.growth = growth
        self._borders = [0]
        self._blocks: list[slice] = []
        #: Number of blocks → the ends of the blocks, the same for all prompts.
        self._ends: dict[int, tuple[int, ...]] = {}
        self._max_bytes = max_bytes

    def borders(self, length: int) -> list[int]:
        """Return the block borders 0, `finest`, … up to `length` bytes."""
        borders = self._borders
        length = min(length, self._max_bytes)
        while borders[-1] <= length:
            last = borders[-1]
            borders.append(last + max(self.finest, last // self.growth))
            self._blocks.append(slice(*borders[-2:]))
        return borders[: bisect_right(borders, length)]

    def chain(self, root: bytes, prompt: bytes | memoryview) -> PrefixChain:
        """Return the chain of `prompt` in the scope `root`. O(bytes) at memory speed, without a copy."""
        text = memoryview(prompt)
        length = len(text)
        if self._borders[-1] <= length:
            length = min(length, self._max_bytes)
            self.borders(length)
        count = bisect_right(self._borders, length) - 1
        if not count:
            return NO_PREFIX
        ends = self._ends.get(count)
        if ends is None:
            ends = self._ends[count] = tuple(self._borders[1 : count + 1])
        parent = xxh3_64_intdigest(root)
        return PrefixChain(
            tuple([parent := xxh3_64_intdigest(text[block], parent) for block in self._blocks[:count]]), ends
        )


class PrefixIndex:
    """Block hash → set of endpoints (a bit mask over slots), with one LRU per endpoint."""

    def __init__(self, max_entries: int = 2_000_000) -> None:
        #: Block hash → bit mask of slots; the dict is chosen by the hash modulo `_PARTS`.
        self._holders: list[dict[int, int]] = [defaultdict(int) for _ in range(_PARTS)]
        #: By slot: block hash → bytes, the least recently used first.
        self._lru: dict[int, OrderedDict[int, int]] = {}
        #: Bit mask of the slots in `_lru`; and the blocks of departed endpoints that are set aside, and that are still
        #: to be removed.
        self._there = 0
        self._aside: dict[int, OrderedDict[int, int]] = {}
        self._leaving: dict[int, OrderedDict[int, int]] = {}
        #: By slot: bytes that can be added before older blocks are evicted; and all bytes.
        self._free: dict[int, int] = {}
        self._capacity: dict[int, int] = {}
        self._entries = 0
        #: Number of the newest entry for an answer. These are negative, hashes of prompts are not.
        self._occupied = 0
        self._max_entries = max_entries

    @property
    def entries(self) -> int:
        """The number of known block copies, over all endpoints in the pool."""
        return self._entries - sum(map(len, (*self._leaving.values(), *self._aside.values())))

    def add_slot(self, slot: int, capacity: int = DEFAULT_CAPACITY) -> None:
        self.forget(slot)
        while slot in self._leaving:
            self._sweep()
        self._lru[slot] = OrderedDict()
        self._there |= 1 << slot
        self._free[slot] = self._capacity[slot] = capacity

    def drop_slot(self, slot: int) -> None:
        self.set_aside(slot)
        self.forget(slot)

    def set_aside(self, slot: int) -> None:
        """The endpoint left. Its blocks are kept until `bring_back`, `forget` or `add_slot`, if memory allows."""
        self._aside[slot] = self._lru.pop(slot)
        self._there &= ~(1 << slot)
        del self._free[slot], self._capacity[slot]

    def forget(self, slot: int) -> None:
        """Begin to remove the blocks that were set aside, if there are any."""
        if slot in self._aside:
            self._leaving[slot] = self._aside.pop(slot)

    def bring_back(self, slot: int, capacity: int) -> None:
        """The endpoint that left this slot is there again. It has what is left of the blocks that were set aside."""
        blocks = self._aside.pop(slot, None)
        self.add_slot(slot, capacity)
        if blocks is not None:
            self._lru[slot] = blocks
            self._free[slot] -= sum(blocks.values())
            self._trim(slot)

    def set_capacity(self, slot: int, capacity: int) -> None:
        """Set how many bytes of prompt text the endpoint's KV cache holds. Evict blocks if it shrinks."""
        self._free[slot] += capacity - self._capacity[slot]
        self._capacity[slot] = capacity
        self._trim(slot)

    def _sweep(self) -> None:
        """Remove up to `_SWEEP` blocks of the endpoint that left first."""
        slot, lru = next(iter(self._leaving.items()))
        for _ in range(min(_SWEEP, len(lru))):
            self._unmark(lru.popitem(last=False)[0], slot)
            self._entries -= 1
        if not lru:
            del self._leaving[slot]

    def match(self, chain: PrefixChain, slots: int, total_bytes: int | None = None) -> FloatColumn | None:
        """Return the matched bytes by slot, as a column of length `slots`. With `total_bytes`: as a share of these, or
        of the chain's bytes if those are more. `None` = no endpoint has any of it."""
        if not chain.hashes:
            return None
        first = chain.hashes[0]
        if first not in self._holders[first % _PARTS]:
            return None
        # Inline media count for fewer bytes in `total_bytes` than in the chain.
        total = 1 if total_bytes is None else max(total_bytes, chain.ends[-1])
        column: FloatColumn | None = None
        for holders, matched in self._depths(chain):
            if column is None:
                column = np.zeros(slots)
            if holders.bit_count() < _FEW:
                while holders:
                    column[holders.bit_length() - 1] = matched / total
                    holders &= ~(1 << holders.bit_length() - 1)
            else:
                column[_mask(holders, slots)] = matched / total
        return column

    def _depths(self, chain: PrefixChain) -> Iterator[tuple[int, int]]:
        """Iterate over (mask of the slots that match exactly so many bytes, matched bytes), in ascending order.

        Chains have no holes, so the holders of block i+1 are among those of block i. The next block that one of them
        lacks is found by bisection: for 74 blocks, 7 look-ups per distinct depth.
        """
        holders, hashes = self._holders, chain.hashes
        here = holders[hashes[0] % _PARTS].get(hashes[0], 0) if hashes else 0
        depth = 0
        while here:
            low, high = depth, len(hashes)
            if holders[hashes[-1] % _PARTS].get(hashes[-1], 0) == here:
                low = high - 1
            while high - low > 1:
                middle = (low + high) // 2
                if holders[hashes[middle] % _PARTS].get(hashes[middle], 0) == here:
                    low = middle
                else:
                    high = middle
            deeper = here & holders[hashes[high] % _PARTS].get(hashes[high], 0) if high < len(hashes) else 0
            ending = here & ~deeper & self._there
            if ending:
                yield ending, chain.ends[low]
            here, depth = deeper, high

    def insert(self, slot: int, chain: PrefixChain) -> float:
        """Record that a prompt with this chain was sent to `slot`, as its most recently used one. Return `free`."""
        if self._leaving:
            self._sweep()
        hashes = chain.hashes
        if not hashes:
            return self.free(slot)
        lru, holders, bit = self._lru[slot], self._holders, 1 << slot
        before, added = len(lru), hashes
        free = self._free[slot] - chain.ends[-1]
        blocks: Iterator[tuple[int, int]] = zip(reversed(hashes), _sizes(chain.ends))  # noqa: B905 - equally long
        if hashes[0] in lru:
            # Chains have no holes, so the known blocks are the first ones.
            known = len(hashes) if hashes[-1] in lru else bisect_left(hashes, True, key=lambda block: block not in lru)
            added = hashes[known:]
            blocks = islice(blocks, len(added))
            free += chain.ends[known - 1]
        lru.update(blocks)
        grown = len(lru) - before
        if grown != len(added):  # two blocks of the chain have the same hash
            free = self._capacity[slot] - sum(lru.values())
        for block in added:
            holders[block % _PARTS][block] |= bit
        if added is not hashes:
            try:
                deque(map(lru.move_to_end, hashes[len(hashes) - len(added) - 1 :: -1]), maxlen=0)
            except KeyError:  # there is a hole: blocks of different prompts have the same hash
                for block, size in zip(reversed(hashes), _sizes(chain.ends), strict=True):
                    lru[block] = lru.pop(block, size)
                    holders[block % _PARTS][block] |= bit
                grown = len(lru) - before
                free = self._capacity[slot] - sum(lru.values())
        self._free[slot] = free
        self._entries = entries = self._entries + grown
        if free < 0:
            self._trim(slot)
            free = self._free[slot]
        if entries > self._max_entries:
            self._make_room(slot)
            free = self._free[slot]
        return free / (self._capacity[slot] or 1)

    def take_back(self, slot: int, blocks: Sequence[int]) -> float:
        """Remove these last blocks of a chain, which the slot does not have after all. Return `free`."""
        lru = self._lru[slot]
        for block in blocks:
            size = lru.pop(block, 0)
            if size:
                self._free[slot] += size
                self._entries -= 1
                self._unmark(block, slot)
        return self.free(slot)

    def occupy(self, slot: int, size: int) -> None:
        """Record that `size` bytes of the endpoint's cache were taken by something that no prompt begins with, such as
        an answer. It is never looked up, so it has no holders."""
        self._occupied -= 1
        self._lru[slot][self._occupied] = size
        self._entries = entries = self._entries + 1
        self._free[slot] = free = self._free[slot] - size
        if free < 0:
            self._trim(slot)
        if entries > self._max_entries:
            self._make_room(slot)

    # ---- saved and restored ----

    def newest(self, slot: int, most: int) -> list[int]:
        """Return up to `most` blocks of an endpoint, the newest first; answers are negative. About 60 ns each."""
        return list(islice(reversed(self._lru[slot]), most))

    def sizes(self, slot: int, blocks: Sequence[int]) -> tuple[int, ...]:
        """Return the bytes of these blocks, up to the first block that was evicted since."""
        sizes = tuple(map(self._lru[slot].get, blocks))
        return sizes if None not in sizes else sizes[: sizes.index(None)]  # type: ignore[return-value]

    def capacity(self, slot: int) -> int:
        return self._capacity[slot]

    def free(self, slot: int) -> float:
        """Return the share of the endpoint's cache (0..1) that can take prompts before older ones are evicted."""
        return self._free[slot] / (self._capacity[slot] or 1)

    def extend(self, slot: int, blocks: Sequence[int], sizes: Sequence[int], behind: int | None) -> int | None:
        """Add older blocks of an endpoint, the newest first. `behind`: the block that must be its oldest one so far;
        `None` = any.

        Return its oldest block afterwards. `None` = the cache is full, or `behind` was evicted: adding more blocks
        would leave a hole before them."""
        lru, holders, bit = self._lru[slot], self._holders, 1 << slot
        free = self._free[slot]
        left = self._max_entries - self._entries
        before, last = len(lru), behind
        if behind is not None and next(iter(lru), None) != behind:
            return None
        for block, size in zip(blocks, sizes, strict=False):
            if block in lru:
                continue
            if size > free or left <= 0:
                last = None
                break
            if block < 0:
                self._occupied -= 1
                block = self._occupied
            lru[block] = size
            lru.move_to_end(block, last=False)
            if block >= 0:
                holders[block % _PARTS][block] |= bit
            free, left, last = free - size, left - 1, block
        self._free[slot] = free
        self._entries += len(lru) - before
        return last

    def _trim(self, slot: int) -> None:
        free = self._free[slot]
        if free >= 0:
            return
        lru, holders, other_bits = self._lru[slot], self._holders, ~(1 << slot)
        before = len(lru)
        while free < 0 and lru:  # as frequent as inserts, so `_unmark` is inlined
            block, size = lru.popitem(last=False)
            free += size
            if block < 0:
                continue
            part = holders[block % _PARTS]
            remaining = part[block] & other_bits
            if remaining:
                part[block] = remaining
            else:
                del part[block]
        self._free[slot] = free
        self._entries -= before - len(lru)

    def _make_room(self, newest: int) -> None:
        """Evict blocks until `max_entries` holds: of the slot `newest` if it has more than an even share, else of the
        slot with the most blocks.

        The search for the latter is O(endpoints), so it is not done for every block.
        """
        while (self._leaving or self._aside) and self._entries > self._max_entries:
            if not self._leaving:
                self.forget(next(iter(self._aside)))
            self._sweep()
        share = self._max_entries // len(self._lru)
        loser = newest
        while self._entries > self._max_entries:
            if len(self._lru[loser]) <= share:
                loser = max(self._lru, key=lambda slot: len(self._lru[slot]))
            block, size = self._lru[loser].popitem(last=False)
            self._free[loser] += size
            self._entries -= 1
            self._unmark(block, loser)

    def _unmark(self, block: int, slot: int) -> None:
        if block < 0:
            return
        part = self._holders[block % _PARTS]
        remaining = part[block] & ~(1 << slot)
        if remaining:
            part[block] = remaining
        else:
            del part[block]

    def validate(self) -> None:
        """Raise `AssertionError` when the two directions of the index disagree or a bound is broken."""
        held = [*self._lru.items(), *self._aside.items(), *self._leaving.items()]
        assert self._entries == sum(len(lru) for _, lru in held) <= self._max_entries
        assert self._there == sum(1 << slot for slot in self._lru) and len({slot for slot, _ in held}) == len(held)
        marks: dict[int, int] = {}
        for slot, lru in self._lru.items():
            assert self._free[slot] == self._capacity[slot] - sum(lru.values())
            assert self._free[slot] >= 0 or not lru
        for slot, lru in held:
            for block in lru:
                if block >= 0:
                    marks[block] = marks.get(block, 0) | 1 << slot
        assert marks == {block: mask for part in self._holders for block, mask in part.items()}
        assert all(block % _PARTS == number for number, part in enumerate(self._holders) for block in part)


@lru_cache(maxsize=4096)  # prompts with the same number of blocks have the same ends
def _sizes(ends: tuple[int, ...]) -> tuple[int, ...]:
    """Return the bytes of a chain's blocks, the last one first."""
    return tuple(map(sub, reversed(ends), (*ends[-2::-1], 0)))


def _mask(holders: int, slots: int) -> BoolColumn:
    """Return the bit mask of slots as a bool column."""
    raw = np.frombuffer(holders.to_bytes(slots // 8 + 1, "little"), np.uint8)
    return np.unpackbits(raw, count=slots, bitorder="little").view(np.bool_)
