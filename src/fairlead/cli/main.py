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
from typer.core import TyperCommand, TyperGroup

from fairlead import __version__
from fairlead.cli.options import FAILED, INTERRUPTED, WRONG_INPUT, complain, note_renamed
from fairlead.core.errors import ConfigError, FairleadError, PluginError


class Command(NamedTuple):
    """Where a command lives."""

    module: str
    function: str
    help: str
    #: It reads its flags by itself.
    raw: bool = False


#: The words behind `fairlead` → the command.
COMMANDS: dict[str, Command] = {
    "demo": Command("fairlead.cli.demo", "demo", "Compare Fairlead with round robin on simulated servers."),
    "init": Command("fairlead.cli.init", "init", "Write a configuration for your model servers."),
    "validate": Command("fairlead.cli.config", "validate", "Check a configuration and print every problem."),
    "config show": Command("fairlead.cli.config", "show", "Print every value in effect and where it comes from."),
    "config explain": Command("fairlead.cli.config", "explain", "Print the reference of a field, section or plugin."),
    "config schema": Command("fairlead.cli.config", "schema", "Print the JSON Schema of the configuration."),
    "key": Command("fairlead.cli.key", "key", "Create an API key for a client of the gateway."),
    "serve": Command("fairlead.cli.serve", "serve", "Run the scheduler and its embedded gateway."),
    "epp": Command("fairlead.cli.epp", "epp", "Serve with the reference endpoint picker's flags.", raw=True),
    "envoy config": Command("fairlead.cli.envoy_config", "envoy_config", "Print the Envoy configuration."),
    "indexer": Command("fairlead.cli.indexer", "indexer", "Run the prefix index alone, as an HTTP service."),
    "scheduler serve": Command("fairlead.cli.scheduler", "serve", "Serve a policy to gateways over gRPC."),
    "scheduler check": Command("fairlead.cli.scheduler", "check", "Check that a scheduler keeps the contract."),
    "scheduler proto": Command("fairlead.cli.scheduler", "proto", "Print the contract, a .proto file."),
    "top": Command("fairlead.cli.top", "top", "Watch a running scheduler: endpoints, traffic, warnings."),
    "explain": Command("fairlead.cli.explain", "explain", "Show why a request went to its endpoint."),
    "doctor": Command("fairlead.cli.doctor", "doctor", "Find out what is wrong with an installation."),
    "journal replay": Command("fairlead.cli.replay", "replay", "Run recorded events through the scheduler again."),
    "journal capture": Command("fairlead.cli.capture", "capture", "Turn a journal into an anonymous workload."),
    "bench": Command("fairlead.cli.bench", "bench", "Send load to an OpenAI endpoint and measure it."),
    "stub": Command("fairlead.cli.stub", "stub", "Run stub model servers: real API and metrics, no GPU."),
    "sim run": Command("fairlead.cli.simulate", "simulate", "Simulate one policy on one workload."),
    "sim compare": Command("fairlead.cli.compare", "compare", "Simulate policies × workloads × loads; write a report."),
    "sim workload show": Command("fairlead.cli.workload", "show", "Describe a workload file."),
    "sim workload convert": Command("fairlead.cli.workload", "convert", "Convert a workload to another format."),
    "sim workload generate": Command("fairlead.cli.workload", "generate", "Generate a workload."),
    "sim workload kinds": Command("fairlead.cli.workload", "kinds", "List the kinds and formats."),
    "plan": Command("fairlead.cli.plan", "plan", "Find the least number of replicas that holds an objective."),
    "tune": Command("fairlead.cli.tune", "tune", "Measure a model server and fit a preset to it."),
}

GROUPS = {
    "config": "Show, explain and describe the configuration.",
    "envoy": "Configure an Envoy that you run yourself.",
    "scheduler": "Serve or check a scheduler in its own process.",
    "journal": "Replay a journal, or turn it into a workload.",
    "sim": "Simulate policies and workloads in virtual time.",
    "sim workload": "Inspect, convert and generate workloads.",
}

#: How `fairlead --help` lists them.
SECTIONS = {
    "Set up": ("demo", "init", "validate", "config", "key"),
    "Run": ("serve", "epp", "envoy", "indexer", "scheduler"),
    "Observe": ("top", "explain", "doctor", "journal"),
    "Measure and plan": ("bench", "stub", "sim", "plan", "tune"),
}

#: Names of 0.1, which work until 0.3 → the names of today.
RENAMED = {
    "schema": "config schema",
    "envoy-config": "envoy config",
    "replay": "journal replay",
    "capture": "journal capture",
    "simulate": "sim run",
    "compare": "sim compare",
    "workload": "sim workload",
}

#: Optional dependencies, and the extra that brings each.
EXTRAS = {"matplotlib": "report", "distributed": "cluster"}

EPILOG = """\b
Every command has --help with examples. Start with: fairlead demo
Exit codes: 0 success, 1 failed, 2 wrong usage or configuration."""


class CommandError(FairleadError):
    """A command that is listed cannot be run in this installation."""


class LazyGroup(TyperGroup):
    """Lists commands from the table, and loads the one that is about to run."""

    path = ""

    def list_commands(self, ctx: Any) -> list[str]:
        return members(self.path)

    def get_command(self, ctx: Any, name: str) -> Any:
        """A group, or a placeholder that knows the command's name and help."""
        path = f"{self.path} {name}".strip()
        if name not in members(self.path):
            return None
        if path in COMMANDS:
            return TyperCommand(name, help=COMMANDS[path].help, short_help=COMMANDS[path].help)
        group = LazyGroup(
            name=name, help=GROUPS[path], short_help=GROUPS[path], no_args_is_help=True, rich_markup_mode=None
        )
        group.path = path
        return group

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if not self.path and name in RENAMED:
            note_renamed(f"fairlead {name}", f"fairlead {RENAMED[name]}")
            args = [*RENAMED[name].split(), *args[1:]]
            name = args[0]
        path = f"{self.path} {name}".strip()
        if path in COMMANDS:
            return name, load_command(path, COMMANDS[path]), args[1:]
        if path not in GROUPS and not ctx.resilient_parsing and not name.startswith("-"):
            ctx.fail(f"No such command '{name}'.{_meant(self.path, name)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        sections = SECTIONS if not self.path else {"Commands": members(self.path)}
        for title, names in sections.items():
            with formatter.section(title):
                # The same column in all sections.
                known = [name for name in names if name in members(self.path)]
                rows = [(f"{name:<9}", self.get_command(ctx, name).short_help) for name in known]
                formatter.write_dl(rows)


def members(group: str) -> list[str]:
    """Commands and groups directly inside of a group; "" = of `fairlead` itself."""
    inside = [path.removeprefix(group).split() for path in COMMANDS if not group or path.startswith(f"{group} ")]
    return list(dict.fromkeys(words[0] for words in inside))


def _meant(group: str, name: str) -> str:
    """Also a command of another group: its last word is what people remember."""
    from difflib import get_close_matches

    known = {path.rpartition(" ")[2]: path for path in (*GROUPS, *COMMANDS)}
    known |= {member: f"{group} {member}".strip() for member in members(group)}
    nearest = get_close_matches(name, known, n=1)
    return f" Did you mean '{known[nearest[0]]}'?" if nearest else ""


def load_command(path: str, command: Command) -> Any:
    """The click command of a typer function. Raises `CommandError` when it cannot be imported."""
    try:
        module = import_module(command.module)
    except ImportError as error:
        missing = error.name or ""
        if missing == command.module:
            raise CommandError(f"the command '{path}' is not part of this installation (no {missing})") from None
        extra = EXTRAS.get(missing.partition(".")[0], "")
        cure = f"; install fairlead[{extra}]" if extra else ""
        raise CommandError(f"the command '{path}' cannot be loaded: {error}{cure}") from error
    function = vars(module).get(command.function)
    if function is None:
        raise CommandError(f"the command '{path}' is broken: {command.module} has no {command.function}")
    from fairlead.cli.help import PlainCommand

    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(
        path.rpartition(" ")[2],
        cls=PlainCommand,
        help=command.help if not function.__doc__ else None,
        context_settings={"ignore_unknown_options": True} if command.raw else None,
    )(function)
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
    """Schedules LLM requests over model-server replicas, behind Envoy."""


def build_app() -> typer.Typer:
    # Plain text: drawing boxes would take three times as long.
    app = typer.Typer(cls=LazyGroup, no_args_is_help=True, epilog=EPILOG, rich_markup_mode=None)
    app.callback()(_root)
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
