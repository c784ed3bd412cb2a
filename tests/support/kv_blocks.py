"""Events of the exact index applied in one go, and what it has of a block."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from fairlead.core.kv.cache import RankCache, Shelf
from fairlead.core.kv.events import KvEvent, apply
from fairlead.core.kv.index import KvIndex
from fairlead.core.kv.keys import EngineSpace, Keys
from fairlead.core.kv.snapshot import Place


def apply_all(index: KvIndex, cache: RankCache, event: KvEvent, now: float) -> None:
    """Apply an event completely, and do all deferred work."""
    steps = apply(index, cache, event, now)
    if steps is not None:
        for _ in steps:
            pass
    while index.tend(now):
        pass


def held(place: Place) -> AbstractContextManager[Callable[[], Place | None]]:
    """What `save` needs of a rank whose events have stopped there."""
    return nullcontext(lambda: place)


def copies_of(shelf: Shelf, digest: int) -> int:
    position = shelf.table.seek(digest)
    return shelf.table.columns[1][position] if position >= 0 else 0


def engine_keys(model: str, hashes: Sequence[int]) -> Keys:
    """The keys of a prompt from the engine's hashes of its blocks."""
    return np.array(hashes, np.uint64) ^ np.uint64(EngineSpace().root(model, ""))
