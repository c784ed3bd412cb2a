"""`fairlead sim run`: one policy on one workload, in virtual time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from fairlead.cli.basics import FAILED, WRONG_INPUT, echo_json
from fairlead.cli.options import (
    BlockSize,
    Engine,
    KvTokens,
    MaxModelLen,
    MaxNumSeqs,
    Prefill,
    Speeds,
    Traces,
    bar,
    complain,
    examples,
    exits,
    given,
    numbers,
    policy_option,
    scenarios,
    traces_of,
)
from fairlead.cli.tune import engine_argument
from fairlead.core.text import plain

Workload = Annotated[
    str,
    typer.Argument(metavar="WORKLOAD", help="A scenario (see --list) or a workload file.", autocompletion=scenarios),
]
Policy = Annotated[str, policy_option("A policy, a configuration that has one, or a .py file.")]


_Replicas = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, max=1000, help="Number of model servers.", show_default="the scenario's"),
]
#: Requests between two updates of the bar: drawing must not slow down what is measured.
_EVERY = 64
#: The lines with latencies: title, prefix of the figures, digits, names of the figures.
_LATENCIES = (
    ("TTFT ms", "ttft", 0, ("mean", "p50", "p90", "p99")),
    ("TPOT ms", "tpot", 1, ("mean", "p50", "p99")),
    ("E2E ms", "e2e", 0, ("mean", "p50", "p90", "p99")),
)
#: A note warns of workloads that last longer than this.
_MANY_DAYS = 2.0
#: How many models a note names.
_MODELS = 4
_KvLagMs = Annotated[
    float | None, typer.Option(metavar="MS", min=0, help="KV events arrive this late.", show_default="no KV events")
]


@examples("""
\b
Examples:
  fairlead sim run --list
  fairlead sim run shared-prefix-14
  fairlead sim run agents --policy mine.yaml --replicas 4 --seed 1
  fairlead sim run traffic.jsonl --speeds 1,1,0.4 --json
  fairlead sim run traffic.jsonl --replicas 2 --engine http://localhost:8000
""")
def simulate(
    ctx: typer.Context,
    workload: Workload = "",
    policy: Policy = "default",
    requests: Annotated[int, typer.Option("--requests", "-n", metavar="N", min=0, help="Only the first N.")] = 0,
    replicas: _Replicas = None,
    speedup: Annotated[float, typer.Option(metavar="N", min=0.001, help="Send N times as fast.")] = 1.0,
    format: Annotated[str, typer.Option(help="Format of the workload file.", show_default="by its content")] = "",
    traces: Traces = "",
    engine: Engine = "",
    kv_tokens: KvTokens = 0,
    block_size: BlockSize = 0,
    max_num_seqs: MaxNumSeqs = 0,
    max_model_len: MaxModelLen = 0,
    speeds: Speeds = "",
    prefill: Prefill = 0,
    kv_lag_ms: _KvLagMs = None,
    dispatch: Annotated[str, typer.Option(help="timestamp or think.", show_default="the workload's")] = "",
    seed: Annotated[int, typer.Option(help="Seed of traffic that is not recorded, of ties and jitter.")] = 0,
    validate: Annotated[bool, typer.Option("--validate", help="Check all invariants after each event (slow).")] = False,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one line per request to this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Figures as JSON.")] = False,
    list: Annotated[bool, typer.Option("--list", help="List the scenarios and policies.")] = False,
) -> None:
    """Simulate one policy on one workload. An hour of traffic on eight replicas takes seconds.

    The scheduler is the one that `fairlead serve` runs. docs/simulator.md says what is simulated and how well it agrees
    with measured servers.
    """
    from fairlead.lab.simulator.build import ScenarioSpec, is_name, listed
    from fairlead.lab.simulator.run import known_policies, policy_text

    if list:
        typer.echo("scenarios: " + ", ".join(listed()))
        typer.echo("policies:  " + ", ".join(known_policies()))
        return
    if not workload:
        complain("name a scenario or a workload file; --list shows the scenarios")
        raise typer.Exit(WRONG_INPUT)
    with exits(WRONG_INPUT, ValueError, OSError):
        spec = given(
            ctx,
            ScenarioSpec,
            name=workload if is_name(workload) else Path(workload).stem,
            source=workload,
            traces=traces_of(traces, [workload]),
            head=requests,
            servers=replicas or 0,
            preset=engine_argument(engine),
            speeds=numbers(speeds, "--speeds"),
            kv_lag_ms=-1 if kv_lag_ms is None else kv_lag_ms,
        )
        _run(spec, policy_text(policy), policy, seed, validate, json, csv)


def _run(spec: object, text: str, policy: str, seed: int, validate: bool, as_json: bool, csv: Path | None) -> None:
    from itertools import count
    from time import perf_counter

    import msgspec

    from fairlead.core.records import OutcomeRecord
    from fairlead.lab.simulator.build import ScenarioSpec, build
    from fairlead.lab.simulator.grid import for_json
    from fairlead.lab.simulator.result import request_table, summarise
    from fairlead.lab.simulator.run import config_from, note_of_schedulers
    from fairlead.lab.simulator.simulation import Simulation

    assert isinstance(spec, ScenarioSpec)
    config, registry = config_from(text)
    if said := note_of_schedulers(policy, config):
        typer.echo(plain(said), err=True)
    if spec.prefill and not config.policy.may_split:
        spec = msgspec.structs.replace(spec, prefill=0)
        typer.echo("note: all servers do both, because no request is split", err=True)
    scenario = build(spec)
    if (days := scenario.workload.duration_s / scenario.speedup / 86_400) > _MANY_DAYS:
        note = f"the traffic lasts {days:,.0f} days, and a day may take a minute; --requests cuts it"
        typer.echo(f"note: {note}", err=True)
    begun = perf_counter()
    ended = count(1)
    with bar(scenario.name, len(scenario.workload.records)) as update:

        def watch(record: object) -> None:
            if isinstance(record, OutcomeRecord) and (done := next(ended)) % _EVERY == 0:
                update(completed=done)

        simulation = Simulation(scenario, config, seed, watch=watch, validate=validate, registry=registry)
        simulation.run()
    took = perf_counter() - begun
    if csv is not None:
        from fairlead.server.files import write_output

        write_output(csv, request_table(simulation))
    figures = summarise(simulation).as_dict()
    if as_json:
        configuration = msgspec.to_builtins(spec) | {"policy": policy, "seed": seed, "text": text}
        echo_json({"figures": for_json(figures), "configuration": configuration})
    else:
        typer.echo(f"{scenario.name}: {policy}, {len(scenario.replicas)} servers, seed {seed} ({took:.1f} s)")
        for line in _lines(figures):
            typer.echo(line)
    _note_models({record.target or record.model for record in scenario.workload.records} - {""})
    for error in dict.fromkeys(map(str, simulation.plugin_errors)):
        complain(error)
    if simulation.plugin_errors:
        raise typer.Exit(FAILED)


def _note_models(models: set[str]) -> None:
    if len(models) > 1:
        shown = ", ".join(sorted(models)[:_MODELS]) + (", …" if len(models) > _MODELS else "")
        text = f"the workload is for {len(models)} models or adapters ({shown}); every server has all, at the same cost"
        typer.echo(plain(f"note: {text}. `fairlead journal capture --model NAME` takes one"), err=True)


def _lines(figures: dict[str, Any]) -> Iterator[str]:
    f = figures
    yield (
        f"  requests  {f['requests']}: {f['done']} done, {f['shed']} shed, {f['failed']} failed, "
        f"{f['cancelled']} cancelled, in {f['duration_s']:,.0f} s"
    )
    for status, reasons in f["reasons"].items():
        for reason, count in reasons.items():
            yield plain(f"  {status:9} {count:,} × {reason}")
    for title, what, digits, names in _LATENCIES:
        values = ((name, f[f"{what}_{name}_ms"]) for name in names)
        yield f"  {title:9} " + "  ".join(f"{name} {f'{v:,.{digits}f}' if f['done'] else '–'}" for name, v in values)
    yield f"  output    {f['output_tokens_per_s']:,.0f} tokens/s, goodput {f['goodput']:.1%}"
    yield (
        f"  cache     {f['prefix_hit_rate']:.1%} of prompt tokens hit, busiest server {f['balance']:.2f}x the mean, "
        f"{f['preemptions']} preemptions"
    )
    if f["in_band"] >= 0.0:
        yield f"  forecasts {f['in_band']:.0%} of first tokens within the 90 % band"
    yield f"  decisions {f['decision_hash']}"
