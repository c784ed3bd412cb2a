"""Blocks whose parent is not known: kept, because the parent may be told later or by another endpoint.

That happens when history is cut off in front: the first batches that are heard continue prompts that were stored
before. Without orphans such a prompt and all that ever follows it would be lost.

Rules
* An orphan waits under its parent's hash, within the scope of a model: equal engine hashes mean equal content, so a
  parent that any endpoint tells will do.
* Who counts copies of an orphan is the orphan; a removed one is gone.
* There are at most `limit` of them; the oldest go first. After `ttl` seconds one is given up.
"""

from collections import OrderedDict
from collections.abc import Iterator

from msgspec import Struct

from fairlead.fleet.kv.shelf import Shelf

#: Estimated bytes per orphan: the struct, its dict entries, two ints, 64 bytes of tokens.
_SIZE = 500


class Orphan(Struct, gc=False):
    """One block, and all that is needed to enter it once its parent's key is known."""

    digest: int
    parent: int
    shelf: Shelf
    tokens: bytes
    block_size: int
    lora: str
    extras: tuple[str, ...]
    until: float
    copies: int = 1


class Orphans:
    """Those of all models. Keys are (scope, parent hash) and (shelf number, hash)."""

    def __init__(self, limit: int = 50_000, ttl: float = 600.0) -> None:
        self.limit = limit
        self.ttl = ttl
        self._entries: OrderedDict[tuple[int, int], Orphan] = OrderedDict()
        self._children: dict[tuple[str, int], dict[tuple[int, int], Orphan]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        return _SIZE * len(self._entries)

    def has(self, shelf: Shelf, digest: int) -> bool:
        return (shelf.number, digest) in self._entries

    def waiting(self, scope: str, parent: int) -> bool:
        """Whether an orphan waits for this parent."""
        return (scope, parent) in self._children

    def add(self, orphan: Orphan) -> None:
        """Keep it, or count one more copy of it. May give up the oldest."""
        name = (orphan.shelf.number, orphan.digest)
        known = self._entries.get(name)
        if known is not None:
            known.copies += 1
            return
        self._entries[name] = orphan
        orphan.shelf.orphans.add(orphan.digest)
        self._children.setdefault((orphan.shelf.cache.model, orphan.parent), {})[name] = orphan
        while len(self._entries) > self.limit:
            self.give_up()

    def removed(self, shelf: Shelf, digest: int) -> bool:
        """One copy is gone. False: no such orphan."""
        orphan = self._entries.get((shelf.number, digest))
        if orphan is None:
            return False
        orphan.copies -= 1
        if not orphan.copies:
            self._forget(orphan)
        return True

    def adopt(self, scope: str, parent: int) -> Iterator[Orphan]:
        """Those that wait for this parent, each taken out before it is given."""
        while children := self._children.get((scope, parent)):
            orphan = next(iter(children.values()))
            self._forget(orphan)
            yield orphan

    def expire(self, now: float) -> None:
        """Give up those that are too old: O(their number)."""
        while self._entries:
            oldest = next(iter(self._entries.values()))
            if oldest.until > now:
                return
            self.give_up()

    def drop_shelf(self, shelf: Shelf, most: int) -> int:
        """Forget up to `most` orphans of a shelf; returns how many."""
        dropped = 0
        while shelf.orphans and dropped < most:
            self._forget(self._entries[shelf.number, next(iter(shelf.orphans))])
            dropped += 1
        return dropped

    def give_up(self) -> None:
        """Forget the oldest."""
        oldest = next(iter(self._entries.values()))
        oldest.shelf.cache.told.orphans_dropped += 1
        self._forget(oldest)

    def _forget(self, orphan: Orphan) -> None:
        name = (orphan.shelf.number, orphan.digest)
        del self._entries[name]
        orphan.shelf.orphans.discard(orphan.digest)
        waiting = (orphan.shelf.cache.model, orphan.parent)
        children = self._children[waiting]
        del children[name]
        if not children:
            del self._children[waiting]

    def validate(self) -> None:
        """Raise `AssertionError` when the directions disagree."""
        assert sum(map(len, self._children.values())) == len(self._entries)
        for (number, digest), orphan in self._entries.items():
            assert digest in orphan.shelf.orphans and orphan.shelf.number == number and orphan.copies > 0
