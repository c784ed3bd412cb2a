"""What a warm restart costs: taking down what was learned, the file, and giving it back.

    python bench/state.py [--json] [--blocks 20000] [--repeat 3]

Pools of 8 and 512 endpoints, each of which has learned so many blocks of prompts, within the two million that all have
together. Figures are the lowest of the repetitions: neighbours only add. Between two turns others are served.

    snapshot_ms   taking it down and encoding it, all turns together; longest_ms: the longest of them
    write_ms      the file, by a thread, with fsync: that of a disk which others use, too
    read_ms       reading and decoding it, by a thread
    restore_ms    all that the pipeline does with it; longest_ms: the longest of its turns
    grown_mb      memory of the process while it is taken down and written, beside that of the tables

JSON: {POOL: {"endpoints", "blocks", "bytes", "snapshot_ms", "snapshot_longest_ms", "write_ms", "read_ms", "restore_ms",
"restore_longest_ms", "grown_mb"}}.
"""

import argparse
import tempfile
import time
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

from _output import tell
from _process import rss
from fairlead.compat.load import load
from fairlead.config.building import build_pipeline
from fairlead.core.clock import VirtualClock
from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.events import EndpointUp, MetricsSampled, Restored
from fairlead.core.prefix import ChainHasher
from fairlead.core.request import PrefixChain
from fairlead.core.scheduler import Pipeline
from fairlead.core.state import ENDPOINT_BLOCKS, VERSION, Head, encode, taken
from fairlead.server.files import write_whole
from fairlead.server.journal.blocks import block
from fairlead.server.live.memory import settle_memory
from fairlead.server.state import MAGIC, read_state

POOLS = (8, 512)
#: Blocks of one prompt, and the bytes of each.
PROMPT, BYTES = 80, 400
MOST = 2_000_000
PAGE = Sample(waiting=0.0, running=0.0, kv_usage=0.5, block_size=16, num_blocks=1_000_000, prefix_queries=1.0)


def pool(count: int) -> Pipeline:
    pipeline = build_pipeline(load("policy: default", need_endpoints=False), VirtualClock(), Random(1))
    for number in range(count):
        name = f"e{number}"
        pipeline.handle(EndpointUp(Endpoint(name, f"10.0.{number >> 8}.{number & 255}:8000", {"gpu": "one"})))
    return pipeline


def experienced(count: int, blocks: int) -> Pipeline:
    pipeline, chance = pool(count), Random(2)
    ends = tuple(range(BYTES, BYTES * (PROMPT + 1), BYTES))
    for number in range(count):
        pipeline.handle(MetricsSampled(f"e{number}", 0.0, PAGE))
    for _ in range(min(blocks, MOST // count, ENDPOINT_BLOCKS) // PROMPT):
        for slot in range(count):
            pipeline.fleet.prefix.insert(slot, PrefixChain(tuple(chance.getrandbits(64) for _ in ends), ends))
    return pipeline


def turns(steps: Iterable[Any]) -> tuple[float, float]:
    """(milliseconds of CPU of all steps, and of the longest)."""
    total = longest = 0.0
    left = iter(steps)
    while True:
        started = time.thread_time()
        if next(left, None) is None:
            return total * 1e3, longest * 1e3
        took = time.thread_time() - started
        total, longest = total + took, max(longest, took)


def once(pipeline: Pipeline, count: int, path: Path) -> dict[str, float]:
    cut = ChainHasher()
    before = rss()
    encoded = [encode(Head(VERSION, time.time(), cut.finest, cut.growth))]
    parts = taken(pipeline.fleet, pipeline.tokens, 0.0, MOST)
    snapshot_ms, longest_ms = turns(encoded.append(encode(part)) or part for part in parts)  # type: ignore[func-returns-value]
    started = time.perf_counter()
    size = write_whole(path, (MAGIC, *(block(content, pack=False) for content in encoded)))
    write_ms = (time.perf_counter() - started) * 1e3
    grown_mb = (rss() - before) / 1e6
    del encoded
    started = time.perf_counter()
    stored = read_state(path, cut, 1 << 30)
    read_ms = (time.perf_counter() - started) * 1e3
    fresh = pool(count)
    assert stored.common is not None
    events = [Restored(part, 1.0) for part in (stored.common, *chain.from_iterable(stored.endpoints.values()))]
    restore_ms, restore_longest_ms = turns(fresh.handle(event) or event for event in events)
    assert fresh.fleet.prefix.entries == pipeline.fleet.prefix.entries
    return {
        "bytes": size,
        "snapshot_ms": snapshot_ms,
        "snapshot_longest_ms": longest_ms,
        "write_ms": write_ms,
        "read_ms": read_ms,
        "restore_ms": restore_ms,
        "restore_longest_ms": restore_longest_ms,
        "grown_mb": grown_mb,
    }


def measure(count: int, blocks: int, repeat: int) -> dict[str, float]:
    pipeline = experienced(count, blocks)
    settle_memory()
    with tempfile.TemporaryDirectory() as folder:
        found = [once(pipeline, count, Path(folder) / "learned.state") for _ in range(repeat)]
    least = {name: round(min(one[name] for one in found), 2) for name in found[0]}
    # Memory that was freed is used again: only the first time tells.
    least["grown_mb"] = round(found[0]["grown_mb"], 1)
    return {"endpoints": count, "blocks": pipeline.fleet.prefix.entries} | least


def show(found: dict[str, dict[str, float]]) -> None:
    for one in found.values():
        print(
            f"{one['endpoints']:.0f} endpoints, {one['blocks']:,.0f} blocks, {one['bytes'] / 1e6:.1f} MB: "
            f"taken down in {one['snapshot_ms']:.0f} ms (longest turn {one['snapshot_longest_ms']:.1f}), "
            f"written {one['write_ms']:.0f}, read {one['read_ms']:.0f}, "
            f"given back {one['restore_ms']:.0f} (longest turn {one['restore_longest_ms']:.1f}), "
            f"{one['grown_mb']:.0f} MB more"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--blocks", type=int, default=20_000, help="of each endpoint")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    tell({str(count): measure(count, options.blocks, options.repeat) for count in POOLS}, options.json, show)
