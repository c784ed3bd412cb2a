"""The command line as typer runs it. A command's module is imported when the command runs (or shows its own `--help`),
never to list the commands: a command whose optional dependency is missing does not affect the others.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from fairlead import __version__
from fairlead.cli.commands import COMMANDS, GROUPS, RENAMED, Command, members, overview
from fairlead.cli.options import complain, note_renamed
from fairlead.core.errors import FairleadError

#: Optional dependencies, and the extra that installs each.
EXTRAS = {"matplotlib": "report", "distributed": "cluster"}


#: Typer contains a copy of click, of whose errors it exports only this one. Its base class covers every wrong usage.
_WrongUsage: Any = typer.BadParameter.__base__


class CommandError(FairleadError):
    """A command in the table cannot run in this installation."""


@contextmanager
def _one_line() -> Iterator[None]:
    """Turn an error of usage into one line, like all other errors. The help shown without arguments stays as it is."""
    try:
        yield
    except _WrongUsage as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        where = f"; see `{error.ctx.command_path} --help`" if error.ctx else ""
        complain(error.format_message().rstrip(".").replace(": Value error, ", ": ") + where)  # pydantic says that
        raise typer.Exit(error.exit_code) from None


class LazyGroup(TyperGroup):
    """Lists commands from the table, and imports only the module of the command that is about to run."""

    path = ""

    def make_context(self, *args: Any, **more: Any) -> Any:
        with _one_line():
            return super().make_context(*args, **more)

    def invoke(self, ctx: Any) -> Any:
        with _one_line():
            return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        return members(self.path)

    def get_command(self, ctx: Any, name: str) -> Any:
        """A group, or a placeholder that has the command's name and help."""
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

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if not self.path:
            formatter.write(overview() + "\n")
        else:
            super().format_help(ctx, formatter)


def _meant(group: str, name: str) -> str:
    """A hint at the most similar command, of any group, because people remember a command's last word; empty = none."""
    from difflib import get_close_matches

    known = {path.rpartition(" ")[2]: path for path in (*GROUPS, *COMMANDS)}
    known |= {member: f"{group} {member}".strip() for member in members(group)}
    nearest = get_close_matches(name, known, n=1)
    return f" Did you mean '{known[nearest[0]]}'?" if nearest else ""


def load_command(path: str, command: Command) -> Any:
    """The click command of a typer function. Raises `CommandError` if it cannot be imported."""
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
    """See `commands.overview`."""


def build_app() -> typer.Typer:
    # Plain text: drawing boxes would take three times as long.
    app = typer.Typer(cls=LazyGroup, no_args_is_help=True, rich_markup_mode=None)
    app.callback()(_root)
    return app
