"""`fairlead workload`: look at, convert and generate workloads."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairlead.cli.options import WRONG_INPUT, echo_json, exits

if TYPE_CHECKING:
    from fairlead.lab.workload.record import Dispatch, Workload


class Action(StrEnum):
    """What to do."""

    show = "show"
    convert = "convert"
    generate = "generate"
    kinds = "kinds"


def workload(
    action: Annotated[Action, typer.Argument(help="show FILE, convert FILE OUT, generate KIND OUT, or kinds.")],
    source: Annotated[str, typer.Argument(metavar="FILE|KIND", help="A workload file, or what to generate.")] = "",
    out: Annotated[Path | None, typer.Argument(metavar="OUT", help="Where to write.")] = None,
    format: Annotated[str, typer.Option("--from", help="Format of FILE; default: by its content.")] = "",
    to: Annotated[str, typer.Option(help="Format of OUT.")] = "native",
    rate: Annotated[float, typer.Option(help="Requests (or sessions) per second.")] = 10.0,
    count: Annotated[int, typer.Option(min=0, help="So many requests (or sessions).")] = 0,
    seconds: Annotated[float, typer.Option(min=0, help="Arrivals of so many seconds.")] = 0.0,
    arrivals: Annotated[str, typer.Option(help="poisson, constant, bursty or ramp.")] = "poisson",
    cv: Annotated[float, typer.Option(help="Of bursty arrivals: coefficient of variation.")] = 3.0,
    to_rate: Annotated[float, typer.Option(help="Of ramp arrivals: the last rate.")] = 0.0,
    dispatch: Annotated[str, typer.Option(help="timestamp or think.")] = "",
    seed: Annotated[int, typer.Option(help="Of everything that is left to chance.")] = 0,
    set: Annotated[list[str] | None, typer.Option(help="A parameter of the kind, e.g. --set groups=20.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON.")] = False,
) -> None:
    """Look at, convert and generate workloads. Formats and kinds are described in docs/workloads.md.

    \b
    Examples:
      fairlead workload kinds
      fairlead workload show traffic.jsonl
      fairlead workload convert trace.csv traffic.jsonl
      fairlead workload generate interactive-chat chat.jsonl --seconds 600 --rate 4
    """
    from fairlead.lab.simulator.build import read_workload, write_workload
    from fairlead.lab.workload.formats import TraceError
    from fairlead.lab.workload.generate import Pace, generate

    if action is Action.kinds:
        _print_kinds()
        return
    with exits(WRONG_INPUT, TraceError, ValueError, OSError):
        _need(source, out, action)
        if action is Action.generate:
            pace = Pace(
                rate=rate,
                count=count,
                seconds=seconds,
                arrivals=arrivals,
                cv=cv,
                to_rate=to_rate,
                dispatch=_dispatch(dispatch),
                seed=seed,
            )
            made = generate(source, pace, _parameters(set or []))
        else:
            made = read_workload(Path(source), format)
        if out is not None:
            write_workload(made, out, to)
        _describe(made, as_json)


def _need(source: str, out: Path | None, action: Action) -> None:
    if not source:
        raise ValueError(f"{action.value} needs a {'kind' if action is Action.generate else 'file'}")
    if out is None and action is Action.convert:
        raise ValueError("convert needs a second file to write to")


def _dispatch(text: str) -> "Dispatch | None":
    if text == "timestamp":
        return "timestamp"
    if text == "think":
        return "think"
    if not text:
        return None
    raise ValueError(f"unknown dispatch {text!r}; known: timestamp, think")


def _parameters(settings: list[str]) -> dict[str, str]:
    parameters = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"expected NAME=VALUE, got {setting!r}")
        parameters[name.strip().replace("-", "_")] = value.strip()
    return parameters


def _print_kinds() -> None:
    from fairlead.lab.workload.formats import FORMATS
    from fairlead.lab.workload.generate import CATALOGUE, KINDS

    typer.echo("kinds:")
    for kind in KINDS:
        known = CATALOGUE.get(kind)
        note = f"mean {known.mean_in:,} in, {known.mean_out:,} out; {known.slo}" if known else ""
        typer.echo(f"  {kind:18} {note}".rstrip())
    typer.echo("formats:")
    for name, format in FORMATS.items():
        typer.echo(f"  {name:18} {format.help}")


def _describe(made: "Workload", as_json: bool) -> None:
    from fairlead.lab.workload.describe import describe, figures

    if as_json:
        echo_json(figures(made))
        return
    for line in describe(made):
        typer.echo(line)
