"""Bounds from the speed of one engine: a first guess of the size, and objectives that no number of replicas holds."""

from collections.abc import Iterator, Sequence
from math import ceil, inf
from statistics import fmean

from fairlead.lab.simulator.objective import E2E, FAILED, TPOT, TTFT, Objective, loosest
from fairlead.lab.simulator.world import Replica, Scenario
from fairlead.lab.workload.describe import ideal_hits
from fairlead.lab.workload.record import Record, Workload

#: Sequences decoded in a step if no objective bounds them.
_BATCH = 64


def _prompt_s(replica: Replica, prompt: int, cached: int) -> float:
    """The least seconds that an idle server needs to compute a prompt, as far as it takes it."""
    engine, took_s = replica.engine, 0.0
    prompt = min(prompt, engine.max_model_len)
    done = min(cached, prompt - 1)
    while done < prompt:
        new = min(engine.max_batched_tokens, prompt - done)
        took_s += engine.latency.step_s(new, new * (done + new / 2), 0, 0)
        done += new
    return took_s / replica.speed + replica.overhead_ms * 1e-3


def _token_s(replica: Replica, context: int) -> float:
    """The least seconds for a further token of an answer that decodes alone."""
    return replica.engine.latency.step_s(0, 0.0, 1, context) / replica.speed / (1 + replica.engine.draft_tokens)


def _cached(workload: Workload) -> Iterator[int]:
    """The largest number of tokens of each prompt that may be cached: the tokens of earlier prompts, and of the answer
    that the prompt continues."""
    before = {record.id: record.in_tokens + record.out_tokens for record in workload.records}
    for record, hits in zip(workload.records, ideal_hits(workload), strict=True):
        yield min(max(hits, before.get(record.parent, 0) if record.parent else 0), record.in_tokens)


def _alone_ms(what: str, replica: Replica, record: Record, cached: int) -> float | None:
    """The least TTFT, TPOT or E2E (`what`) of a request in milliseconds: alone on a server that has `cached` of its
    prompt tokens. `None` = the request has no such latency."""
    first_s, token_s = _prompt_s(replica, record.in_tokens, cached), _token_s(replica, record.in_tokens)
    if what == TPOT:
        return token_s * 1e3 if record.out_tokens > 1 else None
    return (first_s + (token_s * (record.out_tokens - 1) if what == E2E else 0.0)) * 1e3


def impossible(scenario: Scenario, wanted: Sequence[Objective]) -> str:
    """Why one engine is too slow or too small for an objective, whatever the number of replicas; empty if none is."""
    replica = max(scenario.replicas, key=lambda replica: replica.speed)
    records, most = scenario.workload.records, replica.engine.max_model_len
    long = sum(record.in_tokens + record.out_tokens > most for record in records)
    for objective in wanted:
        may_miss = objective.may_miss(len(records))
        if objective.what == FAILED:
            if long > may_miss:
                share = f"{long / len(records):.0%} of the requests are longer than the {most:,} tokens that it takes"
                return f"{objective} cannot be held by this engine: {share}"
            continue
        hits = _cached(scenario.workload)
        times = [_alone_ms(objective.what, replica, record, hit) for record, hit in zip(records, hits, strict=True)]
        known = sorted(time for time in times if time is not None)
        if not known:
            continue
        least_ms = known[len(known) - objective.may_miss(len(known)) - 1]
        if least_ms > objective.limit:
            reason = {
                TTFT: "computing the prompt alone, with every shared beginning cached,",
                TPOT: "one step of an answer that is alone",
                E2E: "a request that is alone",
            }[objective.what]
            said = f"{reason} takes {objective.shown(least_ms)} at that percentile"
            return f"{objective} cannot be held by any number of replicas: on this engine {said}"
    return ""


def _work(scenario: Scenario, wanted: Sequence[Objective]) -> tuple[float, float]:
    """Seconds that one replica needs for all prompts; and for all answers, in batches as large as allowed."""
    replica, records = scenario.replicas[0], scenario.workload.records
    context = fmean(record.in_tokens + record.out_tokens / 2 for record in records) if records else 0.0
    token_ms = dict(loosest(wanted)).get(TPOT, inf)
    latency, fitting = replica.engine.latency, max(int(replica.engine.kv_tokens / max(context, 1.0)), 1)
    batch = min(fitting, replica.engine.max_num_seqs, _BATCH if token_ms == inf else 1024)
    while batch > 1 and latency.step_s(0, 0.0, batch, int(batch * context)) * 1e3 > token_ms * replica.speed:
        batch = batch * 3 // 4
    step_s = latency.step_s(0, 0.0, batch, int(batch * context))
    hits = _cached(scenario.workload)
    prompts_s = sum(_prompt_s(replica, record.in_tokens, hit) for record, hit in zip(records, hits, strict=True))
    return prompts_s, sum(record.n * record.out_tokens for record in records) * step_s / batch / replica.speed


def first_guess(scenario: Scenario, wanted: Sequence[Objective]) -> int:
    """The number of replicas that the work keeps busy all the time."""
    lasts_s = max(scenario.workload.duration_s / scenario.speedup, 1.0)
    return max(ceil(sum(_work(scenario, wanted)) / lasts_s), 1)


def prefill_share(scenario: Scenario, wanted: Sequence[Objective]) -> float:
    """The share of prefill in the work of all replicas, from 0.1 to 0.9."""
    prompts_s, answers_s = _work(scenario, wanted)
    return min(max(prompts_s / (prompts_s + answers_s), 0.1), 0.9) if prompts_s + answers_s else 0.5
