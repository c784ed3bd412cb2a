"""`fairlead plan`: the least number of replicas that holds an objective."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairlead.cli.basics import FAILED, WRONG_INPUT, echo_json
from fairlead.cli.options import (
    OTHER_PORT,
    Engine,
    Traces,
    busy,
    complain,
    examples,
    exits,
    fetched,
    policy_option,
    traces_of,
    usable_url,
    workload_option,
)
from fairlead.cli.tune import engine_argument

if TYPE_CHECKING:
    from fairlead.lab.simulator.build import ScenarioSpec
    from fairlead.lab.simulator.plan import Case, Tried
    from fairlead.lab.simulator.world import Scenario

#: The most bytes to fetch from a running scheduler's journal, the newest first.
_MOST_FETCHED = 256 << 20

Workload = Annotated[str, workload_option("NAME|FILE", "A workload file, a scenario, or a kind of workload.")]
Slo = Annotated[
    str,
    typer.Option(metavar="NAME=LIMIT,...", help="Percentiles of ttft, tpot and e2e, and failed (1%)."),
]
Live = Annotated[
    str,
    typer.Option(metavar="URL|DIR", help="Plan from the journal of a scheduler: its admin port, or the directory."),
]
Policy = Annotated[
    str,
    policy_option(
        "A policy, or a configuration that has one.",
        show_default="as recorded, or default; with --split prefill-decode",
    ),
]
_Rate = Annotated[
    float, typer.Option(metavar="N", min=0, help="Requests per second, of a kind: sessions.", show_default="as it is")
]
_Seconds = Annotated[
    float | None, typer.Option(metavar="S", min=1, help="Length of a kind of workload.", show_default="300")
]
_Spare = Annotated[int, typer.Option(metavar="N", min=0, help="N replicas die after a third of the time.")]
_Price = Annotated[float, typer.Option(metavar="N", min=0, help="Of one replica for an hour, in any currency.")]
_Requests = Annotated[int, typer.Option("--requests", "-n", metavar="N", min=0, help="Only the first N.")]


@examples("""
\b
Examples:
  fairlead plan -w traffic.jsonl -e qwen3-32b-h100 --slo ttft_p95=2s
  fairlead plan -w interactive-chat --rate 4 -e llama-8b-l40s --price 1.2
  fairlead plan -w traffic.jsonl --slo ttft_p95=2s,tpot_p95=25ms --split
  fairlead plan --live http://localhost:9090 --traffic 2x --slo ttft_p95=2s
  fairlead plan --live journal/ --engine mine.yaml --slo ttft_p95=2s --spare 1
""")
def plan(
    workload: Workload = "",
    engine: Engine = "",
    slo: Slo = "ttft_p95=2s,tpot_p95=50ms",
    live: Live = "",
    policy: Policy = "",
    traffic: Annotated[str, typer.Option(metavar="N", help="Multiply the traffic, e.g. 2x.")] = "1x",
    rate: _Rate = 0.0,
    seconds: _Seconds = None,
    requests: _Requests = 0,
    last: Annotated[str, typer.Option(metavar="TIME", help="The end of the journal to plan for.")] = "30min",
    warm_up: Annotated[str, typer.Option(metavar="TIME", help="Do not count the requests of the first TIME.")] = "0s",
    split: Annotated[bool, typer.Option("--split", help="Some replicas prefill, the others decode: how many?")] = False,
    spare: _Spare = 0,
    max_replicas: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="Try no more.")] = 256,
    seeds: Annotated[int, typer.Option(metavar="N", min=1, help="Simulations of each size near the answer.")] = 3,
    price: _Price = 0.0,
    format: Annotated[str, typer.Option(help="Format of the workload file.", show_default="by its content")] = "",
    traces: Traces = "",
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where to write table, plot and report.", file_okay=False)
    ] = Path("out/plan"),
    processes: Annotated[int, typer.Option(metavar="N", min=0, help="0 = one per processor.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="The plan as JSON.")] = False,
) -> None:
    """Find the least number of replicas that holds an objective, and the goodput of more and fewer.

    The scheduler is the one that `fairlead serve` runs, the replicas are simulated. With --live the table also shows
    the replicas that there are now, and what happens when one of them dies. Exit code 1: no size holds the objective.
    """
    from fairlead.lab.simulator.build import ScenarioSpec, is_name, is_paced

    with exits(WRONG_INPUT, ValueError, OSError):
        if bool(workload) == bool(live):
            raise ValueError("give a --workload, or the --live journal of a scheduler")
        if seconds and (live or is_name(workload) or Path(workload).is_file()) and not is_paced(workload):
            raise ValueError(f"--seconds has no effect on {workload or live}, which has its own length; -n cuts it")
        spec = ScenarioSpec(
            name=Path(workload).stem if Path(workload).is_file() else workload,
            source=workload,
            traces=traces_of(traces, [workload]),
            format=format,
            speedup=_times(traffic),
            rate=rate,
            seconds=seconds or 300.0,
            head=requests,
            preset=_engine(engine),
        )
        case, now, decider = _case(spec, slo, policy, live, last, warm_up, spare, split)
    about = {
        "workload": workload or live,
        "engine": engine or ("as learned" if live else "default"),
        "policy": decider,
        "now": now or None,
    }
    search = {"most": max_replicas, "seeds": seeds, "split": split, "now": now}
    _plan(case, about, search, price, out, processes or os.cpu_count() or 1, as_json)


def _case(
    spec: "ScenarioSpec", slo: str, policy: str, live: str, last: str, warm_up: str, spare: int, split: bool
) -> "tuple[Case, int, str]":
    """The case to plan for; the present number of replicas, 0 = unknown; and the name of the policy. Raises what the
    called functions raise."""
    from msgspec import structs

    from fairlead.lab.simulator.build import build
    from fairlead.lab.simulator.objective import objectives
    from fairlead.lab.simulator.plan import Case

    wanted, now = objectives(slo), 0
    decider, decides = _decider(policy, None, split)
    if live:
        scenario, scheduling, now = _recorded(live, _duration(last, "--last"), spec)
        decider, decides = _decider(policy, scheduling, split)
    else:
        scenario = build(spec)
    if not scenario.workload.records:
        raise ValueError(f"{spec.source or live} has no requests")
    counted_s = _duration(warm_up, "--warm-up") or scenario.counted_from_s
    if not any(record.arrival_us >= counted_s * 1e6 for record in scenario.workload.records):
        last_s = scenario.workload.duration_s
        raise ValueError(f"--warm-up {warm_up} leaves no request: the last comes after {last_s:,.0f} s")
    return Case(structs.replace(scenario, counted_from_s=counted_s), wanted, decides, spare), now, decider


def _duration(text: str, option: str) -> float:
    """The seconds that `option` gave. Raises `ValueError`."""
    from fairlead.plugins.params import typed_duration

    try:
        return typed_duration(text)
    except ValueError as error:
        raise ValueError(f"{option} {text}: {error}") from None


def _decider(policy: str, recorded: Any, split: bool) -> tuple[str, Any]:
    """The name of the policy that decides in simulations, and what `Case` takes for it: the named one, else the
    recorded one (`None` = none), else the default. With `split`, `prefill-decode` instead of one that splits nothing.

    Raises `ValueError` if the named policy is unknown or never splits requests, `ConfigError`, `PluginError` or
    `OSError`.
    """
    from fairlead.config.builtins import SPLITTING
    from fairlead.lab.simulator.plan import scheduling_of
    from fairlead.lab.simulator.run import policy_text

    name = policy or ("default" if recorded is None else "as recorded")
    decides = policy_text(name) if recorded is None or policy else recorded
    if not split or scheduling_of(decides)[0].policy.may_split:
        return name, decides
    if policy:
        raise ValueError(f"--split has no effect with {policy}, which never splits a request; {SPLITTING} does")
    return SPLITTING, policy_text(SPLITTING)


def _plan(
    case: "Case", about: dict[str, Any], search: dict[str, Any], price: float, out: Path, processes: int, as_json: bool
) -> None:
    """Search for the least number of replicas, print it, and write the report. `search`: arguments of
    `lab.simulator.plan.plan`."""
    from fairlead.lab.simulator import plan_report
    from fairlead.lab.simulator.plan import impossible, in_processes
    from fairlead.lab.simulator.plan import plan as find

    wanted, scenario = case.wanted, case.scenario
    reason = impossible(scenario, wanted)
    if reason:
        complain(reason)
        raise typer.Exit(FAILED)
    with _progress() as step, in_processes(case, processes, step) as run:
        planned = find(case, run, width=processes, **search)
    lasts_s = scenario.workload.duration_s / scenario.speedup
    count = len(scenario.workload)
    pace = f"{count:,} requests in {lasts_s:,.0f} s ({count / max(lasts_s, 1e-9):.3g}/s)"
    about |= {"requests": count, "duration_s": round(lasts_s, 3), "spare": case.dead}
    document = plan_report.document(planned, wanted, price, about)
    title = f"{scenario.name}: {pace}, engine {about['engine']}, policy {about['policy']}\n{_said(document)}"
    try:
        with exits(WRONG_INPUT, OSError):
            written, missing = plan_report.write_plan(planned, wanted, price, title, document, out)
    finally:  # simulating may have taken an hour
        if as_json:
            echo_json(document)
        else:
            first, _, answer = title.partition("\n")
            typer.echo(first)
            plan_report.print_plan(planned, wanted, price)
            typer.echo(answer)
    for line in filter(None, [missing, *(f"written: {path}" for path in written)]):
        typer.echo(line, err=True)
    if planned.best is None:
        raise typer.Exit(FAILED)


def _said(planned: dict[str, Any]) -> str:
    """The result of planning in words."""
    objective = ", ".join(f"{name} {value}" for name, value in planned["objectives"].items())
    best = planned["replicas"]
    if best is None:
        largest = planned["rows"][-1]
        return f"no size up to {largest['replicas']} replicas holds {objective}; the table shows what is missed"
    parts = f" ({planned['prefill']} of them only prefill)" if planned["prefill"] else ""
    lines = [f"{best} replica{'s' * (best > 1)}{parts} hold{'s' * (best == 1)} {objective}"]
    lines.append(f"  {planned['confidence']}: {planned['why']}")
    if planned["cost"]:
        cost = planned["cost"]
        per = f"{cost['million_output_tokens']:,.2f} per million output tokens"
        lines.append(f"  cost: {cost['hour']:,.2f} per hour; {per}, {cost['million_tokens']:,.2f} of all tokens")
    return "\n".join(lines)


def _times(text: str) -> float:
    """The factor in a text like `2x`. Raises `ValueError`."""
    try:
        times = float(text.lower().removesuffix("x"))
    except ValueError:
        times = 0.0
    if not 0.001 <= times <= 1000.0:
        raise ValueError(f"--traffic {text}: expected e.g. 2x")
    return times


def _engine(engine: str) -> str:
    """The name or the text of a preset; empty = no engine was named. Raises `ValueError` or `OSError`."""
    from fairlead.lab.engine.presets import preset

    made = engine_argument(engine)
    if made:
        preset(made)
    return made


def _recorded(live: str, last_s: float, spec: "ScenarioSpec") -> "tuple[Scenario, Any, int]":
    """The recorded traffic, and the policy and the number of replicas at that time. Raises `JournalError`, `ValueError`
    or `OSError`."""
    from fairlead.lab.engine.presets import preset
    from fairlead.lab.simulator.journal import one_run
    from fairlead.lab.simulator.plan_live import fit, recorded
    from fairlead.lab.simulator.world import Scenario

    with busy(f"reading {live}"), _journal(live) as path:
        run = one_run(path)
        record = recorded(run, last_s, spec.head)
    for note in run.notes:
        typer.echo(f"note: {note}", err=True)
    engine = preset(spec.preset) if spec.preset else record.preset
    if engine is None:
        raise ValueError(f"{live} records no speeds (journal.sample is 0, or nothing was decided); name an --engine")
    if not spec.preset:
        with busy("fitting the engine to what was recorded"):
            fitted = fit(record, engine)
        if fitted is not None:
            engine, (ttft, tpot), (its_ttft, its_tpot) = fitted.preset, fitted.recorded, fitted.simulated
            said = f"TTFT {ttft:,.0f} ms as recorded, {its_ttft:,.0f} simulated; TPOT {tpot:,.1f} and {its_tpot:,.1f}"
            typer.echo(f"engine fitted to the journal, medians: {said}", err=True)
        else:
            typer.echo(
                "note: the engine could not be fitted to the journal, which needs streamed answers of several tokens; "
                "measure it with `fairlead tune`",
                err=True,
            )
    fleet = record.fleet(engine)
    faster = spec.rate * record.workload.duration_s / len(record.workload) if spec.rate else 1.0
    scenario = Scenario(name="live", workload=record.workload, replicas=fleet, speedup=spec.speedup * (faster or 1.0))
    return scenario, record.scheduling, record.replicas


@contextmanager
def _journal(source: str) -> Iterator[Path]:
    """The journal's directory; for an admin port, a copy of the newest segments. Raises `ValueError` or `OSError`."""
    import msgspec

    from fairlead.gateway.directories import temporary_directory

    if not source.startswith(("http://", "https://")):
        yield Path(source)
        return
    page = f"{usable_url(source, '--live')}/debug/journal"
    with temporary_directory("fairlead-plan-") as folder:
        try:
            listed = msgspec.json.decode(
                fetched(page, source, "journal", option="--live"), type=dict[str, list[tuple[str, int]]]
            )
            left = _MOST_FETCHED
            for name, size in reversed(listed["segments"]):
                left -= size
                if left < 0 and left + size < _MOST_FETCHED:
                    break
                (folder / Path(name).name).write_bytes(fetched(f"{page}/{name}", source, "journal", 60.0, "--live"))
        except (msgspec.DecodeError, KeyError):
            raise ValueError(f"{source}: {OTHER_PORT}") from None
        yield folder


@contextmanager
def _progress() -> "Iterator[Callable[[Tried], None]]":
    """Show on stderr, if it is a terminal, which numbers of replicas were tried so far."""
    with busy("simulating") as say:
        counts = [0, 0]

        def step(tried: "Tried") -> None:
            counts[tried.holds] += 1
            size = f"{tried.trial.replicas} replicas {'hold' if tried.holds else 'miss'}"
            say(f"{sum(counts)} simulations, {counts[True]} hold the objective; last: {size}")

        yield step
