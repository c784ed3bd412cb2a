"""The directory of segments: one file open, all of them together never larger than the bound.

Rules
* Room is made before a write, never after it: at no moment is the directory too large. Segments of former runs count,
  and go first.
* Files can be read by their owner only: they name models, tenants and sessions.
* One process writes there at a time: it holds a lock that ends with it. Two would throw away each other's segments.
* A name says when and whose: `20261121T101530-3f2a9c01-000000.journal`, so that names sort by age.
"""

import fcntl
import os
from pathlib import Path

from fairlead.wire.journal.blocks import MAGIC

SUFFIX = ".journal"
#: A segment is at most this part of the bound, so that dropping one leaves most of the journal.
_LEAST_SEGMENTS = 4


class Full(Exception):
    """The bound is reached, and nothing may be dropped."""


class Directory:
    """Bytes are those of files. Raises `OSError` where the disk does."""

    def __init__(self, path: Path, max_bytes: int, segment_bytes: int, keep_oldest: bool, label: str) -> None:
        self.path = path
        self._max = max_bytes
        self._segment = min(segment_bytes, max_bytes // _LEAST_SEGMENTS)
        self._keep_oldest = keep_oldest
        self._label = label
        self._file = -1
        self._size = 0
        #: Segments begun by this run.
        self.number = 0
        self._sizes: dict[Path, int] = {}
        self._current: Path | None = None
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(path / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise OSError("another scheduler writes its journal there; each needs a directory of its own") from None
        for old in sorted(path.glob(f"*{SUFFIX}")):
            self._sizes[old] = old.stat().st_size

    @property
    def size(self) -> int:
        """Of all segments."""
        return sum(self._sizes.values())

    def wants_segment(self, size: int) -> bool:
        """A block of this size should begin a new segment."""
        return self._file < 0 or (self._size + size > self._segment and self._size > len(MAGIC))

    def begin(self, head: bytes) -> None:
        """A new segment with this block in it. Raises `Full`."""
        self.close()
        self._make_room(len(MAGIC) + len(head))
        path = self.path / f"{self._label}-{self.number:06d}{SUFFIX}"
        self._file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.number += 1
        self._current, self._size = path, 0
        self._sizes[path] = 0
        self._write(MAGIC + head)

    def write(self, block: bytes) -> None:
        """Raises `Full`."""
        self._make_room(len(block))
        self._write(block)

    def sync(self) -> None:
        if self._file >= 0:
            os.fsync(self._file)

    def release(self) -> None:
        """Close it, and let others write there."""
        self.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def close(self) -> None:
        """The segment at hand is done."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._current = None

    def _write(self, data: bytes) -> None:
        """All of it. A disk that takes only a part leaves a torn block, which readers skip."""
        assert self._current is not None
        left = memoryview(data)
        while left:
            written = os.write(self._file, left)
            self._size += written
            self._sizes[self._current] += written
            left = left[written:]

    def _make_room(self, size: int) -> None:
        total = self.size
        if size > self._max - len(MAGIC):
            raise Full
        while total + size > self._max:
            oldest = next((path for path in self._sizes if path != self._current), None)
            if oldest is None or self._keep_oldest:
                raise Full
            oldest.unlink(missing_ok=True)
            total -= self._sizes.pop(oldest)
