"""`fairlead bench`: open-loop load against any OpenAI endpoint, and its results."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairlead.cli.basics import FAILED, INTERRUPTED, WRONG_INPUT
from fairlead.cli.options import Header, Traces, completion, examples, exits, given, json_object, pairs, traces_of

if TYPE_CHECKING:
    from fairlead.cli.bench_load import Load, LoadOptions
    from fairlead.lab.load.report import Summary
    from fairlead.lab.load.spec import Options, RunResult


_Url = Annotated[str, typer.Argument(metavar="URL", help="http://HOST:PORT of a gateway or model server.")]


_Workload = Annotated[
    str,
    typer.Option(
        "--workload",
        "-w",
        metavar="KIND|FILE",
        help="shared-prefix, conversation, chat, another kind or a scenario (docs/workloads.md), or a file.",
        autocompletion=completion("fairlead.cli.bench_load", "workloads"),
    ),
]
_Rate = Annotated[
    float | None, typer.Option(min=0.001, help="Requests per second.", show_default="5, or the file's own times")
]
_Arrivals = Annotated[
    str,
    typer.Option(metavar="KIND", help="poisson, constant, bursty (--cv) or ramp (--to-rate).", show_default="poisson"),
]
_Closed = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Closed loop: N clients wait for their answers.", show_default=False),
]
_Requests = Annotated[
    int | None,
    typer.Option(
        "--requests", "-n", metavar="N", min=1, help="Number of requests.", show_default="200, or all of the file"
    ),
]
_Seconds = Annotated[float | None, typer.Option(min=0.001, help="Send for this long.", show_default=False)]
_Speedup = Annotated[
    float | None, typer.Option(metavar="N", min=0.001, help="Replay a file N times as fast.", show_default="1")
]
_Model = Annotated[
    str, typer.Option(metavar="NAME", help="Model to ask for.", show_default="the file's, or the first of /v1/models")
]
_Output = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="max_tokens of each request.", show_default="the workload's")
]
_Set = Annotated[
    list[str] | None, typer.Option(help="A parameter of the workload; a wrong name lists them.", metavar="NAME=VALUE")
]
_Extra = Annotated[str, typer.Option(metavar="JSON", help="More fields for every request.", show_default=False)]
_Timeout = Annotated[float, typer.Option(metavar="SECONDS", min=0.001, help="Time limit of one request.")]
_MaxInFlight = Annotated[int, typer.Option(metavar="N", min=1, help="Maximum concurrent requests; others wait.")]
_Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Directory for summary.json and bench.png.", file_okay=False)
]


@examples("""
\b
Examples:
  fairlead bench http://localhost:8080
  fairlead bench localhost:8080 --rate 12 --seconds 60 --out out/bench
  fairlead bench HOST:8080 --arrivals ramp --rate 2 --to-rate 30 --seconds 90
  fairlead bench localhost:8080 -w conversation -n 500 --slo-ttft-ms 500
  fairlead bench localhost:8080 -w traffic.jsonl --speedup 4 --model mine
  fairlead bench localhost:8080 -w agents -n 300
  fairlead bench localhost:8000 -w chat --closed 32 -n 1000 --json
\b
The workload of most published figures on prefix-aware routing:
  fairlead bench localhost:8080 --rate 14 -n 3000 --output-tokens 1000 \\
    --set groups=150 --set prompts=5 \\
    --set system_tokens=6000 --set question_tokens=1200
\b
A real vLLM stops when the model does. For answers of full length:
  fairlead bench localhost:8000 --extra '{"ignore_eos": true}'

Latencies count from when a request was due, not from when it was sent, so a stalled server cannot hide. Look at
"send lag" first: with a p99 above 20 ms the run is not valid, because this machine was the bottleneck.

Exit codes: 0 all answered, 1 requests failed or nothing answers, 2 wrong usage. More: docs/bench.md.
""")
def bench(
    ctx: typer.Context,
    url: _Url,
    workload: _Workload = "shared-prefix",
    rate: _Rate = None,
    arrivals: _Arrivals = "",
    closed: _Closed = None,
    requests: _Requests = None,
    seconds: _Seconds = None,
    speedup: _Speedup = None,
    cv: Annotated[float, typer.Option(min=0.01, help="Bursty arrivals: 1 is Poisson, more is burstier.")] = 3.0,
    to_rate: Annotated[
        float | None, typer.Option(metavar="RATE", min=0.001, help="Ramp: the last rate.", show_default=False)
    ] = None,
    model: _Model = "",
    output_tokens: _Output = None,
    set: _Set = None,
    extra: _Extra = "",
    header: Header = None,
    traces: Traces = "",
    seed: Annotated[int, typer.Option(help="Seed of arrivals and prompts; a new seed misses all caches.")] = 0,
    slo_ttft_ms: Annotated[float, typer.Option(metavar="MS", min=0, help="Longest TTFT in goodput; 0 = any.")] = 2000.0,
    slo_tpot_ms: Annotated[float, typer.Option(metavar="MS", min=0, help="Longest TPOT in goodput; 0 = any.")] = 50.0,
    timeout: _Timeout = 300.0,
    max_in_flight: _MaxInFlight = 2000,
    out: _Out = None,
    json: Annotated[bool, typer.Option("--json", help="The summary as JSON.")] = False,
) -> None:
    """Send load to an OpenAI endpoint and measure TTFT, TPOT, E2E, tokens/s, goodput, prefix hits and failures.

    Requests leave when they are due, whether or not earlier ones were answered (open loop).
    """
    from fairlead.cli.bench_load import LoadOptions, build

    parameters = pairs(set, "--set", underscores=True)
    with exits(WRONG_INPUT, ValueError, OSError):
        load_options = given(
            ctx, LoadOptions, parameters=parameters, extra=json_object(extra), traces=traces_of(traces, [workload])
        )
        load = build(load_options)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
    options = _options(load, pairs(header, "--header"), timeout, max_in_flight)
    result = _run(url, load, model, options)
    summary = _summarise(result, load_options, slo_ttft_ms or math.inf, slo_tpot_ms or math.inf)
    _show(summary, result, out, json)
    if result.cut:
        raise typer.Exit(INTERRUPTED)
    if summary["failed"] or not summary["requests"]:
        raise typer.Exit(FAILED)


def _options(load: "Load", headers: dict[str, str], timeout: float, max_in_flight: int) -> "Options":
    from fairlead.lab.load.spec import Options

    return Options(
        requests=load.requests,
        duration_s=load.seconds,
        max_in_flight=max_in_flight,
        timeout_s=timeout,
        # Every request has its own time limit. This limit of the whole run must only be longer than any trace.
        time_limit_s=7 * 86400.0,
        headers=headers,
    )


def _run(url: str, load: "Load", model: str, options: "Options") -> "RunResult":
    """Get the model's name from the server, send all requests, and show the progress."""
    import asyncio

    from fairlead.cli.bench_load import bench_progress
    from fairlead.core.errors import ConfigError
    from fairlead.gateway.memory import raise_file_limit
    from fairlead.lab.load.probe import ask_models, normal_target
    from fairlead.lab.load.runner import run

    target = normal_target(url)
    status, served = ask_models(target, options.headers)
    if not (model or served or load.names_models):
        raise ConfigError(f"{target}/v1/models names no model (status {status}): say which one to ask for", "--model")
    fallback = served[0] if served else model
    workload = load.workload(model, fallback)
    raise_file_limit()  # each request in flight holds a socket
    with bench_progress(f"{load.described} → {target}, model {model or fallback or 'of the file'}") as step:
        sent = run(target, workload, load.arrivals, options, step, load.described, interruptible=True)
        return asyncio.run(sent)


def _summarise(result: "RunResult", load_options: "LoadOptions", slo_ttft_ms: float, slo_tpot_ms: float) -> "Summary":
    import msgspec

    from fairlead.lab.load.report import summarise

    summary = summarise(result, slo_ttft_ms=slo_ttft_ms, slo_tpot_ms=slo_tpot_ms)
    # Values of headers are left out: one of them may be a key.
    options = summary["config"]["options"]
    options["headers"] = dict.fromkeys(options["headers"], "(not shown)")
    summary["config"]["command"] = msgspec.to_builtins(load_options)
    return summary


def _show(summary: "Summary", result: "RunResult", out: Path | None, as_json: bool) -> None:
    from json import dumps

    from rich.console import Console

    from fairlead.cli.bench_load import hints
    from fairlead.lab.load.report import table

    try:
        if as_json:
            typer.echo(dumps(summary, indent=2))
        else:
            Console().print(table([summary]))
        for hint in hints(summary):
            typer.echo(hint, err=True)
    finally:  # also if nobody reads the output any more
        if out is not None:
            (out / "summary.json").write_text(dumps(summary, indent=2) + "\n", encoding="utf-8")
            written = [out / "summary.json", *_plot(summary, result, out)]
            typer.echo(f"written: {', '.join(map(str, written))}", err=True)


def _plot(summary: "Summary", result: "RunResult", out: Path) -> list[Path]:
    from fairlead.lab.load.plots import plot_run
    from fairlead.lab.load.report import NO_PLOT

    path = out / "bench.png"
    try:
        plot_run(result, summary, path, f"Load on {summary['target']}")
    except ImportError:
        typer.echo(NO_PLOT, err=True)
        return []
    return [path]
