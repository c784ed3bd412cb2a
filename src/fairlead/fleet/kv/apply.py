"""Events of one rank to changes of the index, in small steps.

Rules
* Events of one rank are applied in order, each to its end before the next; the caller may do other things between two
  steps. A step handles at most `STEP` blocks (about 0.1 ms).
* A bad event raises `ValueError` before it changes anything, or after the part of it that was good; the caller counts
  it and goes on with the next.
* Stores whose parent nobody knows become orphans (not in a self-contained key space, where the parent is not needed).
"""

from collections.abc import Iterator, Sequence

from fairlead.fleet.kv.cache import HEAD_TOKENS, Head, RankCache
from fairlead.fleet.kv.events import AllCleared, BlocksRemoved, BlocksStored, KvEvent
from fairlead.fleet.kv.index import KvIndex
from fairlead.fleet.kv.keys import TOKEN_BYTES
from fairlead.fleet.kv.orphans import Orphan
from fairlead.fleet.kv.shelf import Shelf
from fairlead.fleet.kv.tiers import tier_of

STEP = 64


def apply(index: KvIndex, cache: RankCache, event: KvEvent, now: float) -> Iterator[int] | None:
    """Do what an event says. Raises `ValueError` when it contradicts itself.

    What is more than one step is not begun but returned: iterating does a step and gives the number of its blocks.
    """
    if isinstance(event, BlocksStored):
        return _store(index, cache, event, now)
    if isinstance(event, AllCleared):
        index.clear_rank(cache)
        return None
    shelf = cache.shelves.get((event.group, tier_of(event.medium)))
    if shelf is None:
        cache.told.removed_unknown += len(event.hashes)
        return None
    if len(event.hashes) > STEP:
        return _remove_many(index, shelf, event)
    for digest in event.hashes:
        index.remove(shelf, digest)
    return None


def apply_all(index: KvIndex, cache: RankCache, event: KvEvent, now: float) -> None:
    """`apply` to its end, and all that was put off: for the simulator and tests."""
    steps = apply(index, cache, event, now)
    if steps is not None:
        for _ in steps:
            pass
    while index.tend(now):
        pass


def _remove_many(index: KvIndex, shelf: Shelf, event: BlocksRemoved) -> Iterator[int]:
    for start in range(0, len(event.hashes), STEP):
        step = event.hashes[start : start + STEP]
        for digest in step:
            index.remove(shelf, digest)
        yield len(step)


def _store(index: KvIndex, cache: RankCache, event: BlocksStored, now: float) -> Iterator[int] | None:
    hashes = event.hashes
    if not cache.indexable(event.group, event.kind):
        cache.told.not_indexable += len(hashes)
        return None
    if not hashes:
        return None
    size, tokens = event.block_size, event.tokens
    if not tokens:
        steps = _store_nameless(index, index.shelf(cache, event.group, tier_of(event.medium)), event)
    else:
        count = len(tokens) // TOKEN_BYTES if isinstance(tokens, bytes) else len(tokens)
        if size < 1 or count != size * len(hashes):
            raise ValueError(f"{len(hashes)} blocks of {size} tokens cannot have {count} tokens")
        if event.extras is not None and len(event.extras) != len(hashes):
            raise ValueError(f"{len(hashes)} blocks, but extra keys for {len(event.extras)}")
        store = _Store(index, index.shelf(cache, event.group, tier_of(event.medium)), event, now)
        if len(hashes) <= STEP:
            store.step(hashes, tokens if isinstance(tokens, bytes) else tokens.take(count), event.extras)
            return None
        steps = store.steps()
    if len(hashes) > STEP:
        return steps
    for _ in steps:
        pass
    return None


class _Store:
    """One store on its way: where it stands in its chain."""

    __slots__ = ("_before", "_copies", "_depth", "_event", "_fresh", "_index", "_now", "_parent", "_root", "_shelf")

    def __init__(self, index: KvIndex, shelf: Shelf, event: BlocksStored, now: float) -> None:
        cache = shelf.cache
        self._index = index
        self._shelf = shelf
        self._event = event
        self._now = now
        self._copies = not (cache.reports and not event.parent)
        cache.block_size = event.block_size
        #: A prompt's blocks, of which none was entered yet. While an engine decodes they come one by one.
        self._fresh = not event.parent or len(event.hashes) > 1
        self._root = root = index.space.root(cache.model, event.lora)
        self._depth = 0
        self._parent = event.parent
        #: Key of the block before; `None` = nobody knows.
        self._before: int | None = root
        if event.parent:
            self._before = index.resolve(cache, event.parent, shelf)
            if self._before is not None:
                self._depth = index.blocks.depth_of(self._before)
            elif index.space.self_contained:
                self._before = root

    def steps(self) -> Iterator[int]:
        event, tokens = self._event, self._event.tokens
        width = event.block_size * TOKEN_BYTES
        for start in range(0, len(event.hashes), STEP):
            hashes = event.hashes[start : start + STEP]
            end = start + len(hashes)
            if isinstance(tokens, bytes):
                part = tokens[start * width : end * width]
            else:
                part = tokens.take(len(hashes) * event.block_size)
            self.step(hashes, part, event.extras[start:end] if event.extras is not None else None)
            yield len(hashes)

    def step(self, hashes: list[int], tokens: bytes, extras: Sequence[tuple[str, ...]] | None) -> None:
        if self._before is None:
            self._keep_orphans(hashes, tokens, extras)
            return
        if self._fresh:
            self._keep_head(hashes, tokens, extras)
        keys = self._index.space.keys(self._before, self._root, hashes, tokens, self._event.block_size, extras)
        self._index.store(self._shelf, hashes, keys, self._depth, self._copies)
        self._before = keys[-1]
        self._depth += len(hashes)

    def _keep_head(self, hashes: list[int], tokens: bytes, extras: Sequence[tuple[str, ...]] | None) -> None:
        event, cache = self._event, self._shelf.cache
        self._fresh = False
        size = event.block_size
        count = min(len(hashes), max(1, HEAD_TOKENS // size))
        if size <= HEAD_TOKENS:
            more = tuple(extras[:count]) if extras is not None else ()
            content = tokens[: count * size * TOKEN_BYTES]
            first = not event.parent
            head = Head(first, tuple(hashes[:count]), content, size, event.lora, more)
            (cache.beginnings if first else cache.rests).append(head)

    def _keep_orphans(self, hashes: list[int], tokens: bytes, extras: Sequence[tuple[str, ...]] | None) -> None:
        shelf, event, orphans = self._shelf, self._event, self._index.orphans
        if shelf.dead:
            return
        width = event.block_size * TOKEN_BYTES
        shelf.cache.told.orphaned += len(hashes)
        until = self._now + orphans.ttl
        for at, digest in enumerate(hashes):
            more = extras[at] if extras is not None else ()
            content = tokens[at * width : (at + 1) * width]
            orphans.add(Orphan(digest, self._parent, shelf, content, event.block_size, event.lora, more, until))
            self._parent = digest


def _store_nameless(index: KvIndex, shelf: Shelf, event: BlocksStored) -> Iterator[int]:
    """Blocks that are known by their hashes were put into another tier."""
    cache, space = shelf.cache, index.space
    root = space.root(cache.model, event.lora)
    hashes = event.hashes
    for start in range(0, len(hashes), STEP):
        step = hashes[start : start + STEP]
        for digest in step:
            key = index.resolve(cache, digest, shelf)
            if key is None and space.self_contained:
                key = space.keys(root, root, [digest], b"", 0, None)[0]
            if key is None:
                cache.told.nameless += 1
            else:
                index.store(shelf, [digest], [key], max(0, index.blocks.depth_of(key) - 1))
        yield len(step)
