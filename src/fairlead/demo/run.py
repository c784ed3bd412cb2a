"""Runs the demo: for each policy a fresh pool and a fresh scheduler, then the table, the files and the plot."""

import json
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fairlead.bench import report
from fairlead.bench.process import run_in_process
from fairlead.bench.spec import Progress as LoadProgress
from fairlead.demo.by_hand import Commands, prepare
from fairlead.demo.goals import Goal, judge
from fairlead.demo.plan import HOST, POLICIES, Plan
from fairlead.demo.ports import check_ports
from fairlead.demo.processes import Child
from fairlead.model.errors import FairleadError


async def run(plan: Plan, console: Console, check: bool = False) -> dict[str, dict[str, Any]]:
    """Run all policies one after the other; returns and writes one summary per policy.

    Whether the goals are met is told of the usual demo only, and of others when asked for by `check`.
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
        _show_goals(judge(summaries), console)
    _show_files(plan, prepare(plan), console)
    return summaries


async def _run_policy(plan: Plan, policy: str, look: Callable[[LoadProgress], None]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="fairlead-demo-") as folder:
        endpoints, config = Path(folder, "endpoints.yaml"), Path(folder, "fairlead.yaml")
        config.write_text(plan.config(policy, endpoints))
        ports = plan.replica_ports
        stub = Child(
            "stub",
            f"--port={ports[0]}",
            f"--replicas={plan.replicas}",
            f"--preset={plan.preset}",
            f"--time-ratio={plan.time_ratio}",
            f"--stream-interval={plan.stream_interval}",
            f"--write-endpoints={endpoints}",
        )
        async with stub:
            await stub.ready(f"http://{HOST}:{ports[-1]}/health")
            async with Child("serve", str(config)) as serve:
                await serve.ready(f"http://{HOST}:{plan.own_ports[2]}/readyz")
                result = await run_in_process(plan.load(policy), look)
    return report.summarise(result, "model")


def _look(progress: LoadProgress, ratio: float) -> str:
    ttft = "" if progress.ttft_p50_ms is None else f", TTFT p50 {progress.ttft_p50_ms * ratio / 1000:.2f} s"
    failed = f", [red]{progress.failed} failed[/]" if progress.failed else ""
    return f"{progress.in_flight} in flight{ttft}{failed}"


def _write(plan: Plan, summaries: dict[str, dict[str, Any]]) -> None:
    (plan.out / "summary.json").write_text(json.dumps(summaries, indent=2) + "\n")
    if find_spec("matplotlib") is not None:
        from fairlead.bench.plot import plot

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


def _show_goals(goals: list[Goal], console: Console) -> None:
    console.print("Goals of this comparison, and what this run came to:")
    for goal in goals:
        verdict = "[green]met   [/]" if goal.met else "[bold red]missed[/]"
        console.print(f"  {verdict}  {goal.wanted}: {goal.got}", highlight=False, soft_wrap=True)


def _show_files(plan: Plan, commands: Commands, console: Console) -> None:
    plot = f" and {plan.out / 'demo.png'}" if find_spec("matplotlib") is not None else ""
    console.print(f"Written: {plan.out / 'summary.json'}{plot}", markup=False, soft_wrap=True)
    console.print(
        f"By hand, the first two each in a terminal of its own, all in this directory:\n"
        f"  {commands.stub}\n  {commands.serve}\n  {commands.curl}\n"
        f"What it decided, and why: {commands.dashboard}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
