"""A journal → the planning problem: its last traffic, the policy in force, and as many replicas of the same speed.

The speed starts from what the scheduler had learned. Then the recorded traffic is simulated, and prefill and steps are
made slower or faster until the medians of TTFT and TPOT match the measured ones.
"""

from collections.abc import Sequence
from math import exp, log
from statistics import fmean, median
from typing import Any

import numpy as np
from msgspec import Struct, structs

from fairlead.compat.recorded import restore
from fairlead.core.cost import PRIOR
from fairlead.core.endpoint import Endpoint
from fairlead.core.records import Snapshot
from fairlead.core.snapshot import column
from fairlead.lab.engine.presets import Preset
from fairlead.lab.engine.spec import LatencyModel
from fairlead.lab.simulator.capture import Pool, capture, mixed
from fairlead.lab.simulator.journal import JournalError, Run
from fairlead.lab.simulator.simulation import Simulation
from fairlead.lab.simulator.world import MAX_MODEL_LEN, Replica, Scenario, replicas
from fairlead.lab.workload.record import Record, Workload
from fairlead.server.journal.records import DETAIL, POLICY

#: Tokens per KV block if the engines did not report it.
_BLOCK = 64
#: The limit of vLLM on a large GPU, used if no limit was ever reached.
_MAX_NUM_SEQS = 1024
#: The name of a learned preset.
LEARNED = "learned"
#: Number of simulations to fit the preset, and requests in each.
_ROUNDS, _FITTED_BY = 5, 1000
#: The largest factor by which one simulation changes a speed.
_MOST_SCALED = 4.0
#: A server whose speed differs from the median by less than this share counts as having the median speed.
_ALIKE = 0.1


class Recorded(Struct, frozen=True):
    """`scheduling`: see `compat.recorded`. `endpoints`: those at the end, `mixed`. `preset`: the learned preset; `None`
    if nothing was learned. `speeds`: by the endpoint's id."""

    workload: Workload
    scheduling: Any
    pool: Pool
    endpoints: list[Endpoint]
    preset: Preset | None
    speeds: dict[str, float]

    @property
    def replicas(self) -> int:
        return max(len(self.endpoints), 1)

    def fleet(self, preset: Preset) -> tuple[Replica, ...]:
        """The replicas with this preset, see `Pool.like`. With the learned one they keep their speeds; otherwise all
        are equal."""
        size = preset.block_size or self.workload.block_size or _BLOCK
        speeds = [self.speeds.get(endpoint.id, 1.0) for endpoint in self.endpoints] if preset.name == LEARNED else ()
        return self.pool.like(replicas(self.replicas, preset, block_size=size, speeds=speeds), self.endpoints)


class Fit(Struct, frozen=True):
    """Medians of the recorded traffic and of its simulation: TTFT and TPOT in milliseconds."""

    preset: Preset
    recorded: tuple[float, float]
    simulated: tuple[float, float]


def recorded(run: Run, last_s: float, head: int = 0) -> Recorded:
    """The last `last_s` seconds of a run, and of these only the first `head` requests (0 = all). Raises `JournalError`
    if there were no requests then, or `OSError`."""
    scheduling, snapshot = run.head.scheduling, None
    for kind, _, body in run.items():
        if kind == POLICY:
            scheduling = body.document
        elif kind == DETAIL and body.trace.snapshot is not None:
            snapshot = body.trace.snapshot
    captured = capture(run, key=b"")
    workload = _newest(captured.workload, last_s, head)
    if not workload.records:
        raise JournalError(f"run {run.id} has no request that could be repeated; let it serve some first")
    preset, speeds = _learned(snapshot) if snapshot is not None else (None, {})
    return Recorded(workload, scheduling, captured.pool, mixed(captured.pool.last.values()), preset, speeds)


def fit(record: Recorded, preset: Preset) -> Fit | None:
    """Scale `preset` until the simulated traffic has the recorded medians of TTFT and TPOT. Returns the best of several
    tries; `None` if no times were recorded, or nothing was served."""
    workload = structs.replace(record.workload, records=record.workload.records[:_FITTED_BY])
    rows = [(r.outcome.ttft_ms, r.outcome.e2e_ms, r.out_tokens) for r in workload.records if r.outcome and _timed(r)]
    measured = _medians(rows)
    best: Fit | None = None
    if measured is None:
        return None
    for _ in range(_ROUNDS):
        scenario = Scenario(name="recorded", workload=workload, replicas=record.fleet(preset))
        simulation = Simulation(scenario, restore(record.scheduling))
        simulation.run()
        done = [job for job in simulation.jobs if job.status == "done" and _timed(job.record)]
        simulated = _medians([(job.ttft_ms, job.e2e_ms, job.output_tokens) for job in done])
        if simulated is None:
            break
        made = Fit(preset, measured, simulated)
        best = made if best is None or _off(made) < _off(best) else best
        preset = _scaled(preset, *(a / b for a, b in zip(measured, simulated, strict=True)))
    return best


def _timed(record: Record) -> bool:
    """Whether the record's outcome has the times of the first token and of the answer."""
    outcome = record.outcome
    return outcome is not None and record.stream and record.out_tokens > 1 and 0.0 < outcome.ttft_ms < outcome.e2e_ms


def _medians(rows: Sequence[tuple[float, float, int]]) -> tuple[float, float] | None:
    """The medians of TTFT and TPOT, from (TTFT, E2E, tokens); `None` if no row has a second token."""
    tokens = [(e2e - ttft) / (count - 1) for ttft, e2e, count in rows if count > 1]
    return (median(ttft for ttft, _, _ in rows), median(tokens)) if tokens else None


def _off(fit: Fit) -> float:
    return sum(abs(log(a / b)) for a, b in zip(fit.recorded, fit.simulated, strict=True))


def _scaled(preset: Preset, prefill: float, step: float) -> Preset:
    prefill, step = (min(max(factor, 1.0 / _MOST_SCALED), _MOST_SCALED) for factor in (prefill, step))
    c0, c_pf, c_attn, c_seq, c_kv = structs.astuple(preset.latency)[:5]
    return structs.replace(
        preset, latency=LatencyModel(c0 * step, c_pf * prefill, c_attn * prefill, c_seq * step, c_kv * step)
    )


def _newest(workload: Workload, last_s: float, head: int) -> Workload:
    begin = max(int((workload.duration_s - last_s) * 1e6), 0)
    records = [
        structs.replace(record, arrival_us=record.arrival_us - begin)
        for record in workload.records
        if record.arrival_us >= begin
    ]
    return Workload(name=workload.name, records=records[: head or None], dispatch=workload.dispatch)


def _learned(snapshot: Snapshot) -> tuple[Preset, dict[str, float]]:
    """The prior scaled by the median learned factors, and the speed of each endpoint relative to the median. Endpoints
    that only prefill learn nothing about steps, and those beside them little about prompts: each part is that of its
    own endpoints."""
    there = {slot: endpoint for slot, endpoint in enumerate(snapshot.endpoints) if endpoint is not None}
    prefills = [endpoint.only_prefills for endpoint in there.values()]
    slots, every = list(there), range(len(there))
    kappa, token_kappa, prefill, step, load = (np.asarray(values)[slots].tolist() for values in snapshot.learned)
    computing, decoding = ([i for i in every if prefills[i] is part] or every for part in (True, False))
    new = median(prefill[i] * kappa[i] for i in computing)
    fixed = median(step[i] * token_kappa[i] for i in decoding)
    more = median(load[i] * token_kappa[i] for i in decoding)
    capacities = [float(value) for value in column(snapshot, "capacity_tokens")[slots] if value > 0]
    sequences = [int(value) for value in column(snapshot, "max_seqs")[slots] if value > 0]
    capacity = int(median(capacities)) // _BLOCK * _BLOCK if capacities else Preset(latency=LatencyModel(1.0)).kv_tokens
    preset = Preset(
        name=LEARNED,
        model="as recorded",
        latency=LatencyModel(
            PRIOR.c0 * fixed, PRIOR.c_pf * 1e3 * new, PRIOR.c_attn * 1e6 * new, PRIOR.c_seq * 1e3 * more,
            PRIOR.c_kv * 1e6 * more,
        ),
        kv_tokens=capacity,
        max_model_len=min(capacity, MAX_MODEL_LEN),
        max_num_seqs=max(sequences, default=_MAX_NUM_SEQS),
        async_scheduling=True,
    )  # fmt: skip
    level = [fmean((log(a), log(b))) for a, b in zip(prefill, step, strict=True)]
    middle = [median(level[i] for i in part) for part in (decoding, computing)]
    faster = [middle[prefills[i]] - level[i] for i in every]
    speeds = (exp(by) if abs(by) > _ALIKE else 1.0 for by in faster)
    return preset, {endpoint.id: speed for endpoint, speed in zip(there.values(), speeds, strict=True)}
