"""A hash table from 64-bit keys to small integers, without a Python object per entry.

Theory
* Extendible hashing: a directory maps the top bits of a key to a segment of 1,024 places. To grow, a crowded segment is
  split in two, which takes 0.1 ms. A dict of two million entries stops the process for 60 ms when it is resized, and
  needs 106 bytes per pair of ints.
* Within a segment, places form groups of sixteen: two cache lines of keys. A key is in its group, or in the following
  ones if that was full. A single look-up reads the group in a circle from the key's own place on; a look-up of many
  keys compares whole groups. Both end at an empty place.
* Keys are already hashes, so their bits are used as they are. Small keys (counters, which simulators send as hashes)
  are spread first. Keys chosen to collide fill one segment; then the table refuses more of them (`TableFull`).

Rules
* 0 means empty and 1 means removed. No key is stored as either, since small keys are spread.
* A position is valid until the next `enter`, which may move entries.
* Columns are numpy arrays. Single entries are accessed through memoryviews of them, which is five times faster.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

SEGMENT = 1024
GROUP = 16
#: A segment is split or cleaned when this many of its places are not empty.
_CROWDED = SEGMENT * 3 // 4
#: With at most this many entries, a crowded segment is cleaned instead of split, because it has many removed places.
_SPARSE = SEGMENT // 2
_EMPTY, _REMOVED = 0, 1
#: Up to this many keys are looked up singly (0.5 µs each) instead of in another round over arrays (12 µs).
_FEW = 12
#: The top 30 bits address a place: a Python int of 30 bits has one digit and is three times faster than one of 64 bits.
_TOP = 34
_TOP_BITS = 30
_VECTOR_TOP = np.uint64(_TOP)
_DEEPEST = 20
#: How many more top bits than even keys need may be used to part uneven ones. A directory is then about as large as its
#: segments.
_UNEVEN = 9
#: By how much the room for segments grows. Doubling would leave more freed memory that nothing fits into: 12 bytes per
#: block of an index whose tables grow together.
_GROWTH = 4
_PLACE = SEGMENT - 1
_GROUP_START = SEGMENT - GROUP
_IN_GROUP = GROUP - 1
_SMALL = 1 << 48
_MASK = (1 << 64) - 1
_HIGH_BIT = 1 << 63
_SPREADER = 0x9FB21C651E98DF25
#: The order in which the other places of a group are read, by the offset of the first.
_NEXT_PLACES = tuple(tuple((start + step) % GROUP for step in range(1, GROUP)) for start in range(GROUP))
_ALL = tuple((start, *_NEXT_PLACES[start]) for start in range(GROUP))

Positions = NDArray[np.int64]
Keys = NDArray[np.uint64]


class TableFull(Exception):
    """There is no room for a key: the table's limit is reached, or too many keys collide."""


def spread(key: int) -> int:
    """Return the stored form of a small key, which is never small itself."""
    return (key + 3) * _SPREADER & _MASK | _HIGH_BIT


class Table:
    """`dtypes`: unsigned type of each column. `reserve`: segments of address space to reserve; they take memory at once
    where the allocator has freed memory to reuse. `limit`: the maximum."""

    def __init__(self, dtypes: Sequence[str], reserve: int = 1, limit: int = 1 << 16) -> None:
        self.live = 0
        self._dtypes = tuple(dtypes)
        self._limit = limit
        self.segments = 1
        self._depths = [0]
        #: Number of places of each segment that are not empty.
        self._filled = [0]
        self._depth = 0
        self._shift = _TOP_BITS
        self._directory = [0]
        self._bases: Positions = np.zeros(1, np.int64)
        self._vector_keys: Keys = np.zeros(0, np.uint64)
        #: One numpy array per column. `columns` are memoryviews of them, for access to single entries.
        self.vectors: list[NDArray[Any]] = []
        self._allocate(max(1, min(reserve, limit)))

    # ---------------------------------------------------------------- single entries

    def seek(self, key: int) -> int:
        """Return the position of a key; if it is not there, `~place` with the place that it would get."""
        if key < _SMALL:
            key = spread(key)
        top = key >> _TOP
        place = self._directory[top >> self._shift] + (top & _PLACE)
        keys = self.keys
        stored = keys[place]
        if stored == key:
            return place
        if not stored:
            return ~place
        return self._seek_on(key, place, stored == _REMOVED)

    def _seek_on(self, key: int, first: int, reusable: bool) -> int:
        keys = self.keys
        base = first & ~_PLACE
        group = first & _GROUP_START
        order = _NEXT_PLACES[first & _IN_GROUP]
        free = first if reusable else -1
        for _ in range(SEGMENT // GROUP):
            first_place = base + group
            for offset in order:
                stored = keys[first_place + offset]
                if stored == key:
                    return first_place + offset
                if stored < 2:
                    if free < 0:
                        free = first_place + offset
                    if not stored:
                        return ~free
            order = _ALL[first & _IN_GROUP]
            group = group + GROUP & _GROUP_START
        if free < 0:
            raise TableFull(f"{self.live} entries in {self.segments} segments of at most {self._limit}")
        return ~free

    def enter(self, key: int) -> int:
        """Enter a key. Return its position if it is new (its columns are 0 then); `~position` if it was already there.

        Raise `TableFull` if there is no room; then nothing has changed.
        """
        if key < _SMALL:
            key = spread(key)
        top = key >> _TOP
        base = self._directory[top >> self._shift]
        place = base + (top & _PLACE)
        keys = self.keys
        stored = keys[place]
        if stored == key:
            return ~place
        if stored:
            free = self._seek_on(key, place, stored == _REMOVED)
            if free >= 0:
                return ~free
            place = ~free
            stored = keys[place]
        if not stored:
            segment = base // SEGMENT
            filled = self._filled
            if filled[segment] >= _CROWDED and self._make_room(key, segment):
                return self.enter(key)
            filled[segment] += 1
        keys[place] = key
        self.live += 1
        return place

    def remove(self, position: int) -> None:
        """Remove the entry at a position."""
        self.keys[position] = _REMOVED
        for column in self.columns:
            column[position] = 0
        self.live -= 1

    # ---------------------------------------------------------------- many entries

    def find_many(self, keys: Keys) -> Positions:
        """Return the position of every key, -1 = not there. Takes 40 µs for 1,000 keys."""
        if len(keys) and keys.min() < _SMALL:
            keys = spread_many(keys)
        top = (keys >> _VECTOR_TOP).view(np.int64)
        positions: Positions = self._bases.take(top >> self._shift) + (top & _PLACE)
        # First compare each key's own place: half of the keys are found there, and these independent loads bring the
        # cache lines of the other places. `take` and `nonzero` take a third of the time of indexing and `flatnonzero`.
        (unmatched,) = (self._vector_keys.take(positions) != keys).nonzero()
        if len(unmatched):
            positions[unmatched] = self._find_on(keys.take(unmatched), positions.take(unmatched))
        return positions

    def _find_on(self, keys: Keys, places: Positions) -> Positions:
        """Return the same as `find_many`, for keys that are not at their own places."""
        positions = np.full(len(keys), -1, np.int64)
        left = np.arange(len(keys))
        bases = places & ~_PLACE
        groups = places & _GROUP_START
        while True:
            starts = bases + groups
            rows = self._groups.take(starts // GROUP, axis=0)
            (hits,) = (rows == keys[:, None]).ravel().nonzero()
            which = hits // GROUP
            positions[left.take(which)] = starts.take(which) + (hits & _IN_GROUP)
            if len(which) == len(keys):
                return positions
            missed = np.ones(len(keys), np.bool_)
            missed[which] = False
            (on,) = missed.nonzero()
            if len(on) > _FEW:
                # An empty place ends the search; it continues in the next group only if the group has none.
                on = on[(rows[on] != 0).all(axis=1)]
            if len(on) <= _FEW:
                for index, key in zip(left[on].tolist(), keys[on].tolist(), strict=True):
                    positions[index] = max(self.seek(key), -1)
                return positions
            left, keys, bases = left[on], keys[on], bases[on]
            groups = groups[on] + GROUP & _GROUP_START

    def remove_many(self, positions: Positions) -> None:
        """Remove the entries at distinct positions."""
        self._vector_keys[positions] = _REMOVED
        for column in self.vectors:
            column[positions] = 0
        self.live -= len(positions)

    def of_segment(self, segment: int) -> tuple[Keys, Positions]:
        """Return keys (small ones in stored form) and positions of a segment. Use it to walk a table in small steps."""
        start = segment * SEGMENT
        keys = self._vector_keys[start : start + SEGMENT]
        inside = np.flatnonzero(keys > _REMOVED)
        return keys[inside], inside + start

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use, without address space that is only reserved."""
        width = 8 + sum(np.dtype(dtype).itemsize for dtype in self._dtypes)
        return self.segments * (SEGMENT * width + 64) + len(self._directory) * 16

    # ---------------------------------------------------------------- growing

    def _make_room(self, key: int, segment: int) -> bool:
        """Split or clean a crowded segment. Return False if neither is possible and there is still an empty place."""
        entries = len(self.of_segment(segment)[0])
        if entries <= _SPARSE:
            self._refill(segment, segment)
            return True
        deepest = min(_DEEPEST, self.segments.bit_length() + _UNEVEN)
        if self._depths[segment] < deepest and self.segments < self._limit:
            self._split(key, segment)
            return True
        if entries < self._filled[segment]:
            self._refill(segment, segment)
            return True
        if entries >= SEGMENT - GROUP:
            raise TableFull(f"{self.live} entries in {self.segments} segments of at most {self._limit}")
        return False

    def _split(self, key: int, segment: int) -> None:
        if self._depths[segment] == self._depth:
            self._directory = [base for base in self._directory for _ in (0, 1)]
            self._depth += 1
            self._shift -= 1
        new = self.segments
        if new == self._capacity:
            self._allocate(min(_GROWTH * new, self._limit))
        self.segments += 1
        depth = self._depths[segment] + 1
        self._depths[segment] = depth
        self._depths.append(depth)
        self._filled.append(0)
        # The directory entries of a segment are adjacent; the upper half of them gets the new segment.
        width = 1 << self._depth - depth
        first = (key >> 64 - depth | 1) * width
        self._directory[first : first + width] = [new * SEGMENT] * width
        if len(self._bases) == len(self._directory):
            self._bases[first : first + width] = new * SEGMENT
        else:
            self._bases = np.array(self._directory, np.int64)
        self._refill(segment, new)

    def _refill(self, segment: int, new: int) -> None:
        """Take all entries out of a segment, and put each one back into it or into `new`, by the directory."""
        start = segment * SEGMENT
        keys = self._vector_keys[start : start + SEGMENT]
        inside = np.flatnonzero(keys > _REMOVED)
        moving = keys[inside]
        values = [column[start : start + SEGMENT][inside] for column in self.vectors]
        keys[:] = _EMPTY
        for column in self.vectors:
            column[start : start + SEGMENT] = 0
        places = self._place(moving)
        for column, value in zip(self.vectors, values, strict=True):
            column[places] = value
        moved = int((places // SEGMENT != segment).sum())
        self._filled[segment] = len(places) - moved
        if moved:
            self._filled[new] = moved

    def _place(self, moving: Keys) -> Positions:
        """Write keys into empty places of their segments, most of them in two vectorised rounds. Return the places."""
        top = (moving >> np.uint64(_TOP)).view(np.int64)
        first = self._bases[top >> self._shift] + (top & _PLACE)
        places = np.full(len(moving), -1, np.int64)
        left = np.arange(len(moving))
        keys = self._vector_keys
        for step in (0, 1):
            own = first[left]
            wanted = own // GROUP * GROUP + (own + step) % GROUP
            empty = keys[wanted] == 0
            wanted, who = wanted[empty], left[empty]
            keys[wanted] = moving[who]
            # If several keys wanted the same place, the last one has got it.
            won = keys[wanted] == moving[who]
            places[who[won]] = wanted[won]
            left = np.flatnonzero(places < 0)
        for i in left.tolist():
            key = int(moving[i])
            place = ~self.seek(key)
            self.keys[place] = key
            places[i] = place
        return places

    def _allocate(self, capacity: int) -> None:
        """Allocate room for `capacity` segments. New pages use memory only once they are written to."""
        old = self.segments * SEGMENT
        arrays: list[NDArray[Any]] = [np.zeros(capacity * SEGMENT, dtype) for dtype in ("u8", *self._dtypes)]
        if self.vectors:
            for array, before in zip(arrays, (self._vector_keys, *self.vectors), strict=True):
                array[:old] = before[:old]
        self._capacity = capacity
        self._vector_keys = arrays[0]
        self._groups: Keys = arrays[0].reshape(-1, GROUP)
        self.vectors = arrays[1:]
        self.keys: memoryview[int] = _view(arrays[0])
        self.columns: list[memoryview[int]] = [_view(array) for array in arrays[1:]]


def _view(array: NDArray[Any]) -> "memoryview[int]":
    """Return a memoryview with native format codes: it indexes `Q` at full speed, but not numpy's equivalent `L`."""
    codes: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}
    return memoryview(array.data).cast("B").cast(codes[array.itemsize])


def spread_many(keys: Keys) -> Keys:
    """Return the keys of an array, the small ones in stored form (`spread`)."""
    spreaded = (keys + np.uint64(3)) * np.uint64(_SPREADER) | np.uint64(_HIGH_BIT)
    return np.where(keys < _SMALL, spreaded, keys)
