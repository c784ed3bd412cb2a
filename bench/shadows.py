"""What five shadows change for clients: the same requests through one Envoy to two schedulers, with and without them.

    python bench/shadows.py [--json] [--rate 500] [--count 3000] [--rounds 4]

Windows of both sides take turns, because the machine's speed drifts. Latencies are wall-clock milliseconds of whole
answers, counted from the scheduled arrival; the model servers' answers take no time, so all of it is the way through
gateway and scheduler.

JSON: {"plain": SIDE, "shadowed": SIDE, "p99_ratio", "verdicts", "errors", "skipped"}, where a SIDE has `p50_ms`,
`p99_ms` and `cpu_us` (per request), medians over the windows, and `p99_of_windows_ms`.
"""

import argparse
import asyncio
import re
import sys
import urllib.request
from statistics import median
from typing import Any

from msgspec import structs

from _gateway import Processes, Side, free_ports
from _output import tell
from _process import usage
from fairlead.lab.load import report
from fairlead.lab.load.process import run_in_process
from fairlead.lab.load.spec import Options, RunSpec
from fairlead.lab.load.workload import Chat, Poisson

SHADOWS = ("cost-model", "lpwl", "least-requests", "power-of-two", "dynamo-linear")
_OWN_PORTS = free_ports(6)
SIDES = [Side("plain", *_OWN_PORTS[:3]), Side("shadowed", *_OWN_PORTS[3:])]
PORTS = free_ports(8)


class Pair(Processes):
    """One of the two schedulers has shadows."""

    def _config(self, side: Side) -> dict[str, Any]:
        config = super()._config(side)
        if side.name == "shadowed":
            config["shadows"] = {"policies": [{"policy": one, "name": one} for one in SHADOWS], "cpu": 0.5}
        return config


def metric(side: Side, name: str, labels: str = "") -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{side.admin}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    return sum(float(value) for found, value in re.findall(rf"^{name}(\S*) (\S+)$", page, re.M) if labels in found)


async def run(options: argparse.Namespace) -> dict[str, Any]:
    rows: dict[str, list[tuple[float, float, float]]] = {side.name: [] for side in SIDES}
    with Pair(SIDES, PORTS) as pair:
        spec = RunSpec(
            target="",
            workload=Chat(body_bytes=4096, output_tokens=10, stream=False),
            arrivals=Poisson(options.rate),
            options=Options(requests=options.count, read_usage=False, gaps=False, timeout_s=60, time_limit_s=120),
        )
        for turn in range(options.rounds + 1):
            print(f"window {turn} of {options.rounds} …", file=sys.stderr)
            for side in SIDES if turn % 2 else SIDES[::-1]:
                before = usage(pair.pids[side.name])
                run = structs.replace(spec, target=f"http://127.0.0.1:{side.port}", name=side.name)
                summary = report.summarise(await run_in_process(run))
                spent = (usage(pair.pids[side.name]) - before).cpu_s / max(summary["requests"], 1) * 1e6
                assert not summary["failed"], summary
                if turn:  # the first turn warms up
                    rows[side.name].append((summary["e2e_ms"]["p50"], summary["e2e_ms"]["p99"], spent))
        found: dict[str, Any] = {
            side: {
                **{key: median(one[i] for one in rows) for i, key in enumerate(("p50_ms", "p99_ms", "cpu_us"))},
                "p99_of_windows_ms": [one[1] for one in rows],
            }
            for side, rows in rows.items()
        }
        found["p99_ratio"] = found["shadowed"]["p99_ms"] / found["plain"]["p99_ms"]
        found["verdicts"] = metric(SIDES[1], "fairlead_shadow_decisions_total")
        found["errors"] = metric(SIDES[1], "fairlead_shadow_decisions_total", 'verdict="error"')
        found["skipped"] = metric(SIDES[1], "fairlead_shadow_skipped_total")
    return found


def show(found: dict[str, Any], options: argparse.Namespace) -> None:
    print(f"{options.rate:g}/s, {options.rounds} windows of {options.count} requests, medians over windows\n")
    print(f"{'':<10}{'p50 ms':>10}{'p99 ms':>10}{'us CPU':>10}   p99 of each window")
    for name in ("plain", "shadowed"):
        row = found[name]
        each = " ".join(f"{one:.2f}" for one in row["p99_of_windows_ms"])
        print(f"{name:<10}{row['p50_ms']:>10.2f}{row['p99_ms']:>10.2f}{row['cpu_us']:>10.0f}   {each}")
    print(f"\np99 with shadows / without: {found['p99_ratio']:.3f}")
    errors, skipped = found["errors"], found["skipped"]
    print(f"verdicts {found['verdicts']:.0f}, of which errors {errors:.0f}; decisions left out {skipped:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--rate", type=float, default=500.0)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    found = asyncio.run(run(options))
    tell(found, options.json, lambda figures: show(figures, options))


if __name__ == "__main__":
    main()
