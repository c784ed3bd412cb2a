"""`fairlead simulate`: one policy on one workload, in virtual time."""

from pathlib import Path
from typing import Annotated

import typer

from fairlead.cli.options import (
    WRONG_INPUT,
    BlockSize,
    KvTokens,
    MaxModelLen,
    MaxNumSeqs,
    complain,
    echo_json,
    examples,
    exits,
    numbers,
    preset_argument,
)

Source = Annotated[
    str, typer.Argument(metavar="SCENARIO|FILE", help="A built-in scenario (--list), or a workload file.")
]
Policy = Annotated[
    str,
    typer.Option(
        "--policy", "-p", help="A policy's name, a configuration whose scheduling part is used, or a .py file."
    ),
]


@examples("""
\b
Examples:
  fairlead simulate --list
  fairlead simulate shared-prefix-14
  fairlead simulate agents --policy mine.yaml --servers 4 --seed 1
  fairlead simulate traffic.jsonl --speeds 1,1,0.4 --json
  fairlead simulate traffic.jsonl --servers 2 --like http://localhost:8000
""")
def simulate(
    source: Source = "",
    policy: Policy = "default",
    traces: Annotated[str, typer.Option(envvar="FAIRLEAD_TRACES", help="Directory of the published traces.")] = "",
    format: Annotated[str, typer.Option(help="Of a workload file; default: by its content.")] = "",
    speedup: Annotated[float, typer.Option(min=0.001, help="Timestamps are divided by it.")] = 1.0,
    head: Annotated[int, typer.Option(min=0, help="Only the first so many requests.")] = 0,
    servers: Annotated[int, typer.Option(min=0, max=1000, help="Model servers; default: the scenario's own.")] = 0,
    preset: Annotated[str, typer.Option(help="Model and hardware: a name, or a FILE of `fairlead tune`.")] = "",
    like: Annotated[str, typer.Option(help="http://HOST:PORT of an idle server to imitate: a minute of probes.")] = "",
    kv_tokens: KvTokens = 0,
    block_size: BlockSize = 0,
    max_num_seqs: MaxNumSeqs = 0,
    max_model_len: MaxModelLen = 0,
    speeds: Annotated[str, typer.Option(help="Relative speeds of the servers, e.g. 1,1,0.4; repeated in turn.")] = "",
    prefill: Annotated[int, typer.Option(min=0, help="So many servers only prefill, the others decode.")] = 0,
    kv_lag_ms: Annotated[float, typer.Option(help="KV events that are so late; -1 = there are none.")] = -1,
    dispatch: Annotated[str, typer.Option(help="timestamp or think; default: the workload's own.")] = "",
    seed: Annotated[int, typer.Option(help="Of everything that is left to chance.")] = 0,
    validate: Annotated[bool, typer.Option(help="Check every invariant after every event (slow).")] = False,
    json: Annotated[bool, typer.Option("--json", help="Figures as JSON.")] = False,
    requests: Annotated[Path | None, typer.Option(help="Write one line of CSV per request to this file.")] = None,
    list: Annotated[bool, typer.Option("--list", help="Name the built-in scenarios and policies.")] = False,
) -> None:
    """Run a policy against simulated model servers: an hour of traffic of eight replicas takes some seconds.

    The same scheduler as in `fairlead serve` decides, fed with the same events; see docs/simulator.md for what is
    simulated and how well it agrees with measured servers.
    """
    from fairlead.lab.simulator.build import ScenarioSpec, names
    from fairlead.lab.simulator.run import known_policies, policy_text
    from fairlead.lab.workload.formats import TraceError

    if list:
        typer.echo("scenarios: " + ", ".join(names()))
        typer.echo("policies:  " + ", ".join(known_policies()))
        return
    if not source:
        complain("name a scenario or a workload file; --list names the built-in ones")
        raise typer.Exit(WRONG_INPUT)
    with exits(WRONG_INPUT, TraceError, ValueError, OSError):
        spec = ScenarioSpec(
            name=source if source in names() else Path(source).stem,
            source=source,
            traces=traces,
            format=format,
            speedup=speedup,
            head=head,
            servers=servers,
            preset=_preset(preset, like),
            kv_tokens=kv_tokens,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            speeds=numbers(speeds),
            dispatch=dispatch,
            prefill=prefill,
            kv_lag_ms=kv_lag_ms,
        )
        _run(spec, policy_text(policy), policy, seed, validate, json, requests)


def _preset(preset: str, like: str) -> str:
    """Its name or text. Raises `ValueError` or `OSError`."""
    from fairlead.cli.tune import preset_like

    if like and preset:
        raise ValueError("give --preset or --like, not both")
    return preset_like(like) if like else preset_argument(preset)


def _run(spec: object, text: str, policy: str, seed: int, validate: bool, as_json: bool, requests: Path | None) -> None:
    from time import perf_counter

    import msgspec

    from fairlead.cli.options import counted
    from fairlead.core.records import OutcomeRecord
    from fairlead.lab.simulator.build import ScenarioSpec, build
    from fairlead.lab.simulator.result import request_table, summarise
    from fairlead.lab.simulator.run import config_from
    from fairlead.lab.simulator.simulation import Simulation

    assert isinstance(spec, ScenarioSpec)
    scenario = build(spec)
    begun = perf_counter()
    config, registry = config_from(text)
    with counted(scenario.name, len(scenario.workload.records)) as step:
        watch = (lambda record: step() if isinstance(record, OutcomeRecord) else None) if step else None
        simulation = Simulation(scenario, config, seed, watch=watch, validate=validate, registry=registry)
        simulation.run()
    took = perf_counter() - begun
    if requests is not None:
        requests.write_bytes(request_table(simulation))
    figures = summarise(simulation).as_dict()
    if as_json:
        configuration = msgspec.to_builtins(spec) | {"policy": policy, "seed": seed, "text": text}
        echo_json({"figures": figures, "configuration": configuration})
        return
    typer.echo(f"{scenario.name}: {policy}, {len(scenario.replicas)} servers, seed {seed} ({took:.1f} s)")
    for line in _lines(figures):
        typer.echo(line)
    for error in dict.fromkeys(map(str, simulation.plugin_errors)):
        complain(error)


def _lines(figures: dict[str, float]) -> tuple[str, ...]:
    f = figures
    return (
        f"  requests  {f['requests']}: {f['done']} done, {f['shed']} shed, {f['failed']} failed, "
        f"{f['cancelled']} cancelled, in {f['duration_s']:,.0f} s",
        f"  TTFT ms   mean {f['ttft_mean_ms']:,.0f}  p50 {f['ttft_p50_ms']:,.0f}  p90 {f['ttft_p90_ms']:,.0f}  "
        f"p99 {f['ttft_p99_ms']:,.0f}",
        f"  TPOT ms   mean {f['tpot_mean_ms']:,.1f}  p50 {f['tpot_p50_ms']:,.1f}  p99 {f['tpot_p99_ms']:,.1f}",
        f"  E2E ms    mean {f['e2e_mean_ms']:,.0f}  p50 {f['e2e_p50_ms']:,.0f}  p90 {f['e2e_p90_ms']:,.0f}  "
        f"p99 {f['e2e_p99_ms']:,.0f}",
        f"  output    {f['output_tokens_per_s']:,.0f} tokens/s, goodput {f['goodput']:.1%}",
        f"  cache     {f['prefix_hit_rate']:.1%} of prompt tokens hit, busiest server {f['balance']:.2f}x the mean, "
        f"{f['preemptions']} preemptions",
        f"  decisions {f['decision_hash']}",
    )
