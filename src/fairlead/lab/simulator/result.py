"""The measurements of a run: one row of figures, a line per request, and conditions on the figures of two runs."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from msgspec import Struct, to_builtins

from fairlead.core.records import OutcomeRecord
from fairlead.lab.simulator.journal import Run, decisions
from fairlead.lab.simulator.simulation import Simulation
from fairlead.lab.simulator.world import Job
from fairlead.lab.workload.formats import write_table


class Summary(Struct, frozen=True, kw_only=True):
    """The figures of a run. Times in milliseconds are over requests served to the end; shed and failed requests are
    only counted."""

    requests: int
    done: int
    shed: int
    failed: int
    cancelled: int
    #: For `shed` and `failed`: reason → the number of requests, the most frequent first.
    reasons: dict[str, dict[str, int]]
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    tpot_mean_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    e2e_mean_ms: float
    e2e_p50_ms: float
    e2e_p90_ms: float
    e2e_p99_ms: float
    #: Output tokens of served requests per second, from the first arrival to the last end.
    output_tokens_per_s: float
    #: The share of all requests that were served within both service levels.
    goodput: float
    #: Cached tokens / prompt tokens, over requests that got a first token.
    prefix_hit_rate: float
    #: Computed (uncached) prompt tokens of the server with the most, divided by their mean over all servers.
    balance: float
    #: The share of streamed first tokens that came within the 90 % band of their forecast, without the first tenth of
    #: them, from which the scheduler learns the engine. -1 = there are none.
    in_band: float
    preemptions: int
    duration_s: float
    plugin_errors: int
    #: The message of the first plugin error; empty = there are none.
    plugin_error: str
    decision_hash: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data with rounded floats."""
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in to_builtins(self).items()}


def summarise(simulation: Simulation) -> Summary:
    scenario = simulation.scenario
    jobs = [job for job in simulation.jobs if job.record.arrival_us >= scenario.counted_from_s * 1e6]
    done = [job for job in jobs if job.status == "done"]
    ttft = [job.ttft_ms for job in done]
    tpot = [job.tpot_ms for job in done if job.output_tokens > 1]
    e2e = [job.e2e_ms for job in done]
    duration = max((job.ended_at for job in jobs), default=0.0) - min((job.arrived for job in jobs), default=0.0)
    tokens = sum(job.output_tokens for job in done)
    good = sum(job.ttft_ms <= scenario.slo_ttft_ms and job.tpot_ms <= scenario.slo_tpot_ms for job in done)
    return Summary(
        requests=len(jobs),
        done=len(done),
        shed=_count(jobs, "shed"),
        failed=_count(jobs, "failed"),
        cancelled=_count(jobs, "cancelled"),
        reasons={status: _reasons(jobs, status) for status in ("shed", "failed")},
        **_spread("ttft", ttft, 50, 90, 99),
        **_spread("tpot", tpot, 50, 99),
        **_spread("e2e", e2e, 50, 90, 99),
        output_tokens_per_s=tokens / duration if duration > 0 else 0.0,
        goodput=good / len(jobs) if jobs else 0.0,
        prefix_hit_rate=_hit_rate(jobs),
        balance=_balance(jobs, len(simulation.servers)),
        in_band=fmean(judged) if (judged := simulation.in_band[len(simulation.in_band) // 10 :]) else -1.0,
        preemptions=sum(job.preemptions for job in jobs),
        duration_s=duration,
        plugin_errors=len(simulation.plugin_errors),
        plugin_error=str(simulation.plugin_errors[0]) if simulation.plugin_errors else "",
        decision_hash=simulation.decision_hash,
    )


def _count(jobs: Sequence[Job], status: str) -> int:
    return sum(job.status == status for job in jobs)


def _reasons(jobs: Sequence[Job], status: str) -> dict[str, int]:
    return dict(Counter(job.reason for job in jobs if job.status == status).most_common())


def _spread(name: str, values: Sequence[float], *percents: int) -> dict[str, Any]:
    """Mean and percentiles; zeros if there are no values."""
    values_ms = np.array(values) if values else np.zeros(1)
    percentiles = {f"{name}_p{percent}_ms": float(np.percentile(values_ms, percent)) for percent in percents}
    return {f"{name}_mean_ms": float(values_ms.mean()), **percentiles}


def _hit_rate(jobs: Sequence[Job]) -> float:
    started = [job for job in jobs if job.first_at >= 0]
    prompts = sum(job.record.in_tokens for job in started)
    return sum(job.cached_tokens for job in started) / prompts if prompts else 0.0


def _balance(jobs: Sequence[Job], servers: int) -> float:
    computed = [0] * servers
    for job in jobs:
        if job.first_at >= 0:
            computed[job.prefill_server if job.prefilled else job.server] += job.record.in_tokens - job.cached_tokens
    total = sum(computed)
    return max(computed) * servers / total if total else 1.0


_COLUMNS = (
    "id", "arrived_s", "status", "reason", "server", "in_tokens", "out_tokens", "cached_tokens", "ttft_ms", "tpot_ms",
    "e2e_ms", "preemptions", "model", "tenant", "priority",
)  # fmt: skip


def request_table(simulation: Simulation) -> bytes:
    """One line of CSV per request, in the order of the workload. Fields of events that did not happen are empty."""
    begin = min((job.arrived for job in simulation.jobs), default=0.0)
    return write_table(_COLUMNS, (_row(job, begin) for job in simulation.jobs))


def _row(job: Job, begin: float) -> tuple[object, ...]:
    done = job.status == "done"
    return (
        *(job.record.id, round(job.arrived - begin, 6), job.status, job.reason),
        job.server if job.server >= 0 else "",
        *(job.record.in_tokens, job.output_tokens, job.cached_tokens),
        round(job.ttft_ms, 3) if job.first_at >= 0 else "",
        *((round(job.tpot_ms, 3), round(job.e2e_ms, 3)) if done else ("", "")),
        *(job.preemptions, job.record.model, job.record.tenant, job.record.priority),
    )


# A regression gate: figures of two runs, and conditions under which the newer run fails.
#
#     ttft_p95 > +5%        more than 5 % above the earlier value
#     hit_rate < -2%        more than 2 % below it
#     failed > 0            an absolute number
#
# Figures: `ttft_*`, `tpot_*`, `e2e_*` with mean, p50, p90, p95, p99, in milliseconds; `failed`, a share of the
# requests; `hit_rate`, cached tokens / prompt tokens, over requests where both are known.


_PERCENTILES = {"p50": 50, "p90": 90, "p95": 95, "p99": 99}
_MEANS = ("mean", *_PERCENTILES)
FIGURES = (*(f"{what}_{how}" for what in ("ttft", "tpot", "e2e") for how in _MEANS), "failed", "hit_rate")
_CONDITION = re.compile(r"\s*([a-z0-9_]+)\s*([<>])\s*([+-]?)(\d+(?:\.\d+)?)\s*(%?)\s*")


class Condition(Struct, frozen=True):
    """A condition under which the newer run fails."""

    text: str
    figure: str
    above: bool
    #: A share of the earlier value if `relative`, otherwise the limit itself.
    amount: float
    relative: bool

    def broken(self, before: Mapping[str, float], after: Mapping[str, float]) -> str:
        """Why the newer run fails, in words; empty = it does not. It also fails if either run lacks the figure."""
        new = after.get(self.figure)
        old = before.get(self.figure) if self.relative else 0.0
        if new is None or old is None:
            return f"{self.figure} is not known of the {'newer' if new is None else 'former'} run"
        limit = old * (1.0 + self.amount) if self.relative else self.amount
        if (new > limit) if self.above else (new < limit):
            change = f", {(new / old - 1.0):+.1%}" if self.relative and old else ""
            return (
                f"{self.figure} is {new:,.4g} (was {before.get(self.figure, 0.0):,.4g}{change}); fails if {self.text}"
            )
        return ""


def condition(text: str) -> Condition:
    """Parse a condition. Raises `ValueError` that shows an example."""
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


def of_journal(run: Run, notes: list[str]) -> dict[str, float]:
    """The figures of a recorded run and of the runs beside it. Adds to `notes` what the figures leave out."""
    notes += run.notes
    rows = [(entry.decision, entry.outcome) for each in (run, *run.beside) for entry in decisions(each)]
    ended = [(decision, outcome) for decision, outcome in rows if outcome is not None and outcome.status == 200]
    tpot = [value for decision, outcome in ended if decision.request.stream and (value := outcome.tpot_ms) > 0.0]
    known = [outcome for _, outcome in ended if outcome.cached_tokens >= 0 and outcome.prompt_tokens > 0]
    if len(known) < len(ended):
        notes.append(
            f"{run.id}: hit_rate covers {len(known)} of {len(ended)} requests, the first ones and a sample; "
            "set inspect.usageSampling: 1 to record all"
        )
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
    """The figures of a simulation, as those of `of_journal`."""
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
    return outcome is None or outcome.failed or (outcome.status != 200 and outcome.cause != "client-disconnect")


def _figures(
    ttft: Iterable[float], tpot: Iterable[float], e2e: Iterable[float], failed: int, count: int, hits: tuple[int, int]
) -> dict[str, float]:
    made: dict[str, float] = {"failed": failed / count if count else 0.0, "requests": count}
    for what, values in (("ttft", list(ttft)), ("tpot", list(tpot)), ("e2e", list(e2e))):
        if values:
            made[f"{what}_mean"] = float(np.mean(values))
            made |= {f"{what}_{name}": float(np.percentile(values, percent)) for name, percent in _PERCENTILES.items()}
    if hits[1]:
        made["hit_rate"] = hits[0] / hits[1]
    return made
