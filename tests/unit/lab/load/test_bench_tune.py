"""`fairlead tune`: the step model of a simulated server is found again in what its requests took."""

import json

import msgspec
import pytest
from commands import fairlead
from typer.testing import CliRunner

from fairlead.cli.app import build_app
from fairlead.lab.engine.engine import Engine
from fairlead.lab.engine.presets import PRESETS, preset, read_preset, write_preset
from fairlead.lab.engine.request import EngineRequest
from fairlead.lab.engine.spec import LatencyModel
from fairlead.lab.load.tune import Facts, Measured, Observation, TooLittle, Traffic, advise, fit, traffic_of
from fairlead.lab.load.tune_probe import ANSWER_TOKENS, SHORT_ANSWER, plan
from fairlead.lab.simulator.world import replicas

#: What a small server on a CPU tells of itself, and its speed.
SMALL = Facts(model="m", max_model_len=2048, block_size=32, num_blocks=256, max_num_seqs=4, max_batched_tokens=2048)
LARGE = Facts(max_model_len=40_960, num_blocks=17_000, block_size=16)
SMALL_PRESET = """
latency: {c0_ms: 10, c_pf_us: 130, c_attn_ns: 115, c_seq_us: 1300, c_kv_ns: 800}
kv_tokens: 8160
block_size: 32
max_model_len: 2048
max_num_seqs: 4
max_batched_tokens: 2048
"""


def served(engine, requests, at, overhead_ms=3.0):
    """Run requests that arrive together; what each was observed to take."""
    for request in requests:
        engine.add(request, at)
    engine.step(at + 1e6)
    return [
        Observation(
            prompt_tokens=request.prompt_tokens,
            cached_tokens=request.cached_tokens,
            completion_tokens=request.output,
            ttft_ms=(request.first_token_at - at) * 1e3 + overhead_ms,
            e2e_ms=(request.finished_at - at) * 1e3 + overhead_ms,
            batch=len(requests),
        )
        for request in requests
    ]


def prompts(count, tokens, answer, first):
    return [
        EngineRequest(
            str(i), b"", answer, prompt_tokens=tokens, hashes=[first + 10_000 * i + b for b in range(tokens // 16)]
        )
        for i in range(count)
    ]


def clients(spec, count, tokens, answer, overhead_ms=3.0, each=4):
    """Each client sends a request when its last one ends. In ticks of a tenth of a millisecond."""
    engine, first, found, now = Engine(spec, 0.0), 0, [], 0.0
    waiting = dict.fromkeys(range(count), 0.0)
    running = {}
    while len(found) < each * count:
        engine.step(now)
        for client, (request, sent) in list(running.items()):
            if request.finished_at > 0.0:
                del running[client]
                waiting[client] = ended = request.finished_at + overhead_ms * 1e-3
                times = [(moment - sent) * 1e3 for moment in (request.first_token_at, ended)]
                found.append(
                    Observation(
                        prompt_tokens=tokens, completion_tokens=answer, clients=count, ttft_ms=times[0], e2e_ms=times[1]
                    )
                )
        for client, at in list(waiting.items()):
            if at <= now:
                first += 10**7
                (request,) = prompts(1, tokens, answer, first)
                engine.add(request, now)
                running[client] = (request, waiting.pop(client))
        now += 1e-4
    return found


def probed(name, facts=LARGE, overhead_ms=3.0):
    """The plan of `tune_probe`, in virtual time."""
    engine, at, first, found = Engine(preset(name).spec(), 0.0), 0.0, 0, []
    for item in plan(facts):
        first += 10**7
        if item.clients:
            continue
        if not item.batch:
            found += served(engine, prompts(1, item.tokens, SHORT_ANSWER, first), at := at + 1e7, overhead_ms)
            continue
        for one in prompts(item.batch, item.tokens, 1, first):
            served(engine, [one], at := at + 1e7)
        found += served(engine, prompts(item.batch, item.tokens, ANSWER_TOKENS, first), at := at + 1e7, overhead_ms)
    return found


@pytest.mark.parametrize("name", ["qwen3-32b-h100", "llama-8b-l40s", "llama-70b-h100-tp8"])
def test_a_known_preset_comes_out_again(name):
    true, found = preset(name), fit(probed(name))
    for field in ("c0_ms", "c_pf_us", "c_kv_ns"):
        assert getattr(found.latency, field) == pytest.approx(getattr(true.latency, field), rel=0.03), field
    assert found.latency.c_seq_us == pytest.approx(true.latency.c_seq_us, rel=0.2)
    assert found.overhead_ms == pytest.approx(3.0, abs=0.3)
    assert found.prefill_error < 0.01 and found.decode_error < 0.01
    assert found.unknown == ()
    for tokens in (300, 3000, 12_000):
        alone = served(Engine(true.spec(), 0.0), prompts(1, tokens, 2, 0), 0.0)[0]
        assert found.prefill_ms(tokens) == pytest.approx(alone.ttft_ms, rel=0.03)
    for batch, tokens in ((20, 1000), (200, 4000)):
        model = true.latency
        assert found.step_ms(batch, tokens) == pytest.approx(
            model.step_s(0, 0.0, batch, batch * tokens) * 1e3, rel=0.03
        )


def test_what_is_asked_fits_the_server():
    for item in plan(SMALL):
        assert max(item.batch, 1) * (item.tokens + ANSWER_TOKENS) <= SMALL.kv_tokens
        assert item.tokens + ANSWER_TOKENS < SMALL.max_model_len
    assert {item.batch for item in plan(SMALL)} == {0, 1, 2, 4}
    assert max(item.tokens for item in plan(SMALL)) > 1500
    tiny = plan(Facts(max_model_len=200, max_num_seqs=1, block_size=16, num_blocks=14))
    assert tiny and all(item.tokens < 136 and item.batch <= 1 for item in tiny)
    for item in plan(Facts()):
        assert item.tokens < 8192


def test_no_prompt_takes_more_than_its_share_of_the_time():
    for most in (50, 900, 3000):
        made = plan(SMALL, beside=True, most_tokens=most)
        assert max(item.tokens for item in made if not item.batch) <= max(most, 64)
        for item in made:
            assert item.batch * item.tokens <= max(most, 4 * 256) or item.tokens == 64
        assert len({item.tokens for item in made if item.batch == 4}) == 2, "short and long ones, all the same"


def test_clients_are_asked_alone_and_beside_a_neighbour_as_far_as_they_fit():
    def asked(facts, **options):
        return [(item.clients, item.beside) for item in plan(facts, **options) if item.clients]

    assert asked(SMALL) == [(4, False)]
    assert asked(LARGE, beside=True) == [(8, False), (8, True)]
    assert asked(Facts(max_model_len=200, max_num_seqs=1, block_size=16, num_blocks=3)) == []


@pytest.mark.parametrize("ahead", [False, True])
def test_asynchronous_scheduling_is_found_in_the_times_of_clients(ahead):
    spec = msgspec.structs.replace(preset("llama-8b-l40s").spec(), async_scheduling=ahead)
    rows = probed("llama-8b-l40s") + clients(spec, 8, 256, 32)
    fitted = fit(rows)
    assert fitted.async_scheduling is ahead
    assert fit(rows, async_scheduling=not ahead).traffic_error > 2 * fitted.traffic_error
    assert Measured(LARGE, rows).preset(fitted, "found").async_scheduling is ahead


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("ahead", [False, True])
def test_how_long_clients_wait_for_answers_follows_from_the_steps(count, ahead):
    """The fit of everything else foretells it, and it leads to the same fit."""
    spec = msgspec.structs.replace(preset(SMALL_PRESET).spec(), async_scheduling=ahead)
    rows, loops = probed(SMALL_PRESET, SMALL), clients(spec, count, 256, 32)
    fitted = fit(rows + loops, 2048, ahead)
    (traffic,) = (one for one in fitted.residuals if one.kind == "traffic")
    assert (traffic.batch, traffic.count) == (count, 4 * count)
    assert f"answers to {count} clients with prompts of 256 tokens" in str(traffic)
    # Journals call it a duration.
    named = [msgspec.structs.replace(one, e2e_ms=-1.0, duration_ms=one.e2e_ms) for one in loops]
    assert fit(rows + named, 2048, ahead) == fitted
    foretold = fit(rows + [msgspec.structs.replace(one, neighbours=1) for one in loops], 2048, ahead)
    assert foretold.contention < 0.04
    true = preset(SMALL_PRESET).latency
    for field in ("c0_ms", "c_pf_us", "c_seq_us"):
        assert getattr(fitted.latency, field) == pytest.approx(getattr(true, field), rel=0.15), field


def test_a_neighbour_costs_clients_what_it_costs_their_answers():
    rows, loops = probed(SMALL_PRESET, SMALL), clients(preset(SMALL_PRESET).spec(), 4, 256, 32)
    slow = LatencyModel(*(1.2 * value for value in (10, 130, 115, 1300, 800)))
    busy = clients(msgspec.structs.replace(preset(SMALL_PRESET).spec(), latency=slow), 4, 256, 32)
    beside = [msgspec.structs.replace(one, neighbours=1) for one in busy]
    # A group beside it that happened to be undisturbed counts less than clients do.
    calm = [msgspec.structs.replace(row, neighbours=1) for row in rows if row.batch == 4]
    assert fit(rows + loops + beside + calm, 2048).contention == pytest.approx(0.2, abs=0.03)


def test_the_beginning_of_a_round_tells_something_of_everything():
    made = plan(LARGE)
    assert not made[0].batch and not made[-1].batch
    assert any(item.batch for item in made[: len(made) // 2])


def test_a_small_server_comes_out_again_with_its_limits():
    measured = Measured(SMALL, probed(SMALL_PRESET, SMALL))
    fitted, true = measured.fit(), preset(SMALL_PRESET)
    for field in ("c0_ms", "c_pf_us", "c_attn_ns", "c_seq_us", "c_kv_ns"):
        assert getattr(fitted.latency, field) == pytest.approx(getattr(true.latency, field), rel=0.1), field
    again = read_preset(write_preset(measured.preset(fitted, "small")))
    assert again.spec() == msgspec.structs.replace(true.spec(), latency=again.latency)
    assert again.overhead_ms == pytest.approx(3.0, abs=0.5)


def test_residuals_show_where_the_fit_is_wrong():
    fitted = fit(probed(SMALL_PRESET, SMALL))
    assert {(one.kind, one.batch) for one in fitted.residuals} == {
        ("prefill", 1), ("decode", 1), ("decode", 2), ("decode", 4),
    }  # fmt: skip
    assert all(abs(one.error) < 0.05 for one in fitted.residuals)
    slow = [
        msgspec.structs.replace(row, ttft_ms=row.ttft_ms * 1.5, e2e_ms=row.e2e_ms + row.ttft_ms * 0.5)
        if row.prompt_tokens > 1500
        else row
        for row in probed(SMALL_PRESET, SMALL)
    ]
    worst = min(fit(slow).residuals, key=lambda one: one.error)
    assert (worst.kind, worst.tokens > 1500, worst.error < -0.1) == ("prefill", True, True)
    assert "prefill of" in str(worst) and "%" in str(worst)


def test_what_a_busy_neighbour_costs_is_told_apart_from_the_server():
    rows = probed(SMALL_PRESET, SMALL)
    slow = LatencyModel(*(1.3 * value for value in (10, 130, 115, 1300, 800)))
    busy = msgspec.structs.replace(preset(SMALL_PRESET), latency=slow)
    beside = [msgspec.structs.replace(row, neighbours=1) for row in probed(write_preset(busy), SMALL, 18.0)]
    fitted = Measured(SMALL, rows + beside).fit()
    assert fitted.contention == pytest.approx(0.3, abs=0.03)
    assert fitted.contended_overhead_ms == pytest.approx(18.0, abs=2.0)
    assert fitted.latency == fit(rows, 2048).latency
    assert all(abs(one.error) < 0.1 for one in fitted.residuals if one.neighbours)
    shared = replicas(2, Measured(SMALL).preset(fitted, "pair"))
    assert {one.machine for one in shared} == {"shared"} and shared[0].engine.contention > 0.25
    assert shared[0].contended_overhead_ms > 15 > shared[0].overhead_ms


def test_a_server_that_tells_no_cached_tokens_is_fitted_all_the_same():
    """Its cached prompts are no prefill of all their tokens in no time."""
    rows = probed(SMALL_PRESET, SMALL)
    untold = [msgspec.structs.replace(row, cached_tokens=-1) if row.completion_tokens > 2 else row for row in rows]
    assert fit(untold).latency.c_pf_us == pytest.approx(fit(rows).latency.c_pf_us, rel=0.1)


def test_a_few_stalls_do_not_move_it():
    rows = probed("qwen3-32b-h100")
    spoiled = [msgspec.structs.replace(row, ttft_ms=row.ttft_ms * 5, e2e_ms=row.e2e_ms * 5) for row in rows[::11]]
    found, clean = fit([*rows, *spoiled]), fit(rows)
    assert found.latency.c_pf_us == pytest.approx(clean.latency.c_pf_us, rel=0.05)
    assert found.latency.c0_ms == pytest.approx(clean.latency.c0_ms, rel=0.05)


def test_what_was_not_varied_is_said():
    rows = [row for row in probed("qwen3-32b-h100") if row.batch == 1 and row.prompt_tokens < 200]
    found = fit(rows * 4)
    assert found.unknown
    assert min(value for value in msgspec.structs.astuple(found.latency) if isinstance(value, float)) >= 0


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [Observation(prompt_tokens=100, ttft_ms=5.0, batch=4)] * 9,
        [Observation(prompt_tokens=100, ttft_ms=5.0, e2e_ms=9.0, completion_tokens=2, batch=1)] * 9,
    ],
)
def test_too_little_says_what_is_missing(rows):
    with pytest.raises(TooLittle, match="at least 3 of each are needed; measure longer, on a server and a machine"):
        fit(rows)


def test_what_no_server_can_be_is_refused():
    """Answers that take twice as long for twice the batch and context: nothing is left for a step itself."""
    rows = [
        Observation(prompt_tokens=tokens, ttft_ms=1.0, e2e_ms=1.0 + batch * tokens, completion_tokens=48, batch=batch)
        for tokens in (1000, 2000, 4000)
        for batch in (1, 2, 4)
    ]
    with pytest.raises(TooLittle, match="no time for a step"):
        fit(rows)


def test_a_preset_goes_through_its_text():
    for known in PRESETS.values():
        assert read_preset(write_preset(known)) == known


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("latency: {c0_ms: 0}", "c0_ms must be above 0"),
        ("latency: {c0_ms: 1, c_pf: 2}", "unknown field"),
        ("name: x", "latency"),
        ("latency: [", "not YAML"),
        ("latency: {c0_ms: 1}\nkv_tokens: 0", "at least 1"),
        ("latency: {c0_ms: 1}\nkv_tokens: 1000\nmax_model_len: 2000", "does not fit into a KV cache of 1000"),
        ("latency: {c0_ms: 1}\nmax_num_seqs: 0.5", "max_num_seqs"),
        ("latency: {c0_ms: 1}\noverhead_ms: .nan", "overhead_ms and api_… at least 0"),
    ],
)
def test_a_bad_preset_names_its_field(text, message):
    with pytest.raises(ValueError, match=message):
        read_preset(text, "mine.yaml")


def test_every_advice_follows_from_traffic_and_has_a_reason():
    fitted = fit(probed("qwen3-32b-h100"))
    facts = Facts(model="m", block_size=16, num_blocks=10_000)

    def advised(**traffic):
        return {one.parameter: one for one in advise(fitted, facts, Traffic(**traffic))}

    short, long = advised(prompt_tokens=400, hit_rate=0.9), advised(prompt_tokens=30_000, hit_rate=0.05)
    assert (short["hashBlockSize"].value, long["hashBlockSize"].value) == (3, 20)
    assert (short["prefix-aware weight"].value, short["load-aware weight"].value) == (30, 100)
    assert (long["prefix-aware weight"].value, long["load-aware weight"].value) == (20, 100)
    assert advised()["prefix-aware weight"].value == 30
    assert short["maxQueueLength"].value == long["maxQueueLength"].value == 204
    assert short["lruCapacityPerServer"].value == 10_000
    small = {one.parameter: one for one in advise(fitted, Facts(max_num_seqs=16), Traffic(prompt_tokens=400))}
    assert small["maxQueueLength"].value == 12 and "80% of the engine's 16" in small["maxQueueLength"].reason
    full_step_s = preset("qwen3-32b-h100").latency.step_s(8192, 8192 * 4096.0, 0, 0)
    assert short["peakPrefillThroughput"].value == pytest.approx(8192 / full_step_s, rel=0.03)
    assert all(len(one.reason) > 20 for one in [*short.values(), *long.values()])
    assert "lruCapacityPerServer" not in {one.parameter for one in advise(fitted, Facts(), Traffic())}


def test_traffic_is_read_off_recorded_requests():
    rows = [Observation(prompt_tokens=1000, cached_tokens=900, completion_tokens=100)] * 3
    found = traffic_of(rows)
    assert (found.prompt_tokens, found.output_tokens, found.hit_rate) == (1000, 100, 0.9)
    assert traffic_of([]) == Traffic()


def test_the_command_fits_a_file_and_its_preset_is_simulated(tmp_path):
    file, out = tmp_path / "seen.jsonl", tmp_path / "mine.yaml"
    rows = [{**msgspec.to_builtins(row), "endpoint": "ignored"} for row in probed("llama-8b-h100")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    runner, app = CliRunner(), build_app()
    done = runner.invoke(app, ["tune", "--observations", str(file), "--out", str(out), "--name", "mine"])
    assert done.exit_code == 0, done.output
    assert "maxQueueLength" in done.output
    assert read_preset(out.read_text()).latency.c0_ms == pytest.approx(5.99, rel=0.03)
    unwritten = runner.invoke(app, ["tune", "--observations", str(file), "--out", str(tmp_path / "none" / "mine.yaml")])
    assert unwritten.exit_code == 2 and "none/mine.yaml: No such file" in unwritten.stderr
    assert "maxQueueLength" in unwritten.stdout, "what was measured is not lost"
    whole = json.loads(runner.invoke(app, ["tune", "--observations", str(file), "--json"]).output)
    assert {*whole} == {"preset", "fit", "server", "advice", "observations"}
    ran = runner.invoke(app, ["sim", "run", "paced-prefix", "--requests", "4", "--engine", str(out), "--json"])
    known = runner.invoke(app, ["sim", "run", "paced-prefix", "--requests", "4", "--engine", "llama-8b-h100", "--json"])
    times = [json.loads(one.output)["figures"]["ttft_mean_ms"] for one in (ran, known)]
    # The preset says what a request takes besides its steps.
    assert times[0] == pytest.approx(times[1] + 3.0, rel=0.03)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "give the URL"),
        (("http://127.0.0.1:1", "--observations", "x"), 2, "give the URL"),
        (("--observations", "no-such-file"), 2, "No such file"),
        (("http://127.0.0.1:1", "--extra", "nope"), 2, "--extra"),
        (("http://127.0.0.1:1", "--header", "nope"), 2, "--header"),
        (("--observations", "x", "--slo-ttft-ms", "inf"), 2, "--slo-ttft-ms"),
        (("http://127.0.0.1:1", "--time-ratio", "1e400"), 2, "--time-ratio"),
    ],
)
def test_wrong_input_is_one_line(arguments, code, message):
    done = fairlead("tune", *arguments)
    assert (done.exit_code, message in done.output, "Traceback" in done.output) == (code, True, False)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt_tokens": "many"}', ""),
        ('{"prompt_tokens": 4000, "cached_tokens": 9000}', ": 9000 cached_tokens of 4000 prompt_tokens"),
        ('{"prompt_tokens": 5, "ttft_ms": -5}', ": ttft_ms is -5; -1 means unknown"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, said):
    file = tmp_path / "seen.jsonl"
    file.write_text(f'{{"prompt_tokens": 5}}\n{line}\n')
    done = CliRunner().invoke(build_app(), ["tune", "--observations", str(file)])
    assert done.exit_code == 2
    assert f"seen.jsonl:2{said}" in done.output


def tuned(tmp_path, rows):
    file = tmp_path / "seen.jsonl"
    file.write_text("".join(json.dumps(msgspec.to_builtins(row)) + "\n" for row in rows))
    return CliRunner().invoke(build_app(), ["tune", "--observations", str(file)])


def test_lines_that_are_not_used_are_counted(tmp_path):
    rows = probed("llama-8b-h100")
    assert "not used" not in tuned(tmp_path, rows).output
    more = [Observation(prompt_tokens=9), Observation(prompt_tokens=9, completion_tokens=9, ttft_ms=1, e2e_ms=9)]
    done = tuned(tmp_path, [*rows, *more])
    assert done.exit_code == 0 and f"note: 2 of {len(rows) + 2} observations lack times or a batch" in done.output


def test_a_term_that_is_lost_is_named(tmp_path):
    """Long prompts that take less per token than short ones leave no time for attention."""
    rows = probed("llama-8b-h100")
    assert "no time was found" not in tuned(tmp_path, rows).output
    less = [0.3 * row.ttft_ms * row.prompt_tokens / max(row.prompt_tokens for row in rows) for row in rows]
    faster = [
        msgspec.structs.replace(row, ttft_ms=row.ttft_ms - by, e2e_ms=row.e2e_ms - by)
        for row, by in zip(rows, less, strict=True)
    ]
    assert "# c_attn_ns: no time was found; measure longer" in tuned(tmp_path, faster).output
