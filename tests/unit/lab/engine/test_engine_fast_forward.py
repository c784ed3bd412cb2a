"""Steps taken in one loop are the steps taken one by one: same times, tokens, gauges, histograms and evictions."""

from random import Random

import pytest

from fairlead.lab.engine.engine import Engine
from fairlead.lab.engine.presets import PRESETS
from fairlead.lab.engine.request import EngineRequest


class Log:
    """Block hooks that write down what the cache did."""

    def __init__(self):
        self.lines = []

    def stored(self, hashes, parent, tokens, lora):
        self.lines.append(("stored", tuple(hashes), parent, tokens()))

    def removed(self, digest):
        self.lines.append(("removed", digest))

    def salted(self, salt):
        self.lines.append(("salted", salt))

    def cleared(self):
        self.lines.append(("cleared",))


def drive(seed, stride, kv_tokens):
    """A random hour of a small server, looked at every `stride` seconds; 0 = after each step, without fast-forward."""
    rng = Random(seed)
    log = Log()
    spec = PRESETS["llama-8b-h100"].spec(block_size=16, max_num_seqs=12, kv_tokens=kv_tokens, max_model_len=2000)
    engine = Engine(spec, 0.0, log, fast_forward=stride > 0)
    arrivals = []
    at = 0.0
    for index in range(60):
        at += rng.expovariate(20.0)
        text = rng.randrange(5).to_bytes(4, "little") * 16 * rng.randint(1, 12) + index.to_bytes(
            4, "little"
        ) * rng.randint(1, 90)
        arrivals.append((at, EngineRequest(str(index), text, rng.randint(1, 300), seed=index * 997)))
    victims = {rng.randrange(60) for _ in range(6)}
    done = []
    events = [(at, 0, request) for at, request in arrivals]
    events += [(at + 0.3, 1, request) for at, request in arrivals if int(request.id) in victims]
    for at, kind, request in sorted(events, key=lambda event: (event[0], event[1])):
        advance(engine, at, stride, done)
        if kind == 0:
            engine.add(request, at)
        else:
            engine.abort(request, at)
        engine.validate()
    advance(engine, at + 1e4, stride, done)
    assert engine.next_step_at() is None
    return engine, done, log, [request for _, request in arrivals]


def advance(engine, until, stride, done):
    while (due := engine.next_step_at()) is not None and due <= until:
        result = engine.step(min(until, due + stride) if stride else due)
        done += [(r.id, "first", r.first_token_at) for r in result.first]
        done += [(r.id, "end", r.finished_at, r.output, r.preemptions, r.cached_tokens) for r in result.finished]


def histograms(engine):
    stats = engine.stats
    shapes = (stats.itl, stats.iteration_tokens, stats.ttft, stats.tpot, stats.e2e)
    return [(h.buckets, h.count, h.sum) for h in shapes], stats.generation_tokens, stats.preemptions


@pytest.mark.parametrize("kv_tokens", [2100, 6000, 60_000])
@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_tells_a_jump_from_single_steps(seed, kv_tokens):
    slow, slow_done, slow_log, _ = drive(seed, 0, kv_tokens)
    for stride in (1e-9, 0.05, 3.0, 1e5):
        fast, done, log, _ = drive(seed, stride, kv_tokens)
        assert sorted(done) == sorted(slow_done)
        assert log.lines == slow_log.lines
        assert histograms(fast) == histograms(slow)
    if kv_tokens == 2100:
        assert slow.stats.preemptions > 0


def test_gauges_in_the_middle_of_a_jump_are_those_of_the_last_step():
    def gauges(stride, fast_forward):
        engine = Engine(PRESETS["qwen3-32b-h100"].spec(block_size=16), 0.0, fast_forward=fast_forward)
        for index in range(9):
            engine.add(EngineRequest(str(index), index.to_bytes(4, "little") * 50 * (index + 1), 400), 0.0)
        seen = []
        for tick in range(1, 60):
            while not stride and (due := engine.next_step_at()) is not None and due <= tick * 0.1:
                engine.step(due)
            engine.step(tick * 0.1)
            shown = engine.stats.gauges
            seen.append((shown.running, shown.waiting, shown.kv_usage, engine.now))
        return seen

    assert gauges(1.0, True) == gauges(0, False)


def test_what_is_foreseen_holds_under_memory_pressure():
    engine = Engine(PRESETS["llama-8b-h100"].spec(block_size=16, kv_tokens=4096, max_model_len=2000), 0.0)
    for index in range(8):
        engine.add(EngineRequest(str(index), index.to_bytes(4, "little") * 600, 300 + index), 0.0)
    while (at := engine.next_event_at()) is not None:
        preempted = engine.stats.preemptions
        early = engine.step(at - 1e-6)
        assert not early.first
        assert not early.finished
        assert engine.stats.preemptions == preempted
        engine.step(at + 1e-6)
        engine.validate()
    assert engine.stats.preemptions > 0
    assert engine.stats.e2e.count == 8
