"""What `quality.py` makes of its simulations: the summary, the regrets, a table."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from _quality_entries import KNOWN, SETS
from fairlead.lab.simulator.grid import COMPARED, CellResult, mean_figures, regrets
from fairlead.lab.simulator.scenarios import APART

KEPT = (
    "ttft_mean_ms", "ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "e2e_mean_ms", "e2e_p99_ms", "tpot_p50_ms",
    "tpot_p99_ms", "output_tokens_per_s", "goodput", "prefix_hit_rate", "shed", "failed", "cancelled", "requests",
)  # fmt: skip
Summary = dict[str, dict[str, dict[str, float]]]
Regrets = Mapping[str, Mapping[str, float]]


def summary_of(results: Sequence[CellResult]) -> Summary:
    """{scenario: {policy: {figure: mean over seeds}}}, in the order of the results."""
    means = mean_figures(results)
    return {
        scenario: {policy: {name: row[name] for name in KEPT} for policy, row in policies.items()}
        for scenario, policies in means.items()
    }


def parted(summary: Summary) -> tuple[Summary, Summary]:
    """What nothing was known at the beginning of, and what the truth was."""
    known = {name.removesuffix(KNOWN): rows for name, rows in summary.items() if name.endswith(KNOWN)}
    return {name: rows for name, rows in summary.items() if not name.endswith(KNOWN)}, known


def regrets_of(chosen: str, summary: Summary) -> Regrets:
    """Over the scenarios of a set, as far as they were simulated. Pools of prefill and decode servers are for other
    rules."""
    names = [name for name in SETS[chosen] if name in summary and name not in APART]
    return regrets({name: summary[name] for name in names})


def judgement(regret: Regrets) -> dict[str, dict[str, dict[str, float]]]:
    """{policy: {ttft_mean, ttft_p99, e2e_mean, goodput: {geomean, worst}}}: the form of `summary.json`."""
    return {
        policy: {
            figure.removesuffix("_ms"): {"geomean": row[figure], "worst": row[f"{figure}_worst"]} for figure in COMPARED
        }
        for policy, row in regret.items()
    }


def print_table(summary: Summary, judged: Mapping[str, Regrets]) -> None:
    """`judged`: the regrets of each set."""
    first: Regrets = next(iter(judged.values()), {})
    order = sorted(first, key=lambda policy: first[policy]["ttft_mean_ms"] * first[policy]["e2e_mean_ms"])
    order += [p for p in dict.fromkeys(p for row in summary.values() for p in row) if p not in first]
    console = Console(width=max(120, 30 + sum(max(len(policy), 8) + 3 for policy in order)))
    for title, figure in (("mean TTFT, ms", "ttft_mean_ms"), ("mean E2E, ms", "e2e_mean_ms")):
        console.print(_table(title, figure, summary, order))
    for name, regret in judged.items():
        console.print(_regret_table(f"regret over the {name} set: geometric mean (worst ratio)", regret, order))


def _regret_table(title: str, regret: Regrets, order: Sequence[str]) -> Table:
    table = Table(title=title)
    for name in ("policy", "mean TTFT", "p99 TTFT", "mean E2E", "goodput", "shed", "failed"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for policy in order:
        row = regret.get(policy)
        if row is not None:
            parts = [f"{row[f]:.2f} ({row[f + '_worst']:.1f})" for f in COMPARED]
            table.add_row(policy, *parts, f"{row['shed']:g}", f"{row['failed']:g}")
    return table


def _table(title: str, figure: str, summary: Summary, order: Sequence[str]) -> Table:
    table = Table(title=f"{title} (* = some were shed or failed)")
    table.add_column("scenario")
    for policy in order:
        table.add_column(policy, justify="right")
    for scenario, policies in summary.items():
        best = min((row[figure] for row in policies.values()), default=0.0)
        cells = []
        for policy in order:
            row = policies.get(policy)
            if row is None:
                cells.append("-")
                continue
            text = f"{row[figure]:,.0f}" + ("*" if row["shed"] or row["failed"] else "")
            cells.append(f"[bold]{text}[/bold]" if row[figure] == best else text)
        table.add_row(scenario, *cells)
    return table
