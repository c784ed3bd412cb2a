"""What `quality.py` makes of its simulations: the summary, the regrets, a table."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from fairlead.lab.simulator.grid import CellResult, mean_figures

KEPT = (
    "ttft_mean_ms", "ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "e2e_mean_ms", "e2e_p99_ms", "tpot_p50_ms",
    "tpot_p99_ms", "output_tokens_per_s", "goodput", "prefix_hit_rate", "shed", "failed", "cancelled", "requests",
)  # fmt: skip
Summary = dict[str, dict[str, dict[str, float]]]


def summary_of(results: Sequence[CellResult]) -> Summary:
    """{scenario: {policy: {figure: mean over seeds}}}, in the order of the results."""
    means = mean_figures(results)
    return {
        scenario: {policy: {name: row[name] for name in KEPT} for policy, row in policies.items()}
        for scenario, policies in means.items()
    }


def print_table(summary: Summary, regret: Mapping[str, Mapping[str, float]]) -> None:
    order = sorted(regret, key=lambda policy: regret[policy]["ttft_mean_ms"] * regret[policy]["e2e_mean_ms"])
    order += [p for p in dict.fromkeys(p for row in summary.values() for p in row) if p not in regret]
    console = Console(width=max(120, 30 + sum(max(len(policy), 8) + 3 for policy in order)))
    for title, figure in (("mean TTFT, ms", "ttft_mean_ms"), ("mean E2E, ms", "e2e_mean_ms")):
        console.print(_table(title, figure, summary, order))
    table = Table(title="regret over the nine: geometric mean (worst ratio)")
    for name in ("policy", "mean TTFT", "p99 TTFT", "mean E2E", "shed", "failed"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for policy in order:
        row = regret.get(policy)
        if row is not None:
            parts = [f"{row[f]:.2f} ({row[f + '_worst']:.1f})" for f in ("ttft_mean_ms", "ttft_p99_ms", "e2e_mean_ms")]
            table.add_row(policy, *parts, f"{row['shed']:g}", f"{row['failed']:g}")
    console.print(table)


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
