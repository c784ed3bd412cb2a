"""Uses of a workload's block ids: hashes for comparing prompts, ideal prefix hits, and a description for people.

Prompts are compared in two forms, KV block hashes and the learned prefix chain. Both are chained: the hash of a block
covers everything before it, so equal hashes mean equal beginnings, whatever the ids of a trace mean by themselves.

* An engine needs the hash of every full block of its own block size. If that is smaller than the trace's, a trace block
  is divided; if it is larger, several trace blocks form one. One size must be a multiple of the other.
* The scheduler's chain is what `fairlead.core.prefix.ChainHasher` would make from the prompt's bytes: borders at least
  `max(finest, offset/growth)` apart that depend only on the offset. It can only have borders where the trace has block
  borders, so the trace's borders are thinned out in the same way. A token counts as a fixed number of bytes.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from struct import pack
from typing import Any

from xxhash import xxh3_64_intdigest

from fairlead.core.request import NO_PREFIX, PrefixChain
from fairlead.lab.workload.record import Record, Workload

#: Bytes of JSON per prompt token, as assumed by `fairlead.core.tokens` and the capacity budget of the fleet.
BYTES_PER_TOKEN = 4.2
#: The values of `fairlead.core.prefix.ChainHasher` with the default hash block of 64 tokens.
FINEST = 256
GROWTH = 32


def chained(ids: Sequence[int], parent: int) -> list[int]:
    """One 64-bit hash per id, each covering all ids before it. O(ids)."""
    hashes = []
    for block in ids:
        parent = xxh3_64_intdigest(pack("<Q", block & 0xFFFFFFFFFFFFFFFF), parent)
        hashes.append(parent)
    return hashes


def engine_hashes(chain: Sequence[int], block_size: int, tokens: int, engine_block: int) -> list[int]:
    """Hashes of the full blocks of `engine_block` tokens in the first `tokens` tokens.

    `chain` is a result of `chained`, with one hash per `block_size` tokens; the last hash may cover fewer tokens.
    Raises `ValueError` if neither size is a multiple of the other.
    """
    full_blocks = tokens // engine_block
    if block_size == engine_block:
        return list(chain[:full_blocks])
    if block_size % engine_block == 0:
        pieces = block_size // engine_block
        hashes = [xxh3_64_intdigest(pack("<Q", piece), parent) for parent in chain for piece in range(pieces)]
        return hashes[:full_blocks]
    if engine_block % block_size == 0:
        step = engine_block // block_size
        return list(chain[step - 1 :: step][:full_blocks])
    raise ValueError(f"KV blocks of {engine_block} tokens do not fit trace blocks of {block_size} tokens")


class Borders:
    """The block borders of a trace that the scheduler's chain keeps. One object per block size; grows as needed."""

    def __init__(
        self, block_size: int, bytes_per_token: float = BYTES_PER_TOKEN, finest: int = FINEST, growth: int = GROWTH
    ) -> None:
        self._width = block_size * bytes_per_token
        self._finest = finest
        self._growth = growth
        #: The indices of the trace blocks that end at a border, and the borders in bytes.
        self._kept: list[int] = []
        self._ends: list[int] = []
        self._known = 0

    def chain(self, hashes: Sequence[int], full_blocks: int) -> PrefixChain:
        """The prefix chain of a prompt. `hashes` are from `chained`; the first `full_blocks` are full blocks."""
        if not full_blocks:
            return NO_PREFIX
        self._extend(full_blocks)
        count = bisect_left(self._kept, full_blocks)
        return PrefixChain(tuple(map(hashes.__getitem__, self._kept[:count])), tuple(self._ends[:count]))

    def _extend(self, blocks: int) -> None:
        last = self._ends[-1] if self._ends else 0
        for index in range(self._known, blocks):
            end = int((index + 1) * self._width)
            if end - last >= max(self._finest, last // self._growth):
                self._kept.append(index)
                self._ends.append(end)
                last = end
        self._known = max(self._known, blocks)


# Describes a workload in a few lines.


def continues(record: Record, before: Record) -> bool:
    """Whether the prompt begins with all full blocks of the prompt before, so that it may contain its answer, too."""
    full = before.in_tokens // before.block_size if before.block_size else 0
    return record.block_size == before.block_size and record.hash_ids[:full] == before.hash_ids[:full]


def ideal_hits(workload: Workload) -> Iterator[int]:
    """The most tokens of each prompt that caches can hold: whole blocks of earlier prompts, and the prompt and answer
    that it continues."""
    seen: set[int] = set()
    earlier: dict[str, Record] = {}
    for record in workload.records:
        hits, counting = 0, True
        for index, block in enumerate(chained(record.hash_ids, 0)):
            if block not in seen:
                counting = False
                seen.add(block)
            elif counting:
                hits += max(min(record.block_size, record.in_tokens - index * record.block_size), 0)
        before = earlier.get(record.parent)
        if before is not None and record.hash_ids and continues(record, before):
            hits = max(hits, min(before.in_tokens + before.out_tokens, record.in_tokens))
        earlier[record.id] = record
        yield hits


def ideal_hit(workload: Workload) -> float:
    """The largest share of prompt tokens that caches can hold."""
    tokens = sum(record.in_tokens for record in workload.records)
    return sum(ideal_hits(workload)) / tokens if tokens else 0.0


def describe(workload: Workload) -> list[str]:
    """The `figures` for people."""
    if not workload.records:
        return [f"{workload.name}: no requests"]
    summary, seconds = figures(workload), workload.duration_s
    rate = f" ({len(workload) / seconds:.2f}/s)" if seconds else ""
    spread = "mean {mean:,.0f}  p50 {p50:,.0f}  max {max:,}".format
    return [
        f"{workload.name}: {len(workload):,} requests in {seconds:,.0f} s{rate}, {workload.dispatch} dispatch,"
        f" {summary['sessions']:,} sessions",
        "  input   " + spread(**summary["in_tokens"]),
        "  output  " + spread(**summary["out_tokens"]),
        f"  ideal prefix hit {summary['ideal_hit']:.1%}, blocks of {workload.block_size or 'no'} tokens",
    ]


def figures(workload: Workload) -> dict[str, Any]:
    """A description for programs: seconds, tokens, shares."""
    records = workload.records
    return {
        "name": workload.name,
        "requests": len(records),
        "duration_s": workload.duration_s,
        "dispatch": workload.dispatch,
        "sessions": len({record.session for record in records if record.session}),
        "block_size": workload.block_size,
        "in_tokens": _mean_and_more([record.in_tokens for record in records]),
        "out_tokens": _mean_and_more([record.out_tokens for record in records]),
        "ideal_hit": ideal_hit(workload),
    }


def _mean_and_more(values: Sequence[int]) -> dict[str, float]:
    return {"mean": fmean(values), "p50": median(values), "max": max(values)} if values else {}
