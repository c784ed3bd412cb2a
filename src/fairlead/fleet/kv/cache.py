"""One rank of one endpoint as a holder of blocks, and what it has been told."""

from collections import deque

from msgspec import Struct

from fairlead.fleet.kv.shelf import Shelf
from fairlead.fleet.kv.tiers import Tier

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
