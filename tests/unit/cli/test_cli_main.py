"""The entry point: listing is light, commands load late, errors become a line and an exit code."""

import os
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Annotated

import pytest
import typer

from fairlead import __version__
from fairlead.cli import main as cli
from fairlead.core.errors import ConfigError, EngineError


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    code = stopped.value.code
    return code if isinstance(code, int) else 0 if code is None else 1


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., object]], None]:
    """Puts a function in the place of `fairlead serve`."""

    def install(function: Callable[..., object]) -> None:
        module = types.ModuleType("fairlead.cli.serve")
        module.serve = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "fairlead.cli.serve", module)

    return install


def test_help_lists_all_commands_and_imports_none_of_them() -> None:
    """In a process of its own, so that nothing is imported yet."""
    code = """
import sys
from fairlead.cli.main import main
try:
    main(["--help"])
except SystemExit as stopped:
    assert not stopped.code, stopped.code
slow = ("fairlead.", "numpy", "aiohttp", "yaml", "asyncio", "grpc", "rich", "pydantic", "msgspec")
heavy = [name for name in sys.modules if name.startswith(slow)]
print("LOADED", *sorted(heavy))
"""
    terminal = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run([sys.executable, "-c", code], env=terminal, capture_output=True, text=True, check=True)
    for name, command in cli.COMMANDS.items():
        assert f" {name} " in done.stdout
        assert command.help in done.stdout, "it is not cut"
    shown = done.stdout.split("LOADED")[0]
    assert max(map(len, shown.splitlines())) <= 80
    assert "Exit codes: 0 success, 1 failed" in done.stdout
    loaded = done.stdout.split("LOADED ")[1].split()
    ours = {"fairlead.cli", "fairlead.cli.options", "fairlead.cli.main", "fairlead.core", "fairlead.core.errors"}
    assert set(loaded) == ours


def test_python_dash_m() -> None:
    done = subprocess.run([sys.executable, "-m", "fairlead", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"fairlead {__version__}\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"fairlead {__version__}\n"


def test_wrong_usage_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("servee") == 2
    assert "Did you mean 'serve'?" in capsys.readouterr().err
    assert run() == 2
    assert run("validate") == 2


def test_a_command_gets_its_arguments(
    command: Callable[[Callable[..., object]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, int]] = []

    def serve(file: str, port: Annotated[int, typer.Option(help="Where.")] = 1) -> None:
        """What serve does."""
        seen.append((file, port))

    command(serve)
    assert run("serve", "x.yaml", "--port", "7") == 0
    assert seen == [("x.yaml", 7)]
    assert run("serve", "--help") == 0
    assert "What serve does." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("wrong", "$.a", "f.yaml"), 2, "error: f.yaml: $.a: wrong\n"),
        (EngineError("vllm-0", "gone"), 1, "error: vllm-0: gone\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (typer.Exit(7), 7, ""),
    ],
)
def test_errors_become_exit_codes(
    command: Callable[[Callable[..., object]], None],
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    said: str,
) -> None:
    def serve() -> None:
        raise error

    command(serve)
    assert run("serve") == code
    assert capsys.readouterr().err == said


def test_an_error_nobody_meant_keeps_its_traceback(command: Callable[[Callable[..., object]], None]) -> None:
    def serve() -> None:
        raise ZeroDivisionError

    command(serve)
    with pytest.raises(ZeroDivisionError):
        cli.main(["serve"])


def test_a_missing_module_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    absent = cli.Command("fairlead.cli.not_there", "run", "Nothing.")
    monkeypatch.setitem(cli.COMMANDS, "serve", absent)
    assert run("serve") == 1
    said = "error: the command 'serve' is not part of this installation (no fairlead.cli.not_there)\n"
    assert capsys.readouterr().err == said
    assert run("--help") == 0


def test_a_missing_dependency_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    (tmp_path / "fl_needs_plot.py").write_text("import matplotlib.pyplot\n")  # type: ignore[operator]
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(cli.COMMANDS, "serve", cli.Command("fl_needs_plot", "run", "Plots."))
    assert run("serve") == 1
    error = capsys.readouterr().err
    assert "the command 'serve' cannot be loaded" in error
    assert "install fairlead[report]" in error


def test_a_module_without_the_function(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(cli.COMMANDS, "serve", cli.Command("fairlead.cli.config", "nope", ""))
    assert run("serve") == 1
    assert "is broken: fairlead.cli.config has no nope" in capsys.readouterr().err
