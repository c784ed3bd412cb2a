"""`fairlead sim workload`: shows, converts and generates workloads."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairlead.cli.basics import WRONG_INPUT, echo_json
from fairlead.cli.options import completion, examples, exits, given, needed_out, pairs

if TYPE_CHECKING:
    from fairlead.lab.workload.record import Workload


_File = Annotated[Path, typer.Argument(metavar="FILE", help="A workload file.")]
_From = Annotated[str, typer.Option("--from", metavar="FORMAT", help="Format of FILE. Default: by its content.")]
_To = Annotated[str, typer.Option(metavar="FORMAT", help="Format to write.")]
_Json = Annotated[bool, typer.Option("--json", help="Figures as JSON.")]
#: The output file as an argument, as it was before 0.2.
_OldOut = Annotated[Path | None, typer.Argument(hidden=True)]


@examples("""
\b
Examples:
  fairlead sim workload show traffic.jsonl
  fairlead sim workload show trace.csv --json
""")
def show(file: _File, format: _From = "", as_json: _Json = False) -> None:
    """Describe a workload file: requests, lengths, rates, how much of the prompts is shared."""
    from fairlead.lab.simulator.build import read_workload

    with exits(WRONG_INPUT, ValueError, OSError):
        _describe(read_workload(file, format), as_json)


@examples("""
\b
Examples:
  fairlead sim workload convert trace.csv --out traffic.jsonl
  fairlead sim workload convert traffic.jsonl --to vidur --out vidur.csv
""")
def convert(
    file: _File,
    old_out: _OldOut = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The file to write. Needed.")] = None,
    format: _From = "",
    to: _To = "native",
    as_json: _Json = False,
) -> None:
    """Convert a workload file to another format."""
    from fairlead.lab.simulator.build import read_workload, write_workload

    with exits(WRONG_INPUT, ValueError, OSError):
        target = needed_out(out, old_out)
        made = read_workload(file, format)
        write_workload(made, target, to)
        _describe(made, as_json)


@examples("""
\b
Examples:
  fairlead sim workload generate rag-summaries --seconds 600 --out rag.jsonl
  fairlead sim workload generate shared-prefix --requests 500 --set groups=20
  fairlead sim workload kinds
""")
def generate(
    ctx: typer.Context,
    kind: Annotated[
        str,
        typer.Argument(
            help="See `fairlead sim workload kinds`.",
            autocompletion=completion("fairlead.lab.workload.generate", "KINDS"),
        ),
    ],
    old_out: _OldOut = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the workload to this file.")] = None,
    to: _To = "native",
    rate: Annotated[float, typer.Option(help="Requests (or sessions) per second.")] = 10.0,
    requests: Annotated[
        int,
        typer.Option(
            "--requests", "-n", metavar="N", min=0, help="How many requests, or sessions of a kind that has them."
        ),
    ] = 0,
    seconds: Annotated[float, typer.Option(min=0, help="Requests arrive for this long.")] = 0.0,
    arrivals: Annotated[str, typer.Option(help="poisson, constant, bursty or ramp.")] = "poisson",
    cv: Annotated[float, typer.Option(help="Bursty arrivals: coefficient of variation.")] = 3.0,
    to_rate: Annotated[float, typer.Option(metavar="RATE", help="Ramp arrivals: the last rate.")] = 0.0,
    dispatch: Annotated[str, typer.Option(help="timestamp or think.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    set: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A parameter of the kind; repeat.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Generate a workload of some kind, and describe it."""
    from fairlead.lab.simulator.build import write_workload
    from fairlead.lab.workload.generate import Pace
    from fairlead.lab.workload.generate import generate as make
    from fairlead.lab.workload.record import dispatch_of

    with exits(WRONG_INPUT, ValueError, OSError):
        pace = given(ctx, Pace, count=requests, dispatch=dispatch_of(dispatch) if dispatch else None)
        made = make(kind, pace, pairs(set, "--set", underscores=True))
        if out is not None or old_out is not None:
            write_workload(made, needed_out(out, old_out), to)
        _describe(made, as_json)


def kinds() -> None:
    """List the kinds that can be generated and the formats that can be read and written.

    \b
    Examples:
      fairlead sim workload kinds
    """
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
