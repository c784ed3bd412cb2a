"""What a run measured, as one row of figures."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct, to_builtins

from fairlead.sim.job import Job
from fairlead.sim.simulation import Simulation
from fairlead.workload.formats.table import write_table


class Summary(Struct, frozen=True, kw_only=True):
    """Milliseconds are those of requests that were served to the end. Shed and failed ones stand beside them."""

    requests: int
    done: int
    shed: int
    failed: int
    cancelled: int
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
    #: Share of all requests that were served within both service levels.
    goodput: float
    #: Cached tokens / prompt tokens, of requests that got a first token.
    prefix_hit_rate: float
    #: Most uncached prompt tokens on one server / their mean.
    balance: float
    preemptions: int
    duration_s: float
    plugin_errors: int
    decision_hash: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data, floats rounded to what is meant."""
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in to_builtins(self).items()}


def summarise(simulation: Simulation) -> Summary:
    scenario = simulation.scenario
    jobs = [job for job in simulation.jobs if job.record.arrival_us >= scenario.counted_from_s * 1e6]
    done = [job for job in jobs if job.status == "done"]
    ttft = np.array([job.ttft_ms for job in done])
    tpot = np.array([job.tpot_ms for job in done if job.output_tokens > 1])
    e2e = np.array([job.e2e_ms for job in done])
    duration = max((job.ended_at for job in jobs), default=0.0) - min((job.arrived for job in jobs), default=0.0)
    tokens = sum(job.output_tokens for job in done)
    good = sum(job.ttft_ms <= scenario.slo_ttft_ms and job.tpot_ms <= scenario.slo_tpot_ms for job in done)
    return Summary(
        requests=len(jobs),
        done=len(done),
        shed=_count(jobs, "shed"),
        failed=_count(jobs, "failed"),
        cancelled=_count(jobs, "cancelled"),
        ttft_mean_ms=_mean(ttft),
        ttft_p50_ms=_at(ttft, 50),
        ttft_p90_ms=_at(ttft, 90),
        ttft_p99_ms=_at(ttft, 99),
        tpot_mean_ms=_mean(tpot),
        tpot_p50_ms=_at(tpot, 50),
        tpot_p99_ms=_at(tpot, 99),
        e2e_mean_ms=_mean(e2e),
        e2e_p50_ms=_at(e2e, 50),
        e2e_p90_ms=_at(e2e, 90),
        e2e_p99_ms=_at(e2e, 99),
        output_tokens_per_s=tokens / duration if duration > 0 else 0.0,
        goodput=good / len(jobs) if jobs else 0.0,
        prefix_hit_rate=_hit_rate(jobs),
        balance=_balance(jobs, len(simulation.servers)),
        preemptions=sum(job.preemptions for job in jobs),
        duration_s=duration,
        plugin_errors=len(simulation.plugin_errors),
        decision_hash=simulation.decision_hash,
    )


def _count(jobs: Sequence[Job], status: str) -> int:
    return sum(job.status == status for job in jobs)


def _mean(values: "np.ndarray[Any, Any]") -> float:
    return float(values.mean()) if len(values) else 0.0


def _at(values: "np.ndarray[Any, Any]", percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else 0.0


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
    "e2e_ms", "preemptions",
)  # fmt: skip


def request_table(simulation: Simulation) -> bytes:
    """One line of CSV per request, in the order of the workload. What did not happen is empty."""
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
        job.preemptions,
    )
