"""Every policy on every scenario, simulated: `make quality`.

The development set: nine scenarios of the published comparison (shared prefix at three rates, conversations at three
speeds, code completion, agents, unlike servers), the adversarial set, stages of the published shared-prefix benchmark,
situations that pools get into, and pools of prefill and decode servers; mostly 8 servers of Qwen3-32B on two H100.
The held-out set: docs/workloads.md.

    python bench/quality.py                    the development set, in all processors
    python bench/quality.py --set drawn        24 scenarios drawn at random; --scenario drawn-7: others
    python bench/quality.py --set held_out     what nothing was tuned on: once per release, and reported as it comes
    python bench/quality.py --quick            a smaller version of each scenario, for a first look
    python bench/quality.py --policy default --scenario agents
    python bench/quality.py --docs docs        all of it, and the tables and plots of docs/benchmarks-policies.md

`fairlead sim quality` does the same with policies of your own (`fairlead.lab.simulator.quality` says what the scheduler
knows and what a regret is); this program writes the pages, too.

Writes `out/quality/summary.json`: {set: {"policies": {policy: {figure: {"geomean", "worst"}}}}}, each policy's regret
over the set's scenarios, and `scenarios.json`: {"scenarios", "known", "calm": {scenario: {policy: figures}}}. Prints
tables of both. A simulated millisecond is no measured one: rankings are the finding. The published traces are not part
of the project; give their directory with `--traces` or FAIRLEAD_TRACES. Without them made-up workloads of the same size
stand in.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from _output import tell
from _quality_docs import Run, write_section
from fairlead.lab.simulator.grid import CellResult, run_grid
from fairlead.lab.simulator.quality import SETS, cells, entries, named, names, print_table, write_summary
from fairlead.lab.simulator.scenarios import usable_traces


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    texts = entries()
    chosen = {name: texts[name] for name in _policies(options.policy, list(texts))}
    try:
        scenarios = named(options.scenario or ()) or names(options.set)
    except ValueError as error:
        sys.exit(f"error: {error}")
    traces, note = usable_traces(options.traces, scenarios)
    if note:
        print(note, file=sys.stderr)
    wanted = cells(scenarios, chosen, traces, options.quick, options.seeds, options.head)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    results = run_grid(
        wanted, processes=options.processes, kept=None if options.fresh else out / "cells.jsonl", progress=_progress
    )
    print(f"\n{len(results)} simulations in {time.monotonic() - begun:.0f} s", file=sys.stderr)
    compared = write_summary(out, results)
    found, parts = (msgspec.json.decode((out / f"{name}.json").read_bytes()) for name in ("summary", "scenarios"))
    tell({**parts, "summary": found}, options.json, lambda _: print_table(compared))
    print(f"written: {out / 'summary.json'}, {out / 'scenarios.json'}", file=sys.stderr)
    # The pages show the two sets that stay the same.
    if options.docs and options.set != "drawn":
        minutes = sum(result.cpu_s for result in results) / 60
        run = Run(cells=len(results), seeds=options.seeds, cpu_minutes=minutes, traces=bool(traces))
        for path in write_section(Path(options.docs), compared, run):
            print(f"written: {path}", file=sys.stderr)
    errors = [result for result in results if result.error]
    for result in errors:
        print(f"error: {result.policy} on {result.scenario}: {result.error}", file=sys.stderr)
    return 1 if errors else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--quick", action="store_true", help="fewer requests of each scenario")
    parser.add_argument("--head", type=int, default=0, help="only the first so many requests of each scenario")
    parser.add_argument("--policy", action="append", help="only these (may be given more than once)")
    parser.add_argument(
        "--set", default="development", choices=(*SETS, "all"), help="of the scenarios (default development)"
    )
    parser.add_argument("--scenario", action="append", help="only these (may be given more than once)")
    parser.add_argument("--seeds", type=int, default=1, help="repeat with so many seeds and average (default 1)")
    parser.add_argument("--processes", type=int, default=0, help="0 = one per processor")
    parser.add_argument("--traces", default=os.environ.get("FAIRLEAD_TRACES", "traces"), help="directory of the traces")
    parser.add_argument("--out", default="out/quality")
    parser.add_argument(
        "--docs", default="", help="write the section of benchmarks-policies.md in this directory, and its plots"
    )
    parser.add_argument("--fresh", action="store_true", help="do not take results of a former run")
    return parser.parse_args(arguments)


def _policies(wanted: list[str] | None, known: list[str]) -> list[str]:
    for name in wanted or ():
        if name not in known:
            sys.exit(f"error: unknown policy {name!r}; known: {', '.join(known)}")
    return wanted or known


def _progress(result: CellResult, count: int, total: int) -> None:
    print(
        f"\r[{count}/{total}] {result.scenario} {result.policy} {result.cpu_s:.1f} s CPU    ", end="", file=sys.stderr
    )


if __name__ == "__main__":
    sys.exit(main())
