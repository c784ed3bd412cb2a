"""Prefix hits, decode blocks, pressure on the cache and preemption."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead.lab.engine import tokens as tk
from fairlead.lab.engine.engine import Engine
from fairlead.lab.engine.request import EngineRequest, Phase
from fairlead.lab.engine.spec import EngineSpec, LatencyModel


class Recorder:
    def __init__(self) -> None:
        self.stored_blocks: list[tuple[int, int, bytes, str]] = []
        self.removed_hashes: list[int] = []
        self.clears = 0

    def stored(self, hashes, parent, tokens, lora) -> None:
        data = tokens()
        width = len(data) // len(hashes)
        for i, digest in enumerate(hashes):
            self.stored_blocks.append((digest, parent, data[i * width : (i + 1) * width], lora))
            parent = digest

    def removed(self, digest: int) -> None:
        self.removed_hashes.append(digest)

    def cleared(self) -> None:
        self.clears += 1


def serve(engine: Engine, run, tokens: bytes, output: int = 1, **more: object) -> EngineRequest:
    request = EngineRequest("r", tokens, output, seed=7, **more)
    engine.add(request, engine.now)
    run(engine)
    return request


def test_only_full_blocks_are_cached(make_spec, prompt, run):
    engine = Engine(make_spec(), 0.0)
    assert serve(engine, run, prompt(50)).cached_tokens == 0
    assert serve(engine, run, prompt(50)).cached_tokens == 48
    assert serve(engine, run, prompt(30)).cached_tokens == 28
    assert serve(engine, run, prompt(50, 1)).cached_tokens == 0


def test_an_exact_multiple_computes_its_last_block_again(make_spec, prompt, run):
    engine = Engine(make_spec(), 0.0)
    serve(engine, run, prompt(48))
    assert serve(engine, run, prompt(48)).cached_tokens == 44


def test_hits_shorten_the_prefill(make_spec, prompt, run):
    engine = Engine(make_spec(max_batched_tokens=100), 0.0)
    cold = serve(engine, run, prompt(98))
    warm = serve(engine, run, prompt(98))
    assert cold.first_token_at - cold.scheduled_at > 0.00197
    assert warm.first_token_at - warm.scheduled_at < 0.00103


def test_the_next_turn_hits_the_blocks_that_the_answer_filled(make_spec, prompt, run):
    engine = Engine(make_spec(), 0.0)
    serve(engine, run, prompt(10), output=31)
    answer = tk.output(7, 0, 31)
    turn = prompt(10) + answer + prompt(20, 5)
    # 10 + 31 tokens; the last one was sampled and never computed, so 40 are in the cache.
    assert serve(engine, run, turn).cached_tokens == 40


def test_adapters_and_salts_share_nothing(make_spec, prompt, run):
    engine = Engine(make_spec(max_loras=1), 0.0)
    serve(engine, run, prompt(40))
    assert serve(engine, run, prompt(40), lora="a").cached_tokens == 0
    assert serve(engine, run, prompt(40), salt="s").cached_tokens == 0
    assert serve(engine, run, prompt(40), lora="a").cached_tokens == 36
    assert serve(engine, run, prompt(40), salt="s").cached_tokens == 36


def test_caching_can_be_switched_off(make_spec, prompt, run):
    engine = Engine(make_spec(prefix_caching=False), 0.0)
    serve(engine, run, prompt(40), output=20)
    assert serve(engine, run, prompt(40), output=20).cached_tokens == 0
    assert engine.blocks.sealed() == 0


def test_a_second_request_of_the_same_step_hits_what_the_first_computes(make_spec, prompt, run):
    engine = Engine(make_spec(), 0.0)
    engine.add(EngineRequest("busy", prompt(4, 9), 1), 0.0)
    twins = [EngineRequest(str(i), prompt(24), 4) for i in range(2)]
    for twin in twins:
        engine.add(twin, 0.0)
    run(engine)
    assert [twin.cached_tokens for twin in twins] == [0, 20]


def test_a_simulator_may_give_hashes_instead_of_tokens(make_spec, prompt, run):
    engine = Engine(make_spec(), 0.0)
    hashes = tk.chain(prompt(50), 4, 0)
    for expected in (0, 48):
        request = EngineRequest("h", b"", 9, prompt_tokens=50, hashes=list(hashes))
        engine.add(request, engine.now)
        run(engine)
        assert request.cached_tokens == expected


def test_everything_stored_and_removed_is_told(make_spec, prompt, run):
    recorder = Recorder()
    engine = Engine(make_spec(num_blocks=13, max_model_len=48), 0.0, recorder)
    text = prompt(10)
    serve(engine, run, text, output=7)
    root = 0
    full = text + tk.output(7, 0, 7)
    hashes = tk.chain(full, 4, root)
    assert recorder.stored_blocks == [
        (hashes[0], root, full[:16], ""),
        (hashes[1], hashes[0], full[16:32], ""),
        (hashes[2], hashes[1], full[32:48], ""),
        (hashes[3], hashes[2], full[48:64], ""),
    ]
    serve(engine, run, prompt(44, 3), output=4)
    assert recorder.removed_hashes == [hashes[3], hashes[2], hashes[1], hashes[0]]
    assert engine.blocks.clear()
    assert recorder.clears == 1
    assert serve(engine, run, prompt(44, 3), output=4).cached_tokens == 0


def test_a_request_waits_until_the_whole_prompt_fits(make_spec, prompt, run):
    engine = Engine(make_spec(num_blocks=17, max_model_len=64), 0.0)
    first = EngineRequest("first", prompt(40, 1), 10)
    second = EngineRequest("second", prompt(40, 2), 10)
    third = EngineRequest("third", prompt(4, 3), 2)
    for request in (first, second, third):
        engine.add(request, 0.0)
    engine.step(engine.next_step_at())
    assert engine.queued() == 2  # the third would fit, but it is not its turn
    assert run(engine) == [first, third, second]
    assert engine.stats.preemptions == 0


def test_the_last_of_the_batch_is_preempted_and_starts_over(make_spec, prompt, run):
    engine = Engine(make_spec(num_blocks=17, max_model_len=64), 0.0)
    first = EngineRequest("first", prompt(28, 1), 30, seed=1)
    second = EngineRequest("second", prompt(28, 2), 30, seed=2)
    third = EngineRequest("third", prompt(40, 3), 1)
    for request in (first, second, third):
        engine.add(request, 0.0)
    while second.preemptions == 0:
        engine.step(engine.next_step_at())
        engine.validate()
    assert second.phase is Phase.WAITING
    kept = engine.output_tokens(second)
    assert 0 < kept < 30
    assert engine.queued() == 2
    assert run(engine) == [first, second, third]
    assert (first.preemptions, second.preemptions, engine.stats.preemptions) == (0, 1, 1)
    assert second.output == 30
    assert engine.stats.generation_tokens == 61
    assert engine.stats.itl.count == 58


@pytest.mark.parametrize("length", [33, 36])
def test_an_unfinished_prefill_is_preempted_before_any_decode(make_spec, prompt, run, length):
    """Where the prefill took the block that the decode needs now, and where it finds none for its next chunk."""
    engine = Engine(make_spec(num_blocks=17, max_model_len=64, max_batched_tokens=6, max_num_seqs=4), 0.0)
    decoding = EngineRequest("decoding", prompt(16, 1), 30, seed=1)
    prefilling = EngineRequest("prefilling", prompt(length, 2), 5, seed=2)
    engine.add(decoding, 0.0)
    while engine.output_tokens(decoding) < 5:
        engine.step(engine.next_step_at())
    engine.add(prefilling, engine.now)
    assert run(engine) == [decoding, prefilling]
    assert (decoding.preemptions, prefilling.preemptions) == (0, 1)
    assert prefilling.output == 5


def test_a_small_request_gets_in_beside_the_big_one_that_waited(make_spec, prompt, run):
    engine = Engine(make_spec(num_blocks=17, max_model_len=64), 0.0)
    first = EngineRequest("first", prompt(40, 1), 4)
    big = EngineRequest("big", prompt(44, 2), 4)
    small = EngineRequest("small", prompt(4, 3), 4)
    for request in (first, big, small):
        engine.add(request, 0.0)
    run(engine)
    assert first.finished_at <= big.scheduled_at == small.scheduled_at


def test_the_cache_is_not_cleared_under_a_running_request(make_spec, prompt):
    engine = Engine(make_spec(), 0.0)
    engine.add(EngineRequest("a", prompt(20), 5), 0.0)
    assert not engine.blocks.clear()


WORKLOAD = st.lists(
    st.tuples(
        st.integers(0, 3),  # which text
        st.integers(1, 60),  # prompt tokens
        st.integers(1, 30),  # output tokens
        st.floats(0, 0.02),  # seconds until the next arrival
        st.sampled_from(["", "", "a", "b", "c"]),
        st.one_of(st.none(), st.floats(0, 0.05)),  # seconds until the client gives up
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=80, deadline=None)
@given(
    WORKLOAD,
    st.sampled_from([1, 2, 4, 16]),
    st.integers(1, 6),
    st.integers(90, 200),
    st.integers(8, 64),
    st.integers(1, 2),
)
def test_any_workload_ends_with_everything_served_and_every_invariant_kept(work, size, seqs, kv, budget, loras):
    spec = EngineSpec(
        latency=LatencyModel(1.0, 10.0),
        num_blocks=-(-kv // size) + 1,
        block_size=size,
        max_model_len=90,
        max_num_seqs=seqs,
        max_batched_tokens=budget,
        max_loras=loras,
    )
    engine = Engine(spec, 0.0)
    now = 0.0
    agenda: list[tuple[float, int, EngineRequest | None]] = []
    requests = []
    for index, (text, length, output, gap, lora, patience) in enumerate(work):
        tokens = tk.output(text * 1000, 0, length)
        request = EngineRequest(str(index), tokens, output, seed=text, lora=lora)
        requests.append((request, patience))
        agenda.append((now, index, request))
        if patience is not None:
            agenda.append((now + patience, 1000 + index, None))
        now += gap
    finished = []
    for at, index, request in sorted(agenda, key=lambda entry: entry[:2]):
        finished += engine.step(at).finished
        if request is not None:
            engine.add(request, at)
        else:
            engine.abort(requests[index - 1000][0], at)
        engine.validate()
    for _ in range(5000):
        due = engine.next_step_at()
        if due is None:
            break
        finished += engine.step(due).finished
        engine.validate()
    assert engine.next_step_at() is None
    assert engine.blocks.used == 0
    for request, patience in requests:
        assert request.phase is Phase.DONE
        if request.finish_reason == "abort":
            assert patience is not None and request not in finished
        else:
            assert request.output == request.max_tokens
            assert finished.count(request) == 1
            assert request.arrived <= request.scheduled_at < request.first_token_at <= request.finished_at
    assert engine.stats.gauges.running == engine.stats.gauges.waiting == 0
