"""A day of traffic on a pool that an autoscaler makes larger and smaller: by what Fairlead asks for, by requests that
wait, and by KV memory in use (the two that users of a HorizontalPodAutoscaler take).

    python bench/autoscale.py [--json] [--hours 2] [--seeds 1] [--workload groups|chat]

Per signal: `replica_hours`, and the share of requests that miss the objective (first token within 2 s, 50 ms per
further token), counting those that fail. The traffic rises from 2 to 20 requests per second and falls again; a server
serves two minutes after it was ordered, with an empty cache; the controller looks every 15 s and shrinks after five
minutes. Every signal has the same routing; of each of the others several targets are shown.
`misses_ratio` and `hours_ratio`: Fairlead's, over those of the queue's best target: the one with the fewest misses
among those that take no fewer replica-hours, or of all if there is none.
"""

import argparse
from statistics import fmean
from typing import Any

from _autoscaling import Autoscaler, Signal, by_demand, by_memory, by_queue, day
from _output import tell
from fairlead.lab.simulator.result import summarise

QUEUE_TARGETS, MEMORY_TARGETS = (0.2, 0.5, 1.0, 2.0, 5.0), (0.4, 0.6, 0.8)
SERVERS, FIRST = 12, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--hours", type=float, default=2.0, help="length of the day (default: 2)")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--workload", default="groups", choices=("groups", "chat"))
    parser.add_argument("--quick", action="store_true", help="one target of each signal")
    arguments = parser.parse_args()
    signals: dict[str, Signal] = {"fairlead_desired_replicas": by_demand}
    signals |= {f"queue {target:g}": by_queue(target) for target in QUEUE_TARGETS[: 1 if arguments.quick else None]}
    signals |= {f"memory {target:g}": by_memory(target) for target in MEMORY_TARGETS[: 1 if arguments.quick else None]}
    rows = {
        name: _row(signal, arguments.hours, arguments.seeds, arguments.workload) for name, signal in signals.items()
    }
    own = rows["fairlead_desired_replicas"]
    queues = [row for name, row in rows.items() if name.startswith("queue")]
    rival = min(
        [row for row in queues if row["replica_hours"] >= own["replica_hours"]] or queues, key=lambda row: row["misses"]
    )
    found = {
        "signals": rows,
        "misses_ratio": round(own["misses"] / max(rival["misses"], 1e-9), 3),
        "hours_ratio": round(own["replica_hours"] / rival["replica_hours"], 3),
    }
    tell(found, arguments.json, _show)


def _row(signal: Signal, hours: float, seeds: int, workload: str) -> dict[str, Any]:
    runs = []
    for seed in range(seeds):
        scenario = day(workload, hours * 3600.0, SERVERS, seed)
        pool = Autoscaler(scenario, "policy: default\n", signal, first=FIRST, least=2, seed=seed)
        summary = summarise(pool.run())
        runs.append((pool.server_seconds / 3600.0, 1.0 - summary.goodput, summary.ttft_mean_ms, summary.ttft_p99_ms,
                     summary.prefix_hit_rate, summary.failed + summary.shed))  # fmt: skip
    names = ("replica_hours", "misses", "ttft_mean_ms", "ttft_p99_ms", "hits", "failed")
    return {name: round(fmean(column), 4) for name, column in zip(names, zip(*runs, strict=True), strict=True)}


def _show(found: dict[str, Any]) -> None:
    print(
        "| signal | replica-hours | misses | TTFT mean, ms | TTFT p99, ms | hits | failed |",
        "|---|---|---|---|---|---|---|",
        sep="\n",
    )
    for name, row in found["signals"].items():
        figures = f"{row['replica_hours']:.2f} | {row['misses']:.2%} | {row['ttft_mean_ms']:,.0f}"
        print(f"| {name} | {figures} | {row['ttft_p99_ms']:,.0f} | {row['hits']:.0%} | {row['failed']:.0f} |")
    print(f"\nmisses {found['misses_ratio']} of the queue's, at {found['hours_ratio']} of its replica-hours")


if __name__ == "__main__":
    main()
