"""Steps, tokens and times of the engine, with round numbers."""

import pytest

from fairlead.lab.engine.engine import Engine
from fairlead.lab.engine.presets import PRESETS
from fairlead.lab.engine.request import EngineRequest, Phase


def test_one_request_from_arrival_to_end(make_spec, prompt, run):
    engine = Engine(make_spec(), 5.0)
    request = EngineRequest("a", prompt(50), 4)
    engine.add(request, 5.0)
    assert engine.next_step_at() == pytest.approx(5.0 + 0.0015)
    result = engine.step(5.0015)
    assert (result.steps, result.first, result.finished) == (1, [request], [])
    assert engine.output_tokens(request) == 1
    assert run(engine) == [request]
    assert request.output == 4
    assert request.finish_reason == "length"
    assert request.first_token_at == pytest.approx(5.0015)
    assert request.finished_at == pytest.approx(5.0015 + 3 * 0.001)
    assert engine.blocks.used == 0


def test_the_formula_of_the_known_server_is_what_a_client_would_see(run):
    engine = Engine(PRESETS["qwen3-32b-h100"].spec(), 0.0)
    request = EngineRequest("a", bytes(4 * 7200), 20)
    engine.add(request, 0.0)
    run(engine)
    assert request.first_token_at * 1e3 == pytest.approx(13.16 + 0.04334 * 7200 + 1.642e-6 * 7200**2 / 2)
    itl = (request.finished_at - request.first_token_at) / 19 * 1e3
    assert itl == pytest.approx(13.16 + 0.0259 + 45.32e-6 * (7200 + 9))


def test_several_steps_at_once_do_what_single_ones_do(make_spec, prompt):
    def finish(stride: float) -> list[tuple[str, float, float, int]]:
        engine = Engine(make_spec(), 0.0)
        for name in "abc":
            engine.add(EngineRequest(name, prompt(30, ord(name)), 5 + ord(name) % 7), 0.0)
        done = []
        now = 0.0
        while engine.next_step_at() is not None:
            now += stride
            done += engine.step(now).finished
        return [(r.id, r.first_token_at, r.finished_at, r.output) for r in done]

    assert finish(0.0001) == finish(0.0042) == finish(9.0)


def test_output_advances_by_one_per_step_for_everybody(make_spec, prompt):
    engine = Engine(make_spec(), 0.0)
    requests = [EngineRequest(str(i), prompt(8, i), 50) for i in range(3)]
    for request in requests:
        engine.add(request, 0.0)
    engine.step(engine.next_step_at())  # the first one alone
    engine.step(engine.next_step_at())  # the other two join
    assert [engine.output_tokens(r) for r in requests] == [2, 1, 1]
    result = engine.step(engine.next_step_at() + 0.0025)
    assert result.steps == 3
    assert [engine.output_tokens(r) for r in requests] == [5, 4, 4]


def test_a_long_prompt_is_computed_in_chunks_beside_the_decodes(make_spec, prompt):
    engine = Engine(make_spec(max_batched_tokens=20, max_num_seqs=4), 0.0)
    short, long = EngineRequest("short", prompt(4, 1), 100), EngineRequest("long", prompt(50, 2), 2)
    engine.add(short, 0.0)
    engine.step(engine.next_step_at())
    engine.add(long, engine.now)
    engine.step(engine.next_step_at())
    seen = []
    while engine.output_tokens(long) == 0:
        before = engine.stats.iteration_tokens.sum
        engine.step(engine.next_step_at())
        engine.validate()
        seen.append(engine.stats.iteration_tokens.sum - before)
    assert seen == [20, 20, 13]  # 19 + 19 + 12 of the prompt, and a token of the other one each time
    assert engine.output_tokens(short) == 5


def test_the_queue_is_first_come_first_served_within_max_num_seqs(make_spec, prompt, run):
    engine = Engine(make_spec(max_num_seqs=2), 0.0)
    requests = [EngineRequest(str(i), prompt(4, i), 10) for i in range(6)]
    for request in requests:
        engine.add(request, 0.0)
    engine.step(engine.next_step_at())
    assert engine.running() == 2
    assert engine.queued() == 4
    assert run(engine) == requests
    assert sorted(requests, key=lambda r: r.scheduled_at) == requests


def test_gauges_show_the_end_of_the_last_step(make_spec, prompt):
    """As measured: when a whole batch ends together, running and KV are 0 beside a queue until the next step ends."""
    engine = Engine(make_spec(max_num_seqs=2), 0.0)
    gauges = engine.stats.gauges
    for i in range(4):
        engine.add(EngineRequest(str(i), prompt(8, i), 3), 0.0)
    assert (gauges.running, gauges.waiting, gauges.kv_usage) == (0, 0, 0.0)
    engine.step(engine.next_step_at())
    assert (gauges.running, gauges.waiting) == (1, 0)  # those that came meanwhile are in no queue yet
    engine.step(engine.next_step_at())
    assert (gauges.running, gauges.waiting) == (2, 2)
    assert gauges.kv_usage == pytest.approx((3 + 2) / 64)


def test_a_batch_that_ends_together_leaves_gauges_at_zero_beside_a_queue(make_spec, prompt):
    engine = Engine(make_spec(max_num_seqs=2), 0.0)
    gauges = engine.stats.gauges
    blocker = EngineRequest("blocker", prompt(4, 99), 1)
    engine.add(blocker, 0.0)
    for i in range(4):
        engine.add(EngineRequest(str(i), prompt(8, i), 3), 0.0)
    while not (result := engine.step(engine.next_step_at())).finished or blocker in result.finished:
        pass
    assert len(result.finished) == 2
    assert (gauges.running, gauges.waiting, gauges.kv_usage) == (0, 2, 0.0)
    assert engine.running() == 2


@pytest.mark.parametrize("when", ["queued", "incoming", "prefill", "partial", "decode"])
def test_an_aborted_request_leaves_at_once_and_is_counted_nowhere(make_spec, prompt, run, when):
    engine = Engine(make_spec(max_num_seqs=1, max_batched_tokens=16), 0.0)
    other = EngineRequest("other", prompt(4, 1), 6)
    victim = EngineRequest("victim", prompt(40, 2), 6)
    if when in ("queued", "incoming"):
        engine.add(other, 0.0)
        engine.add(victim, 0.0)
        if when == "queued":
            engine.step(engine.next_step_at())
    else:
        engine.add(victim, 0.0)
        steps = {"prefill": 0, "partial": 2, "decode": 5}[when]
        for _ in range(steps):
            engine.step(engine.next_step_at())
        engine.add(other, engine.now)
    assert engine.abort(victim, engine.now)
    assert not engine.abort(victim, engine.now)
    engine.validate()
    assert run(engine) == [other]
    assert (victim.phase, victim.finish_reason, victim.blocks) == (Phase.DONE, "abort", [])
    assert engine.stats.finished == {"stop": 0, "length": 1}
    assert engine.stats.e2e.count == 1


def test_after_the_last_abort_the_engine_comes_to_rest(make_spec, prompt):
    engine = Engine(make_spec(), 0.0)
    request = EngineRequest("a", prompt(8), 100)
    engine.add(request, 0.0)
    engine.step(engine.next_step_at())
    assert engine.stats.gauges.running == 1
    engine.abort(request, engine.now)
    engine.step(engine.next_step_at())
    assert engine.next_step_at() is None
    assert (engine.stats.gauges.running, engine.stats.gauges.kv_usage) == (0, 0.0)


def test_a_natural_stop_and_a_limit_have_their_own_reasons(make_spec, prompt, run):
    engine = Engine(make_spec(), 0.0)
    stop = EngineRequest("stop", prompt(4, 1), 20, stop_after=5)
    cut = EngineRequest("cut", prompt(4, 2), 5, stop_after=20)
    edge = EngineRequest("edge", prompt(4, 3), 5, stop_after=5)
    for request in (stop, cut, edge):
        engine.add(request, 0.0)
    run(engine)
    assert [(r.output, r.finish_reason) for r in (stop, cut, edge)] == [(5, "stop"), (5, "length"), (5, "length")]


def test_a_slow_engine_takes_longer_from_its_next_step_on(make_spec, prompt):
    engine = Engine(make_spec(), 0.0)
    request = EngineRequest("a", prompt(100), 10)
    engine.add(request, 0.0)
    engine.slow_factor = 3.0
    engine.step(engine.next_step_at())
    before = engine.now
    engine.step(engine.next_step_at())
    assert engine.now - before > 0.0029


@pytest.mark.parametrize(
    "bad",
    [
        EngineRequest("empty", b"", 1),
        EngineRequest("no output", bytes(4), 0),
        EngineRequest("long", bytes(4 * 200), 1),
        EngineRequest("adapter", bytes(4), 1, lora="x"),
    ],
    ids=lambda request: request.id,
)
def test_what_no_engine_could_serve_is_refused(make_spec, bad):
    engine = Engine(make_spec(), 0.0)
    with pytest.raises(ValueError):
        engine.add(bad, 0.0)
    assert engine.next_step_at() is None
    engine.validate()


def test_the_next_event_is_foreseen(make_spec, prompt):
    engine = Engine(PRESETS["llama-8b-h100"].spec(), 0.0)
    for i in range(5):
        engine.add(EngineRequest(str(i), prompt(40 + i, i), 100 + 17 * i), 0.0)
    events = 0
    while (at := engine.next_event_at()) is not None:
        early = engine.step(at - 1e-6)
        assert not early.first and not early.finished
        result = engine.step(at + 1e-6)
        assert result.steps <= 1
        events += bool(result.first or result.finished)
    assert events == 2 + 5


def test_counters_and_histograms_add_up(make_spec, prompt, run):
    engine = Engine(make_spec(), 0.0)
    for i in range(4):
        engine.add(EngineRequest(str(i), prompt(20), 6), 0.0)
    run(engine)
    stats = engine.stats
    assert stats.generation_tokens == 24
    assert stats.prompt_tokens == 80 == stats.prefix_queries
    assert stats.prompt_tokens_cached == stats.prefix_hits == 3 * 16
    assert stats.itl.count == 24 - 4
    assert stats.ttft.count == stats.e2e.count == stats.tpot.count == 4
    assert stats.request_generation_tokens.sum == 24
    assert stats.request_computed_tokens.sum == 80 - 48
    assert stats.iteration_tokens.sum == 80 - 48 + 20
    assert sum(stats.e2e.buckets) == stats.e2e.count
    assert stats.queue_time.sum + stats.inference_time.sum == pytest.approx(stats.e2e.sum)
    assert stats.prefill_time.sum + stats.decode_time.sum == pytest.approx(stats.inference_time.sum)
