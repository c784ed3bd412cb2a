"""Every rule in front of engines that nobody modelled, simulated: is the default right whatever the engine is like?

For each shape of engine (`_engines_shapes.py`) a pool of servers and conversations with shared beginnings, at 40, 70
and 90 % of what the pool can do. That capacity is the engine's own, found by simulation (--capacity): the rate at which
first tokens take five times as long as in an idle pool, under the better of two rules that model nothing. The
scheduler's prior knows none of the shapes, and every request counts from the first.

    python bench/engines.py                       all shapes, in two processes
    python bench/engines.py --quick               fewer requests, seeds and loads
    python bench/engines.py --shape cpu --shape moe --policy default --policy round-robin --seeds 3

Per shape and rule: geometric means over loads and seeds. Regret is the default's figure / that of the shape's best.
`behind_round_robin` has the shapes at which the default is behind round robin or least-requests in mean TTFT or E2E,
at some load or over all: paired over the seeds, the mean log ratio is above 2 %, and above zero with 99.5 % confidence
(Student's t; there are about 200 such tests). `false_alarms` counts engines taken for hanging ones: none hangs here.
"""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from math import exp, log, sqrt
from multiprocessing import get_context
from statistics import fmean, stdev
from time import monotonic, process_time
from typing import Any

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from _engines_shapes import LOADS, SHAPES, scenario
from _output import tell
from fairlead.core.records import DecisionRecord, OutcomeRecord, StallRecord
from fairlead.lab.simulator.result import summarise
from fairlead.lab.simulator.run import config_from, policy_text
from fairlead.lab.simulator.simulation import Simulation

DEFAULT, ROUND_ROBIN, LEAST_REQUESTS = "default", "round-robin", "least-requests"
RULES = (DEFAULT, ROUND_ROBIN, LEAST_REQUESTS, "weights-322", "lmetric", "sticky-until-saturated")
#: What the capacity is measured with.
PLAIN = ("weights-322", LEAST_REQUESTS)
KNEE, KNEE_REQUESTS = 5.0, 300
#: Requests of a run, seeds, loads.
WHOLE, QUICK = (300, 4, LOADS), (200, 4, (LOADS[1], LOADS[2]))
#: Captured traffic is short, and the same for every seed: only the scheduler's chance differs.
CAPTURED_SEEDS = 12
#: First share of the forecasts that is not counted in the band: nothing was learned yet.
LEARNING = 0.1
#: Student's t at 99.5 % by degrees of freedom; the last holds for more.
STUDENT = (63.7, 9.92, 5.84, 4.60, 4.03, 3.71, 3.50, 3.36, 3.25, 3.17, 3.11, 3.05, 3.01, 2.98, 2.95, 2.92, 2.9)
LEAST_RATIO = 1.02
FIGURES = ("ttft_ms", "e2e_ms", "ttft_p99_ms", "busiest")


class Cell(Struct, frozen=True):
    """One simulation."""

    shape: str
    load: float
    #: Requests per second, or the multiple of captured traffic's pace.
    rate: float
    requests: int
    seed: int
    rule: str


class Found(Struct, frozen=True):
    """What came of a cell. `in_band`: share of first tokens within the forecast's 90 % band; below 0 = no forecasts."""

    cell: Cell
    figures: dict[str, float]
    in_band: float
    failed: int
    #: Times that an engine was taken for one that hangs.
    alarms: int
    cpu_s: float


def run_cell(cell: Cell) -> Found:
    begun = process_time()
    records: list[DecisionRecord | OutcomeRecord | StallRecord] = []
    config, registry = config_from(policy_text(cell.rule))
    made = scenario(SHAPES[cell.shape], cell.rate, cell.requests, cell.seed)
    simulation = Simulation(made, config, cell.seed, watch=records.append, registry=registry)
    simulation.run()
    summary = summarise(simulation)
    sent = [0] * len(simulation.servers)
    for job in simulation.jobs:
        sent[job.server] += job.server >= 0
    figures = (summary.ttft_mean_ms, summary.e2e_mean_ms, summary.ttft_p99_ms, max(sent) / sum(sent))
    return Found(
        cell=cell,
        figures=dict(zip(FIGURES, figures, strict=True)),
        in_band=_in_band([record for record in records if isinstance(record, OutcomeRecord)]),
        failed=summary.failed + summary.shed,
        alarms=sum(isinstance(record, StallRecord) and record.level != "well" for record in records),
        cpu_s=process_time() - begun,
    )


def _in_band(outcomes: Sequence[OutcomeRecord]) -> float:
    told = [o for o in outcomes if o.forecast is not None and o.ttft_ms >= 0][int(LEARNING * len(outcomes)) :]
    return (
        fmean(o.forecast.low_ms <= o.sent_ttft_ms <= o.forecast.high_ms for o in told if o.forecast) if told else -1.0
    )


def capacity(name: str) -> float:
    """The highest rate, requests per second, at which first tokens take `KNEE` times as long as in an idle pool, under
    the better plain rule. By bisection of the rate's logarithm, within 3 %."""
    shape = SHAPES[name]
    idle = min(_mean_ttft(name, 0.05, rule, 40) for rule in PLAIN)
    low, high = 1.0, 1000.0
    while high / low > 1.03:
        rate = sqrt(low * high)
        bears = any(_mean_ttft(name, rate, rule, KNEE_REQUESTS * shape.times) < KNEE * idle for rule in PLAIN)
        low, high = (rate, high) if bears else (low, rate)
    return low


def _mean_ttft(name: str, rate: float, rule: str, requests: int) -> float:
    return run_cell(Cell(name, 1.0, rate, requests, 1_000, rule)).figures["ttft_ms"]


def cells(options: argparse.Namespace) -> list[Cell]:
    requests, seeds, loads = QUICK if options.quick else WHOLE
    found = []
    for name in options.shape or SHAPES:
        shape = SHAPES[name]
        count = options.seeds or (CAPTURED_SEEDS if shape.captured else seeds)
        for load in shape.paces or options.load or loads:
            for seed in range(count):
                for rule in options.policy or RULES:
                    rate = load * shape.capacity_rps
                    found.append(Cell(name, load, rate, (options.requests or requests) * shape.times, seed, rule))
    return found


# ---- what the figures say ----

#: By shape, load, rule: what came of its seeds, in their order.
Grouped = dict[str, dict[float, dict[str, list[Found]]]]


def grouped(results: Sequence[Found]) -> Grouped:
    found: Grouped = {}
    for result in results:
        cell = result.cell
        found.setdefault(cell.shape, {}).setdefault(cell.load, {}).setdefault(cell.rule, []).append(result)
    return found


def _mean(rows: Sequence[Found], figure: str) -> float:
    """Geometric."""
    return exp(fmean(log(max(row.figures[figure], 1e-6)) for row in rows))


def behind(mine: Sequence[Found], other: Sequence[Found], figure: str) -> bool:
    """Beyond noise, as the module says. One seed says nothing of noise: there 5 % decide."""
    ratios = [log(a.figures[figure] / b.figures[figure]) for a, b in zip(mine, other, strict=True)]
    if len(ratios) < 2:
        return ratios[0] > log(1.05)
    error = stdev(ratios) / sqrt(len(ratios))
    return fmean(ratios) > max(log(LEAST_RATIO), STUDENT[min(len(ratios) - 2, len(STUDENT) - 1)] * error)


def report(results: Sequence[Found]) -> dict[str, Any]:
    shapes = {}
    for name, loads in grouped(results).items():
        shapes[name] = {"what": SHAPES[name].what, "capacity_rps": SHAPES[name].capacity_rps} | _shape(loads)
    made: dict[str, Any] = {"shapes": shapes}
    judged = {name: shape for name, shape in shapes.items() if "regret_ttft" in shape}
    if judged:
        for figure in ("ttft", "e2e"):
            made[f"worst_regret_{figure}"] = max(shape[f"regret_{figure}"] for shape in judged.values())
            made[f"worst_load_{figure}"] = max(_at_a_load(shape, figure) for shape in judged.values())
        made["behind_round_robin"] = [name for name, shape in judged.items() if shape["behind"]]
    made["false_alarms"] = sum(result.alarms for result in results if result.cell.rule == DEFAULT)
    made["failed"] = sum(result.failed for result in results)
    made["cpu_s"] = round(sum(result.cpu_s for result in results), 1)
    return made


def _at_a_load(shape: dict[str, Any], figure: str) -> float:
    """The worst regret at any single load."""
    name = f"{figure}_ms"
    return round(max(by[DEFAULT][name] / min(row[name] for row in by.values()) for by in shape["loads"].values()), 3)


def _shape(loads: dict[float, dict[str, list[Found]]]) -> dict[str, Any]:
    first = next(iter(loads.values()))
    rules = {rule: _row([row for by_rule in loads.values() for row in by_rule[rule]]) for rule in first}
    shape: dict[str, Any] = {
        "rules": rules,
        "loads": {f"{load:g}": {rule: _row(rows) for rule, rows in by_rule.items()} for load, by_rule in loads.items()},
    }
    if DEFAULT not in rules or len(rules) < 2:
        return shape
    for figure in ("ttft", "e2e"):
        best = min(row[f"{figure}_ms"] for row in rules.values())
        shape[f"regret_{figure}"] = round(rules[DEFAULT][f"{figure}_ms"] / best, 3)
    every = {rule: [row for by_rule in loads.values() for row in by_rule[rule]] for rule in rules}
    shape["behind"] = [
        f"{figure.removesuffix('_ms')} {rule} {load if isinstance(load, str) else format(load, '.0%')}"
        for load, by_rule in (*loads.items(), ("overall", every))
        for rule in (ROUND_ROBIN, LEAST_REQUESTS)
        for figure in ("ttft_ms", "e2e_ms")
        if rule in by_rule and behind(by_rule[DEFAULT], by_rule[rule], figure)
    ]
    return shape


def _row(rows: Sequence[Found]) -> dict[str, float]:
    found = {figure: round(_mean(rows, figure), 4 if figure == "busiest" else 2) for figure in FIGURES}
    bands = [row.in_band for row in rows if row.in_band >= 0]
    return found | {
        "busiest_most": round(max(row.figures["busiest"] for row in rows), 4),
        "in_band": round(fmean(bands), 3) if bands else -1.0,
        "alarms": sum(row.alarms for row in rows),
    }


def show(found: dict[str, Any]) -> None:
    console = Console(width=160)
    for name, shape in found["shapes"].items():
        rate = f"{shape['capacity_rps']:.3g} requests/s" if not SHAPES[name].captured else "captured pace"
        table = Table(title=f"{name}: {shape['what']} (100 % = {rate})", title_justify="left")
        for column in ("rule", "mean TTFT, ms", "mean E2E, ms", "p99 TTFT, ms", "busiest, most", "in band"):
            table.add_column(column, justify="left" if column == "rule" else "right")
        for column in shape["loads"]:
            table.add_column(f"TTFT {float(column):.0%}", justify="right")
        for rule, row in shape["rules"].items():
            cells = [f"{row[figure]:,.0f}" for figure in FIGURES[:3]]
            cells.append(f"{row['busiest']:.0%}, {row['busiest_most']:.0%}")
            cells.append(f"{row['in_band']:.0%}" if row["in_band"] >= 0 else "-")
            table.add_row(rule, *cells, *(f"{load[rule]['ttft_ms']:,.0f}" for load in shape["loads"].values()))
        console.print(table)
        if "regret_ttft" in shape:
            line = f"regret: TTFT {shape['regret_ttft']:.2f}, E2E {shape['regret_e2e']:.2f}"
            console.print(line + (f"; behind: {', '.join(shape['behind'])}" if shape["behind"] else ""), "\n")
    summary = Table(*COLUMNS, title="the default beside round robin and the shape's best")
    for row in summary_rows(found):
        summary.add_row(*row)
    console.print(summary)
    for key, value in found.items():
        if key != "shapes":
            console.print(f"{key}: {value}")


COLUMNS = (
    "shape",
    "TTFT",
    "round robin",
    "best",
    "regret",
    "E2E",
    "round robin",
    "best",
    "regret",
    "busiest",
    "in band",
)


def summary_rows(found: dict[str, Any]) -> list[list[str]]:
    """Of the shapes at which the default met other rules; the table of bench/NOTES.md."""
    made = []
    for name, shape in found["shapes"].items():
        if "regret_ttft" in shape:
            rules = shape["rules"]
            row = [name]
            for figure in ("ttft", "e2e"):
                best = min(rules, key=lambda rule: rules[rule][f"{figure}_ms"])
                values = [
                    rules[rule][f"{figure}_ms"] if rule in rules else 0.0 for rule in (DEFAULT, ROUND_ROBIN, best)
                ]
                row += [f"{value:,.0f}" for value in values] + [f"{shape[f'regret_{figure}']:.2f}"]
                row[-2] += f" {best}"
            made.append([*row, f"{rules[DEFAULT]['busiest_most']:.0%}", f"{rules[DEFAULT]['in_band']:.0%}"])
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--quick", action="store_true", help="a first look: fewer requests, seeds and loads")
    parser.add_argument("--shape", action="append", choices=SHAPES, help="only these (may be given more than once)")
    parser.add_argument("--policy", action="append", help="only these: rules, or files (may be given more than once)")
    parser.add_argument("--load", action="append", type=float, help="share of the capacity, instead of the usual ones")
    parser.add_argument("--seeds", type=int, default=0, help="instead of the usual number")
    parser.add_argument("--requests", type=int, default=0, help="of a run, instead of the usual number")
    parser.add_argument("--capacity", action="store_true", help="find what the pools can do, and nothing else")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    begun = monotonic()
    names = [name for name in options.shape or SHAPES if not (options.capacity and SHAPES[name].captured)]
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        if options.capacity:
            tell(dict(zip(names, pool.map(capacity, names), strict=True)), options.json, print)
            return 0
        results = list(pool.map(run_cell, cells(options), chunksize=4))
    print(f"{len(results)} simulations in {monotonic() - begun:.0f} s", file=sys.stderr)
    tell(report(results), options.json, show)
    return 0


if __name__ == "__main__":
    sys.exit(main())
