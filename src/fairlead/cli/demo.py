"""`fairlead demo`: measures Fairlead against round robin, with a real Envoy and simulated model servers."""

from pathlib import Path
from typing import Annotated

import typer

from fairlead.cli.options import examples


@examples("""
\b
Examples:
  fairlead demo
  fairlead demo --rate 20 --requests 1500
  fairlead demo --time-ratio 1 --requests 300     (real time: takes longer)
  fairlead demo --check && echo as promised
  fairlead demo --json > demo.json
""")
def demo(
    requests: Annotated[int, typer.Option("--requests", "-n", metavar="N", min=1, help="Requests per policy.")] = 4500,
    rate: Annotated[float, typer.Option(metavar="N", min=0.01, help="Requests per second of model time.")] = 13.8,
    time_ratio: Annotated[
        float, typer.Option(metavar="N", min=0.1, help="How many times faster than real time.")
    ] = 8.0,
    replicas: Annotated[int, typer.Option(metavar="N", min=1, max=64, help="Stub replicas.")] = 8,
    port: Annotated[
        int,
        typer.Option(
            min=1, max=65000, help="Port of the gateway. The next two, and those from 10 above it, are used too."
        ),
    ] = 8080,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory for summary.json and demo.png.", file_okay=False)
    ] = Path("out/demo"),
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 1,
    check: Annotated[bool, typer.Option("--check", help="Exit with code 1 when a goal is missed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Summaries as JSON; all else goes to stderr.")] = False,
) -> None:
    """Compare round robin with Fairlead: same traffic, same Envoy, simulated replicas.

    Starts stub model servers (Qwen3-32B on H100), the embedded Envoy and the scheduler, and sends open-loop traffic:
    150 groups of prompts, each group with a long system prompt of its own. Prints a table; writes summary.json and a
    plot.

    Goals: TTFT p50 at most a tenth and p95 at most a fifth of round robin's, a prefix hit rate of 80% or more, no
    failed request. Exit code 1 means that requests failed or, with --check, that a goal was missed.
    """
    import asyncio
    from json import dumps

    from rich.console import Console

    from fairlead.lab.demo import Plan, judge, run

    plan = Plan(requests=requests, rate=rate, time_ratio=time_ratio, replicas=replicas, port=port, out=out, seed=seed)
    summaries = asyncio.run(run(plan, Console(stderr=as_json), check))
    if as_json:
        typer.echo(dumps(summaries, indent=2))
    if any(summary["failed"] for summary in summaries.values()) or (
        check and not all(goal.met for goal in judge(summaries))
    ):
        raise typer.Exit(1)
