"""`simulate`, `workload` and `compare` as a user calls them. The runs are tiny."""

import csv
import io
import json

import pytest
from commands import fairlead as call


def test_a_workload_is_generated_shown_converted_and_simulated(tmp_path):
    made, table = tmp_path / "chat.jsonl", tmp_path / "chat.csv"
    done = call(
        "sim", "workload", "generate", "interactive-chat", "--out", made, "--requests", 4, "--rate", 2, "--seed", 3
    )
    assert done.exit_code == 0, done.output
    assert "4 sessions" in done.output
    again = call("sim", "workload", "show", made)
    assert again.output == done.output
    assert call("sim", "workload", "convert", made, "--out", table, "--to", "vidur").exit_code == 0
    assert table.read_text().startswith("arrived_at,")
    requests = tmp_path / "requests.csv"
    ran = call("sim", "run", made, "--policy", "round-robin", "--replicas", 2, "--json", "--csv", requests)
    assert ran.exit_code == 0, ran.output
    document = json.loads(ran.output)
    rows = list(csv.DictReader(io.StringIO(requests.read_text())))
    assert document["figures"]["done"] == len(rows) == document["figures"]["requests"]
    assert {row["status"] for row in rows} == {"done"}
    assert {row["server"] for row in rows} == {"0", "1"}
    assert document["configuration"]["servers"] == 2


def test_the_table_of_requests_names_their_tenants(tmp_path):
    requests = tmp_path / "requests.csv"
    assert call("sim", "run", "one-hog", "-n", 300, "--csv", requests).exit_code == 0
    tenants = {row["tenant"] for row in csv.DictReader(io.StringIO(requests.read_text()))}
    assert len(tenants) > 1 and "" not in tenants


def test_a_scenario_becomes_a_file_that_simulates_alike(tmp_path):
    made = tmp_path / "requests.jsonl"
    done = call("sim", "workload", "convert", "conversation-2x", "--out", made)
    assert done.exit_code == 0, done.output
    assert "fairlead stub --replicas 8 --engine qwen3-32b-h100 --block-size 512 --kv-tokens 269824" in done.output
    of_name, of_file = (call("sim", "run", name, "-n", 60, "--json").output for name in ("conversation-2x", made))
    figures = [json.loads(text[text.index("{") :])["figures"] for text in (of_name, of_file)]
    for name in ("requests", "ttft_mean_ms", "e2e_mean_ms", "prefix_hit_rate"):
        assert figures[0][name] == pytest.approx(figures[1][name], rel=1e-3)
    told = call("sim", "workload", "show", "lora-static").output
    assert "--max-loras 8 --lora adapter-0 --lora adapter-1" in told
    assert "unlike each other" in call("sim", "workload", "show", "unlike-memory").output
    assert "faults" in call("sim", "workload", "show", "restart").output


def test_limits_of_a_server_come_from_its_preset_or_from_options(tmp_path):
    """A server with one slot serves one after another; what is longer than it takes is refused."""
    made, mine = tmp_path / "chat.jsonl", tmp_path / "mine.yaml"
    line = {"input_length": 500, "output_length": 20, "hash_ids": []}
    made.write_text("".join(json.dumps({"timestamp": 10 * i, **line}) + "\n" for i in range(20)))
    mine.write_text("latency: {c0_ms: 14}\nkv_tokens: 12288\nmax_model_len: 4096\nmax_num_seqs: 1\nblock_size: 32\n")

    def figures(*options):
        done = call("sim", "run", made, "--replicas", 1, "--engine", mine, "--json", *options)
        assert done.exit_code == 0, done.output
        return json.loads(done.output)["figures"]

    assert figures()["ttft_mean_ms"] > 5 * figures("--max-num-seqs", 64)["ttft_mean_ms"]
    assert figures("--max-model-len", 519)["failed"] == 20
    refused = call("sim", "run", made, "--engine", mine, "--kv-tokens", 100)
    assert refused.exit_code == 2 and "does not fit into a KV cache of 100 tokens" in refused.output


def test_a_built_in_scenario_is_simulated_for_people():
    done = call("sim", "run", "paced-prefix", "--requests", 5)
    assert done.exit_code == 0, done.output
    assert "5: 5 done, 0 shed, 0 failed" in done.output
    assert "TTFT ms" in done.output


def test_servers_have_slots_for_the_adapters_of_a_workload(tmp_path):
    file = tmp_path / "adapters.jsonl"
    file.write_text("".join(f'{{"id":"{i}","in_tokens":9,"out_tokens":2,"lora":"a{i}"}}\n' for i in range(3)))
    for workload in ("adapters", file):
        done = call("sim", "run", workload, "--requests", 3, "--json")
        assert json.loads(done.stdout)["figures"]["done"] == 3, done.output


def test_a_run_says_why_requests_failed(tmp_path):
    reason = "prompt and output exceed the context length of 50 tokens"
    arguments = ("agents", "--requests", 3, "--max-model-len", 50)
    done = call("sim", "run", *arguments)
    assert f"  failed    3 × {reason}\n" in done.output and "TTFT ms   mean –  p50 –" in done.output
    figures = json.loads(call("sim", "run", *arguments, "--json").stdout)["figures"]
    assert figures["reasons"] == {"shed": {}, "failed": {reason: 3}}
    assert figures["ttft_mean_ms"] is None and figures["e2e_p99_ms"] is None


def test_a_comparison_says_why_requests_failed(tmp_path):
    reason = "prompt and output exceed the context length of 50 tokens"
    engine = tmp_path / "mine.yaml"
    engine.write_text("latency: {c0_ms: 14}\nkv_tokens: 12288\nmax_model_len: 50\n")
    arguments = ("-w", "agents", "-p", "random", "-n", 3, "-e", engine, "--out", tmp_path / "out", "--processes", 1)
    done = call("sim", "compare", *arguments, "--json")
    assert f"note: agents: 3 requests failed: {reason}" in done.stderr
    assert json.loads(done.stdout)["summary"]["agents"]["random"]["ttft_mean_ms"] is None
    document = json.loads((tmp_path / "out" / "results.json").read_bytes())
    assert document["summary"]["agents"]["random"]["ttft_mean_ms"] is None
    assert document["cells"][0]["figures"]["ttft_mean_ms"] is None
    assert f"<p>3 requests failed: {reason}</p>" in (tmp_path / "out" / "report.html").read_text()


def commands_of_scenarios(scenario, out):
    few = ("-n", 5, "-p", "random", "--out", out, "--processes", 1)
    return [
        ("sim", "run", scenario, "-n", 5),
        ("sim", "compare", "-w", scenario, *few),
        ("sim", "quality", "-w", scenario, "--quick", *few[2:]),
        ("plan", "-w", scenario, "-n", 5, "--seeds", 1, *few[2:]),
    ]


@pytest.mark.parametrize("command", range(4))
def test_a_missing_trace_is_noted_and_a_missing_directory_refused(tmp_path, command, monkeypatch):
    monkeypatch.setattr("fairlead.lab.simulator.quality.requests_of_quick", lambda name: 5)
    arguments = commands_of_scenarios("azure-code", tmp_path / "out")[command]
    noted = call(*arguments, "--traces", tmp_path)
    assert f"note: no azure_2023_code.csv in {tmp_path}; made-up workloads stand in" in noted.stderr
    refused = call(*arguments, "--traces", tmp_path / "nothing")
    assert refused.exit_code == 2 and f"FAIRLEAD_TRACES: '{tmp_path}/nothing' is not a directory" in refused.stderr
    if command == 1:
        assert "<p>note: no azure_2023_code.csv in --traces; made-up" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(("policies", "counts"), [(("default", "random"), {1}), ((), {1, 3})])
def test_quality_of_given_policies_simulates_these_alone(tmp_path, monkeypatch, policies, counts):
    taken = []
    monkeypatch.setattr("fairlead.cli.quality.results_of", lambda cells, *_: taken.extend(cells) or [])
    done = call("sim", "quality", "--quick", *(f"--policy={name}" for name in policies), "--out", tmp_path)
    assert done.exit_code == 0, done.output
    ran = {}
    for cell in taken:
        ran.setdefault(cell.scenario.source, []).append(cell.policy)
    assert ("apart-agents" in ran) == (not policies)
    assert {names.count("default") for names in ran.values()} == counts
    assert not policies or all([*names] == [*policies] for names in ran.values())


def test_traffic_that_lasts_for_days_is_noted_before_it_is_simulated(tmp_path, monkeypatch):
    file = tmp_path / "slow.jsonl"
    lines = ({"timestamp": day * 86_400_000, "input_length": 9, "output_length": 2} for day in (0, 9))
    file.write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr("fairlead.lab.simulator.simulation.Simulation.run", lambda self: None)
    said = call("sim", "run", file).stderr
    assert "note: the traffic lasts 9 days" in said and "error" not in said
    assert "note: the traffic" not in call("sim", "run", file, "--speedup", 9).stderr


def test_a_policy_that_splits_nothing_is_simulated_on_servers_that_do_both():
    common = ("sim", "run", "agents", "--requests", 20)
    done, plain = call(*common, "--prefill", 2), call(*common)
    assert "note: all servers do both, because no request is split" in done.stderr
    assert done.stdout.splitlines()[1:] == plain.stdout.splitlines()[1:]
    assert "note" not in call(*common, "--prefill", 2, "--policy", "prefill-decode").stderr


@pytest.mark.parametrize("place", ["scheduler: {%s}", "canary: {percent: 5, scheduler: {%s}}"])
def test_a_scheduler_in_another_process_is_noted_because_nobody_asks_it(tmp_path, place):
    file = tmp_path / "mine.yaml"
    file.write_text("policy: round-robin\n" + place % "address: '127.0.0.1:9100'")
    few = ("--requests", 5, "--policy", file)
    note = f"note: {file}: simulations do not ask 127.0.0.1:9100: round-robin decides"
    compared = ("-w", "agents", "--out", tmp_path / "out", "--processes", 1)
    assert note in call("sim", "run", "agents", *few).stderr
    assert note in call("sim", "compare", *compared, *few).stderr


def test_what_there_is_can_be_listed():
    listed = call("sim", "run", "--list").output
    assert "shared-prefix-20" in listed
    assert "round-robin" in listed
    kinds = call("sim", "workload", "kinds").output
    assert "deep-research" in kinds
    assert "burstgpt" in kinds


def test_policies_are_compared_and_reported(tmp_path):
    arguments = ["sim", "compare", "-w", "paced-prefix", "-p", "default", "-p", "round-robin"]
    arguments += ["--requests", "4", "--load", "1,2"]
    arguments += ["--out", str(tmp_path), "--processes", "1"]
    done = call(*arguments)
    assert done.exit_code == 0, done.output
    assert "paced-prefix @2" in done.output
    assert "regret" in done.output
    assert (tmp_path / "report.html").is_file()
    assert len((tmp_path / "cells.jsonl").read_bytes().splitlines()) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sim", "run"), "name a scenario"),
        (("sim", "run", "nothing"), "neither a scenario nor a file"),
        (("sim", "run", "agents", "--policy", "nothing"), "neither a policy nor a file"),
        (("sim", "run", "agents", "--speeds", "1,fast"), "--speeds takes numbers above 0"),
        (("sim", "run", "agents", "--engine", "abacus"), "unknown preset"),
        (("sim", "workload", "show"), "Missing argument"),
        (("sim", "workload", "show", "no-such-file"), "neither a scenario nor a file"),
        (("sim", "workload", "convert", "x"), "name the file to write"),
        (("sim", "workload", "generate", "magic", "--out", "out"), "give --requests or --seconds"),
        (("sim", "workload", "generate", "magic", "--out", "out", "--requests", "1"), "unknown kind"),
        (("sim", "workload", "generate", "overload", "--set", "rate"), "expected NAME=VALUE"),
        (("sim", "workload", "generate", "overload", "--dispatch", "never"), "unknown dispatch"),
        (("sim", "compare", "-w", "nothing"), "neither a scenario nor a file"),
        (("sim", "compare", "-w", "agents", "--load", "0"), "above 0"),
        (("sim", "compare", "-w", "agents", "--load", "nan"), "above 0"),
        (("sim", "run", "agents", "--speeds=-1"), "above 0"),
        (("sim", "run", "agents", "--speeds", "1,0.4", "--replicas", "4"), "2 speeds for 4 replicas"),
        (("sim", "run", "agents", "--replicas", "0"), "'--replicas'"),
        (("sim", "compare", "-w", "agents", "--replicas", "0"), "'--replicas'"),
        (("sim", "run", "agents", "--kv-lag-ms", "-5"), "'--kv-lag-ms'"),
        (("sim", "run", "agents", "--dispatch", "foo"), "unknown dispatch 'foo'; known: timestamp, think"),
        (("sim", "compare", "-w", "agents", "--fail-if", "failed > 0"), "--fail-if has no effect without --against"),
        (("sim", "compare", "--against", "j", "--json", "--seeds", "2"), "--seeds and --json have no effect with"),
        (("plan", "-w", "agents", "--slo", "ttft_p95=2s", "--warm-up", "10000s"), "leaves no request"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, message):
    done = call(*arguments)
    assert done.exit_code == 2
    assert message in done.output
    assert [line[:7] for line in done.stderr.splitlines()] == ["error: "]


def test_a_bad_trace_names_its_line_and_field(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"input_length": 5, "output_length": 5}\n{"input_length": 5}\n')
    done = call("sim", "workload", "show", path)
    assert done.exit_code == 2
    assert "bad.jsonl:2: output_length" in done.output


def test_a_cluster_needs_its_library(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "distributed", None)
    done = call("sim", "compare", "-w", "agents", "-p", "default", "--cluster", "tcp://127.0.0.1:1", "--out", tmp_path)
    assert done.exit_code == 2
    assert "pip install distributed" in done.output
