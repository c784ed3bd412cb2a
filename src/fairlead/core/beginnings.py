"""Beginnings that many recent prompts share, so that they can be sent to an endpoint whose cache is empty.

Rules
* The block hashes of the last `RECENT` prompts are counted. A prompt with a block also has all blocks before it, so
  counts fall along a chain, and bisection finds the deepest block that at least `shared` prompts have.
* Later turns of a recognised conversation are not counted, because no other request asks for what only they share.
* Text is kept only of such beginnings, up to that block, and at most `max_bytes` in total. The beginning that the
  fewest prompts share is dropped first; one that is no longer shared is forgotten.
"""

from bisect import bisect_left
from collections import Counter, deque

from msgspec import Struct

from fairlead.core.request import RECOGNISED, Request

RECENT = 1024
#: Shorter beginnings (in bytes) are computed faster than they are sent.
SHORTEST = 2048
#: Upper bounds: beginnings with text, and refused ones that are remembered.
MOST, REFUSED = 256, 1024


class Beginning(Struct, frozen=True):
    """A request for one token whose prompt is the shared beginning."""

    #: Hash of its last block.
    digest: int
    path: str
    body: bytes


class Beginnings:
    def __init__(self, shared: int = 4, max_bytes: int = 4 << 20) -> None:
        self._shared = shared
        self._max_bytes = max_bytes
        self._counts: Counter[int] = Counter()
        self._recent: deque[tuple[int, ...]] = deque()
        self._kept: dict[int, Beginning] = {}
        #: Beginnings whose text is not available or had no room, and the count of prompts at which it is wanted again.
        self._refused: dict[int, int] = {}
        #: Bytes of text that is kept.
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def seen(self, request: Request) -> tuple[int, int]:
        """Count a prompt. Return (hash, end in bytes) of a shared beginning whose text is wanted, see `keep`; (0, 0) =
        none."""
        hashes, counts = request.prefix.hashes, self._counts
        if not hashes or request.session.startswith(RECOGNISED):
            return 0, 0
        counts.update(hashes)
        self._recent.append(hashes)
        if len(self._recent) > RECENT:
            self._forget(self._recent.popleft())
        depth = bisect_left(hashes, True, key=lambda block: counts[block] < self._shared)
        if not depth or request.prefix.ends[depth - 1] < SHORTEST or request.media:
            return 0, 0
        digest = hashes[depth - 1]
        known = digest in self._kept or counts[digest] < self._refused.get(digest, 0)
        return (0, 0) if known else (digest, request.prefix.ends[depth - 1])

    def keep(self, digest: int, path: str, body: bytes) -> None:
        """Take the text of a beginning that `seen` asked for; empty = it is not available."""
        if body and self._has_room(digest, len(body)):
            self._kept[digest] = Beginning(digest, path, body)
            self.bytes += len(body)
            return
        if len(self._refused) >= REFUSED:
            self._refused.clear()
        self._refused[digest] = 2 * self._counts[digest]

    def hottest(self) -> list[Beginning]:
        """Return the kept beginnings, the most shared first."""
        return sorted(self._kept.values(), key=lambda kept: -self._counts[kept.digest])

    def _has_room(self, digest: int, size: int) -> bool:
        """Make room for one more by dropping less shared ones. Return whether there is room."""
        if size > self._max_bytes:
            return False
        while self._kept and (self.bytes + size > self._max_bytes or len(self._kept) >= MOST):
            least = min(self._kept, key=self._counts.__getitem__)
            if self._counts[least] >= self._counts[digest]:
                return False
            self._drop(least)
        return True

    def _forget(self, hashes: tuple[int, ...]) -> None:
        counts = self._counts
        for block in hashes:
            left = counts[block] = counts[block] - 1
            if left < self._shared:
                self._drop(block)
                if left <= 0:
                    del counts[block]

    def _drop(self, digest: int) -> None:
        kept = self._kept.pop(digest, None)
        if kept is not None:
            self.bytes -= len(kept.body)
            self._refused.clear()  # there is room again
