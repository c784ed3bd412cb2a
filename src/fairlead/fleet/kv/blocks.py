"""Which blocks exist and who holds each: the two directions of the index, kept equal.

Rules
* A shelf knows a hash → (key, copies); the block table knows the key → (holder set, depth, used). The bit of a shelf is
  in a block's holder set exactly when the shelf has at least one copy under that key.
* A block without holders is not in the table.
* Everything that handles single blocks is O(1); what handles many does so for one segment (at most 1,024) at a time.
* Memory per block and copy: 15 and 18 bytes per place, places being 0.38 to 0.75 filled, so 44 to 88 bytes together.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fairlead.fleet.kv.holders import HolderSets
from fairlead.fleet.kv.shelf import MOST_COPIES, Shelf
from fairlead.fleet.kv.table import Keys, Positions, Table, TableFull

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
        told = shelf.cache.told
        shelf_table, blocks, joined = shelf.table, self.table, self.holders.joined
        enter, enter_block = shelf_table.enter, blocks.enter
        bit = shelf.bit
        new = refused = conflicts = 0
        for digest, key in zip(hashes, keys, strict=True):
            depth += 1
            try:
                at = enter(digest)
                if at < 0:
                    conflicts += shelf_table.columns[0][~at] != key
                    count = shelf_table.columns[1]
                    if copies and count[~at] < MOST_COPIES:
                        count[~at] += 1
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
            keys_column[at] = key
            counts[at] = 1
            new += 1
            sets, _, used = blocks.columns
            number = sets[block]
            sets[block] = after = joined(number, bit)
            if after == number:
                shelf.doubles[key] = shelf.doubles.get(key, 0) + 1
            used[block] = 1
        told.refused += refused
        told.conflicts += conflicts
        told.copied += len(hashes) - new - refused
        told.stored += new
        return new

    def remove(self, shelf: Shelf, digest: int) -> int:
        """One copy is gone. Returns copies left; -1 if there was none."""
        table = shelf.table
        at = table.seek(digest)
        if at < 0:
            return -1
        counts = table.columns[1]
        left = counts[at] - 1
        if left > 0:
            counts[at] = left
            return left
        key = table.columns[0][at]
        table.remove(at)
        self._unhold(shelf, key)
        return 0

    def _leave_out(self, shelf_table: Table, digest: int) -> None:
        """There is no room for a block: its hash must not stay on the shelf, where it may have been entered."""
        try:
            at = shelf_table.seek(digest)
        except TableFull:
            return
        if at >= 0 and not shelf_table.columns[1][at]:
            shelf_table.remove(at)

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
