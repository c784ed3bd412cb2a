"""`fairlead config show` and `fairlead config schema`."""

import json
from pathlib import Path

import pytest

from fairlead.cli.main import main

ROOT = Path(__file__).parents[3]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    return int(stopped.value.code or 0)


def show(file: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[object, str]]:
    assert run("config", "show", str(file), "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {row["path"]: (row["value"], row["origin"]) for row in rows}


def write(folder: Path, text: str) -> Path:
    file = folder / "f.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("via", "shown"),
    [
        ("valkeys://fairlead:s3cret@h.example:6379/0", "valkeys://fairlead:***@h.example:6379/0"),
        ("redis://:s3cret@10.0.0.1", "redis://:***@10.0.0.1"),
        ("unix://me:s3cret@/run/v.sock", "unix://me:***@/run/v.sock"),
        ("valkey://fairlead@h.example", "valkey://fairlead@h.example"),
    ],
)
def test_passwords_are_masked(tmp_path: Path, capsys: pytest.CaptureFixture[str], via: str, shown: str) -> None:
    file = write(tmp_path, f"endpoints: ['10.0.0.1:1']\nreplicas: {{via: '{via}'}}\n")
    assert show(file, capsys)["$.replicas.via"] == (shown, "line 2")


def test_every_value_has_an_origin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """endpoints: ['10.0.0.1:1']
gateway: none
metrics:
  interval: 50ms
scorers:
  - type: load-aware
    weight: 7
    parameters:
      queueWeightFactor: 0.5
"""
    found = show(write(tmp_path, text), capsys)
    assert found["$.policy"] == ("custom", "the lists of the file")
    assert found["$.scorers[0].weight"] == (7.0, "line 7")
    assert found["$.scorers[0].queueWeightFactor"] == (0.5, "line 9")
    assert found["$.scorers[0].activeRequestsWeight"] == (None, "default")
    assert found["$.filters[0].type"] == ("role", "built in")
    assert found["$.filters[4].maxQueueLength"] == (200, "default")
    assert found["$.selection.type"] == ("top-k", "default")
    assert "$.policy.type" not in found
    assert found["$.metrics.interval"] == (0.05, "line 4")
    assert found["$.metrics.timeout"] == (1.0, "default")
    assert found["$.gateway.mode"] == ("none", "line 2")
    assert found["$.extProc.host"] == ("::", "from gateway.mode")
    assert found["$.als.port"] == (9002, "from extProc.port")
    assert found["$.endpoints[0]"] == ({"name": "10.0.0.1:1", "address": "10.0.0.1:1"}, "line 1")


def test_shorthands_and_policies_are_origins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = show(write(tmp_path, "endpoints: ['10.0.0.1:1']\npolicy: round-robin\n"), capsys)
    assert found["$.policy"] == ("round-robin", "line 2")
    assert found["$.selection.type"] == ("round-robin", "policy: round-robin (line 2)")
    plugin = show(write(tmp_path, "endpoints: ['10.0.0.1:1']\npolicy:\n  type: cost-model\n  nearTie: 0.03\n"), capsys)
    assert plugin["$.policy.type"] == ("cost-model", "line 3")
    assert plugin["$.policy.nearTie"] == (0.03, "line 4")
    assert plugin["$.policy.name"] == ("cost-model", "line 3")


def test_top_k_is_the_picker_of_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = show(write(tmp_path, "endpoints: ['10.0.0.1:1']\nselection:\n  topK: 2\n"), capsys)
    assert (found["$.selection.type"], found["$.selection.k"]) == (("top-k", "line 3"), (2, "line 3"))


def test_plugins_of_the_reference_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    found = show(ROOT / "tests/data/epp-configs/sticky-until-saturated.yaml", capsys)
    assert found["$.policy"] == ("default", "schedulingProfiles")
    assert found["$.filters[0].type"] == ("subset", "built in")
    assert found["$.filters[2].affinityThreshold"] == (0.7, "line 7, prefix-cache-affinity-filter")
    assert found["$.scorers[0].weight"][1].endswith("token-load-scorer")
    assert found["$.metrics.interval"] == (0.1, "plugins")
    files = show(ROOT / "tests/data/epp-configs/performance-profile.yaml", capsys)
    assert files["$.endpoints.watch"] == (False, "file-discovery")


def test_it_is_readable_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "show", str(ROOT / "examples/minimal.yaml")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("$.gateway.port ") and line.endswith("8080  # default") for line in lines)
    assert all("  # " in line for line in lines)


def test_a_configuration_that_does_not_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "show", str(write(tmp_path, "seed: x"))) == 2
    assert "$.seed" in capsys.readouterr().err
    assert run("config", "hide", "x") == 2


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "schema") == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Fairlead configuration"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("scheduling.policy", "Name of a policy, or a mapping with its type and parameters. One of default, "),
        ("gateway.retry", 'gateway.retry: connect, unanswered, hedge (default "hedge") When a request goes to'),
        ("$.flowControl.bands[3].priority", "flowControl.bands[].priority: whole number (needed)"),
        ("als", "als.port: whole number"),
        ("prefix-aware", "hashBlockSize: whole number"),
        ("filters", "One of "),
    ],
)
def test_explain_prints_what_the_reference_says(name: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["config", "explain", name])
    assert stopped.value.code == 0
    assert words in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gateway.retyr", "did you mean 'gateway.retry'?"),
        ("retry", "perhaps gateway.retry, kubernetes.leaderElection.retryPeriod"),
        ("zzz", "known: active-requests, admin,"),
    ],
)
def test_explain_suggests_near_names(name: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["config", "explain", name])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert hint in said and len(said) < 1500


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["sim", "compare", "-w", "agenst", "-p", "default"], "agents"),
        (["sim", "compare", "-w", "agents", "-p", "round-robbin"], "round-robin"),
        (["sim", "quality", "-w", "agenst", "-p", "default"], "agents"),
        (["sim", "quality", "-p", "round-robbin"], "round-robin"),
        (["sim", "run", "agent", "-p", "default"], "agents"),
        (["sim", "run", "agents", "-p", "leest-requests"], "least-requests"),
        (["bench", "127.0.0.1:1", "-w", "converstion"], "conversation"),
        (["doctor", "f.yaml", "--only", "endpoint"], "endpoints"),
    ],
    ids=" ".join,
)
def test_names_that_are_nearly_right_are_suggested(
    arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert f"did you mean '{meant}'?" in capsys.readouterr().err
