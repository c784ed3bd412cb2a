"""The stub's block hashes → those of a vLLM with a certain algorithm and seed, for subscribers that recompute them.

The engine knows its blocks by hashes of its own. Here each gets vLLM's full digest too, chained from its parent's; the
last eight bytes of it are what events tell. An adapter's path, which vLLM hashes too, is taken to be its name.
"""

from collections import OrderedDict
from collections.abc import Sequence

from fairlead.engine import tokens as tk
from fairlead.fleet.kv.engine_hash import EngineHasher, short

#: Blocks that have a name; more are told by the stub's own hash where they are a parent.
_MOST = 500_000


class BlockNames:
    """`seed`: PYTHONHASHSEED; empty = not set. Raises `ValueError` for an algorithm that then hashes at random."""

    def __init__(self, algorithm: str, seed: str = "") -> None:
        self._hasher = EngineHasher(algorithm, seed or None)
        self._digests: OrderedDict[int, bytes] = OrderedDict()

    def name(
        self, hashes: Sequence[int], parent: int, tokens: bytes, block_size: int, lora: str, salt: str
    ) -> tuple[list[int], int]:
        """What an event tells of consecutive blocks after `parent` (0 = none): their hashes, and the parent's."""
        before = self._digests.get(parent) if parent else None
        adapter = (lora, lora) if lora else None
        digests = self._hasher.digests(tk.ids(tokens), block_size, adapter, salt or None, parent=before)
        self._digests.update(zip(hashes, digests, strict=True))
        while len(self._digests) > _MOST:
            self._digests.popitem(last=False)
        return [short(digest) for digest in digests], short(before) if before is not None else parent

    def of(self, digest: int) -> int:
        """The name of one block."""
        found = self._digests.get(digest)
        return short(found) if found is not None else digest
