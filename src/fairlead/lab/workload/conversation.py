"""Workloads of conversations, and of shared prefixes."""

from functools import lru_cache
from math import exp, log, sqrt
from random import Random

from msgspec import Struct
from msgspec.structs import asdict

from fairlead.lab.workload.arrivals import Arrivals, poisson, times
from fairlead.lab.workload.record import Dispatch, Record, Workload, arranged


class Conversation(Struct, frozen=True, kw_only=True):
    """Parameters. `turns`, `gap_s` and the tokens of first prompts, later turns and answers are means; `spread` is the
    coefficient of variation of each of them. The other values are fixed."""

    #: The number of different system prompts, and their length.
    systems: int = 10
    system_tokens: int = 1000
    turns: float = 4.0
    first_tokens: int = 500
    turn_tokens: int = 200
    output_tokens: int = 300
    #: Seconds from an answer's end to the next turn.
    gap_s: float = 45.0
    spread: float = 0.6
    #: The limit of a prompt and its answer in tokens. A session that would exceed it ends. With `compact_to`, its
    #: history is replaced by a summary of that length instead, as coding agents do.
    max_tokens: int = 120_000
    compact_to: int = 0
    block_size: int = 64
    model: str = ""
    slo_ttft_ms: float = 0.0
    slo_tpot_ms: float = 0.0

    def __post_init__(self) -> None:
        values = asdict(self)
        for name in ("systems", "turns", "first_tokens", "turn_tokens", "output_tokens", "block_size"):
            if values[name] < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.max_tokens < 2 * self.output_tokens + self.system_tokens:
            raise ValueError(f"max_tokens {self.max_tokens} leaves no room for a prompt beside its answer")
        if self.system_tokens < 0 or self.gap_s < 0 or self.spread < 0:
            raise ValueError("lengths, gaps and spread must not be negative")


#: Assumed output tokens per second, used for the timestamps of later turns. `think` dispatch ignores these timestamps.
_ASSUMED_RATE = 30.0


def conversation(
    spec: Conversation,
    *,
    sessions: int = 0,
    seconds: float = 0.0,
    rate: float = 1.0,
    seed: int = 0,
    arrivals: Arrivals | None = None,
    dispatch: Dispatch = "think",
    name: str = "conversation",
) -> Workload:
    """Conversations that start at `rate` per second: the first `sessions`, or those of the first `seconds`."""
    rng = Random(f"conversation/{seed}")
    starts = times(arrivals or poisson(rate), rng, count=sessions, seconds=seconds)
    ids = _Ids(spec)
    records: list[Record] = []
    for session, start in enumerate(starts):
        records += _session(spec, session, start, rng, ids)
    return arranged(name, records, dispatch)


class _Ids:
    """Block ids: first those of the system prompts, then ascending new numbers."""

    def __init__(self, spec: Conversation) -> None:
        self._shared = spec.system_tokens // spec.block_size
        self._next = spec.systems * self._shared

    def begin(self, system: int) -> list[int]:
        return list(range(system * self._shared, (system + 1) * self._shared))

    def grow(self, ids: list[int], blocks: int) -> None:
        missing = max(blocks - len(ids), 0)
        ids.extend(range(self._next, self._next + missing))
        self._next += missing


def _session(spec: Conversation, session: int, start: float, rng: Random, ids: _Ids) -> list[Record]:
    turns = max(1, round(_around(spec.turns, spec.spread, rng))) if spec.turns > 1 else 1
    system = rng.randrange(spec.systems)
    blocks = ids.begin(system)
    length = spec.system_tokens + _length(spec.first_tokens, spec.spread, rng)
    time_s = start
    records: list[Record] = []
    for turn in range(turns):
        output = min(_length(spec.output_tokens, spec.spread, rng), spec.max_tokens // 2)
        if length + output > spec.max_tokens and records:
            if not spec.compact_to:
                break
            blocks = ids.begin(system)
            length = spec.system_tokens + spec.compact_to
        length = min(length, spec.max_tokens - output)
        ids.grow(blocks, -(-length // spec.block_size))
        gap = _around(spec.gap_s, spec.spread, rng) if turn and spec.gap_s else 0.0
        time_s += gap
        records.append(
            Record(
                id=f"{session}.{turn}",
                arrival_us=int(time_s * 1e6),
                session=f"s{session}",
                parent=f"{session}.{turn - 1}" if turn else "",
                think_ms=round(gap * 1e3, 3),
                in_tokens=length,
                out_tokens=output,
                max_tokens=output,
                block_size=spec.block_size,
                hash_ids=tuple(blocks),
                model=spec.model,
                slo_ttft_ms=spec.slo_ttft_ms,
                slo_tpot_ms=spec.slo_tpot_ms,
            )
        )
        time_s += output / _ASSUMED_RATE
        length += output + _length(spec.turn_tokens, spec.spread, rng)
    return records


def _around(mean: float, spread: float, rng: Random) -> float:
    """A log-normal value with this mean and coefficient of variation."""
    return exp(rng.gauss(*_log_normal(mean, spread))) if spread else mean


@lru_cache(maxsize=64)
def _log_normal(mean: float, spread: float) -> tuple[float, float]:
    """Mean and standard deviation of the logarithm."""
    variance = log(1.0 + spread * spread)
    return log(mean) - variance / 2, sqrt(variance)


def _length(mean: float, spread: float, rng: Random) -> int:
    return max(1, round(_around(mean, spread, rng)))


# The shared-prefix workload: several prompts in random order after each system prompt.
#
# Most published figures on prefix-aware routing are for 150 groups of 5 prompts with 6000 tokens of system prompt, 1200
# of question and 1000 of answer, at 3 to 60 requests per second. A router either keeps a system prompt on few replicas,
# or has it computed everywhere.


class SharedPrefix(Struct, frozen=True, kw_only=True):
    """Parameters; the defaults are those of the published figures."""

    groups: int = 150
    prompts: int = 5
    system_tokens: int = 6000
    question_tokens: int = 1200
    output_tokens: int = 1000
    #: Tokens per hash id. Must divide the system prompt; otherwise its last block is never shared.
    block_size: int = 80
    model: str = ""

    def __post_init__(self) -> None:
        values = asdict(self)
        for name in ("groups", "prompts", "system_tokens", "question_tokens", "output_tokens", "block_size"):
            if values[name] < 1:
                raise ValueError(f"{name} must be at least 1")


def shared_prefix(
    spec: SharedPrefix,
    *,
    rate: float = 10.0,
    seconds: float = 0.0,
    count: int = 0,
    seed: int = 0,
    arrivals: Arrivals | None = None,
) -> Workload:
    """One shuffled order of groups × prompts, repeated; Poisson arrivals by default."""
    rng = Random(f"shared-prefix/{seed}")
    order = [(group, prompt) for group in range(spec.groups) for prompt in range(spec.prompts)]
    rng.shuffle(order)
    ids = {place: _ids(spec, *place) for place in order}
    records = []
    for index, arrival_s in enumerate(times(arrivals or poisson(rate), rng, count=count, seconds=seconds)):
        group, prompt = order[index % len(order)]
        records.append(
            Record(
                id=str(index),
                arrival_us=int(arrival_s * 1e6),
                in_tokens=spec.system_tokens + spec.question_tokens,
                out_tokens=spec.output_tokens,
                max_tokens=spec.output_tokens,
                block_size=spec.block_size,
                hash_ids=ids[group, prompt],
                model=spec.model,
            )
        )
    return Workload(name=f"shared-prefix-{rate:g}rps", records=records)


def _ids(spec: SharedPrefix, group: int, prompt: int) -> tuple[int, ...]:
    """The blocks of the system prompt belong to the group, all others to the prompt alone."""
    total = -(-(spec.system_tokens + spec.question_tokens) // spec.block_size)
    shared = spec.system_tokens // spec.block_size
    first = (group * (spec.prompts + 1)) * total
    own = (group * (spec.prompts + 1) + 1 + prompt) * total
    return (*range(first, first + shared), *range(own, own + total - shared))
