"""`--json` where a command has figures: one document on stdout, and nothing else there."""

import json
from pathlib import Path
from typing import Any

import pytest

from fairlead.cli.main import main
from fairlead.cli.options import complain
from fairlead.lab.simulator.drawn import drawn_names


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--json"])
    return int(stopped.value.code or 0), json.loads(capsys.readouterr().out)


def test_validate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("endpoints: ['10.0.0.1:1']\n")
    code, found = run(capsys, "validate", str(file))
    assert (code, found["valid"], found["problems"]) == (0, True, [])
    assert found["summary"].startswith("Policy default")
    file.write_text("endpoints: ['10.0.0.1:1']\nscorers:\n- {type: load-aware, wieght: 3}\n")
    code, found = run(capsys, "validate", str(file))
    assert (code, found["valid"], found["summary"]) == (2, False, "")
    assert found["problems"][0]["line"] == 3
    assert found["problems"][0]["path"] == "$.scorers[0].wieght"


def test_validate_looks_at_models_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "f.yaml"
    (tmp_path / "names.yaml").write_text("kind: InferenceModel\n")
    file.write_text("endpoints: ['10.0.0.1:1']\nmodels: {file: names.yaml}\n")
    code, found = run(capsys, "validate", str(file))
    assert (code, found["valid"]) == (2, False)
    assert "names.yaml" in found["problems"][0]["message"]


def test_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "w.jsonl"
    code, made = run(capsys, "sim", "workload", "generate", "interactive-chat", "--out", str(file), "--requests", "30")
    assert (code, made["sessions"]) == (0, 30)
    code, shown = run(capsys, "sim", "workload", "show", str(file))
    assert (code, shown["in_tokens"]) == (0, made["in_tokens"])
    assert shown["in_tokens"]["max"] >= shown["in_tokens"]["p50"] > 0


@pytest.mark.simulation
def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "-s",
        "agents",
        "--head",
        "20",
        "-p",
        "random",
        "-p",
        "lpwl",
        "--processes",
        "1",
        "--out",
        str(tmp_path),
    ]
    code, found = run(capsys, "sim", "compare", *arguments)
    assert code == 0
    assert {*found["summary"]["agents"]} == {*found["regret"]} == {"random", "lpwl"}
    assert (tmp_path / "report.html").is_file()


@pytest.mark.simulation
def test_compare_takes_all_scenarios_of_a_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenarios = ("-w", "drawn-7", "-w", "drawn-7-30")
    more = ("-n", "3", "--processes", "1", "--out", str(tmp_path))
    code, found = run(capsys, "sim", "compare", "-p", "round-robin", *scenarios, *more)
    assert code == 0
    assert {*found["summary"]} == {*drawn_names("drawn-7"), "drawn-7-30"}


@pytest.mark.simulation
def test_quality(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlead.lab.simulator.quality.requests_of_quick", lambda name: 20)
    (tmp_path / "mine.yaml").write_text("policy: round-robin\n")
    policies = ("-p", "default", "-p", f"mine={tmp_path / 'mine.yaml'}", "-p", "sticky, 5 s")
    scenarios = ("-w", "agents", "-w", "hot-prefix", "-w", "drawn-7-3")
    more = ("--quick", "--processes", "1", "--out", str(tmp_path / "out"))
    code, found = run(capsys, "sim", "quality", *policies, *scenarios, *more)
    assert code == 0
    assert [*found] == ["development", "drawn"]
    for regrets in found.values():
        assert {*regrets} == {"default", "mine", "sticky, 5 s"}
        assert all(row["ttft_mean"]["geomean"] >= 1.0 for row in regrets.values())
    scenarios_file = json.loads((tmp_path / "out" / "scenarios.json").read_text())
    assert [*scenarios_file["scenarios"]] == ["agents", "hot-prefix", "drawn-7-3"]
    assert scenarios_file["known"] == scenarios_file["calm"] == {}, "they are in no table, so only whole sets have them"


def test_a_file_that_cannot_be_used_is_named_first(capsys: pytest.CaptureFixture[str]) -> None:
    complain(FileNotFoundError(2, "No such file or directory", "a.txt"))
    complain(OSError("something else"))
    complain("first\nsecond")
    said = ["a.txt: No such file or directory", "something else", "first", "second"]
    assert capsys.readouterr().err.splitlines() == [f"error: {line}" for line in said]
