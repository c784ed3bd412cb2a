"""A child process imports what its parent does."""

import subprocess
import sys
from pathlib import Path

import pytest

import fairlead
from fairlead.server.python import python_module

START = "import subprocess, sys\nfrom fairlead.server.python import python_module\nassert __name__ == '__main__'\n"
START += "sys.exit(subprocess.run(python_module('here')).returncode)\n"


@pytest.mark.parametrize("by_name", [False, True])
def test_only_python_m_imports_from_the_working_directory(tmp_path: Path, by_name: bool) -> None:
    """The installed command does not, and its files may have names of the standard library."""
    working, installed = tmp_path / "working", tmp_path / "bin"
    working.mkdir()
    installed.mkdir()
    (working / "here.py").write_text("print('imported')")
    place = working if by_name else installed
    (place / "start.py").write_text(START)
    command = [sys.executable, *(["-m", "start"] if by_name else [str(place / "start.py")])]
    ended = subprocess.run(command, cwd=working, capture_output=True, text=True)
    assert (ended.returncode == 0, ended.stdout.strip()) == (by_name, "imported" if by_name else ""), ended.stderr


def test_the_working_directory_may_be_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.syspath_prepend(tmp_path)
    gone.rmdir()
    assert python_module("fairlead") == [sys.executable, "-P", "-m", "fairlead"]


def test_every_child_is_started_so() -> None:
    package = Path(fairlead.__file__).parent
    assert [path for path in package.rglob("*.py") if 'sys.executable, "-m"' in path.read_text(encoding="utf-8")] == []
