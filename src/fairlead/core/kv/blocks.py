"""The blocks that exist and the holders of each. Holders are sets of bits; each distinct set is stored once.

Theory
* The blocks of one prompt mostly have the same holders, so a block only stores the number of its set: 4 bytes for any
  number of endpoints. Eight endpoints have at most 255 sets; a hundred that share little have some thousands.
* A bit is `plane * width + unit`. The unit stands for the cache (endpoint, rank, group), the plane for the tier. A set
  is stored as a Python int for single changes (two dict look-ups), and as a row of 64-bit words for matching many
  blocks.

Rules
* Set 0 is the empty set. A number is reused only after its last block is gone.
* If a unit or plane does not fit, all sets are widened. This costs O(sets) and happens when the pool doubles.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fairlead.core.kv.cache import MOST_COPIES, Shelf
from fairlead.core.kv.table import Keys, Positions, Table, TableFull

_WORD = 64
_GROWTH = 256

Rows = NDArray[np.uint64]


class HolderSets:
    """The distinct sets, with the number of blocks that have each."""

    def __init__(self) -> None:
        self.planes = 1
        #: Units per plane; a multiple of 64.
        self.width = _WORD
        self._masks = [0]
        self._numbers = {0: 0}
        self._blocks = [0]
        self._free: list[int] = []
        self._rows: Rows = np.zeros((_GROWTH, 1), np.uint64)

    def __len__(self) -> int:
        """The number of distinct sets in use, including the empty one."""
        return len(self._numbers)

    def bit(self, unit: int, plane: int) -> int:
        """Return the bit of a unit in a plane, as a mask. Earlier masks are invalid after `widen`."""
        return 1 << plane * self.width + unit

    def wide_enough(self, unit: int, plane: int) -> bool:
        return unit < self.width and plane < self.planes

    def widen(self, unit: int, plane: int) -> None:
        """Make room for that unit and plane."""
        width, planes, before = self.width, self.planes, self.width
        while unit >= width:
            width *= 2
        planes = max(planes, plane + 1)
        low = (1 << before) - 1
        self._masks = [
            sum((mask >> old_plane * before & low) << old_plane * width for old_plane in range(self.planes))
            for mask in self._masks
        ]
        self.width, self.planes = width, planes
        self._numbers = {self._masks[number]: number for number in self._numbers.values()}
        self._rows = np.zeros((len(self._rows), planes * width // _WORD), np.uint64)
        for mask, number in self._numbers.items():
            self._write(number, mask)

    def joined(self, number: int, bit: int) -> int:
        """Add `bit` to a block's set. Return the number of its new set, the same if it had the bit. New blocks have set
        0."""
        return self._moved(number, self._masks[number] | bit)

    def left(self, number: int, bit: int) -> int:
        """Remove `bit` from a block's set, which must have it. Return the number of its new set."""
        return self._moved(number, self._masks[number] ^ bit)

    def _moved(self, number: int, mask: int, count: int = 1) -> int:
        """Move `count` blocks from a set to another. Return the number of the latter."""
        new = self._numbers.get(mask)
        if new is None:
            new = self._intern(mask)
        if new != number:
            blocks = self._blocks
            blocks[new] += count
            blocks[number] -= count
            if not blocks[number] and number:
                self._drop(number)
        return new

    def leave_many(self, numbers: Positions, bit: int) -> Positions:
        """Return the result of `left` for many blocks."""
        distinct, inverse, counts = np.unique(numbers, return_inverse=True, return_counts=True)
        sets = zip(distinct.tolist(), counts.tolist(), strict=True)
        new = [self._moved(number, self._masks[number] ^ bit, count) for number, count in sets]
        result: Positions = np.array(new, np.int64)[inverse]
        return result

    def have(self, numbers: Positions, bit: int) -> NDArray[np.bool_]:
        """Return for each of these sets whether it has the bit."""
        masks = self._masks
        distinct, inverse = np.unique(numbers, return_inverse=True)
        result: NDArray[np.bool_] = np.array([bool(masks[number] & bit) for number in distinct.tolist()])[inverse]
        return result

    def words(self, units: int) -> NDArray[np.uint64]:
        """Return a mask of units as a row of one plane."""
        return np.frombuffer(units.to_bytes(self.width // 8, "little"), np.uint64)

    def mask(self, number: int) -> int:
        return self._masks[number]

    def rows(self, numbers: NDArray[np.uint32]) -> NDArray[np.uint64]:
        """Return the sets as bits, lowest first; shape (len(numbers), planes, words)."""
        taken = self._rows.take(numbers, axis=0)
        return taken.reshape(len(numbers), self.planes, self.width // _WORD)

    @property
    def nbytes(self) -> int:
        """The estimated memory in bytes: rows, and per set an int, its dict entry and two list entries."""
        per_set = 8 * self._rows.shape[1] + 24 + 4 * (self.planes * self.width // 30 + 1) + 100
        return int(self._rows.nbytes + per_set * len(self._masks))

    def _intern(self, mask: int) -> int:
        if self._free:
            number = self._free.pop()
            self._masks[number] = mask
        else:
            number = len(self._masks)
            self._masks.append(mask)
            self._blocks.append(0)
            if number == len(self._rows):
                self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        self._numbers[mask] = number
        self._write(number, mask)
        return number

    def _drop(self, number: int) -> None:
        del self._numbers[self._masks[number]]
        self._masks[number] = 0
        self._free.append(number)

    def _write(self, number: int, mask: int) -> None:
        row = mask.to_bytes(self.planes * self.width // 8, "little")
        self._rows[number] = np.frombuffer(row, np.uint64)

    def validate(self, blocks: dict[int, int]) -> None:
        """Raise `AssertionError` unless the counts match `blocks`: set number → number of blocks."""
        assert self._masks[0] == 0 and self._numbers[0] == 0
        for mask, number in self._numbers.items():
            assert self._masks[number] == mask
            if number:
                assert self._blocks[number] == blocks.get(number, 0) > 0, f"set {number}"
                assert self._rows[number].tobytes() == mask.to_bytes(self._rows.shape[1] * 8, "little")
        assert set(blocks) <= set(self._numbers.values())


# The two directions of the index, which are kept consistent.
#
# Rules
# * A shelf maps a hash → (key, copies); the block table maps the key → (holder set, depth, used). The bit of a shelf is
#   in a block's holder set exactly if the shelf has at least one copy under that key.
# * A block without holders is not in the table.
# * Methods for single blocks are O(1). Methods for many blocks handle one segment (at most 1,024) per call.
# * Memory: 15 bytes per place of a block and 18 per place of a copy. Places are 38 to 75 % full, so a block and a copy
#   take 44 to 88 bytes together.

_DEEPEST = 0xFFFF


class BlockTable:
    """`max_blocks`: distinct blocks to reserve address space for; memory is used only when they are stored."""

    def __init__(self, max_blocks: int) -> None:
        # Segments are between 0.375 and 0.75 full.
        segments = max_blocks // 384 + 2
        self.table = Table(("u4", "u2", "u1"), min(segments, 1 << 16), 1 << 20)
        self.holders = HolderSets()
        # Large arrays use huge pages, and the kernel needs 0.5 ms to clear each: touch the first ones now, not later
        # while events are handled.
        for column in (self.table.keys, *self.table.columns):
            column[0] = 0

    def store(self, shelf: Shelf, hashes: Sequence[int], keys: Sequence[int], depth: int, copies: int) -> int:
        """Store consecutive blocks from `depth` on. Return how many are new on the shelf. `copies`: how many of each
        are stored; 0 = one of those that are not there yet.

        Blocks without room are left out and counted as refused.
        """
        since = shelf.cache.counts
        shelf_table, blocks, joined = shelf.table, self.table, self.holders.joined
        enter, enter_block = shelf_table.enter, blocks.enter
        bit, first = shelf.bit, min(max(copies, 1), MOST_COPIES)
        new = refused = conflicts = 0
        for digest, key in zip(hashes, keys, strict=True):
            depth += 1
            try:
                place = enter(digest)
                if place < 0:
                    conflicts += shelf_table.columns[0][~place] != key
                    count = shelf_table.columns[1]
                    if copies and count[~place] < MOST_COPIES:
                        count[~place] = min(count[~place] + copies, MOST_COPIES)
                    continue
                block = enter_block(key)
            except TableFull:
                refused += 1
                self._leave_out(shelf_table, digest)
                continue
            if block >= 0:
                blocks.columns[1][block] = depth if depth < _DEEPEST else _DEEPEST
            else:
                block = ~block
            keys_column, counts = shelf_table.columns
            keys_column[place] = key
            counts[place] = first
            new += 1
            sets, _, used = blocks.columns
            number = sets[block]
            sets[block] = after = joined(number, bit)
            if after == number:
                shelf.doubles[key] = shelf.doubles.get(key, 0) + 1
            used[block] = 1
        since.refused += refused
        since.conflicts += conflicts
        since.copied += max(copies, 1) * (len(hashes) - refused) - new
        since.stored += new
        return new

    def remove(self, shelf: Shelf, digest: int, copies: int = 1) -> int:
        """Remove so many copies, at most all. Return the copies left; -1 = there was none."""
        table = shelf.table
        place = table.seek(digest)
        if place < 0:
            return -1
        counts = table.columns[1]
        left = counts[place] - copies
        if left > 0:
            counts[place] = left
            return left
        key = table.columns[0][place]
        table.remove(place)
        self._unhold(shelf, key)
        return 0

    def _leave_out(self, shelf_table: Table, digest: int) -> None:
        """Remove the hash of a block without room from the shelf, where it may have been entered."""
        try:
            place = shelf_table.seek(digest)
        except TableFull:
            return
        if place >= 0 and not shelf_table.columns[1][place]:
            shelf_table.remove(place)

    def _unhold(self, shelf: Shelf, key: int) -> None:
        if shelf.doubles and key in shelf.doubles:
            shelf.doubles[key] -= 1
            if not shelf.doubles[key]:
                del shelf.doubles[key]
            return
        blocks = self.table
        block = blocks.seek(key)
        number = self.holders.left(blocks.columns[0][block], shelf.bit)
        if number:
            blocks.columns[0][block] = number
        else:
            blocks.remove(block)

    def take_apart(self, shelf: Shelf, segment: int) -> int:
        """Unmark all blocks in one segment of a dead shelf. Return the number of hashes in it."""
        positions = shelf.table.of_segment(segment)[1]
        keys = np.unique(shelf.table.vectors[0][positions])
        if len(keys):
            blocks = self.table.find_many(keys)
            blocks = blocks[blocks >= 0]
            # Two hashes of one key may be in different segments; the block is unmarked with the first one.
            blocks = blocks[self.holders.have(self.table.vectors[0][blocks], shelf.bit)]
            self._unmark_many(blocks, shelf.bit)
        return len(positions)

    def evict(self, shelf: Shelf, forced: bool = False) -> int:
        """Evict the deeper half of those blocks in the shelf's next segment that were not matched since the last pass.

        Return how many. If all were used, 0: each gets a second chance, unless `forced`.
        """
        segment = shelf.hand % shelf.table.segments
        shelf.hand = segment + 1
        hashes, positions = shelf.table.of_segment(segment)
        if not len(positions):
            return 0
        keys: Keys = shelf.table.vectors[0][positions]
        blocks = self.table.find_many(keys)
        used = self.table.vectors[2]
        idle = np.flatnonzero((used[blocks] == 0) | forced)
        used[blocks] = 0
        if not len(idle):
            return 0
        depths = self.table.vectors[1][blocks[idle]]
        victims = idle[np.argsort(depths, kind="stable")[len(idle) // 2 :]]
        if shelf.doubles:
            for digest in hashes[victims].tolist():
                while self.remove(shelf, digest) > 0:
                    pass
        else:
            shelf.table.remove_many(positions[victims])
            self._unmark_many(blocks[victims], shelf.bit)
        return len(victims)

    def _unmark_many(self, blocks: Positions, bit: int) -> None:
        if not len(blocks):
            return
        sets: NDArray[np.uint32] = self.table.vectors[0]
        numbers = self.holders.leave_many(sets[blocks].astype(np.int64), bit)
        sets[blocks] = numbers
        self.table.remove_many(blocks[numbers == 0])

    def depth_of(self, key: int) -> int:
        """Return the number of blocks up to and including this one; 0 = not known."""
        block = self.table.seek(key)
        return self.table.columns[1][block] if block >= 0 else 0

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + self.holders.nbytes
