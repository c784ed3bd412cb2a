"""What several commands share: options, their values, messages, progress, and pages of a scheduler's admin port."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from msgspec import Struct

from fairlead.cli.basics import config_file
from fairlead.core.text import masked, plain, token_apart

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound=Struct)

#: The message if a port answers but is not the expected one.
OTHER_PORT = "this is not Fairlead's admin port (admin.port, default 9090)"


WORKERS_NEED = "workers need the embedded gateway; without it, start several processes"
Workers = Annotated[
    int, typer.Option(metavar="N", min=1, max=64, help="Schedulers that decide as one. See docs/replicas.md.")
]
ConfigFile = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="Configuration, YAML or JSON.", callback=config_file),
]


def complain(problem: str | Exception) -> None:
    """Print each line of a message on stderr. For an `OSError`, print the file's name, if any, and the reason."""
    message = str(problem)
    if isinstance(problem, OSError) and problem.strerror:
        message = f"{problem.filename}: {problem.strerror}" if problem.filename else problem.strerror
    for line in message.splitlines():
        typer.echo(f"error: {plain(masked(line))}", err=True)


def note_renamed(old: str, new: str) -> None:
    """Print one line on stderr about a name that will be removed."""
    typer.echo(f"note: `{old}` is now `{new}`; the old name goes in 0.3", err=True)


def needed_out(out: Path | None, old: Path | None) -> Path:
    """The file of `--out`. `old`: the second argument, which named it before 0.2. Raises `ConfigError` if both are
    missing."""
    if old is not None:
        note_renamed("IN OUT", "IN --out OUT")
    if (path := out or old) is None:
        from fairlead.core.errors import ConfigError

        raise ConfigError("name the file to write", "--out")
    return path


def completion(module: str, name: str) -> Callable[[str], list[str]]:
    """A function for the shell's completion. `name`: a collection in `module`, or a function there that returns one.
    The module is imported only for a completion."""

    def complete(incomplete: str) -> list[str]:
        known = vars(import_module(module))[name]
        return [word for word in (known() if callable(known) else known) if word.startswith(incomplete)]

    return complete


policies = completion("fairlead.lab.simulator.run", "known_policies")
scenarios = completion("fairlead.lab.simulator.build", "names")


# Options that several commands have, each with its own help text.


def policy_option(help: str, **more: Any) -> Any:
    return typer.Option("--policy", "-p", metavar="NAME|FILE", help=help, autocompletion=policies, **more)


def workload_option(metavar: str, help: str, **more: Any) -> Any:
    return typer.Option("--workload", "-w", metavar=metavar, help=help, autocompletion=scenarios, **more)


def engine_option(help: str, **more: Any) -> Any:
    return typer.Option(
        "--engine",
        "-e",
        metavar="NAME|FILE|URL",
        help=help,
        autocompletion=completion("fairlead.lab.engine.presets", "PRESETS"),
        **more,
    )


@contextmanager
def exits(code: int, *errors: type[Exception]) -> Iterator[None]:
    """Turn these errors into lines on stderr and the exit code."""
    try:
        yield
    except BrokenPipeError:  # the reader of the output (such as `head`) has ended, which is no error
        raise
    except errors as error:
        complain(error)
        raise typer.Exit(code) from None


def examples(text: str) -> Callable[[F], F]:
    """Append `text`, with examples and further notes, to the docstring of a command, which is its `--help`."""

    def add(command: F) -> F:
        command.__doc__ = f"{cleandoc(command.__doc__ or '')}\n{text}"
        return command

    return add


def wrapped(text: str, indent: int) -> str:
    """The text wrapped between words to the terminal's width."""
    from shutil import get_terminal_size
    from textwrap import fill

    before = " " * indent
    width = max(get_terminal_size().columns, 40)
    return fill(text, width, initial_indent=before, subsequent_indent=before, break_on_hyphens=False)


def given(ctx: typer.Context, kind: type[S], **more: Any) -> S:
    """A struct of this kind with the command's options of the same names that are not `None`, and with `more`."""
    named = {name: value for name, value in ctx.params.items() if name in kind.__struct_fields__ and value is not None}
    return kind(**named | more)


def json_object(text: str) -> dict[str, Any]:
    """The JSON object given for --extra; an empty one if none was given. Raises `ConfigError`."""
    import msgspec

    from fairlead.core.errors import ConfigError

    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{text!r} is not a JSON object: {error}", "--extra") from None


def pairs(settings: Sequence[str] | None, option: str, underscores: bool = False) -> dict[str, str]:
    """The NAME=VALUE pairs given for `option`. Raises `ConfigError`."""
    from fairlead.core.errors import ConfigError

    values = {}
    for setting in settings or ():
        name, equals, value = setting.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"expected NAME=VALUE, got {setting!r}", option)
        values[name.strip().replace("-", "_") if underscores else name.strip()] = value.strip()
    return values


def numbers(text: str, option: str) -> tuple[float, ...]:
    """The numbers in a text like `1,1,0.4`, which must be above 0. Raises `ValueError`."""
    from math import isfinite

    given = [part for part in text.split(",") if part.strip()]
    try:
        values = tuple(map(float, given))
    except ValueError:
        values = (0.0,)
    if not all(isfinite(number) and number > 0.0 for number in values):
        raise ValueError(f"{option} takes numbers above 0, such as 0.5,1,2; got {text!r}")
    return values


# Limits of a model server that differ from the preset's.
MaxNumSeqs = Annotated[
    int, typer.Option(metavar="N", min=0, help="Requests in one batch.", show_default="the preset's")
]
MaxModelLen = Annotated[
    int, typer.Option(metavar="TOKENS", min=0, help="Prompt plus output.", show_default="the preset's")
]
KvTokens = Annotated[
    int,
    typer.Option(
        metavar="TOKENS", min=0, max=100_000_000, help="KV cache of one replica.", show_default="the preset's"
    ),
]
BlockSize = Annotated[
    int, typer.Option(metavar="TOKENS", min=0, help="Size of a KV block.", show_default="the preset's")
]
Engine = Annotated[
    str,
    engine_option(
        "Model and GPU: a preset, a FILE of `fairlead tune`, or an idle server to measure.",
        show_default="as recorded, or the scenario's",
    ),
]
Header = Annotated[
    list[str] | None, typer.Option("--header", "-H", help="Header for every request; repeatable.", metavar="NAME=VALUE")
]
Traces = Annotated[
    str, typer.Option(metavar="DIR", envvar="FAIRLEAD_TRACES", help="The published traces [env: FAIRLEAD_TRACES].")
]


def traces_of(directory: str, scenarios: Sequence[str]) -> str:
    """The directory of the published traces, empty if it has none. Notes which traces of these scenarios are missing.
    Raises `ValueError` if the directory is needed and is none."""
    from fairlead.lab.simulator.scenarios import usable_traces

    usable, note = usable_traces(directory, scenarios)
    if note:
        if directory and not Path(directory).is_dir():
            raise ValueError(f"--traces or FAIRLEAD_TRACES: {directory!r} is not a directory")
        typer.echo(plain(note), err=True)
    return usable


#: The help of --seeds.
SEEDS = "Repeat with this many seeds: other traffic, unless it is recorded, other ties and jitter."
Processes = Annotated[int, typer.Option(metavar="N", min=0, help="Number of processes.", show_default="one per core")]
Speeds = Annotated[str, typer.Option(metavar="N,...", help="Relative speeds of the replicas, e.g. 1,1,0.4.")]
Prefill = Annotated[int, typer.Option(metavar="N", min=0, help="This many replicas prefill, the others decode.")]


DEFAULT_ADMIN = "http://localhost:9090"


def with_scheme(address: str) -> str:
    """The address as a URL: HOST:PORT is of http."""
    return address if "://" in address else f"http://{address}"


def admin_url(given: str, old: str = "") -> str:
    """The URL of the admin port, with a scheme. `old`: the URL as an argument, where it was before 0.2. Raises
    `BadParameter` if it is none."""
    if old:
        note_renamed("URL", "--admin URL")
    return usable_url(given or old or DEFAULT_ADMIN, "--admin")


def usable_url(given: str, option: str) -> str:
    """The URL that `option` gave, with a scheme. Raises `BadParameter` if nothing can be asked there."""
    from urllib.parse import urlsplit

    url = with_scheme(given).rstrip("/")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and "?" not in url
    except ValueError:
        usable = False
    if not usable or any(character <= " " for character in url):
        # What comes before an @ may be a token.
        shown = masked(given).rpartition("@")[2]
        raise typer.BadParameter(f"expected HOST:PORT or a URL like {DEFAULT_ADMIN}, got {shown!r}", param_hint=option)
    return url


Admin = Annotated[
    str, typer.Option("--admin", metavar="URL", help="Admin port of a scheduler.", show_default=DEFAULT_ADMIN)
]

# Options that replace a recorded policy: `--policy NAME|FILE` and `--set NAME=VALUE`.

if TYPE_CHECKING:
    from http.client import HTTPResponse
    from urllib.request import Request

    from fairlead.config.registry import Registry
    from fairlead.config.schema import Config

Policy = Annotated[str, policy_option("Another policy: its name, a configuration that has it, or a .py file.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="A scorer's weight, a parameter, or PLUGIN.PARAMETER; repeat.", metavar="NAME=VALUE"),
]


def change(policy: str, settings: Sequence[str] | None) -> "tuple[Callable[[Config], Config] | None, Registry | None]":
    """A function that changes a recorded configuration as the options say; `None` = no change. And the plugins that
    the changed one may name, as in `lab.simulator.run.configuration`. Raises `ConfigError` or `ValueError`."""
    from fairlead.compat.recorded import changed, with_policy
    from fairlead.lab.simulator.run import config_from, policy_text

    loaded, registry = config_from(policy_text(policy)) if policy else (None, None)

    def apply(config: "Config") -> "Config":
        if loaded is not None:
            config = with_policy(config, loaded)
        for setting in settings or ():
            config = changed(config, setting)
        return config

    return (apply if policy or settings else None), registry


# Progress on stderr for work that takes longer than a second.


@contextmanager
def bar(title: str, total: int | None = None, *, everywhere: bool = False) -> Iterator[Callable[..., None]]:
    """A bar, or a spinner if `total` is `None`. Yields rich's `update`, with `completed`, `total` and `description`.
    If stderr is not a terminal, nothing is drawn. `everywhere`: the last state is printed in any case, and stays."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console, words = Console(stderr=True), TextColumn("{task.description}")
    columns = (SpinnerColumn(), words) if total is None else (words, BarColumn(bar_width=24), MofNCompleteColumn())
    hidden = not (everywhere or console.is_terminal)
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=not everywhere, disable=hidden) as shown:
        yield partial(shown.update, shown.add_task(title, total=total))


@contextmanager
def busy(title: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner and the elapsed time during work of unknown length. Yields a function that changes the title."""
    with bar(title) as update:
        yield lambda text: update(description=text)


#: OpenSSL's words if it does not know a certificate's authority.
_UNKNOWN_AUTHORITY = (
    "self-signed", "self signed", "unable to get issuer", "unable to get local issuer", "unable to verify the first"
)  # fmt: skip


def hint_of(reason: object, option: str = "--admin") -> str:
    """A hint for the case that nothing answers at the address given by `option`, for this reason."""
    text = str(reason)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        if any(unknown in text for unknown in _UNKNOWN_AUTHORITY):
            return "name the PEM file of its authority in the environment variable SSL_CERT_FILE"
        return "it needs a certificate that is valid, and the address a name that is in there"
    return f"is `fairlead serve` running, and is this its admin port ({option})?"


def with_token(url: str) -> "Request":
    """A request to an admin port; `http://:TOKEN@HOST` sends the token along."""
    from urllib import request as http

    address, headers = token_apart(url)
    return http.Request(address, headers=headers)


def opened(url: str, timeout_s: float) -> "HTTPResponse":
    """Open a page of an admin port, without a proxy. Raises what `urlopen` raises."""
    from urllib.request import ProxyHandler, build_opener

    answer: HTTPResponse = build_opener(ProxyHandler({})).open(with_token(url), timeout=timeout_s)
    return answer


def fetched(page: str, base: str, ours: str, timeout_s: float = 10.0, option: str = "--admin") -> bytes:
    """A page of the admin port at `base`, which `option` gave.

    Raises `EngineError` if nothing answers, and `ValueError` for an error response: with its text if that contains
    `ours` (so it is from Fairlead), otherwise saying that something else listens there."""
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError

    from fairlead.core.errors import EngineError

    try:
        with opened(page, timeout_s) as answer:
            return bytes(answer.read())
    except HTTPError as error:
        said = error.read(500).decode(errors="replace").strip()
        # The gateway and model servers also answer 404, with texts that do not name Fairlead.
        raise ValueError(said if ours in said or error.code != 404 else f"{masked(base)}: {OTHER_PORT}") from None
    except HTTPException:
        raise ValueError(f"{masked(base)}: {OTHER_PORT}") from None
    except URLError as error:
        why = (error.reason.strerror if isinstance(error.reason, OSError) else "") or error.reason
        raise EngineError(masked(base), f"does not answer ({why}); {hint_of(error.reason, option)}") from None
