"""Who holds a block: sets of bits, each distinct set kept once.

Theory
* The blocks of one prompt mostly have the same holders, so a block needs only the number of its set: 4 bytes, however
  many endpoints there are. Eight endpoints make at most 255 sets; a hundred that share little make some thousands.
* A bit is `plane * width + unit`: the unit says which cache (endpoint, rank, group), the plane in which tier. A set is
  a Python int for single changes (two dict look-ups), and a row of 64-bit words for matching many blocks at once.

Rules
* Set 0 is the empty one. A number is reused only after its last block is gone.
* More units or planes than fit widen all sets, which costs O(sets) and happens when the pool doubles.
"""

import numpy as np
from numpy.typing import NDArray

from fairlead.fleet.kv.table import Positions

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
            sum((mask >> at * before & low) << at * width for at in range(self.planes)) for mask in self._masks
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
