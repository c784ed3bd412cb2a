"""Every policy on every scenario, simulated: `make quality`.

Nine scenarios of the published comparison (shared prefix at three rates, conversations at three speeds, code
completion, agents, unlike servers) and the adversarial set, each with 8 servers of Qwen3-32B on two H100.

    python bench/quality.py                    everything, in all processors
    python bench/quality.py --quick            a smaller version of each scenario, for a first look
    python bench/quality.py --policy default --scenario agents

Writes `out/quality/summary.json`: {scenario: {policy: figures}}, and prints a table and each policy's regret: the
geometric mean over the nine of value / best value of any policy. A simulated millisecond is no measured one: rankings
are the finding. The published traces are not part of the project; give their directory with `--traces` or
FAIRLEAD_TRACES. Without them made-up workloads of the same size stand in.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import msgspec

from _quality_report import print_table, summary_of
from fairlead.sim.adversarial import ADVERSARIAL
from fairlead.sim.build import ScenarioSpec
from fairlead.sim.grid import Cell, CellResult, run_grid
from fairlead.sim.policies import known_policies
from fairlead.sim.regret import regrets
from fairlead.sim.scenarios import AZURE_CODE, MOONCAKE, QUALITY

QUICK_HEAD = {"shared-prefix-10": 600, "shared-prefix-14": 900, "shared-prefix-20": 900, "agents": 1200}


def main() -> int:
    options = _options()
    traces = _traces(options.traces)
    texts = known_policies()
    chosen = _choose(options.policy, texts, "policy")
    scenarios = _choose(options.scenario, [*QUALITY, *ADVERSARIAL], "scenario")
    cells = [
        Cell(scenario=_spec(name, traces, options.quick), policy=policy, text=texts[policy], seed=seed)
        for name in scenarios
        for policy in chosen
        for seed in range(options.seeds)
    ]
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    results = run_grid(
        cells, processes=options.processes, kept=None if options.fresh else out / "cells.jsonl", progress=_progress
    )
    print(f"\n{len(results)} simulations in {time.monotonic() - begun:.0f} s", file=sys.stderr)
    summary = summary_of(results)
    (out / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=1) + b"\n")
    regret = regrets({name: figures for name, figures in summary.items() if name in QUALITY})
    (out / "regret.json").write_bytes(msgspec.json.format(msgspec.json.encode(regret), indent=1) + b"\n")
    print_table(summary, regret)
    print(f"written: {out / 'summary.json'}")
    errors = [result for result in results if result.error]
    for result in errors:
        print(f"error: {result.policy} on {result.scenario}: {result.error}", file=sys.stderr)
    return 1 if errors else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer requests of each scenario")
    parser.add_argument("--policy", action="append", help="only these (may be given more than once)")
    parser.add_argument("--scenario", action="append", help="only these (may be given more than once)")
    parser.add_argument("--seeds", type=int, default=1, help="repeat with so many seeds and average (default 1)")
    parser.add_argument("--processes", type=int, default=0, help="0 = one per processor")
    parser.add_argument("--traces", default=os.environ.get("FAIRLEAD_TRACES", "traces"), help="directory of the traces")
    parser.add_argument("--out", default="out/quality")
    parser.add_argument("--fresh", action="store_true", help="do not take results of a former run")
    return parser.parse_args()


def _traces(directory: str) -> str:
    path = Path(directory)
    missing = [name for name in (MOONCAKE, AZURE_CODE) if not (path / name).is_file()]
    if missing:
        print(f"note: no {' and no '.join(missing)} in {path}; made-up workloads stand in", file=sys.stderr)
    return str(path.resolve()) if len(missing) < 2 else ""


def _choose(wanted: list[str] | None, known: "list[str] | dict[str, str]", what: str) -> list[str]:
    for name in wanted or ():
        if name not in known:
            sys.exit(f"error: unknown {what} {name!r}; known: {', '.join(known)}")
    return wanted or list(known)


def _spec(name: str, traces: str, quick: bool) -> ScenarioSpec:
    head = (QUICK_HEAD.get(name, 2500) if name in QUALITY else 600) if quick else 0
    return ScenarioSpec(name=name, source=name, traces=traces, head=head)


def _progress(result: CellResult, count: int, total: int) -> None:
    print(
        f"\r[{count}/{total}] {result.scenario} {result.policy} {result.cpu_s:.1f} s CPU    ", end="", file=sys.stderr
    )


if __name__ == "__main__":
    sys.exit(main())
