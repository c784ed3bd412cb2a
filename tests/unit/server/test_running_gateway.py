"""What a scheduler that starts beside a running gateway takes from the start, and what from the present file."""

from pathlib import Path
from typing import Any

import pytest

from fairlead.compat.load import load
from fairlead.config.reload import plan_reload
from fairlead.core.errors import ConfigError
from fairlead.gateway.envoy.process import CONFIG, LAST_CONFIG
from fairlead.server.running_gateway import NONE_RUNS, RunningGateway

OWN: dict[str, Any] = {"extProc": {"port": 9010}, "kubernetes": {"pool": "p"}}


@pytest.mark.parametrize("workers", [1, 2])
def test_it_begins_with_what_the_others_apply(tmp_path: Path, workers: int) -> None:
    file, gateway = tmp_path / "f.yaml", RunningGateway([], str(tmp_path), 0, workers)
    (tmp_path / CONFIG).write_text("endpoints: ['10.0.0.1:1']\n")
    file.write_text("endpoints: ['10.0.0.2:1']\ngateway: {port: 8081}\nextProc: {port: 9100}\n")
    config, begun = gateway.configurations(file, {"extProc": {"port": 9010}}, file.read_bytes())
    assert [listed.endpoint.address for listed in config.endpoints.static] == ["10.0.0.2:1"]
    assert (config.gateway.port, config.ext_proc.port) == (8080, 9010)
    changes, refused = plan_reload(config, load(file), begun)
    assert (changes.paths, [problem.path for problem in refused]) == ((), ["$.gateway.port", "$.extProc.port"])


@pytest.mark.parametrize("present", ["endpoints: ['10.0.0.3:1'\n", None])
def test_a_file_that_cannot_be_used_leaves_what_was_in_force(tmp_path: Path, present: str | None) -> None:
    """Whether it is broken or missing."""
    file, gateway = tmp_path / "f.yaml", RunningGateway([], str(tmp_path))
    (tmp_path / CONFIG).write_text("endpoints: ['10.0.0.1:1']\n")
    if present is not None:
        file.write_text(present)
    for last, address in ((None, "10.0.0.1:1"), ("endpoints: ['10.0.0.2:1']\n", "10.0.0.2:1"), ("[", "10.0.0.1:1")):
        if last is not None:
            (tmp_path / LAST_CONFIG).write_text(last)
        config, begun = gateway.configurations(file, {}, None)
        assert [listed.endpoint.address for listed in config.endpoints.static] == [address]
        assert [listed.endpoint.address for listed in begun.endpoints.static] == ["10.0.0.1:1"]
    with pytest.raises(ConfigError):
        NONE_RUNS.configurations(file, {}, None)


def test_a_start_that_cannot_be_used_any_longer_stops_nobody(tmp_path: Path) -> None:
    """Its plugin was uninstalled since, for example."""
    file = tmp_path / "f.yaml"
    (tmp_path / CONFIG).write_text("policy: gone\n")
    file.write_text("seed: 4\n")
    config, begun = RunningGateway([], str(tmp_path), 0, 1).configurations(file, OWN, file.read_bytes())
    assert (config.seed, config.ext_proc.port, config is begun) == (4, 9010, True)
    assert "at the start cannot be used any longer" in str(config.notes[-1])


def test_a_parent_of_an_older_version_has_not_kept_the_start(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("policy: default\n")
    config, begun = RunningGateway([], str(tmp_path), 1, 2).configurations(file, OWN, file.read_bytes())
    assert config is begun and begun.flags == OWN


def test_without_a_gateway_the_file_counts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(CONFIG).write_text("nonsense: 1\n")
    file = tmp_path / "f.yaml"
    file.write_text("endpoints: ['10.0.0.1:1']\n")
    assert NONE_RUNS.configurations(file, {}, file.read_bytes())[0].source == str(file)
