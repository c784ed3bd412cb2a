"""Which blocks exist and who holds each. Holders are sets of bits, each distinct set kept once.

Theory
* The blocks of one prompt mostly have the same holders, so a block needs only the number of its set: 4 bytes, however
  many endpoints there are. Eight endpoints make at most 255 sets; a hundred that share little make some thousands.
* A bit is `plane * width + unit`: the unit says which cache (endpoint, rank, group), the plane in which tier. A set is
  a Python int for single changes (two dict look-ups), and a row of 64-bit words for matching many blocks at once.

Rules
* Set 0 is the empty one. A number is reused only after its last block is gone.
* More units or planes than fit widen all sets, which costs O(sets) and happens when the pool doubles.
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
    """Interned sets with a count of the blocks that have each."""

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
        """Distinct sets in use, the empty one included."""
        return len(self._numbers)

    def bit(self, unit: int, plane: int) -> int:
        """The bit of a unit in a plane, as a mask. Masks handed out before are void when `wide_enough` was false."""
        return 1 << plane * self.width + unit

    def wide_enough(self, unit: int, plane: int) -> bool:
        return unit < self.width and plane < self.planes

    def widen(self, unit: int, plane: int) -> None:
        """Have room for that unit and plane."""
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
        """A block's set gets `bit`: the number of its new set, the same if it had it. 0 is a new block's set."""
        return self._moved(number, self._masks[number] | bit)

    def left(self, number: int, bit: int) -> int:
        """A block's set loses `bit`, which it has."""
        return self._moved(number, self._masks[number] ^ bit)

    def _moved(self, number: int, mask: int) -> int:
        new = self._numbers.get(mask)
        if new is None:
            new = self._intern(mask)
        if new != number:
            blocks = self._blocks
            blocks[new] += 1
            blocks[number] -= 1
            if not blocks[number] and number:
                self._drop(number)
        return new

    def leave_many(self, numbers: Positions, bit: int) -> Positions:
        """`left` for many blocks at once."""
        distinct, inverse, counts = np.unique(numbers, return_inverse=True, return_counts=True)
        new = []
        for number, count in zip(distinct.tolist(), counts.tolist(), strict=True):
            mask = self._masks[number] ^ bit
            target = self._numbers.get(mask)
            if target is None:
                target = self._intern(mask)
            self._blocks[target] += count
            self._blocks[number] -= count
            if not self._blocks[number] and number:
                self._drop(number)
            new.append(target)
        result: Positions = np.array(new, np.int64)[inverse]
        return result

    def have(self, numbers: Positions, bit: int) -> NDArray[np.bool_]:
        """Which of these sets have the bit."""
        masks = self._masks
        distinct, inverse = np.unique(numbers, return_inverse=True)
        result: NDArray[np.bool_] = np.array([bool(masks[number] & bit) for number in distinct.tolist()])[inverse]
        return result

    def words(self, units: int) -> NDArray[np.uint64]:
        """A mask of units as a row of one plane."""
        return np.frombuffer(units.to_bytes(self.width // 8, "little"), np.uint64)

    def mask(self, number: int) -> int:
        return self._masks[number]

    def rows(self, numbers: NDArray[np.uint32]) -> NDArray[np.uint64]:
        """Shape (len(numbers), planes, words): the sets as bits, lowest first."""
        taken = self._rows.take(numbers, axis=0)
        return taken.reshape(len(numbers), self.planes, self.width // _WORD)

    @property
    def nbytes(self) -> int:
        """Estimated memory: rows, and per set an int, its dict entry and two list entries."""
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
        """Compare with a count of blocks per set number. Raises `AssertionError`."""
        assert self._masks[0] == 0 and self._numbers[0] == 0
        for mask, number in self._numbers.items():
            assert self._masks[number] == mask
            if number:
                assert self._blocks[number] == blocks.get(number, 0) > 0, f"set {number}"
                assert self._rows[number].tobytes() == mask.to_bytes(self._rows.shape[1] * 8, "little")
        assert set(blocks) <= set(self._numbers.values())


# Which blocks exist and who holds each: the two directions of the index, kept equal.
#
# Rules
# * A shelf knows a hash → (key, copies); the block table knows the key → (holder set, depth, used). The bit of a
#   shelf is in a block's holder set exactly when the shelf has at least one copy under that key.
# * A block without holders is not in the table.
# * Everything that handles single blocks is O(1); what handles many does so for one segment (at most 1,024) at a time.
# * Memory per block and copy: 15 and 18 bytes per place, places being 0.38 to 0.75 filled, so 44 to 88 bytes together.

_DEEPEST = 0xFFFF


class BlockTable:
    """`max_blocks`: distinct blocks to have address space for (memory is taken when they come)."""

    def __init__(self, max_blocks: int) -> None:
        # Segments are between 0.375 and 0.75 full.
        segments = max_blocks // 384 + 2
        self.table = Table(("u4", "u2", "u1"), min(segments, 1 << 16), 1 << 20)
        self.holders = HolderSets()
        # Large arrays get huge pages, which take the kernel 0.5 ms each to clear: the first ones now, not with events.
        for column in (self.table.keys, *self.table.columns):
            column[0] = 0

    def store(self, shelf: Shelf, hashes: Sequence[int], keys: Sequence[int], depth: int, copies: bool) -> int:
        """Consecutive blocks from `depth` on lie on a shelf (once more, if `copies`). Returns how many are new there.

        Blocks for which there is no room are counted as refused and left out.
        """
        since = shelf.cache.told
        shelf_table, blocks, joined = shelf.table, self.table, self.holders.joined
        enter, enter_block = shelf_table.enter, blocks.enter
        bit = shelf.bit
        new = refused = conflicts = 0
        for digest, key in zip(hashes, keys, strict=True):
            depth += 1
            try:
                place = enter(digest)
                if place < 0:
                    conflicts += shelf_table.columns[0][~place] != key
                    count = shelf_table.columns[1]
                    if copies and count[~place] < MOST_COPIES:
                        count[~place] += 1
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
            counts[place] = 1
            new += 1
            sets, _, used = blocks.columns
            number = sets[block]
            sets[block] = after = joined(number, bit)
            if after == number:
                shelf.doubles[key] = shelf.doubles.get(key, 0) + 1
            used[block] = 1
        since.refused += refused
        since.conflicts += conflicts
        since.copied += len(hashes) - new - refused
        since.stored += new
        return new

    def remove(self, shelf: Shelf, digest: int) -> int:
        """One copy is gone. Returns copies left; -1 if there was none."""
        table = shelf.table
        place = table.seek(digest)
        if place < 0:
            return -1
        counts = table.columns[1]
        left = counts[place] - 1
        if left > 0:
            counts[place] = left
            return left
        key = table.columns[0][place]
        table.remove(place)
        self._unhold(shelf, key)
        return 0

    def _leave_out(self, shelf_table: Table, digest: int) -> None:
        """There is no room for a block: its hash must not stay on the shelf, where it may have been entered."""
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
        """Unmark all that one segment of a shelf holds, for a shelf that nobody asks any more. Returns copies."""
        positions = shelf.table.of_segment(segment)[1]
        keys = np.unique(shelf.table.vectors[0][positions])
        if len(keys):
            blocks = self.table.find_many(keys)
            blocks = blocks[blocks >= 0]
            # Two hashes of one key may lie in different segments: the first unmarks, the other finds it done.
            blocks = blocks[self.holders.have(self.table.vectors[0][blocks], shelf.bit)]
            self._unmark_many(blocks, shelf.bit)
        return len(positions)

    def evict(self, shelf: Shelf, forced: bool = False) -> int:
        """Forget the deeper half of what one segment of a shelf holds and nobody has matched since the last look.

        Returns how many blocks; 0 when all of them were used, which gives each a second chance unless `forced`.
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
        """Blocks up to and including this one; 0 when it is not known."""
        block = self.table.seek(key)
        return self.table.columns[1][block] if block >= 0 else 0

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + self.holders.nbytes
