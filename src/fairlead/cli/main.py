"""`fairlead COMMAND`: finds the command's module, runs it, and turns errors into one line and an exit code.

A command is a plain function with typer annotations. Its module is imported when the command is run (or asked for its
own `--help`), never to list the commands: that keeps `fairlead --help` fast, and a command whose optional dependency is
missing hurts nobody else.
"""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from fairlead import __version__
from fairlead.cli.options import FAILED, INTERRUPTED, WRONG_INPUT, complain
from fairlead.core.errors import ConfigError, FairleadError, PluginError


class Command(NamedTuple):
    """Where a command lives."""

    module: str
    function: str
    help: str
    #: It reads its flags by itself.
    raw: bool = False


COMMANDS: dict[str, Command] = {
    "serve": Command("fairlead.cli.serve", "serve", "Run the scheduler and, by default, its embedded gateway."),
    "init": Command("fairlead.cli.init", "init", "Look at model servers and write a configuration for them."),
    "epp": Command("fairlead.cli.epp", "epp", "Serve by the reference picker's command line.", raw=True),
    "indexer": Command("fairlead.cli.indexer", "indexer", "The prefix index alone, asked over HTTP."),
    "validate": Command("fairlead.cli.config", "validate", "Check a configuration and print every problem."),
    "doctor": Command("fairlead.cli.doctor", "doctor", "Find out what is wrong with an installation."),
    "config": Command("fairlead.cli.config", "config", "Show the effective configuration, with origins."),
    "schema": Command("fairlead.cli.config", "schema", "Print the JSON Schema of the configuration, for editors."),
    "key": Command("fairlead.cli.key", "key", "Make an API key for a client of the embedded gateway."),
    "envoy-config": Command("fairlead.cli.envoy_config", "envoy_config", "Print the gateway's Envoy configuration."),
    "stub": Command("fairlead.cli.stub", "stub", "Simulated model servers: the real API and metrics, no GPU."),
    "demo": Command("fairlead.cli.demo", "demo", "Gateway, scheduler, stubs and load in one process."),
    "bench": Command("fairlead.cli.bench", "bench", "Send load to a live OpenAI endpoint and measure it."),
    "top": Command("fairlead.cli.top", "top", "Watch a running scheduler: endpoints, traffic, warnings."),
    "explain": Command("fairlead.cli.explain", "explain", "Why a request went where it went, in milliseconds."),
    "replay": Command("fairlead.cli.replay", "replay", "Feed a journal through the scheduler again, or another one."),
    "capture": Command("fairlead.cli.capture", "capture", "Make a workload of a journal, without names and texts."),
    "simulate": Command("fairlead.cli.simulate", "simulate", "Run a policy on a workload in virtual time."),
    "workload": Command("fairlead.cli.workload", "workload", "Look at, convert and generate workloads."),
    "scheduler": Command(
        "fairlead.cli.scheduler", "scheduler", "Serve or check a scheduler of your own, in another process."
    ),
    "tune": Command("fairlead.cli.tune", "tune", "Fit a server's speed to a preset, and suggest parameters."),
    "compare": Command("fairlead.cli.compare", "compare", "Simulate policies x workloads x loads; table and report."),
}

#: Optional dependencies, and the extra that brings each.
EXTRAS = {"matplotlib": "report", "distributed": "cluster"}

EPILOG = "Exit codes: 0 success, 1 failed while running, 2 wrong usage or configuration, 130 interrupted."


class CommandError(FairleadError):
    """A command that is listed cannot be run in this installation."""


class LazyGroup(TyperGroup):
    """Lists commands from the table, and swaps the real one in when it is about to run."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, arguments = super().resolve_command(ctx, args)
        if name in COMMANDS:
            command = load_command(name, COMMANDS[name])
        return name, command, arguments


def load_command(name: str, command: Command) -> Any:
    """The click command of a typer function. Raises `CommandError` when it cannot be imported."""
    try:
        module = import_module(command.module)
    except ImportError as error:
        missing = error.name or ""
        if missing == command.module:
            raise CommandError(f"the command '{name}' is not part of this installation (no {missing})") from None
        extra = EXTRAS.get(missing.partition(".")[0], "")
        cure = f"; install fairlead[{extra}]" if extra else ""
        raise CommandError(f"the command '{name}' cannot be loaded: {error}{cure}") from error
    function = vars(module).get(command.function)
    if function is None:
        raise CommandError(f"the command '{name}' is broken: {command.module} has no {command.function}")
    single = typer.Typer(add_completion=False)
    settings = {"ignore_unknown_options": True} if command.raw else None
    single.command(name=name, help=command.help if not function.__doc__ else None, context_settings=settings)(function)
    return typer.main.get_command(single)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fairlead {__version__}")
        raise typer.Exit()


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Decides for every LLM request when it runs and which model-server replica runs it.

    \b
    Examples:
      fairlead demo             see what it does, on simulated replicas
      fairlead init             a configuration for your own servers
      fairlead serve            schedule for them
      fairlead compare -s agents -p default -p round-robin
      fairlead COMMAND --help   what a command takes, with examples
    """


def build_app() -> typer.Typer:
    # The list of commands is plain text: drawing it would take three times as long.
    app = typer.Typer(cls=LazyGroup, no_args_is_help=True, epilog=EPILOG, rich_markup_mode=None)
    app.callback()(_root)
    for name, command in COMMANDS.items():
        app.command(name, help=command.help)(_root)  # a placeholder with the right help
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit. Errors made on purpose become one line on stderr, others a traceback. SIGTERM ends a
    command as Ctrl-C does, with what it started; the exit code is 143, or 130.

    With NO_COLOR in the environment nothing is drawn: neither colours nor bars, no escape codes at all.
    """
    if os.environ.get("NO_COLOR"):
        os.environ["TERM"] = "dumb"  # What rich and click look at; NO_COLOR alone leaves bold, dim and cursor codes.
    with _terminable() as terminated:
        try:
            typer.main.get_command(build_app())(args=arguments, prog_name="fairlead")
        except (ConfigError, PluginError) as error:
            complain(str(error))
            sys.exit(WRONG_INPUT)
        except FairleadError as error:
            complain(str(error))
            sys.exit(FAILED)
        except (KeyboardInterrupt, SystemExit) as ended:
            if isinstance(ended, SystemExit) and ended.code != INTERRUPTED:
                raise
            typer.echo("terminated" if terminated else "interrupted", err=True)
            sys.exit(128 + signal.SIGTERM if terminated else INTERRUPTED)


@contextmanager
def _terminable() -> Iterator[list[int]]:
    """SIGTERM does what Ctrl-C does, also in an event loop, until a command has a handler of its own. Yields a list
    that is empty until it came."""
    came: list[int] = []

    def terminate(number: int, _: object) -> None:
        came.append(number)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what runs in the background
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    try:
        before = signal.signal(signal.SIGTERM, terminate)
    except ValueError:  # not the main thread: signals are somebody else's
        yield came
        return
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before)
