"""The tables of docs/tuning.md: block size, weights and queue limits, in the simulator.

python bench/tuning.py            about four CPU minutes
python bench/tuning.py --head 300 quicker, coarser

JSON: {"settings": {TABLE: {VALUE: {SCENARIO: {"ttft_mean_ms", "ttft_p99_ms", "prefix_hit_rate", "unserved"}}}},
"recognised": {BLOCK SIZE: {"shares": {TOKENS IN COMMON: share}, "us_24_kb", "us_500_kb"}}}.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from itertools import takewhile
from random import Random
from statistics import fmean
from time import process_time
from typing import Any

from _output import tell
from fairlead.config.builtins import BYTES_PER_TOKEN
from fairlead.core.prefix import ChainHasher
from fairlead.lab.simulator.build import ScenarioSpec
from fairlead.lab.simulator.grid import Cell, CellResult, run_grid

REUSE, AGENTS, NONE, TOO_MUCH = "shared-prefix-14", "agents", "azure-code", "shared-prefix-20"


def profile(prefix: float, load: float, limit: int = 200, top_k: int = 1) -> str:
    """The short form with its two scorers."""
    return (
        f"filters: [{{type: queue-depth, maxQueueLength: {limit}}}]\n"
        f"scorers:\n- {{type: prefix-aware, weight: {prefix}, hashBlockSize: 64}}\n"
        f"- {{type: load-aware, weight: {load}}}\nselection: {{topK: {top_k}}}\n"
    )


DEFAULT = "policy: default\n"
Table = tuple[str, tuple[str, ...], dict[str, str]]
TABLES: tuple[Table, ...] = (
    (
        "prefix : load",
        (REUSE, AGENTS, NONE),
        {f"{prefix} : {load}": profile(prefix, load) for prefix, load in ((100, 30), (60, 60), (30, 100), (0, 100))}
        | {"100 : 30, topK 3": profile(100, 30, top_k=3), "default policy": DEFAULT},
    ),
    (
        "maxQueueLength",
        (REUSE, TOO_MUCH),
        {str(limit): profile(100, 30, limit=limit) for limit in (1, 5, 20, 50, 200)} | {"default policy": DEFAULT},
    ),
)
SIZES = (3, 5, 10, 20, 64, 256)
#: Tokens that two prompts have in common.
SHARED = (50, 200, 1_000, 6_000, 100_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--head", type=int, default=0, help="only the first so many requests of each workload")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lengths", type=int, default=200, help="lengths of what two prompts have in common")
    parser.add_argument("--processes", type=int, default=0, help="0 = one per processor")
    options = parser.parse_args()
    settings = {table[0]: figures(table, options.head, options.seeds, options.processes) for table in TABLES}
    found = {"settings": settings, "recognised": recognised(options.lengths)}
    tell(found, options.json, lambda figures: print("\n".join(lines(figures))))


def figures(table: Table, head: int, seeds: int, processes: int) -> dict[str, dict[str, dict[str, float]]]:
    """By value and scenario: mean TTFT in ms, its p99, the share of prompt tokens that were cached, and of requests
    that were not served. Means of all seeds."""
    title, scenarios, texts = table
    cells = [
        Cell(scenario=ScenarioSpec(name=source, source=source, head=head), policy=name, text=text, seed=seed)
        for source in scenarios
        for name, text in texts.items()
        for seed in range(seeds)
    ]
    found = run_grid(cells, processes=processes, progress=_progress(title))
    rows: dict[str, dict[str, dict[str, float]]] = {name: {} for name in texts}
    for name in texts:
        for source in scenarios:
            runs = [one.figures for one in found if (one.policy, one.scenario) == (name, source)]
            mean = {key: fmean(run[key] for run in runs) for key in (*_SHOWN, "shed", "failed", "requests")}
            unserved = (mean["shed"] + mean["failed"]) / mean["requests"]
            rows[name][source] = {key: mean[key] for key in _SHOWN} | {"unserved": unserved}
    return rows


_SHOWN = ("ttft_mean_ms", "ttft_p99_ms", "prefix_hit_rate")


def recognised(count: int) -> dict[int, dict[str, Any]]:
    """Of what two prompts have in common, the share that is recognised; mean of `count` lengths around each."""
    rng = Random(1)
    rows = {}
    for size in SIZES:
        hasher = ChainHasher(finest=size * BYTES_PER_TOKEN)
        shares = {shared: fmean(_share(hasher, shared, rng) for _ in range(count)) for shared in SHARED}
        rows[size] = {
            "shares": shares,
            "us_24_kb": _hash_us(hasher, 24_000, count),
            "us_500_kb": _hash_us(hasher, 500_000, count),
        }
    return rows


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The tables, as in the documentation."""
    for title, scenarios, texts in TABLES:
        yield f"\n| {title} | " + " | ".join(f"{name}: TTFT mean | p99 | hit | unserved" for name in scenarios) + " |"
        yield "|---" * (1 + 4 * len(scenarios)) + "|"
        for name in texts:
            rows = (found["settings"][title][name][source] for source in scenarios)
            parts = (
                f"{row['ttft_mean_ms']:,.0f} | {row['ttft_p99_ms']:,.0f} | {row['prefix_hit_rate']:.0%} | "
                f"{row['unserved']:.1%}"
                for row in rows
            )
            yield f"| {name} | {' | '.join(parts)} |"
    common = " | ".join(f"{shared:,} in common" for shared in SHARED)
    yield f"\n| hashBlockSize | {common} | µs for 24 kB | 500 kB |"
    yield "|---" * (3 + len(SHARED)) + "|"
    for size, row in found["recognised"].items():
        shares = " | ".join(f"{share:.0%}" for share in row["shares"].values())
        yield f"| {size} | {shares} | {row['us_24_kb']:,.0f} | {row['us_500_kb']:,.0f} |"


def _share(hasher: ChainHasher, shared: int, rng: Random) -> float:
    """Two prompts that go on differently after `shared` tokens, more or less a half."""
    common = rng.randbytes(int(shared * BYTES_PER_TOKEN * rng.uniform(0.5, 1.5)))
    one, other = (hasher.chain(b"", common + rng.randbytes(2_000)) for _ in range(2))
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one.hashes, other.hashes, strict=True)))
    return one.ends[same - 1] / len(common) if same else 0.0


def _hash_us(hasher: ChainHasher, length: int, count: int) -> float:
    prompt, begun = bytes(length), process_time()
    for _ in range(count):
        hasher.chain(b"", prompt)
    return (process_time() - begun) / count * 1e6


def _progress(title: str) -> Callable[[CellResult, int, int], None]:
    def step(result: CellResult, count: int, total: int) -> None:
        sys.stderr.write(f"\r{title}: {count} of {total}" + ("\n" if count == total else ""))

    return step


if __name__ == "__main__":
    main()
