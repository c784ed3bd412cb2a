"""Conversations and agents: sessions whose every prompt is all that was said before, plus something new.

A session starts with a system prompt that it shares with others of its kind. Each turn adds new tokens (a user's
words, a tool's output) and an answer; the next prompt begins with both. Lengths are log-normal around their means.
"""

from math import exp, log, sqrt
from random import Random

from msgspec import Struct

from fairlead.workload.arrivals import Arrivals, poisson, times
from fairlead.workload.record import Dispatch, Record, Workload, arranged


class Conversation(Struct, frozen=True, kw_only=True):
    """Means are of tokens, turns and seconds; `spread` is the coefficient of variation of all of them."""

    #: Different system prompts, and their length.
    systems: int = 10
    system_tokens: int = 1000
    turns: float = 4.0
    first_tokens: int = 500
    turn_tokens: int = 200
    output_tokens: int = 300
    #: From an answer's end to the next turn.
    gap_s: float = 45.0
    spread: float = 0.6
    #: A prompt and its answer grow no longer than this: the session ends, or, with `compact_to`, its history is
    #: replaced by a summary of that length, as coding agents do.
    max_tokens: int = 120_000
    compact_to: int = 0
    block_size: int = 64
    model: str = ""
    slo_ttft_ms: float = 0.0
    slo_tpot_ms: float = 0.0

    def __post_init__(self) -> None:
        for name in ("systems", "turns", "first_tokens", "turn_tokens", "output_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.max_tokens < 2 * self.output_tokens + self.system_tokens:
            raise ValueError(f"max_tokens {self.max_tokens} leaves no room for a prompt beside its answer")
        if self.system_tokens < 0 or self.gap_s < 0 or self.spread < 0:
            raise ValueError("lengths, gaps and spread must not be negative")


#: Output tokens per second that timestamps of later turns assume; with `think` dispatch they do not matter.
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
    """Sessions that start at `rate` per second: the first `sessions`, or those of the first `seconds`."""
    rng = Random(f"conversation/{seed}")
    starts = times(arrivals or poisson(rate), rng, count=sessions, seconds=seconds)
    ids = _Ids(spec)
    records: list[Record] = []
    for session, start in enumerate(starts):
        records += _session(spec, session, start, rng, ids)
    return arranged(name, records, dispatch)


class _Ids:
    """Block ids: those of the system prompts first, then one fresh number after another."""

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
    at = start
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
        at += gap
        records.append(
            Record(
                id=f"{session}.{turn}",
                arrival_us=int(at * 1e6),
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
        at += output / _ASSUMED_RATE
        length += output + _length(spec.turn_tokens, spec.spread, rng)
    return records


def _around(mean: float, spread: float, rng: Random) -> float:
    """Log-normal with this mean and coefficient of variation."""
    if spread == 0:
        return mean
    variance = log(1.0 + spread * spread)
    return exp(rng.gauss(log(mean) - variance / 2, sqrt(variance)))


def _length(mean: float, spread: float, rng: Random) -> int:
    return max(1, round(_around(mean, spread, rng)))
