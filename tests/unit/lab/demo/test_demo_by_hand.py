"""The commands that the demo prints start this very program, from where the user is."""

import shlex
import sys
from pathlib import Path

import pytest

from fairlead.compat.load import load
from fairlead.lab.demo import Plan, prepare, program


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def script(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(0o755)
    return path


def test_the_program_below_the_directory_is_named_from_there(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(script(here / ".venv" / "bin" / "fairlead"))])
    assert program() == [".venv/bin/fairlead"]
    monkeypatch.setattr(sys, "argv", [".venv/bin/fairlead"])
    assert program() == [".venv/bin/fairlead"]


def test_a_program_in_the_directory_is_not_looked_for_on_path(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(here / "fairlead")
    monkeypatch.setattr(sys, "argv", ["fairlead"])
    assert program() == ["./fairlead"]


def test_a_program_elsewhere_is_named_in_full(
    here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = script(tmp_path_factory.mktemp("elsewhere") / "fairlead")
    monkeypatch.setattr(sys, "argv", [str(elsewhere)])
    assert program() == [str(elsewhere)]


def test_a_module_is_started_by_the_script_beside_its_python(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(here / "src" / "fairlead" / "__main__.py")])
    monkeypatch.setattr(sys, "executable", str(here / "env" / "python"))
    assert program() == ["env/python", "-m", "fairlead"]
    script(here / "env" / "fairlead")
    assert program() == ["env/fairlead"]


def test_the_configuration_is_one_and_its_ports_do_not_clash(here: Path) -> None:
    out = here / 'odd: "ü" name'
    out.mkdir()
    plan = Plan(port=23000, replicas=3, out=out)
    commands = prepare(plan)
    serve = shlex.split(commands.serve)
    config = load(Path(serve[-1]))
    assert (config.gateway.mode, config.gateway.port) == ("embedded", 23000)
    assert config.endpoints.watch
    stub = dict(option[2:].split("=", 1) for option in shlex.split(commands.stub) if option.startswith("--"))
    assert config.endpoints.file == stub["out"]
    first, count = int(stub["port"]), int(stub["replicas"])
    replicas = set(range(first, first + count))
    assert replicas.isdisjoint({config.gateway.port, config.ext_proc.port, config.admin.port})
    assert replicas <= set(plan.replica_ports)
