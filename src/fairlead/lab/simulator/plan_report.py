"""A plan for people: the table, goodput over replicas as a picture, and one HTML file that needs nothing else."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from fairlead.lab.load.report import NO_PLOT
from fairlead.lab.simulator.objective import Objective
from fairlead.lab.simulator.plan import Plan, Row
from fairlead.lab.simulator.report import inline, page_head, plots


def document(plan: Plan, wanted: Sequence[Objective], price: float, about: dict[str, Any]) -> dict[str, Any]:
    """The plan as plain values. `price`: the price of a replica per hour, 0 = unknown. `about`: further entries, which
    describe the planned case."""
    best = plan.best
    return about | {
        "objectives": {objective.name: str(objective).partition("=")[2] for objective in wanted},
        "replicas": best.replicas if best else None,
        "prefill": best.prefill if best else None,
        "confidence": plan.confidence,
        "why": plan.why,
        "cost": costs(best, price) if best else None,
        "rows": [msgspec.to_builtins(row) | {"cost": costs(row, price)} for row in plan.rows],
        "simulations": plan.trials,
        "cpu_s": round(plan.cpu_s, 1),
    }


def costs(row: Row, price: float) -> dict[str, float] | None:
    """Costs per hour, and per million served tokens: of answers, and of prompts and answers together."""
    if not price:
        return None
    hour, (prompts, answers) = row.replicas * price, row.tokens_per_hour
    return {
        "hour": round(hour, 4),
        "million_output_tokens": round(hour / answers * 1e6, 4) if answers else 0.0,
        "million_tokens": round(hour / (prompts + answers) * 1e6, 4) if prompts + answers else 0.0,
    }


def lines(plan: Plan, wanted: Sequence[Objective], price: float) -> list[list[str]]:
    """The table: its header, then a row for each size."""
    head = ["replicas", "goodput", *(objective.name for objective in wanted), "seeds"]
    split, dead = any(row.prefill for row in plan.rows), any(row.dead for row in plan.rows)
    head[1:1] = [*(["prefill"] if split else []), *(["dead"] if dead else [])]
    rows = [head + (["per million\noutput tokens"] if price else [])]
    for row in plan.rows:
        cells = [("* " if row == plan.best else "") + str(row.replicas)]
        cells += [str(row.prefill)] if split else []
        cells += [str(row.dead)] if dead else []
        cells += [f"{row.goodput:.1%}", *(objective.shown(row.measured[objective.name]) for objective in wanted)]
        cells.append(f"{row.held} of {row.seeds}")
        cost = costs(row, price)
        rows.append(cells + ([f"{cost['million_output_tokens']:,.2f}"] if cost else []))
    return rows


def print_plan(plan: Plan, wanted: Sequence[Objective], price: float) -> None:
    """Print the table to stdout; `*` marks the least size that holds."""
    head, *rows = lines(plan, wanted, price)
    table = Table(box=None, pad_edge=False)
    for name in head:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(markup=False, highlight=False).print(table)


def draw(plan: Plan, wanted: Sequence[Objective], path: Path) -> None:
    """Draw goodput over replicas as SVG. Raises `ImportError` without matplotlib."""
    pyplot = plots()
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(figsize=(4.6, 3.0), layout="constrained")
    for dead in dict.fromkeys(row.dead for row in plan.rows):
        rows = [row for row in plan.rows if row.dead == dead]
        label = "goodput" if not dead else f"goodput, {dead} of them dead after a third of the time"
        axes.plot([row.replicas for row in rows], [row.goodput for row in rows], "o-", markersize=5, label=label)
    if plan.best is not None:
        label = f"least that holds: {plan.best.replicas}"
        axes.axvline(plan.best.replicas, color="#1d9a83", linewidth=1, linestyle="--", label=label)
    axes.set_ylim(0.0, 1.05)
    axes.yaxis.set_major_formatter(lambda value, _place: f"{value:.0%}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(f"replicas; goodput: within {', '.join(str(o) for o in wanted if o.limit)}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper left", frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def write_plan(
    plan: Plan, wanted: Sequence[Objective], price: float, title: str, report: dict[str, Any], out: Path
) -> tuple[list[Path], str]:
    """Write plan.json, goodput.svg if matplotlib is installed, and report.html. Returns their paths, and a message
    about what is missing. Raises `OSError`."""
    out.mkdir(parents=True, exist_ok=True)
    written, missing = [out / "plan.json"], ""
    written[0].write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    figure = f"<p>{NO_PLOT}</p>"
    try:
        draw(plan, wanted, out / "goodput.svg")
        written.append(out / "goodput.svg")
        figure = f"<figure>{inline(written[-1])}</figure>"
    except ImportError:
        missing = NO_PLOT
    head, *rows = lines(plan, wanted, price)
    cells = ["".join(f"<th>{escape(name)}" for name in head)]
    cells += ["".join(f"<td>{escape(cell)}" for cell in row) for row in rows]
    page = (
        page_head("Fairlead plan", "How many replicas")
        + "".join(f"<p>{escape(line)}</p>" for line in title.splitlines())
        + f'<div class="wide" tabindex="0"><table><tr>{"<tr>".join(cells)}</table></div>{figure}'
        f'<h2>In full</h2><pre tabindex="0">{escape(written[0].read_text(encoding="utf-8"))}</pre></main></html>'
    )
    written.append(out / "report.html")
    written[-1].write_text(page, encoding="utf-8")
    return written, missing
