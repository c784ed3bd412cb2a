"""`fairlead top`: a running scheduler in a terminal."""

from inspect import cleandoc
from typing import Annotated, Any

import typer

from fairlead.cli._options import FAILED, complain

_EXAMPLES = """
\b
Examples:
  fairlead top
  fairlead top http://localhost:9090 --sort waiting
  fairlead top --once
  fairlead top --once --json | jq '.now.totals'
"""


def top(
    url: Annotated[str, typer.Argument(metavar="URL", help="The admin port.")] = "http://localhost:9090",
    once: Annotated[bool, typer.Option("--once", help="Print one moment and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON: one line per moment.")] = False,
    sort: Annotated[
        str, typer.Option(help="Column to sort endpoints by: name, waiting, running, kv, sent, hits, ttft.")
    ] = "name",
    every: Annotated[float, typer.Option(min=0.2, max=60.0, help="Seconds between two moments.")] = 1.0,
) -> None:
    """The pool at a glance: endpoints, traffic, queues and warnings, once a second, until Ctrl-C.

    It reads what the dashboard reads. NO_COLOR switches colours off. Exit code 1: nothing answers (with --once).
    """
    from fairlead.cli import _top_feed, _top_view

    if sort not in _top_view.SORTS:
        raise typer.BadParameter(f"{sort!r} is none of {', '.join(_top_view.SORTS)}", param_hint="--sort")
    address = _top_feed.address(url)
    if not once:
        (_stream if as_json else _live)(address, sort, every)
        return
    try:
        told = _top_feed.snapshot(address)
    except (OSError, ValueError) as error:
        complain(f"{address} does not answer: {error}")
        raise typer.Exit(FAILED) from None
    _print(told, as_json, sort)


top.__doc__ = f"{cleandoc(top.__doc__ or '')}\n{_EXAMPLES}"


def _print(told: dict[str, Any], as_json: bool, sort: str) -> None:
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode(told))
        return
    from rich.console import Console

    from fairlead.cli._top_view import view

    console = Console(highlight=False)
    console.print(view(told, sort, console.width))


def _stream(address: str, sort: str, every: float) -> None:
    from fairlead.cli._top_feed import follow

    for told, problem in follow(address, every):
        if problem:
            complain(problem)
        else:
            _print(told, True, sort)


def _live(address: str, sort: str, every: float) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from fairlead.cli._top_feed import follow
    from fairlead.cli._top_view import view

    console = Console(highlight=False)
    if not console.is_terminal:
        for told, problem in follow(address, every):
            console.print(view(told, sort, console.width, problem=problem))
        return
    with Live(Text(f"asking {address} …"), console=console, screen=True, auto_refresh=False) as live:
        for told, problem in follow(address, every):
            live.update(view(told, sort, console.width, console.height, problem), refresh=True)
