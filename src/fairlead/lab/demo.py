"""`fairlead demo`: the same traffic under round robin and Fairlead, goals for the results, commands for manual use."""

import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from math import floor
from pathlib import Path
from typing import Any

import aiohttp
from msgspec import Struct, structs
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fairlead.core.errors import FairleadError
from fairlead.gateway.directories import temporary_directory
from fairlead.gateway.envoy.launcher import tied
from fairlead.gateway.ports import obstacle
from fairlead.lab.load import report
from fairlead.lab.load.process import run_in_process
from fairlead.lab.load.spec import Options, RunSpec
from fairlead.lab.load.spec import Progress as LoadProgress
from fairlead.lab.load.workload import Poisson, SharedPrefix
from fairlead.server.python import python_module

#: The headline workload of the documentation: 150 groups × 5 prompts share a 6,000-token system prompt.
WORKLOAD = SharedPrefix(groups=150, prompts=5, system_tokens=6000, question_tokens=1200, output_tokens=1000)

HOST = "127.0.0.1"
MODEL = "Qwen/Qwen3-32B"

POLICIES = {"round-robin": "round robin", "default": "Fairlead"}


class Plan(Struct, frozen=True, kw_only=True):
    """The settings of a demo, which are printed or written next to the results. Rates and times are in model time."""

    #: Requests per policy: six passes over the workload, the first of which fills the caches.
    requests: int = 4500
    #: Poisson arrivals per second of model time, over the whole pool. Round robin saturates at about 7.
    rate: float = 13.8
    #: Model seconds per wall-clock second.
    time_ratio: float = 8.0
    replicas: int = 8
    preset: str = "qwen3-32b-h100"
    #: Tokens per streamed event, as with vLLM's --stream-interval. Fewer events cost less CPU; the result is the same.
    stream_interval: int = 25
    seed: int = 1
    #: The port of the gateway; see `own_ports` and `replica_ports` for the others.
    port: int = 8080
    out: Path = Path("out/demo")

    @property
    def own_ports(self) -> tuple[int, int, int]:
        """Ports of gateway, ext_proc and admin server."""
        return self.port, self.port + 1, self.port + 2

    @property
    def replica_ports(self) -> range:
        return range(self.port + 10, self.port + 10 + self.replicas)

    @property
    def usual(self) -> bool:
        """Whether this is the default demo, whose results are known. Its port and output folder may differ."""
        return self == structs.replace(Plan(), port=self.port, out=self.out)

    def load(self, policy: str) -> RunSpec:
        """The load run against the gateway, with model-time rates converted to wall-clock rates."""
        return RunSpec(
            target=f"http://{HOST}:{self.port}",
            name=POLICIES[policy],
            workload=structs.replace(WORKLOAD, seed=self.seed, model=MODEL, extra={"ignore_eos": True}),
            arrivals=Poisson(self.rate * self.time_ratio, self.seed),
            options=Options(
                requests=self.requests,
                # Round robin's queue grows to half of all requests. The generator must not hold any of them back.
                max_in_flight=self.requests,
                time_ratio=self.time_ratio,
                timeout_s=600.0,
                time_limit_s=600.0,
            ),
        )

    def config(self, policy: str, endpoints: Path) -> str:
        """The configuration of `fairlead serve` for this policy, as JSON (which is YAML)."""
        gateway, ext_proc, admin = self.own_ports
        return json.dumps(
            {
                "policy": policy,
                "gateway": {"mode": "embedded", "host": HOST, "port": gateway, "concurrency": 1},
                "extProc": {"host": HOST, "port": ext_proc},
                "admin": {"host": HOST, "port": admin},
                "endpoints": {"file": str(endpoints), "watch": False},
                "log": {"level": "warning"},
                "seed": self.seed,
            },
            indent=2,
        )

    def describe(self) -> str:
        return (
            f"{self.requests} requests at {self.rate:g}/s (Poisson) to {self.replicas} simulated replicas of "
            f"Qwen3-32B on 2×H100; {WORKLOAD.groups} groups × {WORKLOAD.prompts} prompts, "
            f"{WORKLOAD.system_tokens:,} + {WORKLOAD.question_tokens:,} tokens in, {WORKLOAD.output_tokens:,} out. "
            f"The replicas run {self.time_ratio:g}× faster than real ones; all figures are converted to real time."
        )


# Checks that the ports of a demo are free before anything is started.


def check_ports(plan: Plan) -> None:
    """Raise `FairleadError` for the first port that cannot be bound, and say what to change."""
    own, replicas = plan.own_ports, plan.replica_ports
    needed = f"The demo needs {own[0]} to {own[-1]} and {replicas[0]} to {replicas[-1]}; choose others with --port"
    for port in (*own, *replicas):
        error = obstacle(HOST, port)
        if error is not None:
            raise FairleadError(f"cannot listen on {HOST}:{port}: {error.strerror or error}. {needed}")


# The goals of the demo, and whether a run met them.

P50_LOWER, P95_LOWER, HIT_RATE = 10.0, 5.0, 0.8


class Goal(Struct, frozen=True):
    """One goal and its result in words, and whether the run met it."""

    wanted: str
    got: str
    met: bool


def judge(summaries: Mapping[str, Mapping[str, Any]]) -> list[Goal]:
    """Compare a run with the goals. `summaries`: one of `load.report.summarise` per policy, by the policy's name."""
    base, ours = summaries["round-robin"], summaries["default"]
    failed = sum(summary["failed"] for summary in summaries.values())
    return [
        _lower("p50", base, ours, P50_LOWER),
        _lower("p95", base, ours, P95_LOWER),
        _hits(ours["prefix_hit_rate"]),
        Goal("no failed request", f"{failed:,}", failed == 0),
    ]


def _lower(quantile: str, base: Mapping[str, Any], ours: Mapping[str, Any], times: float) -> Goal:
    wanted = f"TTFT {quantile} at least {times:g}× lower than round robin's"
    theirs, mine = base["ttft_ms"][quantile], ours["ttft_ms"][quantile]
    if not theirs or not mine:
        return Goal(wanted, "not measured", False)
    ratio = theirs / mine
    return Goal(wanted, f"{_cut(ratio)}×", ratio >= times)


def _hits(rate: float | None) -> Goal:
    wanted = f"prefix hit rate at least {HIT_RATE:.0%}"
    if rate is None:
        return Goal(wanted, "not measured", False)
    return Goal(wanted, f"{_cut(rate * 100)}%", rate >= HIT_RATE)


def _cut(value: float) -> str:
    """The value with one decimal, rounded down, so that a missed goal is not shown as met."""
    return f"{floor(value * 10) / 10:g}"


# A pool for manual use: a configuration next to the results, and commands that work as printed in the directory in
# which the demo was run, even if `fairlead` is not on PATH.

_REPLICAS = 4

_CONFIG = """\
# Written by `fairlead demo`: its gateway and scheduler, to try by hand. Change it while it runs: most settings follow.
policy: default
gateway: {{mode: embedded, host: {host}, port: {gateway}, concurrency: 1}}
extProc: {{host: {host}, port: {ext_proc}}}
admin: {{host: {host}, port: {admin}}}
# Written by `fairlead stub`.
endpoints: {{file: {endpoints}, watch: true}}
"""


class Commands(Struct, frozen=True):
    """Shell commands: two servers, each in its own terminal, then a request; and the address of the dashboard."""

    stub: str
    serve: str
    curl: str
    dashboard: str


def prepare(plan: Plan) -> Commands:
    """Write `by-hand.yaml` into the demo's folder and return the commands that use it."""
    config, endpoints = plan.out / "by-hand.yaml", plan.out / "by-hand-endpoints.yaml"
    gateway, ext_proc, admin = plan.own_ports
    written = json.dumps(str(endpoints.absolute()), ensure_ascii=False)
    config.write_text(
        _CONFIG.format(host=HOST, gateway=gateway, ext_proc=ext_proc, admin=admin, endpoints=written), encoding="utf-8"
    )
    fairlead = program()
    stub = ("stub", f"--port={plan.replica_ports[0]}", f"--replicas={min(_REPLICAS, plan.replicas)}")
    body = {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": "Hello"}]}
    url = f"http://{HOST}:{gateway}/v1/chat/completions"
    curl = ("curl", url, "-H", "content-type: application/json", "-d", json.dumps(body))
    return Commands(
        stub=shlex.join((*fairlead, *stub, f"--out={endpoints}")),
        serve=shlex.join((*fairlead, "serve", str(config))),
        curl=shlex.join(curl),
        dashboard=f"http://{HOST}:{admin}/",
    )


def program() -> list[str]:
    """The command that starts this `fairlead` from the current directory."""
    called = Path(sys.argv[0])
    for candidate in (called, Path(sys.executable).with_name("fairlead")):
        if candidate.name == "fairlead" and candidate.is_file() and os.access(candidate, os.X_OK):
            return [_shown(candidate)]
    return [_shown(Path(sys.executable)), "-m", "fairlead"]


def _shown(file: Path) -> str:
    """The path, relative to the current directory if inside it. A slash keeps the shell from searching PATH."""
    path = file.absolute()
    here = Path.cwd()
    if not path.is_relative_to(here):
        return str(path)
    relative = str(path.relative_to(here))
    return relative if "/" in relative else f"./{relative}"


#: The prefix of error lines of commands, see `cli.main`.
_ERROR = "error: "


class Child:
    """A `fairlead` command in a separate process, which ends with this one even if that is killed. Its last output is
    kept, to be shown if it fails."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self._process: Process | None = None
        self._tail: deque[str] = deque(maxlen=15)
        self._reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def __aenter__(self) -> "Child":
        self._process = await asyncio.create_subprocess_exec(
            *tied(*python_module("fairlead"), *self._arguments), stdout=PIPE, stderr=asyncio.subprocess.STDOUT
        )
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        process = self._process
        assert process is not None and self._reader is not None
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(15.0):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        await self._reader

    async def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self._tail.append(line.decode(errors="replace").rstrip())

    async def ready(self, url: str, seconds: float = 30.0, file: Path | None = None) -> None:
        """Wait until `url` answers 200 and `file` (`None` = none) is written, for at most `seconds`. Otherwise raises
        `FairleadError` with the command's last output."""
        assert self._process is not None
        deadline = asyncio.get_running_loop().time() + seconds
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session:
            while asyncio.get_running_loop().time() < deadline:
                if self._process.returncode is not None:
                    break
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(url) as response:
                        if response.status == 200 and (file is None or (file.exists() and file.stat().st_size)):
                            return
                await asyncio.sleep(0.1)
        raise FairleadError(await self._complaint())

    async def _complaint(self) -> str:
        """Why the command is not ready: the errors it printed, otherwise its last output."""
        assert self._process is not None and self._reader is not None
        if self._process.returncode is not None:
            await self._reader
        errors = [line.removeprefix(_ERROR) for line in self._tail if line.startswith(_ERROR)]
        words = "\n".join(errors or self._tail) or "(it said nothing)"
        return f"`fairlead {self._arguments[0]}` did not become ready: {words}"


# Runs the demo: a new pool and a new scheduler for each policy, then the table, the files and the plot.


async def run(plan: Plan, console: Console, check: bool = False) -> dict[str, dict[str, Any]]:
    """Run all policies one after the other. Returns and writes one summary per policy.

    The goals are shown for the default demo (`Plan.usual`), and for other demos only if `check` is set.
    """
    check_ports(plan)
    console.print(plan.describe(), highlight=False)
    try:
        plan.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FairleadError(f"cannot make the folder {plan.out}: {error.strerror or error}") from None
    summaries: dict[str, dict[str, Any]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[now]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
        for policy, title in POLICIES.items():
            task = bar.add_task(f"{title:12}", total=plan.requests, now="starting Envoy, Fairlead and the replicas")

            def look(progress: LoadProgress, task: Any = task) -> None:
                bar.update(task, completed=progress.done, now=_look(progress, plan.time_ratio))

            summaries[policy] = await _run_policy(plan, policy, look)
            bar.update(task, now="done")
    _write(plan, summaries)
    _show(plan, summaries, console)
    if check or plan.usual:
        goals = judge(summaries)
        console.print("Goals of this comparison, and the results of this run:")
        for goal in goals:
            verdict = "[green]met   [/]" if goal.met else "[bold red]missed[/]"
            console.print(f"  {verdict}  {goal.wanted}: {goal.got}", highlight=False, soft_wrap=True)
    commands = prepare(plan)
    drawn = find_spec("matplotlib") is not None
    plot = f" and {plan.out / 'demo.png'}" if drawn else f"; {report.NO_PLOT}"
    console.print(f"Written: {plan.out / 'summary.json'}{plot}", markup=False, soft_wrap=True)
    console.print(
        f"By hand, all in this directory, the first two commands each in its own terminal:\n"
        f"  {commands.stub}\n  {commands.serve}\n  {commands.curl}\n"
        f"The dashboard shows each decision and its reason: {commands.dashboard}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return summaries


async def _run_policy(plan: Plan, policy: str, look: Callable[[LoadProgress], None]) -> dict[str, Any]:
    with temporary_directory("fairlead-demo-") as folder:
        endpoints, config = folder / "endpoints.yaml", folder / "fairlead.yaml"
        config.write_text(plan.config(policy, endpoints), encoding="utf-8")
        ports = plan.replica_ports
        stub = Child(
            "stub",
            f"--port={ports[0]}",
            f"--replicas={plan.replicas}",
            f"--engine={plan.preset}",
            f"--time-ratio={plan.time_ratio}",
            f"--stream-interval={plan.stream_interval}",
            f"--out={endpoints}",
        )
        async with stub:
            await stub.ready(f"http://{HOST}:{ports[-1]}/health", file=endpoints)
            async with Child("serve", str(config)) as serve:
                await serve.ready(f"http://{HOST}:{plan.own_ports[2]}/readyz")
                result = await run_in_process(plan.load(policy), look)
    return report.summarise(result, "model")


def _look(progress: LoadProgress, ratio: float) -> str:
    ttft = "" if progress.ttft_p50_ms is None else f", TTFT p50 {progress.ttft_p50_ms * ratio / 1000:.2f} s"
    failed = f", [red]{progress.failed} failed[/]" if progress.failed else ""
    return f"{progress.in_flight} in flight{ttft}{failed}"


def _write(plan: Plan, summaries: dict[str, dict[str, Any]]) -> None:
    (plan.out / "summary.json").write_text(json.dumps(summaries, indent=2) + "\n", encoding="utf-8")
    if find_spec("matplotlib") is not None:
        from fairlead.lab.load.plots import plot

        plot(list(summaries.values()), plan.out / "demo.png", "The same traffic through the same Envoy, two policies")


def _show(plan: Plan, summaries: dict[str, dict[str, Any]], console: Console) -> None:
    console.print(report.table(list(summaries.values())))
    base, ours = summaries["round-robin"], summaries["default"]
    if base["ttft_ms"]["p50"] and ours["ttft_ms"]["p50"]:
        ratios = {q: base["ttft_ms"][q] / ours["ttft_ms"][q] for q in ("p50", "p95")}
        speed = ours["output_tokens_per_s"] / base["output_tokens_per_s"]
        console.print(
            f"Fairlead: TTFT p50 {ratios['p50']:.0f}× and p95 {ratios['p95']:.0f}× lower than round robin, "
            f"{speed:.2f}× the output tokens/s, {ours['prefix_hit_rate']:.0%} prefix hits "
            f"against {base['prefix_hit_rate']:.0%}.",
            style="bold",
            highlight=False,
        )
    if not all(summary["valid"] for summary in summaries.values()):
        console.print(
            "This machine was too busy, and its delays are in the times above: end other programs, or slow the demo "
            f"down with --time-ratio {plan.time_ratio / 2:g}.",
            style="yellow",
            highlight=False,
        )
