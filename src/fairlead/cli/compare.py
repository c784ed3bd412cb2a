"""`fairlead sim compare`: policies × workloads × loads, simulated in parallel, as a table and a report.

Simulations run in processes here or on a Dask cluster (`on_cluster`). With --against it compares two runs of a
journal's traffic instead, and fails if a condition is broken (`_gate`). `fairlead sim quality` uses parts of it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairlead.cli.basics import FAILED, WRONG_INPUT, echo_json
from fairlead.cli.options import (
    SEEDS,
    Engine,
    Prefill,
    Processes,
    Speeds,
    Traces,
    bar,
    complain,
    examples,
    exits,
    numbers,
    policy_option,
    traces_of,
    workload_option,
)
from fairlead.cli.tune import engine_argument
from fairlead.core.text import plain
from fairlead.lab.simulator.grid import Cell, CellResult, Runner, run_cell, version

if TYPE_CHECKING:
    from fairlead.lab.simulator.build import ScenarioSpec
    from fairlead.lab.simulator.journal import Run
    from fairlead.lab.simulator.simulation import Simulation

Against = Annotated[
    Path | None,
    typer.Option(
        metavar="JOURNAL", help="Simulate its traffic under its own policy and under --policy.", show_default=False
    ),
]
MeasuredJournal = Annotated[
    Path | None,
    typer.Option(
        "--journal", metavar="JOURNAL", help="With --against: compare two measured journals.", show_default=False
    ),
]
_RunOf = Annotated[
    str,
    typer.Option("--run", metavar="ID", help="With --against: which run of its journal.", show_default="the last one"),
]
FailIf = Annotated[
    list[str] | None,
    typer.Option(help="With --against: exit code 1 if this holds; repeat.", metavar="CONDITION"),
]

#: The note about other runs of a journal names so many of them.
_NAMED = 3


def _gate(
    against: Path,
    journal: Path | None,
    policies: Sequence[str],
    fail_if: Sequence[str],
    *,
    run: str,
    load: str,
    servers: int,
    engine: str,
    head: int,
) -> None:
    """Print both runs' figures. Exit with 1 if a condition is broken or a plugin failed, with 2 on wrong usage."""
    from fairlead.cli.options import busy
    from fairlead.lab.simulator.result import FIGURES, condition

    with exits(WRONG_INPUT, ValueError, OSError):
        conditions = [condition(text) for text in fail_if]
        factor, *more = numbers(load, "--load") or (1.0,)
        if more:
            raise ValueError("--against takes one --load")
        failed: list[str] = []
        with busy(f"simulating {against}" if journal is None else "reading journals"):
            preset = engine_argument(engine)
            simulate = partial(_simulated, load=factor, servers=servers, preset=preset, head=head)
            before, after, names = _figures(_chosen(against, run), journal, policies, failed, simulate)
    typer.echo(f"{'':12} {names[0][-20:]:>20} {names[1][-20:]:>20}  change")
    typer.echo(f"{'requests':12} {before['requests']:>20,.0f} {after['requests']:>20,.0f}")
    for name in FIGURES:
        old, new = before.get(name), after.get(name)
        if old is not None or new is not None:
            shown = "" if not old or new is None else f"{new / old - 1.0:+.1%}"
            typer.echo(f"{name:12} {_number(old):>20} {_number(new):>20}  {shown}")
    broken = failed + [said for threshold in conditions if (said := threshold.broken(before, after))]
    for said in broken:
        complain(said)
    if broken:
        raise typer.Exit(FAILED)
    if conditions:
        typer.echo(f"passed: {', '.join(threshold.text for threshold in conditions)}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3f}"


def _chosen(journal: Path, run: str = "") -> "Run":
    """Return a run of a journal, by its id or the last one, and say so if there are others."""
    from fairlead.lab.simulator.journal import one_run, runs

    chosen = one_run(journal, run)
    known = {chosen.id, *(each.id for each in chosen.beside)}
    earlier = [each.id for each in runs(journal) if each.id not in known]
    if earlier and not run:
        newest = ", ".join(reversed(earlier[-_NAMED:]))
        text = f"note: {journal} has {len(earlier)} more runs than the last one, {chosen.id}, which is taken"
        typer.echo(f"{text}; the newest others: {newest}", err=True)
    return chosen


def _figures(
    base: "Run",
    journal: Path | None,
    policies: Sequence[str],
    failed: list[str],
    simulate: "Callable[[Run, Any, str], Simulation]",
) -> tuple[dict[str, float], dict[str, float], tuple[str, str]]:
    """Return the figures and names of both runs. Policies whose plugins failed are added to `failed`, in words."""
    from fairlead.lab.simulator.journal import in_force
    from fairlead.lab.simulator.result import of_jobs, of_journal

    if journal is not None:
        changed = _chosen(journal)
        notes: list[str] = []
        measured = of_journal(base, notes), of_journal(changed, notes), (base.id, changed.id)
        for note in notes:
            typer.echo(f"note: {note}", err=True)
        return measured
    if len(policies) != 1:
        raise ValueError("--against needs one --policy to simulate, or a --journal to measure")
    scheduling, share = in_force(base)
    if share < 1.0:
        typer.echo(
            f"note: the configuration changed; the recorded one is that of {share:.0%} of the decisions", err=True
        )
    names = "recorded policy", policies[0]
    figures = []
    for name, policy in zip(names, ("", policies[0]), strict=True):
        simulation = simulate(base, scheduling, policy)
        figures.append(of_jobs(simulation.jobs))
        if errors := simulation.plugin_errors:
            failed.append(f"{name}: {_not_its_own(len(errors), str(errors[0]))}")
    return figures[0], figures[1], names


def _simulated(
    run: "Run", scheduling: Any, policy: str, load: float, servers: int, preset: str, head: int
) -> "Simulation":
    """Simulate the journal's traffic under the recorded configuration `scheduling`, with `policy` in place of its own
    unless that is empty. `servers`: 0 = as many as recorded at most."""
    from fairlead.compat.recorded import restore, with_policy
    from fairlead.lab.engine.presets import DEFAULT_PRESET
    from fairlead.lab.engine.presets import preset as find_preset
    from fairlead.lab.simulator.capture import capture, mixed
    from fairlead.lab.simulator.run import config_from, policy_text
    from fairlead.lab.simulator.scenarios import cut
    from fairlead.lab.simulator.simulation import Simulation
    from fairlead.lab.simulator.world import Scenario, replicas

    config, registry = restore(scheduling), None
    if policy:
        instead, registry = config_from(policy_text(policy))
        config = with_policy(config, instead)
    captured = capture(run, key=b"")
    workload = cut(captured.workload, head) if head else captured.workload
    endpoints = mixed(captured.pool.most.values())
    kind = find_preset(preset or DEFAULT_PRESET)
    alike = replicas(servers or len(endpoints) or 1, kind, block_size=kind.block_size or 64)
    fleet = captured.pool.like(alike, endpoints)
    scenario = Scenario(name=run.id, workload=workload, replicas=fleet, speedup=load)
    simulation = Simulation(scenario, config, registry=registry)
    simulation.run()
    return simulation


#: Seconds to wait for the Dask scheduler.
_TIMEOUT_S = 10.0


@contextmanager
def on_cluster(address: str) -> Iterator[Runner]:
    """Run cells on the workers of the Dask scheduler at `address`, e.g. tcp://host:8786.

    Raises `ValueError` if Dask is not installed, nothing answers, there are no workers, or a worker has other code than
    this machine: results are stored under the version of the local code.
    """
    try:
        dask = import_module("distributed")
    except ImportError:
        raise ValueError(
            "--cluster needs Dask, here and on the workers: pip install distributed, or fairlead[cluster]"
        ) from None
    try:
        client = dask.Client(address, timeout=_TIMEOUT_S)
    except (OSError, ValueError) as error:
        raise ValueError(f"no Dask scheduler answers at {address}: {error}") from None
    try:
        _check(client, address)
        yield lambda cells: _run(dask, client, cells)
    finally:
        client.close()


def _check(client: Any, address: str) -> None:
    versions = client.run(version, on_error="return")
    if not versions:
        raise ValueError(f"the cluster at {address} has no workers: dask worker {address}")
    here = version()
    for worker, code in versions.items():
        if isinstance(code, Exception):
            raise ValueError(f"worker {worker} cannot run simulations, is Fairlead installed there? {code}")
        if code != here:
            raise ValueError(f"worker {worker} has another version of Fairlead than this machine; install the same")


def _run(dask: Any, client: Any, cells: Sequence[tuple[Cell, str]]) -> Iterator[CellResult]:
    """Yield results as they arrive. If a worker dies, another runs its cells; a cell that fails becomes an error."""
    futures = {client.submit(run_cell, cell, key, pure=False): (cell, key) for cell, key in cells}
    for future in dask.as_completed(list(futures)):
        cell, key = futures.pop(future)
        error = future.exception()
        if error is None:
            yield future.result()
        else:
            name, text = cell.scenario.name, f"{type(error).__name__}: {error}"
            yield CellResult(key=key, scenario=name, policy=cell.policy, seed=cell.seed, error=text)


_Workload = Annotated[
    list[str] | None,
    workload_option("NAME|FILE", "Scenario or workload file; repeat.", show_default="all for quality"),
]
Policies = Annotated[
    list[str] | None, policy_option("Policy, FILE (.yaml or .py) or NAME=FILE; repeat.", show_default="all")
]
_Requests = Annotated[
    int, typer.Option("--requests", "-n", metavar="N", min=0, help="Only the first N requests of each workload.")
]
_Replicas = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Number of model servers.", show_default="the scenario's")
]


@examples("""
\b
Examples:
  fairlead sim compare -w agents -p default -p round-robin
  fairlead sim compare -w traffic.jsonl -p default -p mine.yaml --load 0.5,1,2
  fairlead sim compare -w agents -p default -p my_policy.py
  fairlead sim compare --against journal/ -p mine.yaml \\
    --fail-if 'ttft_p95 > +5%'
""")
def compare(
    workload: _Workload = None,
    policy: Policies = None,
    load: Annotated[str, typer.Option(metavar="N,...", help="How many times as fast, e.g. 0.5,1,2.")] = "1",
    seeds: Annotated[int, typer.Option(metavar="N", min=1, help=SEEDS)] = 1,
    traces: Traces = "",
    requests: _Requests = 0,
    replicas: _Replicas = None,
    speeds: Speeds = "",
    engine: Engine = "",
    prefill: Prefill = 0,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory for results and report.", file_okay=False)] = Path(
        "out/compare"
    ),
    processes: Processes = 0,
    cluster: Annotated[str, typer.Option(metavar="ADDRESS", help="A Dask scheduler, e.g. tcp://host:8786.")] = "",
    fresh: Annotated[bool, typer.Option("--fresh", help="Do not resume an interrupted run.")] = False,
    against: Against = None,
    journal: MeasuredJournal = None,
    run: _RunOf = "",
    fail_if: FailIf = None,
    as_json: Annotated[bool, typer.Option("--json", help="Means of each policy on each scenario as JSON.")] = False,
) -> None:
    """Simulate every policy on every workload at every load.

    Writes results.json, plots and a self-contained report.html. An interrupted run resumes when it is started again.
    """
    servers = replicas or 0
    with exits(WRONG_INPUT, ValueError):
        simulated = {"-w": workload, "--seeds": seeds > 1, "--speeds": speeds, "--prefill": prefill, "--fresh": fresh}
        simulated |= {"--cluster": cluster, "--json": as_json}
        _check_options(against, simulated, {"--journal": journal, "--run": run, "--fail-if": fail_if})
    if against is not None:
        chosen = partial(_gate, run=run, load=load, servers=servers, engine=engine, head=requests)
        chosen(against, journal, policy or [], fail_if or [])
        return
    from fairlead.lab.simulator.build import ScenarioSpec
    from fairlead.lab.simulator.report import print_comparison, write_report

    with exits(WRONG_INPUT, ValueError, OSError):
        spec = ScenarioSpec(
            name="",
            source="",
            traces=traces,
            head=requests,
            servers=servers,
            speeds=numbers(speeds, "--speeds"),
            prefill=prefill,
            preset=engine_argument(engine),
        )
        cells = compared_cells(spec, workload or [], policy or [], load, seeds)
        if unsplit := {cell.policy: None for cell in cells if cell.scenario.prefill < prefill}:
            typer.echo(f"note: all servers do both where no request is split: {', '.join(unsplit)}", err=True)
        if said := _unequal({cell.policy: cell.text for cell in cells}):
            typer.echo(said, err=True)
        results = results_of(cells, out, fresh, processes, cluster)
    (_print_json if as_json else print_comparison)(results)
    for path in write_report(results, cells, out):
        typer.echo(f"written: {path}", err=True)
    end_with_errors(results)


def _unequal(texts: Mapping[str, str]) -> str:
    """A note if the default, which holds requests, is compared with policies that do not, and not with `AT_ONCE`."""
    from fairlead.lab.simulator.run import AT_ONCE, config_from

    at_once = [name for name, text in texts.items() if config_from(text)[0].flow_control is None]
    if "default" not in texts or not at_once or AT_ONCE in texts:
        return ""
    shown = ", ".join(at_once[:_NAMED]) + (" and others" if at_once[_NAMED:] else "")
    return (
        f"note: default may hold requests in flow control; without it: {shown}. To compare only the choice of "
        f"endpoints, add -p {AT_ONCE}, or `flowControl: {{}}` to a policy's file"
    )


def _check_options(against: Path | None, simulated: Mapping[str, object], gated: Mapping[str, object]) -> None:
    """Raise `ValueError` for a given option without effect: one of `simulated` together with --against, or one of
    `gated` without --against."""
    given = [name for name, value in (gated if against is None else simulated).items() if value]
    if given:
        where = "without --against JOURNAL" if against is None else "with --against"
        raise ValueError(f"{' and '.join(given)} {'has' if len(given) == 1 else 'have'} no effect {where}")


def results_of(cells: list[Cell], out: Path, fresh: bool, processes: int, cluster: str = "") -> list[CellResult]:
    """The results of all cells. Results in the directory `out` are reused unless `fresh`. It is created if needed."""
    from fairlead.lab.simulator.grid import note_of_seeds, read_kept, run_grid

    if note := note_of_seeds(cells):
        typer.echo(note, err=True)
    out.mkdir(parents=True, exist_ok=True)
    kept = out / "cells.jsonl"
    if fresh:
        kept.unlink(missing_ok=True)
    earlier = {result.key for result in read_kept(kept)}
    where = on_cluster(cluster) if cluster else nullcontext()
    with where as runner, bar("simulating", len(cells), everywhere=True) as update:

        def progress(result: CellResult, done: int, _: int) -> None:
            update(completed=done, description=f"{result.scenario}: {result.policy}")

        results = run_grid(cells, processes=processes, kept=kept, progress=progress, runner=runner)
    if reused := sum(result.key in earlier for result in results):
        typer.echo(
            f"{reused} of {len(cells)} results are an earlier run's in {out} (--fresh runs them again)", err=True
        )
    return results


def end_with_errors(results: list[CellResult]) -> None:
    """Print why requests failed. If results have errors, print them and end the command with a failure."""
    from fairlead.lab.simulator.grid import failures

    for scenario, reasons in failures(results).items():
        for reason in reasons:
            typer.echo(plain(f"note: {scenario}: {reason}"), err=True)
    problems = [
        f"{result.policy} on {result.scenario}: {problem}" for result in results if (problem := _problem(result))
    ]
    for problem in problems:
        complain(problem)
    if problems:
        raise typer.Exit(FAILED)


def _problem(result: CellResult) -> str:
    count = result.figures.get("plugin_errors", 0)
    if result.error or not count:
        return result.error
    return _not_its_own(count, result.figures["plugin_error"])


def _not_its_own(count: int, first: str) -> str:
    times = "once" if count == 1 else f"{count} times"
    return f"a plugin failed {times}, so these are not its figures; first: {first}"


def _print_json(results: list[CellResult]) -> None:
    from fairlead.lab.simulator.grid import for_json, judged, mean_figures

    means = mean_figures(results)
    summary = {name: {policy: for_json(row) for policy, row in rows.items()} for name, rows in means.items()}
    echo_json({"summary": summary, "regret": judged(results)})


def compared_cells(
    spec: "ScenarioSpec", scenarios: list[str], policies: list[str], load: str, seeds: int
) -> list[Cell]:
    """The cells to simulate. `spec`: the settings that all scenarios have in common. A policy that splits no request
    keeps servers that do both: those that only prefill would be idle."""
    from msgspec.structs import replace

    from fairlead.config.problems import suggestion
    from fairlead.lab.simulator.build import is_generated, is_name, listed
    from fairlead.lab.simulator.drawn import drawn_names
    from fairlead.lab.simulator.run import config_from, known_policies
    from fairlead.lab.simulator.scenarios import QUALITY

    sources = [source for name in scenarios for source in (drawn_names(name) or [name])]
    for name in sources:
        if not is_name(name) and not Path(name).is_file():
            raise ValueError(f"{name!r} is neither a scenario nor a file; {suggestion(name, listed())}")
    spec = replace(spec, traces=traces_of(spec.traces, sources or [*QUALITY]))
    texts = texts_of(policies) or known_policies()
    loads = numbers(load, "--load") or (1.0,)
    labels = _labels(sources or QUALITY)
    generated = {source for source in labels if is_generated(source, spec.traces)}
    prefill = {name: spec.prefill if config_from(text)[0].policy.may_split else 0 for name, text in texts.items()}
    return [
        Cell(
            scenario=replace(
                spec,
                name=f"{label} @{factor:g}" if len(loads) > 1 else label,
                source=source,
                seed=seed if source in generated else 0,
                speedup=factor,
                prefill=prefill[policy],
            ),
            policy=policy,
            text=text,
            seed=seed,
        )
        for source, label in labels.items()
        for factor in loads
        for seed in range(seeds)
        for policy, text in texts.items()
    ]


def texts_of(policies: Sequence[str]) -> dict[str, str]:
    """By name in tables: the configuration of each policy. Prints notes. Raises what `policy_text` raises."""
    from fairlead.lab.simulator.run import config_from, note_of_schedulers, policy_text

    texts: dict[str, str] = {}
    for given in policies:
        name, text = _name(given), policy_text(given)
        if texts.setdefault(name, text) != text:
            raise ValueError(f"two policies are called {name!r}; give one a name of its own: -p NAME=FILE")
        if said := note_of_schedulers(name, config_from(text)[0]):
            typer.echo(plain(said), err=True)
    return texts


def _name(policy: str) -> str:
    """The policy's name in tables: the part before `=`, otherwise the name; a Python file's name without folder and
    suffix."""
    from fairlead.lab.simulator.run import named_file

    name, path = named_file(policy)
    return Path(name).stem if name == path and name.endswith(".py") else name


def _labels(sources: Iterable[str]) -> dict[str, str]:
    """By source: its name in tables. A file's is without folder and suffix, unless another file has the same."""
    from collections import Counter

    names = {name: Path(name).stem if Path(name).suffix and Path(name).is_file() else name for name in sources}
    times = Counter(names.values())
    return {source: name if times[name] == 1 else source for source, name in names.items()}
