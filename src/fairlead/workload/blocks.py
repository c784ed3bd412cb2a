"""Block ids of a workload → the two forms in which prompts are compared: KV block hashes and the learned prefix chain.

Both are chained: the hash of a block covers everything before it, so equal hash means equal beginning, whatever a
trace's ids mean by themselves.

* An engine wants the hash of every full block of its own block size. Where that is smaller than the trace's, a trace
  block is cut into pieces; where it is larger, several make one (it must be a multiple one way or the other).
* The scheduler's chain is what `fairlead.fleet.prefix.ChainHasher` would make of the prompt's bytes: borders at least
  `max(finest, offset/growth)` apart that depend on the offset alone. It can only be cut where the trace is, so borders
  are the trace's block borders, thinned out in the same way. Tokens become bytes at a fixed rate.
"""

from collections.abc import Sequence
from struct import pack

from xxhash import xxh3_64_intdigest

from fairlead.model.request import NO_PREFIX, PrefixChain

#: Bytes of JSON per prompt token, as `fairlead.parse.tokens` and the fleet's capacity budget assume.
BYTES_PER_TOKEN = 4.2
#: As `fairlead.fleet.prefix.ChainHasher` with the default hash block of 64 tokens.
FINEST = 256
GROWTH = 32


def chained(ids: Sequence[int], parent: int) -> list[int]:
    """One 64-bit hash per id, each covering all before it. O(ids)."""
    hashes = []
    for block in ids:
        parent = xxh3_64_intdigest(pack("<Q", block & 0xFFFFFFFFFFFFFFFF), parent)
        hashes.append(parent)
    return hashes


def engine_hashes(chain: Sequence[int], block_size: int, tokens: int, engine_block: int) -> list[int]:
    """Hashes of the full blocks of `engine_block` tokens in the first `tokens` tokens.

    `chain` comes from `chained`, one hash per `block_size` tokens, the last one perhaps for fewer.
    Raises `ValueError` when neither size is a multiple of the other.
    """
    whole = tokens // engine_block
    if block_size == engine_block:
        return list(chain[:whole])
    if block_size % engine_block == 0:
        pieces = block_size // engine_block
        hashes = [xxh3_64_intdigest(pack("<Q", piece), parent) for parent in chain for piece in range(pieces)]
        return hashes[:whole]
    if engine_block % block_size == 0:
        step = engine_block // block_size
        return list(chain[step - 1 :: step][:whole])
    raise ValueError(f"KV blocks of {engine_block} tokens do not fit trace blocks of {block_size} tokens")


class Borders:
    """Which of a trace's block borders the scheduler's chain keeps. One per block size; grows as needed."""

    def __init__(
        self, block_size: int, bytes_per_token: float = BYTES_PER_TOKEN, finest: int = FINEST, growth: int = GROWTH
    ) -> None:
        self._width = block_size * bytes_per_token
        self._finest = finest
        self._growth = growth
        #: Index of the trace block that a border ends, and the border in bytes.
        self._kept: list[tuple[int, int]] = []
        self._known = 0

    def chain(self, hashes: Sequence[int], whole: int) -> PrefixChain:
        """The prefix chain of a prompt; `hashes` from `chained`, of which the first `whole` are full blocks."""
        if not whole:
            return NO_PREFIX
        self._extend(whole)
        kept = [(index, end) for index, end in self._kept if index < whole]
        return PrefixChain(tuple(hashes[index] for index, _ in kept), tuple(end for _, end in kept))

    def _extend(self, blocks: int) -> None:
        last = self._kept[-1][1] if self._kept else 0
        for index in range(self._known, blocks):
            end = int((index + 1) * self._width)
            if end - last >= max(self._finest, last // self._growth):
                self._kept.append((index, end))
                last = end
        self._known = max(self._known, blocks)
