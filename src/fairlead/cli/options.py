"""Arguments and small helpers that several commands share."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

#: Exit codes, as promised by `fairlead --help`.
FAILED = 1
WRONG_INPUT = 2
INTERRUPTED = 130

F = TypeVar("F", bound=Callable[..., Any])
#: What `fairlead init` writes, and others read where no file is named.
DEFAULT_FILE = Path("fairlead.yaml")


#: Where something else answers than was expected.
OTHER_PORT = "this is not Fairlead's admin port (admin.port, default 9090)"


def config_file(file: Path) -> Path:
    """Raises `ConfigError` where none was named and the usual one is not here."""
    if file == DEFAULT_FILE and not file.exists():
        from fairlead.core.errors import ConfigError

        raise ConfigError("no such file here: name the configuration, or write one with `fairlead init`", str(file))
    return file


ConfigFile = Annotated[
    Path,
    typer.Argument(
        metavar="[FILE]", help="Configuration, YAML or JSON. See docs/configuration.md.", callback=config_file
    ),
]


def complain(problem: str | Exception) -> None:
    """One line on stderr for each line of the message; of a file that cannot be used, its name and the reason."""
    message = str(problem)
    if isinstance(problem, OSError) and problem.filename and problem.strerror:
        message = f"{problem.filename}: {problem.strerror}"
    for line in message.splitlines():
        typer.echo(f"error: {line}", err=True)


@contextmanager
def exits(code: int, *errors: type[Exception]) -> Iterator[None]:
    """These errors become lines on stderr and the exit code."""
    try:
        yield
    except errors as error:
        complain(error)
        raise typer.Exit(code) from None


def examples(text: str) -> Callable[[F], F]:
    """Put `text`, examples and what else a command says of itself, behind the first part of its description."""

    def add(command: F) -> F:
        command.__doc__ = f"{cleandoc(command.__doc__ or '')}\n{text}"
        return command

    return add


def wrapped(text: str, indent: int) -> str:
    """Broken between words where the terminal ends."""
    from shutil import get_terminal_size
    from textwrap import fill

    before = " " * indent
    width = max(get_terminal_size().columns, 40)
    return fill(text, width, initial_indent=before, subsequent_indent=before, break_on_hyphens=False)


def echo_json(value: object) -> None:
    """Indented, on stdout."""
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value)))


def json_object(text: str, option: str = "--extra") -> dict[str, Any]:
    """What `option` was given; nothing = an empty one. Raises `ConfigError`."""
    import msgspec

    from fairlead.core.errors import ConfigError

    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{text!r} is no JSON object: {error}", option) from None


def pairs(settings: Sequence[str] | None, option: str, underscores: bool = False) -> dict[str, str]:
    """What `option` was given as NAME=VALUE, any number of times. Raises `ConfigError`."""
    from fairlead.core.errors import ConfigError

    found = {}
    for setting in settings or ():
        name, equals, value = setting.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"expected NAME=VALUE, got {setting!r}", option)
        found[name.strip().replace("-", "_") if underscores else name.strip()] = value.strip()
    return found


def numbers(text: str) -> tuple[float, ...]:
    """`1,1,0.4`. Raises `ValueError`."""
    return tuple(float(part) for part in text.split(",") if part.strip())


# Limits of a model server, where they are not to be the preset's.
MaxNumSeqs = Annotated[int, typer.Option(min=0, help="Requests in one batch. 0 = the preset's.")]
MaxModelLen = Annotated[int, typer.Option(min=0, help="Prompt plus output tokens. 0 = the preset's.")]
KvTokens = Annotated[int, typer.Option(min=0, help="KV cache of one server, in tokens. 0 = the preset's.")]
BlockSize = Annotated[int, typer.Option(min=0, help="Tokens per KV block. 0 = the preset's.")]


def preset_argument(value: str) -> str:
    """A preset's name as it is, or the text of the file that `value` names. Raises `ValueError` or `OSError`."""
    path = Path(value)
    if path.suffix not in (".yaml", ".yml", ".json"):
        return value
    from fairlead.lab.engine.presets import read_preset

    text = path.read_text(encoding="utf-8")
    read_preset(text, value)
    return text + "\n"


# Options that replace a recorded policy: `--policy NAME|FILE` and `--set NAME=VALUE`.

if TYPE_CHECKING:
    from urllib.request import Request

    from fairlead.config.schema import Config

Policy = Annotated[
    str, typer.Option("--policy", "-p", help="Another policy: its name, or a configuration file whose policy is used.")
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="SCORER=WEIGHT, PARAMETER=VALUE or PLUGIN.PARAMETER=VALUE; repeat.", metavar="NAME=VALUE"
    ),
]


def change(policy: str, settings: Sequence[str] | None) -> "Callable[[Config], Config] | None":
    """What the options do to a recorded configuration; `None` = nothing. Raises `ConfigError` or `ValueError`."""
    from fairlead.compat.load import load
    from fairlead.compat.recorded import changed
    from fairlead.lab.simulator.run import policy_text

    if not policy and not settings:
        return None
    if policy.endswith(".py"):
        raise ValueError(f"{policy}: a Python file can be simulated; here name an installed policy or a configuration")
    loaded = load(policy_text(policy), need_endpoints=False) if policy else None

    def apply(config: "Config") -> "Config":
        if loaded is not None:
            config = config.model_copy(update={"policy": loaded.policy, "flow_control": loaded.flow_control})
        for setting in settings or ():
            config = changed(config, setting)
        return config

    return apply


# Bars on stderr for what takes longer than a second. Nothing is drawn where stderr is no terminal.

#: Steps between two looks at the bar: drawing must not cost what is measured.
_EVERY = 64


@contextmanager
def counted(title: str, total: int) -> Iterator[Callable[[], None] | None]:
    """Gives a function to be called once per step; `None` where nobody would see it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task, done = bar.add_task(title, total=total), 0

        def step() -> None:
            nonlocal done
            done += 1
            if done % _EVERY == 0:
                bar.update(task, completed=done)

        yield step


@contextmanager
def busy(title: str) -> Iterator[None]:
    """Something moves, and the seconds are counted, while it is not known how much there is to do."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        bar.add_task(title, total=None)
        yield


def with_token(url: str) -> "Request":
    """To ask an admin port; `http://:TOKEN@HOST` gives its token along."""
    from urllib import request as http
    from urllib.parse import unquote, urlsplit

    parts = urlsplit(url)
    request = http.Request(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())
    if parts.password:
        request.add_header("Authorization", f"Bearer {unquote(parts.password)}")
    return request
