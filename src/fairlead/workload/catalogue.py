"""Kinds of use by name, with the mean lengths, turns, gaps and service levels that are published for them."""

from collections.abc import Mapping

from msgspec import Struct

from fairlead.workload.conversation import Conversation


class Kind(Struct, frozen=True, kw_only=True):
    """`slo` says what counts as good service, as published; records carry its TTFT and TPOT parts."""

    spec: Conversation
    slo: str
    #: Mean prompt and answer, in tokens, that the parameters are made for.
    mean_in: int
    mean_out: int


def _kind(mean_in: int, mean_out: int, slo: str, **fields: float) -> Kind:
    values = {"output_tokens": mean_out, "spread": 0.5, **fields}
    return Kind(spec=Conversation(**values), slo=slo, mean_in=mean_in, mean_out=mean_out)  # type: ignore[arg-type]


#: A prompt's mean is system + first + (turns - 1) / 2 · (turn + output), where turns are not cut short.
CATALOGUE: Mapping[str, Kind] = {
    "interactive-chat": _kind(
        *(4000, 300, "TTFT p99 1 s, ITL p99 50 ms"),
        system_tokens=1000, turns=4, first_tokens=1500, turn_tokens=700, gap_s=45,
        slo_ttft_ms=1000, slo_tpot_ms=50,
    ),
    "code-generation": _kind(
        *(160_000, 425, "TTFT p95 30 s"),
        system_tokens=3000, turns=540, first_tokens=115_000, turn_tokens=150, gap_s=15,
        max_tokens=199_000, compact_to=118_000, slo_ttft_ms=30_000,
    ),
    "reasoning": _kind(
        *(1000, 8000, "TTFT p99 2 s"),
        system_tokens=250, turns=1, first_tokens=750, gap_s=0, block_size=50, slo_ttft_ms=2000,
    ),
    "deep-research": _kind(
        *(45_000, 300, "TTFT p90 10 s"),
        system_tokens=2000, turns=15, first_tokens=8000, turn_tokens=4700, gap_s=25, max_tokens=190_000,
        slo_ttft_ms=10_000,
    ),
    "rag-summaries": _kind(
        *(15_000, 500, "TTFT p90 15 s"),
        system_tokens=500, turns=1, first_tokens=14_500, gap_s=0, block_size=50, slo_ttft_ms=15_000,
    ),
    "synthetic-data": _kind(
        *(500, 4000, "E2E 2080 s"), system_tokens=0, turns=1, first_tokens=500, gap_s=0
    ),
    "agentic-replay": _kind(
        *(49_141, 659, "none published"),
        systems=4, system_tokens=8320, turns=22, first_tokens=6171, turn_tokens=2641, gap_s=13, max_tokens=190_000,
    ),
}  # fmt: skip
