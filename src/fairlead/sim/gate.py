"""A regression gate: figures of two runs, and conditions under which the newer one fails.

    ttft_p95 > +5%        more than 5 % above the former value
    hit_rate < -2%        more than 2 % below it
    failed > 0            an absolute number

Figures: `ttft_*`, `tpot_*`, `e2e_*` with mean, p50, p90, p95, p99, in milliseconds; `failed`, a share of the requests;
`hit_rate`, cached tokens / prompt tokens, where both are known.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct

from fairlead.model.decision import DecisionRecord, OutcomeRecord
from fairlead.sim.job import Job
from fairlead.sim.journal import Run
from fairlead.sim.journal_search import decisions

_AT = {"p50": 50, "p90": 90, "p95": 95, "p99": 99}
FIGURES = (*(f"{what}_{how}" for what in ("ttft", "tpot", "e2e") for how in ("mean", *_AT)), "failed", "hit_rate")
_CONDITION = re.compile(r"\s*([a-z0-9_]+)\s*([<>])\s*([+-]?)(\d+(?:\.\d+)?)\s*(%?)\s*")


class Condition(Struct, frozen=True):
    """What must not be."""

    text: str
    figure: str
    above: bool
    #: A share of the former value where `relative`, else the limit itself.
    amount: float
    relative: bool

    def broken(self, before: Mapping[str, float], after: Mapping[str, float]) -> str:
        """What is wrong, in words; empty = nothing. A figure that is missing on either side is wrong."""
        new = after.get(self.figure)
        old = before.get(self.figure) if self.relative else 0.0
        if new is None or old is None:
            return f"{self.figure} is not known {'here' if new is None else 'of the former run'}"
        limit = old * (1.0 + self.amount) if self.relative else self.amount
        if (new > limit) if self.above else (new < limit):
            change = f", {(new / old - 1.0):+.1%}" if self.relative and old else ""
            return (
                f"{self.figure} is {new:,.4g} (was {before.get(self.figure, 0.0):,.4g}{change}); fails if {self.text}"
            )
        return ""


def condition(text: str) -> Condition:
    """Raises `ValueError` that says how one looks."""
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no condition; expected one such as 'ttft_p95 > +5%' or 'failed > 0'")
    figure, way, sign, amount, percent = match.groups()
    if figure not in FIGURES:
        raise ValueError(f"no figure {figure!r}; there are: {', '.join(FIGURES)}")
    if bool(sign) != bool(percent):
        raise ValueError(f"{text!r}: a change has a sign and a percent sign, a limit has neither")
    value = float(amount) * (-1.0 if sign == "-" else 1.0)
    return Condition(text.strip(), figure, way == ">", value / 100.0 if percent else value, bool(percent))


def of_journal(run: Run) -> dict[str, float]:
    """Figures of what really happened."""
    rows = [(found.decision, found.outcome) for found in decisions(run)]
    ended = [(decision, outcome) for decision, outcome in rows if outcome is not None and outcome.status == 200]
    tpot = [value for decision, outcome in ended if (value := _tpot(decision, outcome)) >= 0.0]
    known = [outcome for _, outcome in ended if outcome.cached_tokens >= 0 and outcome.prompt_tokens > 0]
    hits = sum(outcome.cached_tokens for outcome in known), sum(outcome.prompt_tokens for outcome in known)
    return _figures(
        [outcome.ttft_ms for decision, outcome in ended if outcome.ttft_ms >= 0 and decision.request.stream],
        tpot,
        [outcome.duration_ms for _, outcome in ended if outcome.duration_ms >= 0],
        sum(_failed(outcome) for _, outcome in rows),
        len(rows),
        hits,
    )


def of_jobs(jobs: Sequence[Job]) -> dict[str, float]:
    """Figures of a simulation."""
    done = [job for job in jobs if job.status == "done"]
    started = [job for job in jobs if job.first_at >= 0]
    return _figures(
        [job.ttft_ms for job in done],
        [job.tpot_ms for job in done if job.output_tokens > 1],
        [job.e2e_ms for job in done],
        sum(job.status in ("shed", "failed") for job in jobs),
        len(jobs),
        (sum(job.cached_tokens for job in started), sum(job.record.in_tokens for job in started)),
    )


def _failed(outcome: OutcomeRecord | None) -> bool:
    return outcome is None or (outcome.status != 200 and outcome.cause != "client-disconnect")


def _tpot(decision: DecisionRecord, outcome: OutcomeRecord) -> float:
    if outcome.completion_tokens < 2 or not decision.request.stream or not 0 <= outcome.ttft_ms < outcome.duration_ms:
        return -1.0
    return (outcome.duration_ms - outcome.ttft_ms) / (outcome.completion_tokens - 1)


def _figures(
    ttft: Iterable[float], tpot: Iterable[float], e2e: Iterable[float], failed: int, count: int, hits: tuple[int, int]
) -> dict[str, float]:
    made: dict[str, float] = {"failed": failed / count if count else 0.0}
    for what, values in (("ttft", list(ttft)), ("tpot", list(tpot)), ("e2e", list(e2e))):
        if values:
            made[f"{what}_mean"] = float(np.mean(values))
            made |= {f"{what}_{name}": float(np.percentile(values, at)) for name, at in _AT.items()}
    if hits[1]:
        made["hit_rate"] = hits[0] / hits[1]
    return made
