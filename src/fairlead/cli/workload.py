"""`fairlead sim workload`: shows, converts and generates workloads."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairlead.cli.basics import WRONG_INPUT, echo_json
from fairlead.cli.options import Traces, completion, examples, exits, given, needed_out, pairs, scenarios, traces_of

if TYPE_CHECKING:
    from fairlead.lab.simulator.world import Scenario
    from fairlead.lab.workload.record import Workload


_Source = Annotated[
    str,
    typer.Argument(
        metavar="WORKLOAD", help="A scenario (`fairlead sim run --list`) or a workload file.", autocompletion=scenarios
    ),
]
_From = Annotated[str, typer.Option("--from", metavar="FORMAT", help="Format of the file. Default: by its content.")]
_To = Annotated[str, typer.Option(metavar="FORMAT", help="Format to write.")]
_Seed = Annotated[int, typer.Option(help="Seed of a scenario's traffic.")]
_Json = Annotated[bool, typer.Option("--json", help="Figures as JSON.")]
#: The output file as an argument, as it was before 0.2.
_OldOut = Annotated[Path | None, typer.Argument(hidden=True)]


@examples("""
\b
Examples:
  fairlead sim workload show traffic.jsonl
  fairlead sim workload show trace.csv --json
  fairlead sim workload show agents
""")
def show(source: _Source, format: _From = "", seed: _Seed = 0, traces: Traces = "", as_json: _Json = False) -> None:
    """Describe a workload: requests, lengths, rates, how much of the prompts is shared."""
    with exits(WRONG_INPUT, ValueError, OSError):
        _describe(_read(source, format, seed, traces), as_json)


@examples("""
\b
Examples:
  fairlead sim workload convert trace.csv --out traffic.jsonl
  fairlead sim workload convert traffic.jsonl --to vidur --out vidur.csv
  fairlead sim workload convert agents --out agents.jsonl
""")
def convert(
    source: _Source,
    old_out: _OldOut = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The file to write. Needed.")] = None,
    format: _From = "",
    to: _To = "native",
    seed: _Seed = 0,
    traces: Traces = "",
    as_json: _Json = False,
) -> None:
    """Convert a workload file to another format, or write a scenario's requests to a file."""
    from fairlead.lab.simulator.build import write_workload

    with exits(WRONG_INPUT, ValueError, OSError):
        target = needed_out(out, old_out)
        made = _read(source, format, seed, traces)
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


def _read(source: str, format: str, seed: int, traces: str) -> "Workload":
    """The workload of a file, or that of a scenario. Says which stub servers are like those of the scenario. Raises
    `ValueError` or `OSError`."""
    from fairlead.lab.simulator.build import ScenarioSpec, at_own_pace, build, is_name, read_workload

    if Path(source).is_file() and not is_name(source):
        return read_workload(Path(source), format)
    made = build(ScenarioSpec(name=source, source=source, traces=traces_of(traces, [source]), seed=seed))
    for line in _stubs(made):
        typer.echo(line, err=True)
    return at_own_pace(made)


def _stubs(scenario: "Scenario") -> Iterator[str]:
    """How to start stub servers like those of the scenario, and what the requests alone do not tell."""
    from fairlead.lab.engine.presets import PRESETS

    replicas, engine = scenario.replicas, scenario.replicas[0].engine
    if known := [name for name, preset in PRESETS.items() if preset.latency == engine.latency]:
        adapters = sorted({record.lora for record in scenario.workload.records} - {""})
        words = [
            f"fairlead stub --replicas {len(replicas)} --engine {known[0]} --block-size {engine.block_size}",
            f"--kv-tokens {engine.kv_tokens} --max-model-len {engine.max_model_len}",
            *([f"--max-loras {engine.max_loras}"] if adapters else []),
            *(f"--lora {name}" for name in adapters),
        ]
        yield f"servers: {' '.join(words)}"
    unlike = any(replica != replicas[0] for replica in replicas)
    if left := [
        *(["its servers are unlike each other"] if unlike else []),
        *(["it has faults"] if scenario.faults else []),
    ]:
        yield f"note: {' and '.join(left)}, which its requests do not tell"


def _describe(made: "Workload", as_json: bool) -> None:
    from fairlead.lab.workload.describe import describe, figures

    if as_json:
        echo_json(figures(made))
        return
    for line in describe(made):
        typer.echo(line)
