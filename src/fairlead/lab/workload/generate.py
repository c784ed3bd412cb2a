"""Generators by name, and the catalogue: kinds of use with their published lengths, turns, gaps and service levels."""

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

import msgspec
from msgspec import Struct

from fairlead.config.problems import suggestion
from fairlead.lab.workload import adversarial
from fairlead.lab.workload.arrivals import Arrivals, bursty, constant, poisson, ramp
from fairlead.lab.workload.conversation import Conversation, SharedPrefix, conversation, shared_prefix
from fairlead.lab.workload.record import Dispatch, Workload

T = TypeVar("T", bound=Struct)


class Kind(Struct, frozen=True, kw_only=True):
    """A kind of use. `slo`: the published service level in words; the records have its TTFT and TPOT as numbers."""

    spec: Conversation
    slo: str
    #: Published mean prompt and answer in tokens; the parameters are chosen to give these means.
    mean_in: int
    mean_out: int


def _kind(mean_in: int, mean_out: int, slo: str, **fields: float) -> Kind:
    values = {"output_tokens": mean_out, "spread": 0.5, **fields}
    return Kind(spec=Conversation(**values), slo=slo, mean_in=mean_in, mean_out=mean_out)  # type: ignore[arg-type]


#: The mean prompt is system + first + (turns - 1) / 2 · (turn + output) tokens, if `max_tokens` cuts no session short.
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

# Generators by name, for `fairlead sim workload generate`, with parameters as text.

#: The adversarial workloads. `generate` uses their default parameters.
ADVERSARIAL: Mapping[str, Callable[..., Workload]] = {
    make.__name__.replace("_", "-"): make
    for make in (
        *(adversarial.paced_prefix, adversarial.cold_bursts, adversarial.viral_prompt, adversarial.long_and_short),
        *(adversarial.cancel_storm, adversarial.overload, adversarial.hot_prefix, adversarial.same_prompts),
        *(adversarial.rare_giants, adversarial.one_hog, adversarial.adapters),
    )
}
#: The kinds whose pace can be chosen.
PACED = ("shared-prefix", "conversation", *CATALOGUE)
KINDS = (*PACED, *ADVERSARIAL)


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Amount and rate of a workload, in sessions if it has any, otherwise in requests. They start within `seconds`.
    0 as `count` or `seconds` = no such limit; `dispatch`: `None` = the default of the kind."""

    rate: float = 10.0
    count: int = 0
    seconds: float = 0.0
    arrivals: str = "poisson"
    #: For `bursty` arrivals: coefficient of variation of the gaps.
    cv: float = 3.0
    #: For `ramp` arrivals: the final rate, reached after `seconds`.
    to_rate: float = 0.0
    dispatch: Dispatch | None = None
    seed: int = 0


def generate(kind: str, pace: Pace, parameters: Mapping[str, str]) -> Workload:
    """Generate a workload. Raises `ValueError` for an unknown kind or parameter, or an invalid value."""
    if kind in ADVERSARIAL:
        if parameters or pace != Pace(seed=pace.seed):
            raise ValueError(f"{kind} takes no parameters and no pace; its seed is all that can be chosen")
        return ADVERSARIAL[kind](seed=pace.seed)
    if pace.count <= 0 and pace.seconds <= 0:
        raise ValueError("give --requests or --seconds: arrivals never end by themselves")
    arrivals = arrivals_of(pace)
    if kind == "shared-prefix":
        made = shared_prefix(
            changed(SharedPrefix(), parameters),
            arrivals=arrivals,
            rate=pace.rate,
            seconds=pace.seconds,
            count=pace.count,
            seed=pace.seed,
        )
    elif kind == "conversation" or kind in CATALOGUE:
        spec = CATALOGUE[kind].spec if kind in CATALOGUE else Conversation()
        made = conversation(
            changed(spec, parameters),
            sessions=pace.count,
            seconds=pace.seconds,
            arrivals=arrivals,
            seed=pace.seed,
            dispatch=pace.dispatch or "think",
            name=kind,
        )
    else:
        raise ValueError(f"unknown kind {kind!r}; {suggestion(kind, KINDS)}")
    return msgspec.structs.replace(made, dispatch=pace.dispatch) if pace.dispatch else made


def arrivals_of(pace: Pace) -> Arrivals:
    """The arrivals of a pace. Raises `ValueError` for an unknown name, a rate that is not above 0, or half a ramp."""
    if pace.arrivals == "poisson":
        return poisson(pace.rate)
    if pace.arrivals == "constant":
        return constant(pace.rate)
    if pace.arrivals == "bursty":
        return bursty(pace.rate, pace.cv)
    if pace.arrivals == "ramp":
        if not (pace.to_rate and pace.seconds):
            raise ValueError("a ramp goes from --rate to --to-rate within --seconds: give all three")
        return ramp(pace.rate, pace.to_rate, pace.seconds)
    raise ValueError(f"unknown arrivals {pace.arrivals!r}; known: poisson, constant, bursty, ramp")


def changed(spec: T, parameters: Mapping[str, str], settable: Collection[str] = ()) -> T:
    """`spec` with the given fields changed, converted from text. `settable`: the fields that may be changed; empty =
    all. Raises `ValueError`."""
    fields = msgspec.structs.asdict(spec)
    known = settable or fields
    for name in parameters:
        if name not in known:
            raise ValueError(f"unknown parameter {name!r}; known: {', '.join(known)}")
    try:
        return msgspec.convert({**fields, **parameters}, type(spec), strict=False)
    except msgspec.ValidationError as error:
        said, marked, path = str(error).partition(" - at `$.")
        raise ValueError(f"{path[:-1]}: {said[:1].lower()}{said[1:]}" if marked else said) from None
