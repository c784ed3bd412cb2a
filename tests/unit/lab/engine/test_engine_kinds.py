"""Engines that are no sum of linear terms: rooflines, jumps, noise, drafts, whole prompts, shared machines."""

from itertools import pairwise
from random import Random
from statistics import fmean, stdev

import pytest

from fairlead.lab.engine.engine import Engine
from fairlead.lab.engine.presets import preset, read_preset, write_preset
from fairlead.lab.engine.request import EngineRequest
from fairlead.lab.engine.spec import LatencyModel


def test_a_roofline_takes_the_longer_of_computing_and_reading():
    model = LatencyModel(c0_ms=1, c_pf_us=100, c_seq_us=50, c_kv_ns=1000, weights_ms=10)
    assert model.step_s(0, 0.0, 4, 2000) == pytest.approx(0.013)
    assert model.step_s(500, 0.0, 4, 2000) == pytest.approx(0.0512)


def test_steps_jump_with_the_tokens_in_them():
    model = LatencyModel(c0_ms=5, jumps=((2, 3.0), (8, 4.0)))
    assert [round(model.step_s(0, 0.0, count, 0) * 1e3, 6) for count in (1, 2, 7, 8, 100)] == [5, 8, 8, 12, 12]
    assert model.step_s(7, 0.0, 1, 0) == pytest.approx(0.012)


def served(spec, count=6, output=40, seed=1):
    """Requests one after another every 3 ms, all to their end, every invariant checked after each step."""
    engine, at = Engine(spec, 0.0, chance=Random(seed)), 0.0
    requests = [EngineRequest(str(i), bytes([i, 0, 0, 0]) * 30, output) for i in range(count)]
    for request in requests:
        engine.step(at)
        engine.add(request, at)
        engine.validate()
        at += 0.003
    for _ in range(10_000):
        due = engine.next_event_at()
        if due is None:
            break
        engine.step(due)
        engine.validate()
    assert all(request.output == output for request in requests)
    return requests


def test_noise_spreads_the_steps_around_their_mean_and_follows_from_the_seed(make_spec):
    engine, ends = Engine(make_spec(noise=0.3, max_model_len=3000, num_blocks=800), 0.0, chance=Random(7)), [0.0]
    engine.add(EngineRequest("a", bytes(4), 2500), 0.0)
    while (due := engine.next_event_at()) is not None:
        engine.step(due)
        ends.append(due)
    steps = [after - before for before, after in pairwise(ends)][1:]
    assert fmean(steps) == pytest.approx(0.001, rel=0.03)
    assert stdev(steps) == pytest.approx(0.0003, rel=0.1)
    spec = make_spec(noise=0.3)
    once, again, other = ([r.finished_at for r in served(spec, seed=seed)] for seed in (1, 1, 2))
    assert once == again != other


def test_accepted_drafts_are_further_tokens_of_the_same_step(make_spec):
    plain = served(make_spec())
    one_by_one = served(make_spec(draft_tokens=3, acceptance=0.0))
    assert [r.finished_at for r in one_by_one] == [r.finished_at for r in plain]
    drafted = served(make_spec(draft_tokens=3, acceptance=1.0))
    assert [r.first_token_at for r in drafted] == [r.first_token_at for r in plain]
    steps = [round((r.finished_at - r.first_token_at) * 1e3) for r in drafted[-1:]]
    assert steps == [10], "39 tokens, four a step"
    halves = served(make_spec(draft_tokens=1, acceptance=0.5), count=1, output=150)
    assert (halves[0].finished_at - halves[0].first_token_at) * 1e3 == pytest.approx(149 / 1.5, rel=0.1)


def test_verifying_drafts_costs_their_tokens(make_spec):
    model = LatencyModel(c0_ms=1, c_seq_us=100)
    alone = served(make_spec(latency=model, draft_tokens=4, acceptance=0.0), count=1)[0]
    assert alone.finished_at - alone.first_token_at == pytest.approx(39 * 0.0015)


def test_drafts_survive_a_full_memory(make_spec):
    requests = served(make_spec(draft_tokens=3, acceptance=0.6, num_blocks=52, max_model_len=200), output=80)
    assert sum(request.preemptions for request in requests) > 0


def test_without_chunks_nobody_decodes_beside_a_prompt(make_spec):
    spec = make_spec(chunked_prefill=False, max_batched_tokens=200, latency=LatencyModel(c0_ms=1, c_pf_us=100))
    engine = Engine(spec, 0.0)
    first, second = EngineRequest("a", bytes(4) * 20, 50), EngineRequest("b", b"b" * 4 * 150, 50)
    engine.add(first, 0.0)
    engine.step(0.0035)
    before = engine.output_tokens(first)
    engine.add(second, 0.0035)
    engine.step(0.019)  # a step of one token until 4 ms, then 150 tokens of prompt in 16 ms
    engine.validate()
    assert before == 1 and engine.output_tokens(first) == 2
    engine.step(0.0201)
    assert second.first_token_at == pytest.approx(0.020)
    engine.step(0.0211)
    assert engine.output_tokens(first) == 3


def test_without_chunks_everybody_is_served(make_spec):
    full = make_spec(chunked_prefill=False, max_batched_tokens=200, num_blocks=52)
    assert sum(request.preemptions for request in served(full, output=80)) > 0
    with pytest.raises(ValueError, match="without chunked prefill"):
        make_spec(chunked_prefill=False)


def test_a_neighbour_that_computes_takes_its_share(make_spec):
    engine = Engine(make_spec(contention=1.0, latency=LatencyModel(c0_ms=10)), 0.0)
    engine.add(EngineRequest("a", bytes(4), 3), 0.0)
    engine.share(1, 0.004)
    assert engine.next_step_at() == pytest.approx(0.016), "the 6 ms that were left take 12"
    engine.step(0.016)
    assert engine.next_step_at() == pytest.approx(0.036)
    engine.share(0, 0.026)
    assert engine.next_step_at() == pytest.approx(0.031)


@pytest.mark.parametrize(
    "wrong", [{"noise": -0.1}, {"acceptance": 1.1}, {"draft_tokens": 8}, {"contention": float("nan")}]
)
def test_what_no_engine_can_be(make_spec, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong)) if "draft_tokens" not in wrong else "max_batched_tokens"):
        make_spec(**wrong)


def test_a_preset_file_says_all_of_it():
    text = """
latency: {c0_ms: 5, weights_ms: 8, jumps: [[2, 3.0], [8, 4.0]]}
noise: 0.3
draft_tokens: 4
acceptance: 0.7
chunked_prefill: false
"""
    made = read_preset(text)
    assert read_preset(write_preset(made)) == made
    spec = preset(text).spec()
    assert spec.latency.jumps == ((2, 3.0), (8, 4.0)) and spec.max_batched_tokens == spec.max_model_len
    assert (spec.noise, spec.draft_tokens, spec.acceptance, spec.chunked_prefill) == (0.3, 4, 0.7, False)
    with pytest.raises(ValueError, match="c0_ms must be above 0"):
        read_preset("latency: {c0_ms: 5, jumps: [[2, -1.0]]}")


@pytest.mark.parametrize("ahead", [False, True])
def test_with_asynchronous_scheduling_who_comes_in_a_step_waits_for_one_more(make_spec, prompt, run, ahead):
    engine = Engine(make_spec(async_scheduling=ahead), 0.0)
    first, second, third = (EngineRequest(str(i), prompt(4, i), 9) for i in range(3))
    engine.add(first, 0.0)
    assert first.scheduled_at == 0.0
    ends = engine.next_step_at()
    engine.add(second, 0.5 * ends)
    engine.step(ends)
    engine.validate()
    assert engine.queued() == ahead
    engine.step(engine.next_step_at())
    assert second.scheduled_at == (pytest.approx(engine.now) if ahead else ends)
    engine.add(third, engine.now)
    engine.step(engine.next_step_at())
    assert engine.abort(third, engine.now)
    assert run(engine) == [first, second]
    engine.add(third := EngineRequest("3", prompt(4, 3), 2), engine.now)
    assert third.scheduled_at == engine.now
