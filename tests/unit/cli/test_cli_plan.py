"""`fairlead plan` as a user calls it. The runs are tiny."""

import json
import tempfile
from pathlib import Path

import pytest
from commands import fairlead as call

QUICK = ("-n", "60", "--seeds", "1", "--processes", "1", "--slo", "ttft_p90=2s,tpot_p90=50ms")


@pytest.mark.simulation
def test_the_answer_stands_below_the_table_and_in_files(tmp_path: Path) -> None:
    out = tmp_path / "plan"
    done = call("plan", "-w", "shared-prefix-10", "--engine", "h100-qwen3-32b", "--price", 2.5, *QUICK, "--out", out)
    assert done.exit_code == 0, done.output
    found = json.loads((out / "plan.json").read_text())
    assert f"* {found['replicas']} " in done.stdout and "…" not in done.stdout
    assert f"{found['replicas']} replicas hold ttft_p90 2s, tpot_p90 50ms, failed 1%" in done.stdout
    assert f"cost: {2.5 * found['replicas']:,.2f} per hour" in done.stdout
    assert max(map(len, done.stdout.splitlines()[1:5])) <= 80
    less = ("--traffic", "0.2x", *QUICK, "--processes", 2)
    faster = call("plan", "-w", "shared-prefix-10", *less, "--out", out, "--json")
    assert json.loads(faster.stdout)["replicas"] < found["replicas"]
    split = call("plan", "-w", "shared-prefix-10", "--split", *QUICK, "--out", out, "--json")
    figures = json.loads(split.stdout)
    assert 0 < figures["prefill"] < figures["replicas"]
    assert figures["policy"] == "prefill-decode", "the default would leave servers that only prefill idle"


@pytest.mark.simulation
def test_an_answer_that_cannot_be_written_is_printed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = call("plan", "-w", "shared-prefix-10", *QUICK, "--out", tmp_path / "file" / "plan", "--json")
    assert done.exit_code == 2 and "file/plan: Not a directory" in done.stderr
    assert json.loads(done.stdout)["replicas"]


@pytest.mark.simulation
def test_no_size_is_told_apart_from_an_error(tmp_path: Path) -> None:
    done = call("plan", "-w", "shared-prefix-10", "--max-replicas", 1, *QUICK, "--out", tmp_path)
    assert done.exit_code == 1
    assert "no size up to 1 replicas holds ttft_p90 2s" in done.stdout
    impossible = call("plan", "-w", "shared-prefix-10", "-n", 60, "--slo", "ttft_p95=50ms", "--out", tmp_path)
    assert impossible.exit_code == 1
    assert "cannot be held by any number of replicas" in impossible.stderr and "prompt alone" in impossible.stderr


@pytest.mark.simulation
def test_a_process_that_is_killed_is_no_traceback(tmp_path: Path) -> None:
    """A simulation that runs out of memory is killed by the system."""
    policy = tmp_path / "ends.py"
    policy.write_text(
        "import os\nfrom fairlead.plugins.policies.ranked import Ranked\n\n\nclass Ends(Ranked):\n    type = 'ends'\n\n"
        "    def cost(self, request, fleet, cycle):\n        os._exit(9)\n"
    )
    done = call("plan", "-w", "agents", *QUICK, "-p", policy, "--processes", "2", "--out", tmp_path / "out")
    assert done.exit_code == 1
    assert "ran out of memory" in done.stderr and "fewer than 2 --processes" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.simulation
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("    def cost(self, request, fleet, cycle):\n        return 1 / 0\n", "division by zero (wrong.py, line 8)"),
        ("    def __init__(self): ...\n    cost = None\n", "it is called with (parameters, name=…, filters=…)"),
    ],
)
def test_a_policy_that_fails_has_no_plan(body: str, said: str, tmp_path: Path) -> None:
    policy = tmp_path / "wrong.py"
    head = "from fairlead.plugins.policies.ranked import Ranked\n\n\nclass Wrong(Ranked):\n    type = 'wrong'\n\n"
    policy.write_text(head + body)
    done = call("plan", "-w", "agents", *QUICK, "-p", policy, "--out", tmp_path / "out")
    assert done.exit_code == 2, done.output
    assert said in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-w", "reasoning", "--seconds", "30"), "--seconds has no effect on reasoning"),
        (("--live", "journal", "--seconds", "30"), "--seconds has no effect on journal"),
        (("-w", "shared-prefx", "--seconds", "30"), "did you mean 'shared-prefix'?"),
        ((), "give a --workload, or the --live journal"),
        (("-w", "agents", "--live", "journal"), "give a --workload, or the --live journal"),
        (("-w", "agentz"), "neither a scenario nor a file; did you mean 'agents'?"),
        (("-w", "interactive-chad"), "did you mean 'interactive-chat'?"),
        (("-w", "agents", "--engine", "qwen-32b-h200"), "did you mean 'qwen3-32b-h200'?"),
        (("-w", "agents", "--slo", "p95=2s"), "'p95=2s' is not an objective"),
        (("-w", "agents", "--traffic", "twice"), "--traffic twice: expected e.g. 2x"),
        (("-w", "agents", "--policy", "no-such"), "neither a policy nor a file"),
        (("-w", "agents", "--split", "-p", "default"), "--split has no effect with default, which never splits"),
        (("--live", "."), "holds no journal"),
    ],
)
def test_wrong_input_says_what_to_do(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = call("plan", *arguments, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert said in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_what_does_not_answer_is_no_wrong_input(tmp_path: Path) -> None:
    for command in (("plan", "-w", "agents"), ("sim", "compare", "--against", str(tmp_path))):
        done = call(*command, "--engine", "http://127.0.0.1:1")
        assert done.exit_code == 1
        assert "http://127.0.0.1:1 does not answer" in done.stderr
    done = call("plan", "--live", "http://127.0.0.1:1")
    assert done.exit_code == 1
    assert "does not answer" in done.stderr and "(--live)" in done.stderr and len(done.stderr.splitlines()) == 1


def test_the_copy_of_a_journal_that_a_killed_run_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "fairlead-plan-killed_1"
    left.mkdir(mode=0o700)
    (left / "1.journal").touch()
    call("plan", "--live", "http://127.0.0.1:1")
    assert not left.exists()
