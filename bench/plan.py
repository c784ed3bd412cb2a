"""`fairlead plan` against brute force: the least number of replicas, how far off, and the time that each takes.

python bench/plan.py            four to eight minutes on two cores, nearly all of it brute force
python bench/plan.py --quick    the first requests of one workload

Brute force simulates every size to the end with every seed, from one replica up, until most seeds hold the objective.

JSON: {"workloads": {NAME: {"objective", "requests", "planned", "brute_force", "off", "confidence", "simulations",
"seconds", "cpu_s", "brute_simulations", "brute_cpu_s"}}, "most_off", "slowest_cpu_s"}. CPU seconds are those of all
processes that simulate: two free cores take half of them.
"""

import argparse
import os
import sys
from time import perf_counter
from typing import Any

from _output import tell
from fairlead.lab.simulator.build import ScenarioSpec, build
from fairlead.lab.simulator.objective import objectives
from fairlead.lab.simulator.plan import Case, Run, Trial, Tried, in_processes, plan

#: Workload, objective, and how many of its requests.
WORKLOADS = (
    ("shared-prefix-10", "ttft_p95=2s,tpot_p95=50ms", 0),
    ("agents", "ttft_p95=1s,tpot_p95=30ms", 2500),
    ("azure-code", "ttft_p99=500ms,e2e_p99=3s", 5000),
)
QUICK, QUICK_REQUESTS = "agents", 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_REQUESTS} requests of {QUICK}, and one seed")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    seeds = 1 if options.quick else options.seeds
    rows = {}
    for name, objective, head in WORKLOADS:
        if options.quick and name != QUICK:
            continue
        sys.stderr.write(f"{name} …\n")
        rows[name] = measured(name, objective, QUICK_REQUESTS if options.quick else head, seeds)
    figures = {
        "workloads": rows,
        "most_off": max(row["off"] for row in rows.values()),
        "slowest_cpu_s": max(row["cpu_s"] for row in rows.values()),
    }
    tell(figures, options.json, show)


def measured(name: str, objective: str, head: int, seeds: int) -> dict[str, Any]:
    case = Case(build(ScenarioSpec(name=name, source=name, head=head)), objectives(objective), "policy: default\n")
    count = os.cpu_count() or 1
    begun = perf_counter()
    with in_processes(case, count) as run:
        planned = plan(case, run, seeds=seeds, width=count)
    took = perf_counter() - begun
    tried: list[Tried] = []
    with in_processes(case, count, tried.append) as run:
        least = brute_force(run, seeds)
    assert planned.best is not None
    return {
        "objective": objective,
        "requests": len(case.scenario.workload),
        "planned": planned.best.replicas,
        "brute_force": least,
        "off": abs(planned.best.replicas - least),
        "confidence": planned.confidence,
        "simulations": planned.trials,
        "seconds": round(took, 1),
        "cpu_s": round(planned.cpu_s, 1),
        "brute_simulations": len(tried),
        "brute_cpu_s": round(sum(trial.cpu_s for trial in tried), 1),
    }


def brute_force(run: Run, seeds: int) -> int:
    """The least size that most seeds hold."""
    size = 0
    while True:
        size += 1
        held = [tried.holds for tried in run([Trial(size, seed=seed, complete=True) for seed in range(seeds)])]
        if 2 * sum(held) >= seeds:
            return size


def show(figures: dict[str, Any]) -> None:
    keys = ("objective", "requests", "planned", "brute_force", "confidence", "simulations", "cpu_s")
    keys += ("brute_simulations", "brute_cpu_s")
    print(
        "| workload | objective | requests | `plan` | brute force | confidence | runs | CPU s | its runs | its CPU s |"
    )
    print("|---" * (1 + len(keys)) + "|")
    for name, row in figures["workloads"].items():
        print(f"| {name} | {' | '.join(str(row[key]) for key in keys)} |")
    print(f"\nat most {figures['most_off']} off, in at most {figures['slowest_cpu_s']:.0f} CPU seconds")


if __name__ == "__main__":
    main()
