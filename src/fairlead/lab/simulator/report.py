"""A comparison for people: tables on the terminal, one self-contained HTML file, and plots (with matplotlib)."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from textwrap import fill
from typing import Any

import msgspec
from msgspec import structs
from rich.console import Console
from rich.table import Column, Table

from fairlead.lab.load.plots import log_axis
from fairlead.lab.load.report import NO_PLOT
from fairlead.lab.simulator.grid import (
    Cell,
    CellResult,
    Figures,
    failures,
    for_json,
    judged,
    mean_figures,
    note_of_seeds,
    ratios_in_words,
    regret_text,
    served,
)
from fairlead.lab.simulator.scenarios import usable_traces

#: (file, figure, title, log axis)
_PLOTS = (
    ("ttft", "ttft_mean_ms", "mean TTFT, ms (log)", True),
    ("ttft_p99", "ttft_p99_ms", "p99 TTFT, ms (log)", True),
    ("e2e", "e2e_mean_ms", "mean E2E, ms (log)", True),
    ("hit", "prefix_hit_rate", "share of prompt tokens hit", False),
)
_MARKS = "osD^vP*X<>"


def draw(means: Mapping[str, Mapping[str, Figures]], out: Path) -> list[tuple[Path, str]]:
    """One SVG per figure: dots per policy, a line per scenario. Returns (path, note about values without a dot). Raises
    `ImportError`."""
    paths = [out / f"{stem}.svg" for stem, _, _, _ in _PLOTS]
    return [
        (path, _dots(means, key, title, log, path)) for path, (_, key, title, log) in zip(paths, _PLOTS, strict=True)
    ]


def plots() -> Any:
    """matplotlib's pyplot for SVG whose paths and ids are the same from run to run. Raises `ImportError`."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "fairlead", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    return pyplot


def _dots(means: Mapping[str, Mapping[str, Figures]], key: str, title: str, log: bool, path: Path) -> str:
    """Draw one figure, narrow enough for a phone."""
    pyplot = plots()
    policies = list(dict.fromkeys(name for row in means.values() for name in row))
    values = {
        (policy, line): row.get(policy, {}).get(key, 0.0)
        for policy in policies
        for line, row in enumerate(means.values())
    }
    shown = {place: value for place, value in values.items() if value > 0.0 or not log}
    height = 1.0 + len(means) * max(0.3, 0.09 * len(policies)) + 0.17 * len(policies)
    figure, axes = pyplot.subplots(figsize=(4.6, height), layout="constrained")
    for index, policy in enumerate(policies):
        dots = [(value, line) for (name, line), value in shown.items() if name == policy]
        beside = 0.8 * (index - (len(policies) - 1) / 2) / len(policies)
        axes.plot(
            [value for value, _ in dots], [line + beside for _, line in dots], _MARKS[index % len(_MARKS)],
            label=policy, color=pyplot.get_cmap("tab20")(index % 20), markersize=5,
        )  # fmt: skip
    if not log:
        axes.set_xlim(0, 1.05 * max(shown.values(), default=0.0) or 1.0)
    elif shown:
        log_axis(axes, "x", [*shown.values()], lambda value: f"{value:,g}")
    axes.set_yticks(range(len(means)), [fill(name, 18) for name in means])
    axes.set_ylim(len(means) - 0.5, -0.5)
    axes.set_xlabel(title)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower left", ncols=2, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    missing = [f"{policy} on {[*means][line]}" for policy, line in values if (policy, line) not in shown]
    return f"No figure: {', '.join(missing)}" if missing else ""


#: (title, key, digits) of the columns.
COLUMNS = (
    ("TTFT\nmean", "ttft_mean_ms", 0), ("TTFT\np50", "ttft_p50_ms", 0), ("TTFT\np90", "ttft_p90_ms", 0),
    ("TTFT\np99", "ttft_p99_ms", 0), ("TPOT\np50", "tpot_p50_ms", 1), ("TPOT\np99", "tpot_p99_ms", 1),
    ("E2E\nmean", "e2e_mean_ms", 0), ("E2E\np50", "e2e_p50_ms", 0), ("E2E\np99", "e2e_p99_ms", 0),
    ("tok/s", "output_tokens_per_s", 0), ("goodput", "goodput", 3), ("hit", "prefix_hit_rate", 3),
    ("balance", "balance", 2), ("shed", "shed", 0), ("failed", "failed", 0),
)  # fmt: skip
#: Width in characters for measuring a table that is not shown.
_WIDEST = 10_000
_POLICY_WIDTH = 32
_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:76rem;padding:0 1rem;color:#1c1e21;background:#fff}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(20rem,100%),1fr));gap:1rem}
.wide{overflow-x:auto}h1,h2,h3,p{overflow-wrap:anywhere}
table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid #dde}
th:first-child,td:first-child{text-align:left}
.best{font-weight:700}.bad{color:#b00}
figure{margin:0}svg{max-width:100%;height:auto}pre{background:#f4f5f7;padding:.6rem;overflow:auto}
@media(prefers-color-scheme:dark){body{background:#16181c;color:#e4e6ea}td,th{border-color:#333}pre{background:#22252b}
.bad{color:#f77}}
"""
_NOTE = (
    "Simulated with Fairlead's own engine model. Trust the ranking of the policies more than the milliseconds. "
    "Latencies are of requests that were served to the end: read them together with shed and failed requests."
)


def print_comparison(results: Sequence[CellResult]) -> None:
    """Print one table per scenario, and the regrets if there are several policies."""
    console = Console()
    means = mean_figures(results)
    for scenario, policies in means.items():
        rows = sorted(policies.items(), key=_by_latency)
        for table in _tables(console, scenario, rows):
            console.print(table)
    regret = judged(results)
    if len(regret) > 1:
        console.print(_regret_table(regret))


def _by_latency(row: tuple[str, Figures]) -> tuple[bool, float]:
    """A policy that served nothing comes last."""
    return not served(row[1]), row[1]["ttft_mean_ms"]


def _tables(console: Console, title: str, rows: Sequence[tuple[str, Figures]]) -> list[Table]:
    """One table, or several of about equal size if the terminal is too narrow for all columns, so that no figure is cut
    off and none stands alone."""
    options = console.options.update(max_width=_WIDEST)
    tables: list[Table] = []
    for size in sorted({-(-len(COLUMNS) // parts) for parts in range(1, len(COLUMNS) + 1)}, reverse=True):
        tables = [_columns(title, rows, begin, begin + size) for begin in range(0, len(COLUMNS), size)]
        if all(console.measure(table, options=options).maximum <= console.width for table in tables):
            break
    return tables


def _policy_column() -> Column:
    return Column("policy", overflow="fold", max_width=_POLICY_WIDTH)


def _columns(title: str, rows: Sequence[tuple[str, Figures]], begin: int, end: int) -> Table:
    table = Table(_policy_column(), title=f"{title}, times in ms{_seeds(rows)}")
    for name, _, _ in COLUMNS[begin:end]:
        table.add_column(name, justify="right", no_wrap=True)
    for policy, figures in rows:
        table.add_row(policy, *(_cell(figures, key, digits) for _, key, digits in COLUMNS[begin:end]))
    return table


def _seeds(rows: Sequence[tuple[str, Figures]]) -> str:
    most = max((figures.get("seeds", 1) for _, figures in rows), default=1)
    return f", means of {most} seeds ± standard deviation" if most > 1 else ""


def _regret_table(regret: dict[str, Figures]) -> Table:
    table = Table(_policy_column(), title=f"regret = value / best value: {ratios_in_words(regret)}")
    for name in ("TTFT\nmean", "TTFT\np99", "E2E\nmean", "shed", "failed"):
        table.add_column(name, justify="right", no_wrap=name in ("shed", "failed"))
    for policy, row in sorted(regret.items(), key=lambda item: item[1]["ttft_mean_ms"]):
        parts = [regret_text(row, figure) for figure in ("ttft_mean_ms", "ttft_p99_ms", "e2e_mean_ms")]
        table.add_row(policy, *parts, f"{row['shed']:g}", f"{row['failed']:g}")
    return table


def write_report(results: Sequence[CellResult], cells: Sequence[Cell], out: Path) -> list[Path]:
    """Write results.json, one SVG per plot if matplotlib is installed, and report.html. Returns the paths."""
    means = mean_figures(results)
    regret = judged(results)
    document = {
        "summary": {name: {policy: for_json(row) for policy, row in rows.items()} for name, rows in means.items()},
        "regret": regret,
        "cells": [structs.replace(result, figures=for_json(result.figures)) for result in results],
        "configuration": [{"scenario": c.scenario, "policy": c.policy, "text": c.text, "seed": c.seed} for c in cells],
    }
    written = [out / "results.json"]
    written[0].write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))
    try:
        drawn = draw(means, out)
    except ImportError:
        Console(stderr=True).print(NO_PLOT, markup=False, soft_wrap=True)
        drawn = []
    written += [path for path, _ in drawn]
    page = out / "report.html"
    page.write_text(_page(means, regret, drawn, cells, failures(results)), encoding="utf-8")
    return [*written, page]


def _page(
    means: dict[str, dict[str, Figures]],
    regret: dict[str, Figures],
    plots: list[tuple[Path, str]],
    cells: Sequence[Cell],
    failed: Mapping[str, Sequence[str]],
) -> str:
    parts = [f"{page_head('Fairlead comparison', 'Policies compared')}<p>{_NOTE}</p>"]
    if len(regret) > 1:
        rows = sorted(regret.items(), key=lambda item: item[1]["ttft_mean_ms"])
        columns = [("mean TTFT", "ttft_mean_ms", 2), ("worst", "ttft_mean_ms_worst", 1), ("p99 TTFT", "ttft_p99_ms", 2)]
        columns += [("mean E2E", "e2e_mean_ms", 2), ("worst", "e2e_mean_ms_worst", 1), ("failed", "failed", 0)]
        parts.append("<h2>Regret: geometric mean of value / best value of any policy</h2>" + _table(rows, columns))
    figures = [f"<figure>{inline(path)}<figcaption>{escape(note)}</figcaption></figure>" for path, note in plots]
    parts.append(f'<div class="plots">{"".join(figures)}</div>' if figures else f"<p>{NO_PLOT}</p>")
    for scenario, policies in means.items():
        rows = sorted(policies.items(), key=_by_latency)
        parts.append(f"<h2>{escape(scenario)}{_seeds(rows)}</h2>" + _table(rows, COLUMNS))
        parts += [f"<p>{escape(reason)}</p>" for reason in failed[scenario]]
    texts = {cell.policy: cell.text for cell in cells}
    parts.append("<h2>Configurations</h2>")
    parts += [f'<h3>{escape(name)}</h3><pre tabindex="0">{escape(text)}</pre>' for name, text in texts.items()]
    scenarios = {cell.scenario.name: cell.scenario for cell in cells}
    _, note = usable_traces(cells[0].scenario.traces, [cell.scenario.source for cell in cells]) if cells else ("", "")
    note = f"{note} {note_of_seeds(cells)}".strip()
    described = msgspec.json.format(msgspec.json.encode(list(scenarios.values()))).decode()
    parts.append(f'<h3>Scenarios</h3><p>{escape(note)}</p><pre tabindex="0">{escape(described)}</pre></main></html>')
    return "\n".join(parts)


def page_head(title: str, heading: str) -> str:
    """The beginning of a page that needs no other file. It ends with `</main></html>`."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{_STYLE}</style><main><h1>{heading}</h1>"
    )


def _table(rows: Sequence[tuple[str, Figures]], columns: Sequence[tuple[str, str, int]]) -> str:
    head = "".join(f"<th>{escape(title)}" for title in ("policy", *(title for title, _, _ in columns)))
    able = [row for _, row in rows if served(row)] or [row for _, row in rows]
    lowest = {key: min(row[key] for row in able) for _, key, _ in columns if key.endswith(("_ms", "_worst"))}
    body = []
    for name, row in rows:
        cells = []
        for _, key, digits in columns:
            kind = "best" if row[key] == lowest.get(key) else "bad" if key in ("shed", "failed") and row[key] else ""
            cells.append(f'<td class="{kind}">{_cell(row, key, digits)}')
        body.append(f"<tr><td>{escape(name)}{''.join(cells)}")
    return f'<div class="wide" tabindex="0"><table><tr>{head}{"".join(body)}</table></div>'


def _cell(figures: Figures, key: str, digits: int) -> str:
    if not served(figures) and key.endswith("_ms"):
        return "–"
    spread = f" ±{figures[f'{key}_sd']:,.{digits}f}" if f"{key}_sd" in figures else ""
    return f"{figures[key]:,.{digits}f}{spread}"


def inline(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    return text[text.index("<svg") :]
