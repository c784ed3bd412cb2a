"""An index whose blocks are kept by another process. It uses the answers that were fetched for each prompt beforehand.

Decisions read it like any index. Prompts that this process has just sent are still kept here. The state of each
endpoint's ranks is updated from time to time (`report`).

Rules
* A chain without an answer is not a miss but unknown (`knows`); then the learned index serves the request.
* An answer refers to the endpoints at the time of the question. It does not apply to a slot that has another endpoint
  by now.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from fairlead.core.kv.index import KvIndex
from fairlead.core.kv.keys import KeySpace
from fairlead.core.kv.match import BlockChain, KvMatch
from fairlead.core.kv.tiers import Tier

#: Ranks per endpoint, at most.
MOST_RANKS = 256


class RankState(Struct, frozen=True, kw_only=True):
    """The other process's state of a rank; see `RankCache`."""

    rank: int = 0
    heard: bool = False
    linked: bool = False
    behind: bool = False
    provisional: bool = False
    dropped: bool = False
    block_size: int = 0
    lives: int = 0
    numbered: bool = False
    blocks: int = 0
    clears: int = 0


class AnsweredIndex(KvIndex):
    """Has `add_slot`, `drop_slot`, `caches_of`, `look_up` and `speculation` like `KvIndex`, but no blocks."""

    tells_stores = False

    def __init__(self, model: str, space: KeySpace | None = None) -> None:
        super().__init__(10_000, space)
        self._model = model
        self._tenures: dict[int, int] = {}
        #: By slot and rank: the last reported `lives`.
        self._reported: dict[int, dict[int, int]] = {}
        self._tenants = 0

    def add_slot(self, slot: int) -> None:
        super().add_slot(slot)
        self._tenants += 1
        self._tenures[slot] = self._tenants

    def drop_slot(self, slot: int) -> None:
        super().drop_slot(slot)
        del self._tenures[slot]
        self._reported.pop(slot, None)

    def tenure(self, slot: int) -> int:
        """Return a number that distinguishes successive endpoints in the same slot; 0 = the slot is empty."""
        return self._tenures.get(slot, 0)

    def report(self, slot: int, states: Sequence[RankState]) -> None:
        """Take the new states of an endpoint's ranks. Ranks that are not listed no longer exist."""
        before, reported = self._reported.get(slot, {}), {state.rank: state.lives for state in states[:MOST_RANKS]}
        self.lives[slot] += any(before.get(rank, lives) != lives for rank, lives in reported.items())
        self._reported[slot] = reported or before  # an indexer that restarts has no ranks at first
        for state in states[:MOST_RANKS]:
            cache = self.rank(slot, state.rank, self._model)
            if cache.heard and state.clears > cache.clears:  # an indexer that restarts counts from 0
                cache.note_emptied()
            cache.clears = state.clears
            cache.heard, cache.linked, cache.behind = state.heard, state.linked, state.behind
            cache.provisional, cache.dropped, cache.lives = state.provisional, state.dropped, state.lives
            cache.block_size, cache.numbered = state.block_size, state.numbered
        self.keep_ranks(slot, {state.rank for state in states})

    def silent(self) -> None:
        """Mark all ranks as disconnected, because no states arrive any more."""
        for cache in self.caches():
            cache.linked = False

    def knows(self, chain: BlockChain) -> bool:
        return chain.held is not None

    def look_up(self, chain: BlockChain, slots: int) -> KvMatch | None:
        return self.matcher.guess(self._answer(chain, slots), chain, slots)

    def _answer(self, chain: BlockChain, slots: int) -> KvMatch | None:
        held = [
            held_by
            for held_by in chain.held or ()
            if held_by.slot < slots and self.tenure(held_by.slot) == held_by.tenure
        ]
        if not held:
            return None
        tiers = np.zeros((max(len(held_by.tiers) for held_by in held), slots))
        ranks = self.matcher.ranks(slots, 0.0)
        for held_by in held:
            tiers[: len(held_by.tiers), held_by.slot] = held_by.tiers
            if ranks is not None:
                # Without the ranks' blocks, each has those of the endpoint.
                of_each = held_by.ranks[: len(ranks.blocks)] or (sum(held_by.tiers),)
                ranks.blocks[: len(held_by.ranks) or None, held_by.slot] = of_each
        return KvMatch(tiers.sum(axis=0), chain.block_size, tiers, ranks)


def bounded(tiers: Sequence[float], total: int) -> tuple[float, ...]:
    """Return another process's counts of blocks per tier, limited to at least 0 each and at most `total` together."""
    left, clipped = float(total), list[float]()
    for blocks in tiers[: len(Tier)]:
        clipped.append(min(max(float(blocks), 0.0), left))
        left -= clipped[-1]
    return tuple(clipped)
