"""What a workload amounts to, in a few lines."""

from collections.abc import Sequence
from statistics import fmean, median

from fairlead.workload.blocks import chained
from fairlead.workload.record import Workload


def ideal_hit(workload: Workload) -> float:
    """Share of prompt tokens that one cache without bounds would hit, in whole blocks."""
    seen: set[int] = set()
    tokens = hits = 0
    for record in workload.records:
        tokens += record.in_tokens
        counting = True
        for index, block in enumerate(chained(record.hash_ids, 0)):
            if block not in seen:
                counting = False
                seen.add(block)
            elif counting:
                hits += max(min(record.block_size, record.in_tokens - index * record.block_size), 0)
    return hits / tokens if tokens else 0.0


def describe(workload: Workload) -> list[str]:
    """Lines for people."""
    records = workload.records
    if not records:
        return [f"{workload.name}: no requests"]
    seconds = workload.duration_s
    sessions = len({record.session for record in records if record.session})
    return [
        f"{workload.name}: {len(records):,} requests in {seconds:,.0f} s"
        + (f" ({len(records) / seconds:.2f}/s)" if seconds else "")
        + f", {workload.dispatch} dispatch, {sessions:,} sessions",
        "  input   " + _spread([record.in_tokens for record in records]),
        "  output  " + _spread([record.out_tokens for record in records]),
        f"  ideal prefix hit {ideal_hit(workload):.1%}, blocks of {workload.block_size or 'no'} tokens",
    ]


def figures(workload: Workload) -> dict[str, object]:
    """The same for programs: seconds, tokens, shares."""
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


def _spread(values: Sequence[int]) -> str:
    return f"mean {fmean(values):,.0f}  p50 {median(values):,.0f}  max {max(values):,}"
