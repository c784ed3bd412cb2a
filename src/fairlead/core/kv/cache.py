"""What one rank of one endpoint holds: a shelf per tier (the engine's hash of a block → its key and number of copies),
and the blocks whose parent is not known yet."""

from collections import OrderedDict, deque
from collections.abc import Iterator

from msgspec import Struct

from fairlead.core.kv.table import Table
from fairlead.core.kv.tiers import Tier

MOST_COPIES = 0xFFFF


class Shelf:
    """Blocks of one (endpoint, rank, group) in one tier. The index moves things in and out."""

    __slots__ = ("bit", "cache", "dead", "doubles", "group", "hand", "number", "orphans", "reclaimed", "table", "tier",
                 "unit")  # fmt: skip

    def __init__(
        self, cache: "RankCache", group: int, tier: Tier, unit: int, number: int, reserve: int, limit: int
    ) -> None:
        self.cache = cache
        self.group = group
        self.tier = tier
        #: The number of (endpoint, rank, group) in holder sets.
        self.unit = unit
        #: The bit of unit and tier in holder sets.
        self.bit = 0
        #: Never used twice.
        self.number = number
        #: Columns: key, copies.
        self.table = Table(("u8", "u2"), reserve, limit)
        #: Keys that more than one hash here stands for, with how many more; e.g. an adapter loaded from another path.
        self.doubles: dict[int, int] = {}
        #: Hashes of blocks that wait for their parent.
        self.orphans: set[int] = set()
        self.dead = False
        #: Where the next search for a victim begins, and up to where a dead shelf is taken apart.
        self.hand = 0
        self.reclaimed = 0

    def key_of(self, digest: int) -> int | None:
        """The key of a block that lies here."""
        position = self.table.seek(digest)
        return self.table.columns[0][position] if position >= 0 else None

    def copies_of(self, digest: int) -> int:
        position = self.table.seek(digest)
        return self.table.columns[1][position] if position >= 0 else 0


# One rank of one endpoint as a holder of blocks, and what it has been told.

#: Kinds of attention whose cached blocks serve every longer prompt. Of the others (sliding window, Mamba, chunked
#: local, cross attention) only the last blocks are of use, so their groups would pretend prefixes that are not there.
WHOLE_PREFIX_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})


#: The slot of storage that all endpoints of a model share: what lies there counts for each of them.
EVERYONE = -1
#: Groups of one rank that are believed (real models have a handful).
MOST_GROUPS = 64


class Told(Struct):
    """Counts since the rank was added. Blocks, unless it says otherwise."""

    stored: int = 0
    #: Stored again: one more copy.
    copied: int = 0
    removed: int = 0
    #: Removed, but not known to be here.
    removed_unknown: int = 0
    #: In events.
    clears: int = 0
    #: Told without tokens and not known from elsewhere.
    nameless: int = 0
    #: Of groups whose blocks serve no longer prompt.
    not_indexable: int = 0
    #: Parent unknown when they came; then: parent found, gone with their rank, given up.
    orphaned: int = 0
    adopted: int = 0
    orphans_dropped: int = 0
    #: One hash, two contents.
    conflicts: int = 0
    #: No room, or too many colliding hashes.
    refused: int = 0
    #: Forgotten here to stay within bounds.
    evicted: int = 0
    #: In events; what contradicted itself.
    malformed: int = 0


#: Stores that are remembered per rank, to find out why predictions fail, and tokens of each.
_HEADS = 32
HEAD_TOKENS = 256


class Head(Struct, frozen=True, gc=False):
    """The first blocks of one event that stored a prompt, or what was new of one."""

    #: It is the beginning of a prompt.
    first: bool
    hashes: tuple[int, ...]
    #: At most `HEAD_TOKENS` of them, little-endian 32-bit integers.
    tokens: bytes
    block_size: int
    lora: str = ""
    extras: tuple[tuple[str, ...], ...] = ()


class RankCache:
    """Created by `KvIndex.rank`. `model`: the base model, which sets its blocks apart from those of other models."""

    __slots__ = (
        "beginnings", "behind", "block_size", "heard", "kinds", "linked", "lives", "model", "provisional", "rank",
        "reports", "rests", "shelves", "slot", "told", "units",
    )  # fmt: skip

    def __init__(self, slot: int, rank: int, model: str) -> None:
        self.slot = slot
        self.rank = rank
        self.model = model
        self.shelves: dict[tuple[int, Tier], Shelf] = {}
        #: Unit of each group that has been seen.
        self.units: dict[int, int] = {}
        #: What each group said of its attention.
        self.kinds: dict[int, str] = {}
        #: History is missing: more may be cached than is known, and some that is known may be gone.
        self.provisional = False
        #: Whether requests of ours make the engine tell reused blocks again (`kv_cache_report_mode`); such stores start
        #: at the root and are no further copies.
        self.reports = False
        self.told = Told()
        #: Tokens per block, as the last store said; 0 = none was told.
        self.block_size = 0
        #: The last stores of prompts, the beginnings apart from the rest; see `stores`.
        self.beginnings: deque[Head] = deque(maxlen=_HEADS // 2)
        self.rests: deque[Head] = deque(maxlen=_HEADS // 2)
        #: Set by the rank's feed: it has said something in this life; it is connected; something is missing that is
        #: being fetched; how often the engine was found to be another one.
        self.heard = False
        self.linked = False
        self.behind = False
        self.lives = 0

    def stores(self) -> list[Head]:
        """What was stored lately."""
        return [*self.rests, *self.beginnings]

    @property
    def current(self) -> bool:
        """What it holds is all known, and up to date."""
        return self.heard and self.linked and not self.behind and not self.provisional

    def mark_behind(self, behind: bool) -> None:
        """Whether something that the engine has told is still to come."""
        self.behind = behind

    def indexable(self, group: int, kind: str) -> bool:
        """Remember a group's kind; an empty one is what it said before, and full attention if it never did."""
        if kind and (group in self.kinds or len(self.kinds) < MOST_GROUPS):
            self.kinds[group] = kind
        else:
            kind = self.kinds.get(group, "")
        return not kind or kind in WHOLE_PREFIX_KINDS

    @property
    def blocks(self) -> int:
        """Distinct blocks over groups and tiers."""
        return sum(shelf.table.live for shelf in self.shelves.values())

    def key_of(self, digest: int, first: Shelf | None = None) -> int | None:
        """The key of a block that lies anywhere here; `first` is looked at first."""
        if first is not None and (key := first.key_of(digest)) is not None:
            return key
        for shelf in self.shelves.values():
            if shelf is not first and (key := shelf.key_of(digest)) is not None:
                return key
        return None


# Blocks whose parent is not known: kept, because the parent may be told later or by another endpoint.
#
# That happens when history is cut off in front: the first batches that are heard continue prompts that were stored
# before. Without orphans such a prompt and all that ever follows it would be lost.
#
# Rules
# * An orphan waits under its parent's hash, within the scope of a model: equal engine hashes mean equal content, so a
#   parent that any endpoint tells will do.
# * Who counts copies of an orphan is the orphan; a removed one is gone.
# * There are at most `limit` of them; the oldest go first. After `ttl` seconds one is given up.

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
