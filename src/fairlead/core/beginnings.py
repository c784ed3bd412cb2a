"""Which beginnings many prompts share now, so that they can be sent to an endpoint whose cache is empty.

Rules
* The block hashes of the last `RECENT` prompts are counted. A chain contains all that its deeper blocks follow, so
  counts fall along it, and bisection finds the deepest block that at least `shared` prompts begin with.
* Later turns of a recognised conversation are not counted: what only they share, nobody else asks for.
* Text is kept of such beginnings only, up to that block, at most `max_bytes` in all. The one that the fewest prompts
  share gives way, and one that is no longer shared is forgotten.
"""

from bisect import bisect_left
from collections import Counter, deque

from msgspec import Struct

from fairlead.core.request import RECOGNISED, Request

RECENT = 1024
#: Shorter beginnings (bytes) are computed faster than they are sent.
SHORTEST = 2048
#: Beginnings with text; and refused ones that are remembered.
MOST, REFUSED = 256, 1024


class Beginning(Struct, frozen=True):
    """A request for one token whose prompt is the beginning."""

    #: Of its last block.
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
        #: Of those whose text cannot be had or found no room: with how many prompts it is wanted again.
        self._refused: dict[int, int] = {}
        #: Of text that is kept.
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def seen(self, request: Request) -> tuple[int, int]:
        """Count a prompt. Returns (hash, end in bytes) of a shared beginning whose text is wanted, see `keep`; (0, 0) =
        none is."""
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
        """The text of a beginning that `seen` wanted; an empty one = it cannot be had."""
        if body and self._has_room(digest, len(body)):
            self._kept[digest] = Beginning(digest, path, body)
            self.bytes += len(body)
            return
        if len(self._refused) >= REFUSED:
            self._refused.clear()
        self._refused[digest] = 2 * self._counts[digest]

    def hottest(self) -> list[Beginning]:
        """What the most prompts share comes first."""
        return sorted(self._kept.values(), key=lambda kept: -self._counts[kept.digest])

    def _has_room(self, digest: int, size: int) -> bool:
        """Make room for one more, at the cost of those that fewer share."""
        while self._kept and (self.bytes + size > self._max_bytes or len(self._kept) >= MOST):
            least = min(self._kept, key=self._counts.__getitem__)
            if self._counts[least] >= self._counts[digest]:
                return False
            self._drop(least)
        return size <= self._max_bytes

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
