"""The entry point: listing is light, commands load late, errors become a line and an exit code."""

import asyncio
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import pytest
import typer
from commands import fairlead
from rich.console import Console
from tcp import TcpServer

from fairlead import __version__
from fairlead.__main__ import main as started
from fairlead.cli import commands
from fairlead.cli import main as cli
from fairlead.cli.help import RENAMED_OPTIONS, with_new_names
from fairlead.core.errors import PROCESS_LIMIT, ConfigError, EngineError


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


def imported(*arguments: str) -> tuple[str, set[str]]:
    """What a command prints, and the modules that it imports, in a process of its own."""
    code = f"""
import sys
from fairlead.cli.main import main
try:
    main({arguments!r})
except SystemExit as stopped:
    assert not stopped.code, stopped.code
print("LOADED", *sys.modules)
"""
    terminal = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run([sys.executable, "-c", code], env=terminal, capture_output=True, text=True, check=True)
    shown, _, loaded = done.stdout.partition("LOADED ")
    return shown, {*loaded.split()}


def test_help_lists_all_commands_and_imports_none_of_them() -> None:
    shown, loaded = imported("--help")
    for path, command in commands.COMMANDS.items():
        name = path.split()[0]
        assert f"  {name} " in shown
        assert (command.help if path == name else commands.GROUPS[name]) in shown, "it is not cut"
    assert max(map(len, shown.splitlines())) <= 80
    assert len(shown.splitlines()) <= 42, "one screen"
    ours = {name for name in loaded if name.startswith("fairlead.")}
    assert ours == {"fairlead.cli", "fairlead.cli.main", "fairlead.cli.commands"}
    assert not loaded & {"typer", "numpy", "yaml", "asyncio", "rich", "pydantic", "msgspec"}


def test_validate_imports_no_plugin_that_the_file_does_not_name(tmp_path: Path) -> None:
    """Nor numpy, which takes eight times as long to import as Python to start."""
    file = tmp_path / "f.yaml"
    file.write_text("endpoints: ['10.0.0.1:1', '10.0.0.2:1']\ngateway: {port: 81}\npolicy: default\n")
    shown, loaded = imported("validate", str(file))
    assert "4 filters, cost-model" in shown
    assert not loaded & {"numpy", "rich", "asyncio", "aiohttp", "grpc", "ssl"}
    assert not loaded & {"fairlead.core.policy", "fairlead.config.plugins"}
    plugins = {name for name in loaded if name.startswith("fairlead.plugins.")}
    assert plugins == {"fairlead.plugins.params"}
    file.write_text("endpoints: ['10.0.0.1:1']\nfilters: [{type: queue-depth}]\n")
    assert "fairlead.plugins.filters.load" in imported("validate", str(file))[1], "what it names is made"


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
        (RuntimeError("can't start new thread"), 1, f"error: {PROCESS_LIMIT}\n"),
        (PermissionError(13, "Permission denied", "out/a"), 1, "error: out/a: Permission denied\n"),
        (FileNotFoundError(2, "No usable temporary directory"), 1, "error: No usable temporary directory\n"),
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


def test_a_terminal_that_does_not_know_its_size_has_the_usual_one(
    command: Callable[[Callable[..., object]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    monkeypatch.setenv("LINES", "0")
    seen: list[int] = []

    def serve() -> None:
        seen.extend(Console().size)

    command(serve)
    assert run("serve") == 0
    assert min(seen) > 0


def test_an_error_nobody_meant_keeps_its_traceback(command: Callable[[Callable[..., object]], None]) -> None:
    def serve() -> None:
        raise ZeroDivisionError

    command(serve)
    with pytest.raises(ZeroDivisionError):
        cli.main(["serve"])


def test_a_missing_module_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    absent = commands.Command("fairlead.cli.not_there", "run", "Nothing.")
    monkeypatch.setitem(commands.COMMANDS, "serve", absent)
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
    monkeypatch.setitem(commands.COMMANDS, "serve", commands.Command("fl_needs_plot", "run", "Plots."))
    assert run("serve") == 1
    error = capsys.readouterr().err
    assert "the command 'serve' cannot be loaded" in error
    assert "install fairlead[report]" in error


def test_a_module_without_the_function(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(commands.COMMANDS, "serve", commands.Command("fairlead.cli.config", "nope", ""))
    assert run("serve") == 1
    assert "is broken: fairlead.cli.config has no nope" in capsys.readouterr().err


def test_every_command_has_its_place_in_the_help() -> None:
    listed = [name for names in commands.SECTIONS.values() for name in names]
    assert {path.split()[0] for path in commands.COMMANDS} <= {*listed}
    groups = {path.rpartition(" ")[0] for path in commands.COMMANDS} - {""}
    assert {*commands.GROUPS} >= groups


@pytest.mark.parametrize(
    ("typed", "meant"), [("servee", "serve"), ("convert", "sim workload convert"), ("doktor", "doctor")]
)
def test_the_nearest_command_is_suggested(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(typed) == 2
    assert f"Did you mean '{meant}'?" in capsys.readouterr().err


def test_the_nearest_option_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("sim", "run", "agents", "--polic", "x") == 2
    assert "--policy" in capsys.readouterr().err


@pytest.mark.parametrize(("old", "new"), commands.RENAMED.items())
def test_an_old_command_runs_the_new_one(old: str, new: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(old, "--help") == 0
    shown = capsys.readouterr()
    assert f"Usage: fairlead {new}" in shown.out
    assert shown.err == f"note: `fairlead {old}` is now `fairlead {new}`; the old name goes in 0.3\n"
    assert run("--help") == 0
    assert f"  {old} " not in capsys.readouterr().out


def test_old_options_are_the_new_ones(
    command: Callable[[Callable[..., object]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []

    def serve(admin_port: int = 0) -> None:
        """Serve."""
        seen.append(admin_port)

    command(serve)
    assert (
        run("serve", "--metrics-port", "7")
        == run("serve", "--metrics-port=8")
        == run("serve", "--admin-port", "9")
        == 0
    )
    assert seen == [7, 8, 9]
    assert capsys.readouterr().err == "note: `--metrics-port` is now `--admin-port`; the old name goes in 0.3\n" * 2


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        (["agents", "--head", "5"], ["agents", "--requests", "5"]),
        (["--requests", "rows.csv"], ["--csv", "rows.csv"]),
        (["--requests=rows.csv"], ["--csv=rows.csv"]),
        (["--requests", "5"], ["--requests", "5"]),
        (["--requests", "-5"], ["--requests", "-5"]),
        (["--requests", "1k"], ["--requests", "1k"]),
        (["--requests", "1.5"], ["--requests", "1.5"]),
        (["--requests", "./rows"], ["--csv", "./rows"]),
        (["--requests=5", "--servers", "2"], ["--requests=5", "--replicas", "2"]),
        (["--", "--head"], ["--", "--head"]),
        (["--preset", "llama-8b-h100"], ["--engine", "llama-8b-h100"]),
        (["--like=http://127.0.0.1:1"], ["--engine=http://127.0.0.1:1"]),
    ],
)
def test_an_option_that_has_another_meaning_now(typed: list[str], read: list[str]) -> None:
    assert [*with_new_names(typed, RENAMED_OPTIONS["sim run"])] == read


def test_what_was_an_argument_is_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "chat.jsonl"
    assert run("workload", "generate", "interactive-chat", str(out), "--count", "3") == 0
    assert out.exists()
    assert "note: `IN OUT` is now `IN --out OUT`" in capsys.readouterr().err
    assert run("top", "http://127.0.0.1:1", "--once") == 1
    assert "note: `URL` is now `--admin URL`" in capsys.readouterr().err


@pytest.mark.parametrize("path", commands.COMMANDS)
def test_help_fits_80_columns(path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(*path.split(), "--help") == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "<bool>" not in shown and "int range" not in shown


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1 9090",
        "http://127.0.0.1:abc",
        "ftp://127.0.0.1",
        "http://",
        "[::1",
        "http://:s3/cret@h:9o",
        "http://127.0.0.1:1?token=s3cret",
    ],
)
@pytest.mark.parametrize("command", [("top", "--once"), ("explain", "last")])
def test_what_is_no_address_of_an_admin_port(command: tuple[str, ...], address: str) -> None:
    done = fairlead(*command, "--admin", address, columns=200)
    assert done.exit_code == 2
    assert "expected HOST:PORT or a URL like http://localhost:9090" in done.stderr
    assert "cret" not in done.output


@pytest.mark.parametrize(("command", "code"), [(("top", "--once"), 1), (("explain", "last"), 2)])
async def test_a_port_that_speaks_no_http(command: tuple[str, ...], code: int) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"this is not HTTP/2\r\n")
        await writer.drain()
        await reader.read()

    async with TcpServer(answer) as server:
        done = await asyncio.to_thread(fairlead, *command, "--admin", server.address, columns=200)
    assert done.exit_code == code, done.output
    assert "this is not Fairlead's admin port" in done.stderr


@pytest.mark.parametrize("mode", ["none", "{mode: none}"])
def test_the_port_of_a_gateway_that_is_off_is_refused(mode: str, tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(f"endpoints: ['127.0.0.1:1']\ngateway: {mode}\n")
    command = [sys.executable, "-m", "fairlead", "serve", str(file), "--port", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (
        2,
        "error: --port: no gateway listens there: the configuration says gateway: none\n",
    )


def test_a_full_disk_ends_the_overview_with_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fairlead", "--help"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (1, "error: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("command", [["--help"], ["validate"], ["validate", "--json"], ["config", "show"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_nobody_reads_is_no_error(tmp_path: Path, command: list[str], unbuffered: str) -> None:
    (tmp_path / "fairlead.yaml").write_text("endpoints: ['10.0.0.1:8000']\n")
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as closed:
        done = subprocess.run(
            [sys.executable, "-m", "fairlead", *command],
            stdout=closed,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert (done.returncode, done.stderr) == (1, b"")


def test_ctrl_c_while_modules_are_imported_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "fairlead.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "fairlead.cli.main", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        started()
    assert (ended.value.code, capfd.readouterr()) == (130, ("", ""))
