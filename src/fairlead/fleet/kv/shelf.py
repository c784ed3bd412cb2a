"""The copies that one cache has in one tier: the engine's hash of a block to its key and the number of copies."""

from typing import TYPE_CHECKING

from fairlead.fleet.kv.table import Table
from fairlead.fleet.kv.tiers import Tier

if TYPE_CHECKING:
    from fairlead.fleet.kv.cache import RankCache

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
