"""Computes from a prompt's block keys how much of it each endpoint holds, with numpy, for all endpoints in one pass.

Theory
* Neighbouring blocks mostly have the same holder set. One table look-up turns all keys into set numbers, the numbers
  become runs, and only the runs' rows of bits are combined: `and` along the prompt gives the units that still match.
* Run lengths times that matrix of bits is the matched length of every unit. Masked with the bits of one tier, it is the
  part in that tier.
* An endpoint may have several ranks, of which its engine chooses one without looking at prefixes. So the best rank says
  what the endpoint holds, and the mean over its ranks what an answer is expected to find (`KvMatch.expected`).
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairlead.core.columns import FloatColumn
from fairlead.core.kv.blocks import BlockTable
from fairlead.core.kv.cache import EVERYONE, RankCache
from fairlead.core.kv.speculation import Speculation
from fairlead.core.kv.table import Keys, Positions

#: Depths that are checked first, because most misses are early: if the block at one of these depths is unknown, blocks
#: from there on are not looked up.
_LOOKS = (1, 16, 64, 256)
_NO_BITS, _ALL_BITS = np.uint64(0), np.uint64(0xFFFFFFFFFFFFFFFF)
_LOOKED_AT = np.array(_LOOKS) - 1

Floats = NDArray[np.float32]
Numbers = NDArray[np.uint32]


class Held(NamedTuple):
    """What an endpoint holds of a prompt, reported by another process. `tiers`: blocks in each tier, fastest first.
    `ranks`: blocks of each rank; empty = there is one, or they are not known."""

    slot: int
    tenure: int
    tiers: tuple[float, ...]
    ranks: tuple[float, ...] = ()


class BlockChain(NamedTuple):
    """A prompt as the index sees it. `keys`: shape (blocks,), see `keys.prompt_keys`; `block_size` in tokens."""

    keys: Keys
    block_size: int
    #: If another process keeps the index: its answer; `None` = there is none.
    held: tuple[Held, ...] | None = None


class Ranks(NamedTuple):
    """A match by rank. All columns have one entry per slot."""

    #: Blocks that each rank holds, without speculative ones; shape (most ranks, slots).
    blocks: NDArray[np.float64]
    counts: FloatColumn
    #: Blocks of prompts that were just sent to one of the ranks.
    sent: FloatColumn

    @property
    def exist(self) -> NDArray[np.bool_]:
        """Which ranks exist; shape (most ranks, slots)."""
        return np.arange(len(self.blocks))[:, None] < self.counts


class KvMatch(NamedTuple):
    """The result of a look-up. All columns have one entry per slot."""

    #: Blocks held without a gap from the beginning, by the rank that holds most.
    blocks: FloatColumn
    block_size: int
    #: How many of `blocks` are in each tier, fastest first, without speculative ones; shape (tiers, slots).
    tiers: NDArray[np.float64]
    #: `None` = every endpoint has one rank.
    ranks: Ranks | None = None

    def hit_tokens(self, prompt_tokens: int) -> FloatColumn:
        """Return the tokens that need not be computed. An engine always computes at least one token: of a prompt of
        exactly n held blocks, n - 1 are hits (vLLM 0.32, measured)."""
        usable = max(0, prompt_tokens - 1) // self.block_size
        return np.minimum(self.blocks, usable) * self.block_size

    def expected(self) -> "KvMatch":
        """Return the mean over each endpoint's ranks."""
        if self.ranks is None:
            return self
        exist, counts = self.ranks.exist, self.ranks.counts
        mean = np.where(exist, self.ranks.blocks, 0.0).sum(axis=0) / counts
        # A prompt that was just sent is on one rank; the next one meets it there with that chance.
        more = np.where(exist, np.maximum(self.ranks.sent - self.ranks.blocks, 0.0), 0.0).sum(axis=0) / counts**2
        tiers = self.tiers * (mean / np.maximum(self.tiers.sum(axis=0), 1.0))
        return KvMatch(mean + more, self.block_size, tiers)

    def by_rank(self, slot: int) -> list[int]:
        """Return the blocks that each rank of an endpoint holds; empty = it has one."""
        if self.ranks is None or self.ranks.counts[slot] < 2:
            return []
        held: list[int] = self.ranks.blocks[: int(self.ranks.counts[slot]), slot].astype(int).tolist()
        return held


class _Layout(NamedTuple):
    """The slot of each unit. Arrays have one entry per live unit, unless noted."""

    units: Positions
    slots: Positions
    #: Number of the unit's (slot, rank), and of its rank among those of the slot.
    caches: Positions
    ranks: Positions
    #: Slots with several ranks, and how many they have.
    several: tuple[Positions, Positions]
    #: Whether every slot has exactly one unit, and no rank has groups that count only at a hit's end.
    plain: bool
    #: These ranks, and the columns of their units.
    tailed: list[tuple[int, RankCache]]
    #: Ranks that have only such groups, each with its number among those of the slot.
    sole: list[tuple[int, RankCache]]
    #: Bits of one plane that stand for storage shared by all endpoints; `None` = there is none.
    shared: NDArray[np.uint64] | None
    #: One of its units; -1 = there is none.
    shared_unit: int


class Matcher:
    """Looks up prompts in the block table, and manages the numbers of units."""

    def __init__(
        self, blocks: BlockTable, speculation: Speculation, caches: Mapping[int, Mapping[int, RankCache]]
    ) -> None:
        """`caches`: by slot and rank. Call `changed` after changes."""
        self._blocks = blocks
        self._speculation = speculation
        self._caches = caches
        self._units: list[RankCache | None] = []
        self._shelves_of: list[int] = []
        self._free: list[int] = []
        self._layout: _Layout | None = None
        #: Whether matched blocks are marked as used, which causes a third of a match's cache misses.
        self.note_use = False
        #: Prompts looked up, their leading blocks that any slot has, and those of the slot that has most of them.
        self.lookups = self.lookup_hits = self.slot_hits = 0

    # ---------------------------------------------------------------- units

    def new_unit(self, cache: RankCache) -> int:
        """Return a number for one group of one rank."""
        self._layout = None
        if self._free:
            unit = self._free.pop()
            self._units[unit] = cache
        else:
            unit = len(self._units)
            self._units.append(cache)
            self._shelves_of.append(0)
        return unit

    def hold_unit(self, unit: int) -> None:
        """Record that one more shelf uses the unit's bits."""
        self._shelves_of[unit] += 1

    def disown(self, unit: int) -> None:
        """Stop counting the unit's blocks for its endpoint."""
        self._layout = None
        self._units[unit] = None

    def release_unit(self, unit: int) -> None:
        """Record that a shelf no longer has any of the unit's bits set. The last shelf frees the number."""
        self._shelves_of[unit] -= 1
        if not self._shelves_of[unit]:
            self._free.append(unit)

    def changed(self) -> None:
        """Record that the bits of all sets have moved, or that an endpoint has other ranks."""
        self._layout = None

    def _lay_out(self) -> _Layout:
        numbers: dict[int, int] = {}
        units, slots, caches, ranks = [], [], [], []
        places = {id(cache): rank for held in self._caches.values() for rank, cache in enumerate(held.values())}
        ranked = [cache for held in self._caches.values() for cache in held.values() if cache.slot != EVERYONE]
        tailed: list[tuple[int, RankCache]] = []
        several = {slot: len(held) for slot, held in self._caches.items() if len(held) > 1 and slot != EVERYONE}
        shared, shared_unit = 0, -1
        for unit, cache in enumerate(self._units):
            if cache is None:
                continue
            if cache.slot == EVERYONE:
                shared, shared_unit = shared | 1 << unit, unit
                continue
            units.append(unit)
            slots.append(cache.slot)
            if cache.tails:
                tailed.append((len(slots) - 1, cache))
            caches.append(numbers.setdefault(id(cache), len(numbers)))
            ranks.append(places.get(id(cache), 0))
        self._layout = layout = _Layout(
            np.array(units, np.int64),
            np.array(slots, np.int64),
            np.array(caches, np.int64),
            np.array(ranks, np.int64),
            (np.array([*several], np.int64), np.array([*several.values()], np.int64)),
            len(set(slots)) == len(slots) and not tailed,
            tailed,
            [(places[id(cache)], cache) for cache in ranked if cache.tails and not cache.units],
            self._blocks.holders.words(shared) if shared else None,
            shared_unit,
        )
        return layout

    # ---------------------------------------------------------------- matching

    def match(self, chain: BlockChain, slots: int) -> KvMatch | None:
        """See `KvIndex.look_up`."""
        keys = chain.keys
        if not len(keys):
            return None
        self.lookups += 1
        numbers = self._known(keys)
        combined = None
        if len(numbers):
            self.lookup_hits += len(numbers)
            combined = self._combine(numbers, chain, slots)
        if (self._layout or self._lay_out()).sole:
            combined = self._add_sole(combined, chain, slots)
        if combined is not None:
            self.slot_hits += int(combined.blocks.max())
        return self.guess(combined, chain, slots)

    def _known(self, keys: Keys) -> Numbers:
        """Return the set numbers of the leading blocks that have any holder."""
        table = self._blocks.table
        end = len(keys)
        inside = _LOOKED_AT[: _LOOKED_AT.searchsorted(end)]
        for depth, key in zip(_LOOKS, keys[inside].tolist(), strict=False):
            if table.seek(key) < 0:
                end = depth - 1
                break
        if not end:
            return np.zeros(0, np.uint32)
        positions = table.find_many(keys[:end])
        if positions.min() < 0:
            positions = positions[: int((positions < 0).argmax())]
        if self.note_use:
            table.vectors[2][positions] = 1
        numbers: Numbers = table.vectors[0].take(positions)
        return numbers

    def _combine(self, numbers: Numbers, chain: BlockChain, slots: int) -> KvMatch | None:
        layout = self._layout or self._lay_out()
        if not len(layout.units) and layout.shared is None:
            return None
        (starts,) = (numbers[1:] != numbers[:-1]).nonzero()
        edges = np.empty(len(starts) + 2, np.int64)
        edges[0], edges[-1] = 0, len(numbers)
        edges[1:-1] = starts + 1
        lengths = np.diff(edges).astype(np.float32)
        rows = self._blocks.holders.rows(numbers[edges[:-1]])
        planes = rows.shape[1]
        if layout.shared is not None:
            # Blocks in shared storage count as if every endpoint held them in that tier.
            rows |= np.where((rows & layout.shared).any(axis=2), _ALL_BITS, _NO_BITS)[:, :, None]
        held = rows[:, 0] if planes == 1 else np.bitwise_or.reduce(rows, axis=1)
        held = np.bitwise_and.accumulate(held, axis=0)
        per_tier = []
        unmatched = held
        for plane in range(planes - 1):
            per_tier.append(_lengths(lengths, unmatched & rows[:, plane]))
            unmatched = unmatched & ~rows[:, plane]
        per_tier.append(_lengths(lengths, unmatched))
        tiers = np.array(per_tier, np.float64)
        everywhere = tiers[:, layout.shared_unit, None] if layout.shared is not None else np.zeros((planes, 1))
        tiers = tiers[:, layout.units]
        if not (tiers.any() or everywhere.any()):
            return None
        return _by_slot(tiers, layout, everywhere, chain, self.ranks(slots, everywhere.sum()), slots)

    def _add_sole(self, match: KvMatch | None, chain: BlockChain, slots: int) -> KvMatch | None:
        """Add what ranks without full attention hold."""
        keys = chain.keys.tolist()
        for rank, cache in (self._layout or self._lay_out()).sole:
            slot = cache.slot
            blocks = cache.sole_hit(keys) if slot < slots and cache.block_size == chain.block_size else 0
            if not blocks:
                continue
            if match is None:
                match = self._empty(chain, slots)
            if match.ranks is not None:
                match.ranks.blocks[rank, slot] = max(match.ranks.blocks[rank, slot], blocks)
            if blocks > match.blocks[slot]:
                match.blocks[slot] = blocks
                match.tiers[:, slot] = 0.0
                match.tiers[0, slot] = blocks
        return match

    def _empty(self, chain: BlockChain, slots: int) -> KvMatch:
        return KvMatch(np.zeros(slots), chain.block_size, np.zeros((1, slots)), self.ranks(slots, 0.0))

    def ranks(self, slots: int, blocks: float) -> Ranks | None:
        """Return `blocks` for each rank; `None` = every endpoint has one rank."""
        which, numbers = (self._layout or self._lay_out()).several
        inside = which < slots
        if not inside.any():
            return None
        counts = np.ones(slots)
        counts[which[inside]] = numbers[inside]
        return Ranks(np.full((int(counts.max()), slots), blocks), counts, np.zeros(slots))

    def guess(self, match: KvMatch | None, chain: BlockChain, slots: int) -> KvMatch | None:
        """Add blocks that endpoints will soon hold, because prompts were just sent there."""
        if not len(self._speculation):
            return match
        for slot, blocks in self._speculation.depths(chain.keys):
            if any(cache.sparse for cache in self._caches.get(slot, {}).values()):
                blocks = self._speculation.continued(slot, chain.keys)
            if slot >= slots or not blocks:
                continue
            if match is None:
                match = self._empty(chain, slots)
            match.blocks[slot] = max(match.blocks[slot], blocks)
            if match.ranks is not None:
                match.ranks.sent[slot] = blocks
        return match


def _lengths(lengths: Floats, rows: NDArray[np.uint64]) -> Floats:
    """Return the sum of run lengths per unit, for rows of unit bits."""
    bits = np.unpackbits(np.ascontiguousarray(rows).view(np.uint8), axis=1, bitorder="little")
    summed: Floats = lengths @ bits.astype(np.float32)
    return summed


def _by_slot(
    tiers: NDArray[np.float64],
    layout: _Layout,
    everywhere: NDArray[np.float64],
    chain: BlockChain,
    by_rank: Ranks | None,
    slots: int,
) -> KvMatch:
    """Combine units to slots: the minimum over groups, then the maximum over ranks. A slot without units has
    `everywhere`, shape (tiers, 1). `tiers`: shape (tiers, live units). `by_rank` is filled."""
    blocks = tiers.sum(axis=0)
    owners, ranks = layout.slots, layout.ranks
    if not layout.plain:
        keys = chain.keys.tolist() if layout.tailed else []
        for column, cache in layout.tailed if layout.shared is None else ():
            held = blocks[column]
            blocks[column] = cache.hit(keys, int(held))
            tiers[:, column] *= blocks[column] / max(held, 1.0)
        order = np.lexsort((blocks, layout.caches))
        caches = layout.caches[order]
        shortest = order[np.flatnonzero(np.diff(caches, prepend=-1))]
        shortest = shortest[np.argsort(blocks[shortest], kind="stable")]
        # Ascending, so that the rank with the most blocks is written last.
        tiers, blocks = tiers[:, shortest], blocks[shortest]
        owners, ranks = owners[shortest], ranks[shortest]
    inside = owners < slots
    if not inside.all():
        tiers, blocks, owners, ranks = tiers[:, inside], blocks[inside], owners[inside], ranks[inside]
    result = KvMatch(np.full(slots, everywhere.sum()), chain.block_size, np.repeat(everywhere, slots, axis=1), by_rank)
    if by_rank is not None:
        by_rank.blocks[ranks, owners] = blocks
    result.blocks[owners] = blocks
    result.tiers[:, owners] = tiers
    return result
