"""What scheduling costs: the same requests through the same Envoy without ext_proc, with Fairlead, and with grpc.aio.

    python bench/extproc.py [--json] [--scenario NAME ...] [--rounds N] [--requests N] [--no-strace] [--against REV]

Sides: `direct` (no ext_proc), `fairlead` (own transport, complete default pipeline, access log included), `grpc_aio`
(the same behind the grpc.aio transport). `epp_ms` and `envoy_ms` are CPU milliseconds per request by the operating
system's accounting of the two processes; latencies are wall-clock, counted from the scheduled arrival. All sides take
turns within one batch because the machine's speed drifts. Where strace is installed, a short run of its own at the end
of each scenario counts the scheduler's system calls per request.

`--against REV` takes another revision of this repository in place of grpc.aio: the two schedulers take turns, changing
who goes first, and the ratio of their CPU is that of the two turns of a round. It also starts each with an embedded
gateway and prints what memory the scheduler and its parent have then.
"""

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from msgspec import structs
from rich.console import Console
from rich.table import Table

from _gateway import Processes, Side, checked_out, environment, free_ports, wait_for
from _output import tell
from _process import Usage, children, rss, usage
from fairlead.lab.load import report
from fairlead.lab.load.process import run_in_process
from fairlead.lab.load.spec import Options, RunSpec
from fairlead.lab.load.workload import Chat, ClosedLoop, Poisson

_OWN_PORTS = free_ports(7)
SIDES = [
    Side("direct", _OWN_PORTS[0]),
    Side("fairlead", *_OWN_PORTS[1:4]),
    Side("grpc_aio", *_OWN_PORTS[4:7], "grpc-aio"),
]
PORTS = free_ports(8)
#: In the place of the last side, with `--against`.
FORMER = "former"


def _spec(rate: float, count: int, size: int, chunks: int = 0, interval_ms: float = 0, closed: int = 0) -> RunSpec:
    headers = {"x-bench-chunks": str(chunks), "x-bench-interval-ms": str(interval_ms)} if chunks else {}
    return RunSpec(
        target="",
        workload=Chat(body_bytes=size, output_tokens=max(chunks, 100), stream=bool(chunks)),
        arrivals=ClosedLoop(closed) if closed else Poisson(rate),
        options=Options(requests=count, headers=headers, read_usage=False, gaps=False, timeout_s=60, time_limit_s=120),
    )


#: 1 KB chat, JSON answer, open loop · the same, 32 clients · 100 chunks at 20 ms · 10k-token prompt, 1,000 chunks ·
#: 100k-token prompt (490 KB), 10 chunks.
SCENARIOS: dict[str, RunSpec] = {
    "json_200rps": _spec(200, 1200, 1024),
    "closed_32": _spec(0, 5000, 1024, closed=32),
    "sse_100": _spec(40, 240, 1024, 100, 20),
    "sse_1000": _spec(10, 60, 49_000, 1000, 5),
    "prompt_100k": _spec(20, 160, 490_000, 10, 5),
}

#: epp_ms over direct.envoy_ms, and over grpc_aio.epp_ms.
TARGETS = {"json_200rps": 1.0, "closed_32": 1.5, "sse_100": 0.15, "sse_1000": 0.03, "prompt_100k": 2.0}
GRPC_TARGETS = {name: 1 / 8 if name == "closed_32" else 1 / 4 for name in TARGETS}


async def measure(pids: dict[str, int], side: Side, spec: RunSpec) -> dict[str, Any]:
    spec = structs.replace(spec, target=f"http://127.0.0.1:{side.port}", name=side.name)
    idle = Usage(0.0, 0)
    before = usage(pids[side.name]) if side.epp else idle, usage(pids["envoy"])
    result = await run_in_process(spec)
    await asyncio.sleep(0.2)  # the last access-log entries
    after = usage(pids[side.name]) if side.epp else idle, usage(pids["envoy"])
    epp, envoy = after[0] - before[0], after[1] - before[1]
    summary = report.summarise(result)
    count = max(summary["requests"], 1)
    return {
        "requests": summary["requests"],
        "failed": summary["failed"],
        "epp_ms": epp.cpu_s * 1e3 / count,
        "envoy_ms": envoy.cpu_s * 1e3 / count,
        "p50_ms": summary["e2e_ms"]["p50"],
        "p99_ms": summary["e2e_ms"]["p99"],
        "ttfb_p50_ms": summary["ttft_ms"]["p50"],
        "ttfb_p99_ms": summary["ttft_ms"]["p99"],
        "epp_wakeups": epp.wakeups / count,
    }


def merge(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts add up, figures are medians of the rounds."""
    out = {key: median(r[key] for r in rounds if r[key] is not None) for key in rounds[0]}
    return out | {key: sum(r[key] for r in rounds) for key in ("requests", "failed")}


def count_syscalls(pid: int, run: Callable[[], None]) -> int:
    """System calls of a process while `run` runs."""
    tracer = subprocess.Popen(
        ["strace", "-c", "-f", "-p", str(pid)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    time.sleep(0.5)
    if tracer.poll() is not None:
        raise OSError((tracer.stderr.read() if tracer.stderr else "").strip() or "strace ended at once")
    run()
    tracer.terminate()
    _, text = tracer.communicate(timeout=10)
    return calls(text)


def calls(summary: str) -> int:
    """The sum of the column `calls` of `strace -c`. Its rows are: share, seconds, each, calls, errors or not, name."""
    rows = (line.split() for line in summary.splitlines())
    return sum(int(row[3]) for row in rows if len(row) in (5, 6) and row[3].isdigit() and row[-1] != "total")


async def batch(
    names: list[str], rounds: int, console: Console, strace: bool, most: int = 0, former: str = ""
) -> dict[str, dict[str, Any]]:
    """`former`: sources of another revision, in place of grpc.aio."""
    results: dict[str, dict[str, Any]] = {}
    sides = [*SIDES[:2], structs.replace(SIDES[2], name=FORMER, transport="http2", src=former)] if former else SIDES
    with Processes(sides, PORTS) as processes:
        for name in names:
            spec = SCENARIOS[name]
            if most:
                count = min(most, spec.options.requests)
                spec = structs.replace(spec, options=structs.replace(spec.options, requests=count))
            found: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
            warm = structs.replace(
                spec, options=structs.replace(spec.options, requests=max(spec.options.requests // 8, 8))
            )
            for turn in range(rounds + 1):
                for side in sides if turn % 2 else sides[::-1]:
                    console.print(f"{name}: {side.name}, {'warm-up' if not turn else f'round {turn}'}", style="dim")
                    figures = await measure(processes.pids, side, spec if turn else warm)
                    if turn:
                        found[side.name].append(figures)
            results[name] = {side: merge(parts) for side, parts in found.items()}
            if former:
                results[name]["ratio"] = _ratio(found)
            for side in sides[1:] if strace else ():
                console.print(f"{name}: {side.name}, system calls", style="dim")
                pid, target = processes.pids[side.name], structs.replace(warm, target=f"http://127.0.0.1:{side.port}")
                try:
                    count = await asyncio.to_thread(
                        count_syscalls, pid, lambda t=target: asyncio.run(run_in_process(t))
                    )
                except OSError as error:  # tracing may be forbidden
                    console.print(f"system calls are not counted: {error}", style="yellow")
                    strace = False
                    break
                results[name][side.name]["epp_syscalls"] = count / warm.options.requests
    return results


def _ratio(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """CPU of the scheduler, this one's over the former one's, round by round."""
    pairs = zip(rounds["fairlead"], rounds[FORMER], strict=True)
    each = [new["epp_ms"] / old["epp_ms"] for new, old in pairs]
    return {"median": median(each), "least": min(each), "most": max(each)}


def memory(src: str) -> dict[str, float]:
    """Megabytes that the scheduler and its parent have with an embedded gateway that has just become ready."""
    with tempfile.TemporaryDirectory(prefix="fairlead-bench-") as folder:
        config = Path(folder) / "serve.json"
        config.write_text(
            json.dumps(
                {
                    "gateway": {"mode": "embedded", "host": "127.0.0.1", "port": SIDES[0].port},
                    "extProc": {"host": "127.0.0.1", "port": SIDES[1].epp},
                    "admin": {"port": SIDES[1].admin},
                    "endpoints": [{"address": "127.0.0.1", "port": port} for port in PORTS],
                    "log": {"level": "error"},
                }
            )
        )
        command = [sys.executable, "-m", "fairlead", "serve", str(config)]
        parent = subprocess.Popen(command, env=environment(src), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_for(f"http://127.0.0.1:{SIDES[1].admin}/readyz", lambda: None)
            time.sleep(2.0)  # what a start leaves behind is given back
            words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in children(parent.pid)}
            schedulers = [pid for pid, line in words.items() if b"serve" in line]
            return {"parent_mb": rss(parent.pid) / 2**20, "scheduler_mb": sum(map(rss, schedulers)) / 2**20}
        finally:
            parent.terminate()
            parent.wait(40)


def show_against(results: dict[str, Any], console: Console) -> None:
    table = Table(title="This revision and the former one; CPU of the scheduler per request", title_justify="left")
    for column in (
        "scenario",
        "here, ms",
        "former, ms",
        "ratio",
        "least–most",
        "added p50, ms",
        "former",
        "added p99, ms",
        "former",
    ):
        table.add_column(column, justify="left" if column == "scenario" else "right")
    for name, sides in results["scenarios"].items():
        new, old, direct, ratio = sides["fairlead"], sides[FORMER], sides["direct"], sides["ratio"]
        added = (f"{side[key] - direct[key]:.2f}" for key in ("p50_ms", "p99_ms") for side in (new, old))
        spread = f"{ratio['least']:.2f}–{ratio['most']:.2f}"
        table.add_row(name, f"{new['epp_ms']:.3f}", f"{old['epp_ms']:.3f}", f"{ratio['median']:.3f}", spread, *added)
    console.print(table)
    for name, memory in results["memory"].items():
        whole = sum(memory.values())
        console.print(
            f"{name}: parent {memory['parent_mb']:.0f} MB, scheduler {memory['scheduler_mb']:.0f}, sum {whole:.0f}"
        )


def show(results: dict[str, dict[str, Any]], console: Console) -> None:
    table = Table(title="Per request, medians; CPU in milliseconds", title_justify="left")
    for column in (
        "scenario",
        "side",
        "requests",
        "failed",
        "EPP",
        "Envoy",
        "p50",
        "p99",
        "TTFB p50",
        "TTFB p99",
        "wake-ups",
        "system calls",
    ):
        table.add_column(column, justify="left" if column in ("scenario", "side") else "right")
    keys = ("epp_ms", "envoy_ms", "p50_ms", "p99_ms", "ttfb_p50_ms", "ttfb_p99_ms", "epp_wakeups")
    for name, sides in results.items():
        for side, r in sides.items():
            counted = f"{r['epp_syscalls']:.1f}" if "epp_syscalls" in r else "-"
            figures = (f"{r[key]:.3f}" for key in keys)
            table.add_row(name, side, str(r["requests"]), str(r["failed"]), *figures, counted)
    console.print(table)
    ratios = Table(title="Against the targets", title_justify="left")
    for column in ("scenario", "EPP / direct Envoy", "target", "EPP / grpc.aio EPP", "target"):
        ratios.add_column(column, justify="right")
    for name, sides in results.items():
        epp = sides["fairlead"]["epp_ms"]
        direct, aio = epp / sides["direct"]["envoy_ms"], epp / sides["grpc_aio"]["epp_ms"]
        ratios.add_row(name, f"{direct:.3f}", f"{TARGETS[name]:g}", f"{aio:.3f}", f"{GRPC_TARGETS[name]:g}")
    console.print(ratios)
    if "json_200rps" in results:
        ours, base = results["json_200rps"]["fairlead"], results["json_200rps"]["direct"]
        added = {p: ours[f"{p}_ms"] - base[f"{p}_ms"] for p in ("p50", "p99")}
        console.print(
            f"Added at 200 requests/s: p50 {added['p50']:.2f} ms (target 1.0), p99 {added['p99']:.2f} ms (2.0)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--scenario", action="append", choices=list(SCENARIOS), help="only these")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds per scenario and side")
    parser.add_argument("--requests", type=int, default=0, help="at most so many per round, for a quick look")
    parser.add_argument("--against", metavar="REV", help="compare with another revision instead of with grpc.aio")
    parser.add_argument(
        "--strace", action=argparse.BooleanOptionalAction, help="count system calls; by default if strace is installed"
    )
    arguments = parser.parse_args()
    console = Console(stderr=arguments.json)
    console.width = max(console.width, 140)  # less would cut the figures off where this is no terminal
    strace = shutil.which("strace") is not None and arguments.strace is not False
    if arguments.strace is not False and not strace:
        message = "strace is not installed, so system calls are not counted (Debian: apt-get install strace)"
        if arguments.strace:
            parser.error(message)
        console.print(message, style="yellow")
    names = arguments.scenario or list(SCENARIOS)
    if arguments.against:
        with checked_out(arguments.against) as place:
            src = str(place / "src")
            held = {"here": memory(""), FORMER: memory(src)}
            ran = batch(names, arguments.rounds, console, False, arguments.requests, src)
            compared = {"scenarios": asyncio.run(ran), "memory": held}
        tell(compared, arguments.json, lambda figures: show_against(figures, console))
        return
    results = asyncio.run(batch(names, arguments.rounds, console, strace, arguments.requests))
    tell(results, arguments.json, lambda figures: show(figures, console))


if __name__ == "__main__":
    main()
