"""`fairlead compare`: policies × workloads × loads, simulated in parallel, as a table and a report."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairlead.cli._compare_gate import Against, FailIf, Other, gate
from fairlead.cli._options import FAILED, WRONG_INPUT, complain, preset_argument

if TYPE_CHECKING:
    from fairlead.sim.grid import Cell, CellResult


def compare(
    scenario: Annotated[
        list[str] | None,
        typer.Option("--scenario", "-s", help="Built-in scenario or workload file; repeat for more.", metavar="NAME"),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", "-p", help="Policy, FILE (.yaml or .py) or NAME=FILE; repeat.", metavar="NAME"),
    ] = None,
    load: Annotated[str, typer.Option(help="Speedups of each scenario, e.g. 0.5,1,2.")] = "1",
    seeds: Annotated[int, typer.Option(min=1, help="Repeat with so many seeds.")] = 1,
    traces: Annotated[str, typer.Option(envvar="FAIRLEAD_TRACES", help="Directory of the published traces.")] = "",
    head: Annotated[int, typer.Option(min=0, help="Only the first so many requests of each.")] = 0,
    servers: Annotated[int, typer.Option(min=0, help="Model servers; default: the scenario's own.")] = 0,
    speeds: Annotated[str, typer.Option(help="Relative speeds of the servers, e.g. 1,1,0.4.")] = "",
    preset: Annotated[str, typer.Option(help="Model and hardware: a name, or a FILE of `fairlead tune`.")] = "",
    prefill: Annotated[int, typer.Option(min=0, help="So many servers only prefill, the others decode.")] = 0,
    out: Annotated[Path, typer.Option(help="Directory of results and report.")] = Path("out/compare"),
    processes: Annotated[int, typer.Option(min=0, help="0 = one per processor.")] = 0,
    cluster: Annotated[str, typer.Option(help="Address of a running Dask scheduler, e.g. tcp://host:8786.")] = "",
    fresh: Annotated[bool, typer.Option(help="Do not take results of a former, interrupted run.")] = False,
    against: Against = None,
    journal: Other = None,
    fail_if: FailIf = None,
    as_json: Annotated[bool, typer.Option("--json", help="Means of each policy on each scenario as JSON.")] = False,
) -> None:
    """Simulate every policy on every workload at every load.

    Writes results.json, plots and a self-contained report.html to the output directory. A run that was interrupted
    goes on where it stopped when it is started again.

    \b
    Examples:
      fairlead compare -s agents -p default -p round-robin
      fairlead compare -s traffic.jsonl -p default -p mine=mine.yaml --load 0.5,1,2
      fairlead compare -s agents -p default -p my_policy.py
      fairlead compare --against journal/ -p mine.yaml --fail-if 'ttft_p95 > +5%'
    """
    if against is not None:
        gate(against, journal, policy or [], fail_if or [], load=load, servers=servers, preset=preset, head=head)
        return
    from fairlead.cli._cluster import on_cluster
    from fairlead.sim.grid import run_grid
    from fairlead.sim.report import print_comparison, write_report
    from fairlead.workload.formats.problems import TraceError

    try:
        cells = _cells(
            scenario or [], policy or [], load, seeds, traces, head, servers, speeds, prefill, preset_argument(preset)
        )
        out.mkdir(parents=True, exist_ok=True)
        kept = out / "cells.jsonl"
        if fresh:
            kept.unlink(missing_ok=True)
        with ExitStack() as stack:
            runner = stack.enter_context(on_cluster(cluster)) if cluster else None
            progress = stack.enter_context(_Progress(len(cells)))
            results = run_grid(cells, processes=processes, kept=kept, progress=progress.step, runner=runner)
    except (TraceError, ValueError, OSError) as error:
        complain(error)
        raise typer.Exit(WRONG_INPUT) from None
    if as_json:
        _print_json(results)
    else:
        print_comparison(results)
    for path in write_report(results, cells, out):
        typer.echo(f"written: {path}", err=True)
    errors = [result for result in results if result.error]
    for result in errors:
        complain(f"{result.policy} on {result.scenario}: {result.error}")
    if errors:
        raise typer.Exit(FAILED)


def _print_json(results: "list[CellResult]") -> None:
    import msgspec

    from fairlead.sim.regret import mean_figures, regrets

    means = mean_figures(results)
    typer.echo(msgspec.json.format(msgspec.json.encode({"summary": means, "regret": regrets(means)})))


def _cells(
    scenarios: list[str],
    policies: list[str],
    load: str,
    seeds: int,
    traces: str,
    head: int,
    servers: int,
    speeds: str,
    prefill: int,
    preset: str,
) -> "list[Cell]":
    from fairlead.sim.build import ScenarioSpec, names
    from fairlead.sim.grid import Cell
    from fairlead.sim.policies import known_policies, policy_text
    from fairlead.sim.scenarios import QUALITY

    for name in scenarios:
        if name not in names() and not Path(name).is_file():
            raise ValueError(f"{name!r} is neither a scenario nor a file; scenarios: {', '.join(names())}")
    texts = {_name(name): policy_text(name) for name in policies} or known_policies()
    loads = [float(part) for part in load.split(",") if part.strip()]
    if not loads or min(loads) <= 0:
        raise ValueError(f"loads must be numbers above 0, got {load!r}")
    relative = tuple(float(part) for part in speeds.split(",") if part.strip())
    return [
        Cell(
            scenario=ScenarioSpec(
                name=_label(source, factor, len(loads) > 1),
                source=source,
                traces=traces,
                speedup=factor,
                head=head,
                servers=servers,
                speeds=relative,
                prefill=prefill,
                preset=preset,
            ),
            policy=policy,
            text=text,
            seed=seed,
        )
        for source in scenarios or QUALITY
        for factor in loads
        for policy, text in texts.items()
        for seed in range(seeds)
    ]


def _name(policy: str) -> str:
    """As it stands in tables: what is before the `=`, or the name; of a Python file without its folder and ending."""
    name = policy.partition("=")[0]
    return Path(name).stem if name == policy and name.endswith(".py") else name


def _label(source: str, factor: float, several: bool) -> str:
    name = Path(source).stem if Path(source).suffix and Path(source).is_file() else source
    return f"{name} @{factor:g}" if several else name


class _Progress:
    """A bar on stderr where that is a terminal, else a line now and then."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task("simulating", total=total)

    def __enter__(self) -> "_Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(self, result: "CellResult", count: int, total: int) -> None:
        self._bar.update(self._task, completed=count, description=f"{result.scenario}: {result.policy}")
