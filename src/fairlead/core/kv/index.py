"""The exact index: which endpoint holds which blocks, as reported by the engines.

Rules
* A holder is (endpoint, rank, group, tier). A block is *held* while more copies were stored there than removed: engines
  report each physical copy, and with two copies the first removal changes nothing (vLLM 0.32, measured).
* A match has no gap from the first block on. Within a rank a block may be in any tier, and counts in the fastest. Over
  groups the shortest match counts, since all groups of a model need the block. It is cut to where sliding-window and
  Mamba groups (`Tail`) hold what a hit needs; in models that have only these, they alone count. Ranks match one by
  one.
* Clearing takes effect immediately and is cheap: the rank's blocks are disowned and removed later, piece by piece
  (`tend`). No call does more than about 0.3 ms of work.
* Memory is bounded by `max_blocks` copies. To make room, the shelf that has just grown is evicted from if it has more
  than its share, else the largest shelf: from a sample, the deepest blocks that no match has used recently.
* The caller passes the time, in seconds.
"""

from collections import Counter, deque
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from fairlead.core.kv.blocks import BlockTable
from fairlead.core.kv.cache import EVERYONE, MOST_GROUPS, Orphans, RankCache, Shelf, Tail
from fairlead.core.kv.keys import KeySpace, OwnSpace
from fairlead.core.kv.match import BlockChain, KvMatch, Matcher
from fairlead.core.kv.speculation import Speculation
from fairlead.core.kv.table import SEGMENT, Keys, Table, spread_many
from fairlead.core.kv.tiers import Tier

#: Dead shelves beyond this number are taken apart immediately, so that a rank which clears all the time cannot make the
#: list grow.
_MOST_DEAD = 1024
#: Orphans of one parent that are stored in one call of `tend`.
_ADOPTED_AT_ONCE = 100
#: Names of adapters that are remembered, those that were named last.
_MOST_ADAPTERS = 10_000
#: Segments in which used blocks are spared, per search for blocks to evict.
_LOOKS = 3
#: Estimated bytes per block of a tail.
_TAIL_BYTES = 350
#: The part of `max_blocks` that a rank's tail of one group may have.
_TAIL_SHARE = 64


class KvIndex:
    """Slots are those of the endpoint table."""

    #: Whether its caches remember recent stores.
    tells_stores = True

    def __init__(
        self,
        max_blocks: int = 4_000_000,
        space: KeySpace | None = None,
        max_orphans: int = 50_000,
        orphan_ttl: float = 600.0,
    ) -> None:
        self.max_blocks = max_blocks
        self.space: KeySpace = space or OwnSpace()
        self.blocks = BlockTable(max_blocks)
        self.orphans = Orphans(max_orphans, orphan_ttl)
        self.speculation = Speculation()
        #: Names of adapters, from events, snapshots and lists of models; those that were named last are last.
        self.adapters: dict[str, None] = {}
        #: By slot: how often a new engine was found there. It only grows.
        self.lives: Counter[int] = Counter()
        self._caches: dict[int, dict[int, RankCache]] = {}
        self.matcher = Matcher(self.blocks, self.speculation, self._caches)
        #: Blocks held, counted per (endpoint, rank, group, tier). Disowned blocks count until they are taken apart.
        self.entries = 0
        #: Copies that were entered, and those that were evicted to stay within bounds.
        self.admitted = self.evicted = 0
        self._shelf_numbers = 0
        self._dead: deque[Shelf] = deque()

    # ---------------------------------------------------------------- endpoints and ranks

    def add_slot(self, slot: int) -> None:
        """Add an endpoint. Its ranks are added with their first events. Slot `EVERYONE`: storage shared by all."""
        self._caches[slot] = {}

    def drop_slot(self, slot: int) -> None:
        """Remove an endpoint and all its ranks."""
        self.clear(slot)
        del self._caches[slot]
        self.matcher.changed()
        self.speculation.drop_slot(slot)

    def rank(self, slot: int, rank: int, model: str) -> RankCache:
        """Return the cache of one rank, created on first use. Raise `KeyError` if the slot was not added.

        A rank that changes its model is cleared.
        """
        caches = self._caches[slot]
        cache = caches.get(rank)
        if cache is not None and cache.model != model:
            self.clear_rank(cache)
            cache = None
        if cache is None:
            cache = caches[rank] = RankCache(slot, rank, model, self.lives[slot])
            self.matcher.changed()
        return cache

    def keep_ranks(self, slot: int, ranks: Container[int]) -> None:
        """Remove an endpoint's other ranks. Their feeds must have ended."""
        caches = self._caches[slot]
        for rank in [rank for rank in caches if rank not in ranks]:
            self.clear_rank(caches.pop(rank))
            self.matcher.changed()

    def caches(self, model: str | None = None) -> Iterator[RankCache]:
        for ranks in self._caches.values():
            for cache in ranks.values():
                if model is None or cache.model == model:
                    yield cache

    def shelves(self, model: str | None = None) -> list[Shelf]:
        return [shelf for cache in self.caches(model) for shelf in cache.shelves.values()]

    def caches_of(self, slot: int) -> Collection[RankCache]:
        """Return the ranks of one endpoint that have sent events."""
        return self._caches[slot].values()

    def clear(self, slot: int) -> None:
        for cache in self._caches[slot].values():
            self.clear_rank(cache)

    def clear_rank(self, cache: RankCache) -> None:
        """Forget all blocks of one rank: immediately for matches; the O(blocks) work is done later, in `tend`."""
        for group in list(cache.units):
            self.clear_group(cache, group)
        cache.dropped = False
        cache.sizes, cache.repeated = {}, {}
        for tail in cache.tails.values():
            tail.clear()

    def clear_group(self, cache: RankCache, group: int) -> None:
        """Forget all blocks of one group of a rank, like `clear_rank`."""
        unit = cache.units.pop(group, None)
        if unit is None:
            return
        self.matcher.disown(unit)
        for place in [place for place in cache.shelves if place[0] == group]:
            shelf = cache.shelves.pop(place)
            shelf.dead = True
            self._dead.append(shelf)
        while len(self._dead) > _MOST_DEAD:
            self._take_apart()

    def restarted(self, cache: RankCache) -> None:
        """Forget all of one rank, because there is a new engine, whose history begins."""
        self.clear_rank(cache)
        cache.kinds, cache.tails = {}, {}
        cache.numbered = cache.provisional = cache.sparse = False
        self.lives[cache.slot] += 1
        cache.lives = self.lives[cache.slot]

    def know_adapters(self, names: Iterable[str]) -> None:
        for name in names:
            self.adapters.pop(name, None)
            self.adapters[name] = None
        while len(self.adapters) > _MOST_ADAPTERS:
            del self.adapters[next(iter(self.adapters))]

    # ---------------------------------------------------------------- blocks

    def shelf(self, cache: RankCache, group: int, tier: Tier) -> Shelf:
        """Return the shelf of a rank for that group and tier. Raise `ValueError` if the rank has too many groups."""
        shelf = cache.shelves.get((group, tier))
        if shelf is None:
            unit = cache.units.get(group)
            if unit is None:
                if len(cache.units) >= MOST_GROUPS:
                    raise ValueError(f"group {group} is one more than {MOST_GROUPS}")
                unit = cache.units[group] = self.matcher.new_unit(cache)
            self._shelf_numbers += 1
            table = Table(("u8", "u2"), limit=self.max_blocks // (SEGMENT // 4) + 2)
            shelf = Shelf(cache, group, tier, unit, self._shelf_numbers, table)
            cache.shelves[group, tier] = shelf
            self._give_bit(shelf)
        return shelf

    def store(self, shelf: Shelf, hashes: list[int], keys: list[int], depth: int, copies: int = 1) -> int:
        """Store so many copies of consecutive blocks, at most a few hundred, the first one `depth` blocks after the
        beginning. Return how many are new on the shelf."""
        if shelf.dead:
            return 0
        if shelf.cache.slot == EVERYONE:  # shared storage has one copy, whoever reports it
            copies = 0
        admitted = self.blocks.store(shelf, hashes, keys, depth, copies)
        self.entries += admitted
        self.admitted += admitted
        for tail in shelf.cache.tails.values():
            for digest, key in zip(hashes, keys, strict=True):
                tail.name(digest, key)
        if len(self.orphans):
            self.orphans.stored(shelf.cache.model, hashes, keys, depth)
        total = self.entries + len(self.orphans)
        # The use of blocks only matters for evictions, which begin when the index is full.
        self.matcher.note_use = 4 * total > 3 * self.max_blocks
        if total > self.max_blocks:
            self._make_room(shelf)
        return admitted

    def tail(self, cache: RankCache, group: int, size: int, needed: int) -> Tail | None:
        """Return the blocks of a group that a hit needs only at its end. `None` = how many it needs is not known."""
        tail = cache.tails.get(group)
        if tail is None and size > 0 and needed > 0 and group in cache.kinds:
            tail = cache.tails[group] = Tail(size, needed)
            self.matcher.changed()
        return tail

    def store_tail(self, cache: RankCache, tail: Tail, digest: int) -> None:
        """Store one copy of a block there. The oldest block falls if there are too many."""
        if digest in tail.copies:
            tail.copies[digest] += 1
            return
        tail.copies[digest] = 1
        if (key := cache.key_of(digest)) is not None:
            tail.name(digest, key)
        if len(tail.copies) > self.max_blocks // _TAIL_SHARE:
            tail.drop(next(iter(tail.copies)))
            cache.provisional = cache.dropped = True

    def restore_tail(self, cache: RankCache, tail: Tail, digest: int, key: int, copies: int) -> None:
        """Store a block there from a snapshot, unless events have already reported it. `key`: 0 = none."""
        if digest not in tail.copies:
            self.store_tail(cache, tail, digest)
            if digest in tail.copies:
                tail.copies[digest] = max(1, copies)
                if key:
                    tail.name(digest, key)

    def restore(self, shelf: Shelf, digest: int, key: int, depth: int, copies: int) -> None:
        """Store a block from a snapshot, unless events have already reported it."""
        if shelf.table.seek(digest) < 0:
            self.store(shelf, [digest], [key], max(0, depth - 1))
            place = shelf.table.seek(digest)
            if place >= 0:
                shelf.table.columns[1][place] = max(1, copies)

    def remove(self, shelf: Shelf, digest: int, copies: int = 1) -> None:
        """Remove so many copies of a block, at most all."""
        if shelf.dead:
            return
        left = self.blocks.remove(shelf, digest, copies)
        counts = shelf.cache.counts
        if left < 0 and not self.orphans.removed(shelf, digest, copies):
            counts.removed_unknown += copies
            return
        counts.removed += copies
        if left == 0:
            self.entries -= 1

    def resolve(self, cache: RankCache, digest: int, first: Shelf | None = None) -> int | None:
        """Return the key of an engine's hash, as reported by this rank, else by another rank of the same model."""
        key = cache.key_of(digest, first)
        if key is not None:
            return key
        for peer in self.caches(cache.model):
            if peer is not cache and (key := peer.key_of(digest)) is not None:
                return key
        return None

    # ---------------------------------------------------------------- questions

    def knows(self, chain: BlockChain) -> bool:
        """Whether `look_up` knows about the chain; if not, finding nothing is not a miss."""
        return True

    def look_up(self, chain: BlockChain, slots: int) -> KvMatch | None:
        """Return how much of a prompt each slot holds; `None` = no slot holds its first block."""
        return self.matcher.match(chain, slots)

    # ---------------------------------------------------------------- housekeeping

    @property
    def nbytes(self) -> int:
        """The estimated memory in use, in bytes."""
        tables = sum(shelf.table.nbytes + 1000 for shelf in (*self.shelves(), *self._dead))
        tails = sum(len(tail.copies) for cache in self.caches() for tail in cache.tails.values())
        return tables + _TAIL_BYTES * tails + self.blocks.nbytes + self.orphans.nbytes + self.speculation.nbytes

    @property
    def idle(self) -> bool:
        """Whether `tend` has nothing to do."""
        return not self._dead and not self.orphans.known_parents

    def tend(self, now: float) -> bool:
        """Do a part of the deferred work (at most 0.3 ms). Return whether there is more."""
        if self.orphans.known_parents:
            self._adopt_some()
        elif self._dead:
            self._take_apart()
        self.orphans.expire(now)
        self.speculation.expire(now)
        return not self.idle

    def _adopt_some(self) -> None:
        """Store some of the orphans of one parent."""
        (model, parent), (key, depth) = next(iter(self.orphans.known_parents.items()))
        space = self.space
        for orphan in islice(self.orphans.adopt(model, parent), _ADOPTED_AT_ONCE):
            shelf = orphan.shelf
            if not shelf.dead:
                root = space.root(model, orphan.lora)
                extras = [orphan.extras] if orphan.extras else None
                keys = space.keys(key, root, [orphan.digest], orphan.tokens, orphan.block_size, extras)
                self.store(shelf, [orphan.digest], keys, depth, orphan.copies)

    def _take_apart(self) -> None:
        shelf = self._dead[0]
        if shelf.orphans:
            self.orphans.drop_shelf(shelf, 200)
            return
        if shelf.reclaimed < shelf.table.segments:
            self.entries -= self.blocks.take_apart(shelf, shelf.reclaimed)
            shelf.reclaimed += 1
        if shelf.reclaimed == shelf.table.segments:
            self._dead.popleft()
            self.matcher.release_unit(shelf.unit)

    def _give_bit(self, shelf: Shelf) -> None:
        holders = self.blocks.holders
        if not holders.wide_enough(shelf.unit, shelf.tier):
            holders.widen(shelf.unit, shelf.tier)
            self.matcher.changed()
            for moved in (*self._dead, *self.shelves()):
                moved.bit = holders.bit(moved.unit, moved.tier)
        shelf.bit = holders.bit(shelf.unit, shelf.tier)
        self.matcher.hold_unit(shelf.unit)

    def _make_room(self, newest: Shelf) -> None:
        """Return to the bound: take dead shelves apart first, then evict from `newest` if it has more than its share,
        else from the largest shelf."""
        looks = 0
        while self.entries + len(self.orphans) > self.max_blocks:
            if self._dead:
                self._take_apart()
                continue
            shelves = self.shelves()
            loser = newest
            if newest.table.live <= self.max_blocks // len(shelves):
                loser = max(shelves, key=lambda shelf: shelf.table.live)
            if not loser.table.live:
                self.orphans.give_up()
                continue
            evicted = self.blocks.evict(loser, forced=looks >= _LOOKS)
            if evicted:  # the engine still has them
                loser.cache.provisional = loser.cache.dropped = True
            loser.cache.counts.evicted += evicted
            self.evicted += evicted
            self.entries -= evicted
            looks += 1

    def validate(self) -> None:
        """Raise `AssertionError` if shelves and holder sets disagree or a bound is exceeded. O(all blocks)."""
        marks: dict[int, int] = {}
        copies = 0
        for shelf in (*self.shelves(), *self._dead):
            for segment in range(shelf.reclaimed, shelf.table.segments):
                _, positions = shelf.table.of_segment(segment)
                for key in spread_many(shelf.table.vectors[0][positions]).tolist():
                    marks[key] = marks.get(key, 0) | shelf.bit
                    copies += 1
        held: dict[int, int] = {}
        sets: dict[int, int] = {}
        table = self.blocks.table
        for segment in range(table.segments):
            keys, positions = table.of_segment(segment)
            for key, number in zip(keys.tolist(), table.vectors[0][positions].tolist(), strict=True):
                held[key] = self.blocks.holders.mask(number)
                sets[number] = sets.get(number, 0) + 1
        assert marks == held, "shelves and holder sets disagree"
        assert copies == self.entries <= self.max_blocks
        self.blocks.holders.validate(sets)
        self.orphans.validate()
        self.speculation.validate()


# Translates engine hashes to keys, for callers that know a prompt only by its engine hashes.
#
# An engine's hash identifies its block and all blocks before it. So a shelf that holds a block has the keys of the
# whole beginning, as far as it still holds these, and the shelf with the longest beginning has all of them.


def keys_of(index: KvIndex, hashes: Sequence[int], model: str) -> Keys:
    """Return the keys of the leading blocks that any shelf holds. The keys of the other blocks are not known.

    Takes 0.4 ms for 1,000 hashes and 100 endpoints: a bisection in each shelf that may hold more than the best so far.
    """
    if index.space.self_contained:
        return np.array(hashes, np.uint64) ^ np.uint64(index.space.root(model, ""))
    wanted = np.array(hashes, np.uint64)
    shelves = sorted(index.shelves(model), key=lambda shelf: -shelf.table.live)
    keys: list[Keys] = []
    start = 0
    while start < len(wanted):
        shelf, end = _longest(shelves, hashes, start)
        if shelf is None:
            break
        positions = shelf.table.find_many(wanted[start:end])
        known = positions >= 0
        count = len(positions) if known.all() else int((~known).argmax())
        if not count:
            break
        keys.append(shelf.table.vectors[0].take(positions[:count]))
        start += count
    return np.concatenate(keys) if keys else np.zeros(0, np.uint64)


def _longest(shelves: Sequence[Shelf], hashes: Sequence[int], start: int) -> tuple[Shelf | None, int]:
    """Return the shelf that holds most blocks from `start` on, and where these end; `None` = none holds that block."""
    best, end = None, start
    for shelf in shelves:
        seek = shelf.table.seek
        if seek(hashes[start]) < 0 or (best is not None and seek(hashes[end - 1]) < 0):
            continue
        low, high = max(start + 1, end), len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if seek(hashes[middle - 1]) >= 0:
                low = middle
            else:
                high = middle - 1
        if best is None or low > end:
            best, end = shelf, low
        if end == len(hashes):
            break
    return best, end


def numbers(hashes: list[int | str]) -> list[int]:
    """Return hashes as unsigned 64-bit integers. `hashes`: integers of either sign, or decimal text. Raise `ValueError`
    for others."""
    if set(map(type, hashes)) == {int} and min(hashes) >= 0 and max(hashes) < 1 << 64:  # type: ignore[operator]
        return hashes  # type: ignore[return-value]
    return list(_numbers(hashes))


def _numbers(hashes: Sequence[int | str]) -> Iterator[int]:
    for index, given in enumerate(hashes):
        if isinstance(given, str):
            if not given.isascii() or not given.removeprefix("-").isdigit() or len(given) > 20:
                raise ValueError(f"entry {index} is no decimal number: {given[:40]!r}")
            given = int(given)
        if not -(1 << 63) <= given < 1 << 64:
            raise ValueError(f"entry {index} has more than 64 bits")
        yield given & 0xFFFFFFFFFFFFFFFF
