"""The blocks of one rank of one endpoint: a shelf per group and tier (the engine's hash of a block → its key and number
of copies), and the blocks whose parent is not known yet (orphans)."""

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from itertools import islice

from msgspec import Struct, field

from fairlead.core.kv.table import Table
from fairlead.core.kv.tiers import Tier

MOST_COPIES = 0xFFFF


class Shelf(Struct, eq=False):
    """The blocks of one (endpoint, rank, group) in one tier. Only the index changes them."""

    cache: "RankCache"
    group: int
    tier: Tier
    #: The number of (endpoint, rank, group) in holder sets.
    unit: int
    #: Unique, never reused.
    number: int
    #: Columns: key, copies.
    table: Table
    #: The bit of unit and tier in holder sets.
    bit: int = 0
    #: Keys that several hashes of this shelf map to, and how many additional hashes; e.g. if an adapter was loaded from
    #: another path.
    doubles: dict[int, int] = {}
    #: Hashes of blocks that wait for their parent.
    orphans: set[int] = set()
    dead: bool = False
    #: The segment where the next eviction begins; and how many segments of a dead shelf are taken apart.
    hand: int = 0
    reclaimed: int = 0

    def key_of(self, digest: int) -> int | None:
        """Return the key of a block on this shelf; `None` = it is not here."""
        position = self.table.seek(digest)
        return self.table.columns[0][position] if position >= 0 else None


# One rank of one endpoint as a holder of blocks, and counts of its events.

#: Kinds of attention whose cached blocks are useful for every longer prompt. For the others (sliding window, Mamba,
#: chunked local, cross attention) only the last blocks are, so indexing their groups would show prefixes that are not
#: usable. See `Tail`.
WHOLE_PREFIX_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})


#: The slot of storage that all endpoints of a model share: its blocks count for each of them.
EVERYONE = -1
#: The group of events that name none, as older engines and some stores outside of the GPU send them.
UNNAMED = -1
#: Groups per rank, at most (real models have a handful).
MOST_GROUPS = 64
#: Block sizes per rank, at most. Each costs one look-up per prompt.
MOST_SIZES = 4


class Counts(Struct):
    """Counts since the rank was added. Unless noted, they count blocks."""

    stored: int = 0
    #: Stored again: one more copy.
    copied: int = 0
    removed: int = 0
    #: Removed, but not known here.
    removed_unknown: int = 0
    #: Reported without tokens, and not known from another rank.
    nameless: int = 0
    #: Stored with an unknown parent (orphans).
    orphaned: int = 0
    #: One hash with two contents.
    conflicts: int = 0
    #: No room, or too many colliding hashes.
    refused: int = 0
    #: Evicted from the index to stay within bounds.
    evicted: int = 0
    #: Events that contradicted themselves.
    malformed: int = 0


#: Stores that are remembered per rank, to find out why predictions fail, and the tokens kept of each.
_HEADS = 32
#: Calls of `ExactKnowledge.refresh`, ten a second, within which all ranks of an engine empty their caches.
_EMPTIED_FOR = 100
HEAD_TOKENS = 256


class Head(Struct, frozen=True, gc=False):
    """The first blocks of an event that stored a prompt, or the new part of a prompt."""

    #: Whether it is the beginning of the prompt.
    first: bool
    hashes: tuple[int, ...]
    #: At most `HEAD_TOKENS` token ids, little-endian 32-bit integers.
    tokens: bytes
    block_size: int
    lora: str = ""
    extras: tuple[tuple[str, ...], ...] = ()


def _heads() -> deque[Head]:
    return deque(maxlen=_HEADS // 2)


class Tail(Struct, eq=False):
    """The blocks of a group that a hit needs only at its end: those of a sliding window, or Mamba's last state. Engine
    hashes get their keys from the blocks of full attention, which are stored later in the same batch. In models without
    full attention they get them from their own tokens."""

    #: Tokens per block, and blocks before the end of a hit that must be held.
    block_size: int
    needed: int
    #: By engine hash.
    copies: OrderedDict[int, int] = field(default_factory=OrderedDict)
    key_of: dict[int, int] = {}
    keys: set[int] = set()
    #: Stores whose blocks may be one block further ahead than taken for, by the last engine hash: their hashes, and the
    #: keys of their blocks and of the one before.
    doubtful: dict[int, tuple[list[int], list[int]]] = {}
    #: The key of the last block of the latest prompt that was begun, but of which nothing was kept so far. Events do
    #: not say which prompt the next piece continues: two long prompts whose pieces take turns, as they may with vLLM's
    #: `long_prefill_token_threshold`, are predicted as not cached.
    begun: int | None = None

    def clear(self) -> None:
        self.copies, self.key_of, self.keys, self.doubtful, self.begun = OrderedDict(), {}, set(), {}, None

    def begin(self, key: int | None) -> None:
        self.begun = key

    def doubt(self, hashes: list[int], keys: list[int]) -> None:
        """The blocks with these hashes may have all but the last of these keys, instead of all but the first."""
        if hashes[-1] in self.copies:
            self.doubtful[hashes[-1]] = hashes, keys

    def move(self, digest: int) -> None:
        """The blocks up to `digest` are one block further ahead than they were taken for."""
        hashes, keys = self.doubtful.pop(digest)
        for known, key in zip(hashes, keys, strict=False):
            self.name(known, key)

    def remove(self, digest: int, copies: int = 1) -> None:
        """Remove so many copies of a block, at most all. Blocks that are not known are ignored."""
        left = self.copies.get(digest, 0) - copies
        if left > 0:
            self.copies[digest] = left
        elif left > -copies:
            self.drop(digest)

    def drop(self, digest: int) -> None:
        """Remove all copies of a block."""
        del self.copies[digest]
        self.doubtful.pop(digest, None)
        if (key := self.key_of.pop(digest, None)) is not None:
            self.keys.discard(key)

    def name(self, digest: int, key: int) -> None:
        """Note the key of a block, if this group holds it."""
        if digest in self.copies:
            if (former := self.key_of.get(digest, key)) != key:  # taken for another place of the prompt at first
                self.keys.discard(former)
            self.key_of[digest] = key
            self.keys.add(key)

    def end(self, keys: Sequence[int], most: int) -> int:
        """Return the longest hit of at most `most` blocks of a prompt: the blocks before its end are held."""
        while most:
            for place in range(max(0, most - self.needed), most):
                if keys[place] not in self.keys:
                    most = place
                    break
            else:
                break
        return most


class Repeated(Struct, frozen=True, gc=False):
    """A store of a prompt's beginning whose blocks were known: computed again, or only reported."""

    hashes: list[int]
    batch: int
    #: The longest store of the batches before, one after the other, that had this beginning or a part of it.
    longest: list[int]
    #: How often so many of its blocks were stored.
    times: dict[int, int]


class RankCache(Struct, eq=False):
    """The blocks of one rank, created by `KvIndex.rank`. `model`: the base model, to which its blocks belong. `lives`:
    how often a new engine had been found at its endpoint when this one was."""

    slot: int
    rank: int
    model: str
    lives: int = 0
    shelves: dict[tuple[int, Tier], Shelf] = {}
    #: Unit of each group that has been seen.
    units: dict[int, int] = {}
    #: The reported kind of attention of each group.
    kinds: dict[int, str] = {}
    #: The groups that a hit needs only at its end, and whose need is known.
    tails: dict[int, Tail] = {}
    #: Some of them do not keep all blocks of a prompt that the engine has just computed.
    sparse: bool = False
    #: History is missing, so unknown blocks may be cached, and some known blocks may be gone. Or see `dropped`.
    provisional: bool = False
    #: The index dropped blocks to stay within its bounds. Only a cleared or new cache is complete again.
    dropped: bool = False
    counts: Counts = field(default_factory=Counts)
    #: Its engine emptied it a moment ago: the calls of `ExactKnowledge.refresh` until that is forgotten.
    emptied: int = 0
    #: How often it has done so. Tells readers of its state in other processes, who may miss the moment.
    clears: int = 0
    #: Tokens per block, from the last store in the fastest tier that has any; 0 = not reported yet.
    block_size: int = 0
    #: All block sizes of its blocks, and the fastest tier of each. A connector's chunks may be larger than blocks.
    sizes: dict[int, Tier] = {}
    #: Whether the last store of an adapter's blocks had its number instead of its name.
    numbered: bool = False
    #: The last stores of prompts: beginnings, and the rest; see `stores`.
    beginnings: deque[Head] = field(default_factory=_heads)
    rests: deque[Head] = field(default_factory=_heads)
    #: Set by the rank's feed: events have arrived since the engine started; it is connected; missing events are being
    #: fetched.
    heard: bool = False
    linked: bool = False
    behind: bool = False
    #: Batches begun so far; and by group and tier, the last known beginning that was stored, for one batch more.
    batch: int = 0
    repeated: dict[tuple[int, Tier], Repeated] = {}
    #: By the last block of each beginning of this batch that was computed, as a group shows which did not hold it: the
    #: groups and tiers whose store of it has been judged.
    computed: dict[int, set[tuple[int, Tier]]] = {}
    #: How many snapshots are being made of it. Its feed begins no batch meanwhile.
    holds: int = 0

    def stores(self) -> list[Head]:
        """Return recent stores: rests first, then beginnings."""
        return [*self.rests, *self.beginnings]

    @property
    def current(self) -> bool:
        """Whether its blocks are completely known and up to date."""
        return self.heard and self.linked and not self.behind and not self.holds and not self.provisional

    def group_of(self, group: int) -> int:
        """Return the group of an event: for `UNNAMED`, the first one whose blocks are indexed."""
        return min(self.units, default=0) if group == UNNAMED else group

    def indexable(self, group: int, kind: str) -> bool:
        """Remember a group's kind, and return whether its blocks can be indexed. An empty kind means the last reported
        one, or full attention if none was reported."""
        if kind and (group in self.kinds or len(self.kinds) < MOST_GROUPS):
            self.kinds[group] = kind
        else:
            kind = self.kinds.get(group, "")
        return not kind or kind in WHOLE_PREFIX_KINDS

    def needed(self, group: int, size: int, window: int) -> int:
        """Return how many blocks of `size` tokens a hit needs at its end in a group; 0 = all of them, or not known."""
        kind = self.kinds.get(group)
        if kind == "mamba":
            return 1
        return -(-(window - 1) // size) if kind == "sliding_window" and window > 1 and size > 0 else 0

    def hit(self, keys: Sequence[int], blocks: int) -> int:
        """Return how many of the leading `blocks`, which full attention has, all groups can use."""
        longest = -1
        while longest != blocks:
            longest = blocks
            for tail in self.tails.values():
                if tail.block_size == self.block_size:
                    blocks = tail.end(keys, blocks)
        return blocks

    def tail_key(self, digest: int) -> int | None:
        """Return the key of a block of a tail; `None` = it is in none, or its key is not known."""
        return next((tail.key_of[digest] for tail in self.tails.values() if digest in tail.key_of), None)

    def sole_hit(self, keys: Sequence[int]) -> int:
        """Return how many of a prompt's blocks a model without full attention can use."""
        sized = any(tail.block_size == self.block_size for tail in self.tails.values())
        return self.hit(keys, len(keys)) if sized and not self.units else 0

    def note_size(self, size: int, tier: Tier) -> None:
        """Blocks of `size` tokens are stored in a tier. With too many sizes, the one known longest is forgotten."""
        self.sizes[size] = min(tier, self.sizes.get(size, tier))
        if tier <= self.sizes.get(self.block_size, tier):
            self.block_size = size
        if len(self.sizes) > MOST_SIZES:
            del self.sizes[next(known for known in self.sizes if known not in (size, self.block_size))]

    def begin_batch(self) -> None:
        self.batch += 1
        self.computed.clear()
        if self.repeated:
            self.repeated = {place: each for place, each in self.repeated.items() if each.batch == self.batch - 1}

    def note_repeated(self, place: tuple[int, Tier], hashes: list[int]) -> None:
        """The beginning of a prompt was stored whose blocks were known."""
        former, longest, times = self.repeated.get(place), hashes, dict[int, int]()
        if former is not None:
            shorter, longer = sorted((former.longest, hashes), key=len)
            if longer[: len(shorter)] == shorter:
                longest, times = longer, former.times
        times[len(hashes)] = times.get(len(hashes), 0) + 1
        self.repeated[place] = Repeated(hashes, self.batch, longest, times)

    def note_emptied(self) -> None:
        self.emptied = _EMPTIED_FOR
        self.clears += 1

    @property
    def blocks(self) -> int:
        """The number of distinct blocks, summed over groups and tiers."""
        tails = sum(len(tail.copies) for tail in self.tails.values())
        return tails + sum(shelf.table.live for shelf in self.shelves.values())

    def key_of(self, digest: int, first: Shelf | None = None) -> int | None:
        """Return the key of a block on any shelf, `first` being searched first; `None` = it is on none."""
        if first is not None and (key := first.key_of(digest)) is not None:
            return key
        for shelf in self.shelves.values():
            if shelf is not first and (key := shelf.key_of(digest)) is not None:
                return key
        return None


# Blocks whose parent is not known (orphans). They are kept, because the parent may be reported later, or by another
# endpoint.
#
# Orphans occur if the earlier history is missing: the first batches that arrive continue prompts that were stored
# before. Without orphans, such a prompt and all blocks that ever follow it would be lost.
#
# Rules
# * An orphan waits under its parent's hash, within the scope of a model. Equal engine hashes mean equal content, so a
#   parent that any endpoint reports is accepted.
# * An orphan counts its own copies; when all are removed it is forgotten.
# * There are at most `limit` orphans, and they take at most `most_bytes`: blocks of a thousand tokens take 4 kB. The
#   oldest are dropped first. After `ttl` seconds an orphan is given up.

#: Estimated bytes per orphan without its tokens and extra keys: the struct, its dict entries, two ints.
_SIZE = 436


class Orphan(Struct, gc=False):
    """A block, with everything that is needed to store it once its parent's key is known."""

    digest: int
    parent: int
    shelf: Shelf
    tokens: bytes
    block_size: int
    lora: str
    extras: tuple[str, ...]
    until: float
    copies: int = 1

    @property
    def nbytes(self) -> int:
        return _SIZE + len(self.tokens) + sum(map(len, self.extras))


class Orphans:
    """The orphans of all models, by (scope, parent hash) and by (shelf number, hash)."""

    def __init__(self, limit: int = 50_000, ttl: float = 600.0, most_bytes: int = 64 << 20) -> None:
        self.limit = limit
        self.ttl = ttl
        self.most_bytes = most_bytes
        #: The estimated memory in use.
        self.nbytes = 0
        self._entries: OrderedDict[tuple[int, int], Orphan] = OrderedDict()
        self._children: dict[tuple[str, int], dict[tuple[int, int], Orphan]] = {}
        #: Of those, the parents that were stored meanwhile, with their keys and the depth of the next block.
        self.known_parents: dict[tuple[str, int], tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def stored(self, scope: str, hashes: list[int], keys: list[int], depth: int) -> None:
        """Note which of these blocks orphans wait for. They follow `depth` other blocks."""
        for index, digest in enumerate(hashes, 1):
            if (scope, digest) in self._children:
                self.known_parents.setdefault((scope, digest), (keys[index - 1], depth + index))

    def add(self, orphan: Orphan) -> None:
        """Keep an orphan, or count one more copy of it. This may drop the oldest orphan."""
        name = (orphan.shelf.number, orphan.digest)
        known = self._entries.get(name)
        if known is not None:
            known.copies += 1
            return
        self._entries[name] = orphan
        orphan.shelf.orphans.add(orphan.digest)
        self._children.setdefault((orphan.shelf.cache.model, orphan.parent), {})[name] = orphan
        self.nbytes += orphan.nbytes
        while len(self._entries) > self.limit or self.nbytes > self.most_bytes:
            self.give_up()

    def removed(self, shelf: Shelf, digest: int, copies: int = 1) -> bool:
        """Remove so many copies, at most all. Return False if there is no such orphan."""
        orphan = self._entries.get((shelf.number, digest))
        if orphan is None:
            return False
        orphan.copies -= copies
        if orphan.copies <= 0:
            self._forget(orphan)
        return True

    def adopt(self, scope: str, parent: int) -> Iterator[Orphan]:
        """Iterate over the orphans that wait for this parent; each is taken out first."""
        while children := self._children.get((scope, parent)):
            orphan = next(iter(children.values()))
            self._forget(orphan)
            yield orphan

    def expire(self, now: float) -> None:
        """Give up orphans that are too old: O(their number)."""
        while self._entries:
            oldest = next(iter(self._entries.values()))
            if oldest.until > now:
                return
            self.give_up()

    def drop_shelf(self, shelf: Shelf, most: int) -> None:
        """Forget up to `most` orphans of a shelf."""
        for digest in list(islice(shelf.orphans, most)):
            self._forget(self._entries[shelf.number, digest])

    def give_up(self) -> None:
        """Forget the oldest orphan."""
        self._forget(next(iter(self._entries.values())))

    def _forget(self, orphan: Orphan) -> None:
        name = (orphan.shelf.number, orphan.digest)
        del self._entries[name]
        self.nbytes -= orphan.nbytes
        orphan.shelf.orphans.discard(orphan.digest)
        waiting = (orphan.shelf.cache.model, orphan.parent)
        children = self._children[waiting]
        del children[name]
        if not children:
            del self._children[waiting]
            self.known_parents.pop(waiting, None)

    def validate(self) -> None:
        """Raise `AssertionError` if the two indexes, the shelves or the bytes disagree."""
        assert self.nbytes == sum(orphan.nbytes for orphan in self._entries.values()) <= self.most_bytes
        assert sum(map(len, self._children.values())) == len(self._entries)
        assert self.known_parents.keys() <= self._children.keys()
        for (number, digest), orphan in self._entries.items():
            assert digest in orphan.shelf.orphans and orphan.shelf.number == number and orphan.copies > 0
