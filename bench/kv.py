"""What exact prefix knowledge costs: reading and applying events, asking, memory, and how long the event loop is held.

    python bench/kv.py [--json] [--blocks 2000000] [--seconds 5] [--prompts 30] [--rounds 8]

`blocks_per_s`: block events decoded and applied per second of one core's CPU time, for a stream like an engine's: per
batch a prefill of 32 blocks, four decoded blocks in events of their own, and the removal of as many.
`lookup_1000x100_us`: median over prompts of 1,000 blocks, of which 100 endpoints hold different parts, in an index of
`--blocks` copies. `bytes_per_block_copy`: growth of the process (RSS) per copy, with as many distinct blocks as copies,
which is the worst case. `lookup_100k_p99_ms`: one question for a prompt of 100,000 tokens, by the thread's CPU clock;
`lookup_100k_hash_ms`: making its keys, which is done once per request.
`loop_hold_p99_ms`: how long the drain held an asyncio loop at a time, with 20,000 events/s over ZMQ from another
process and 500 requests/s that each ask the index; by the thread's CPU clock, since on a busy machine the wall clock
measures the other processes. The same by the wall clock: `loop_hold_wall_p99_ms`, `lookup_100k_wall_p99_ms`.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import random
import sys
import time
from array import array
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np
import zmq

from _process import rss
from fairlead.core.kv.events import BlocksRemoved, BlocksStored, KvEvent, apply
from fairlead.core.kv.index import KvIndex
from fairlead.core.kv.keys import prompt_keys
from fairlead.core.kv.match import BlockChain
from fairlead.core.kv.tiers import Tier
from fairlead.lab.stub.kv_publisher import encode_batch
from fairlead.pool.kv_events.discovery import KvSource
from fairlead.pool.kv_events.pump import Pump
from fairlead.pool.kv_events.subscriber import KvSubscriber
from fairlead.pool.kv_events.wire import BatchDecoder, sequence

ENDPOINTS, BLOCK, CHAIN = 100, 16, 1000
EVENTS_PER_S, REQUESTS_PER_S, PUBLISHERS = 20_000, 500, 8
PREFILL, DECODES = 32, 4
#: Tokens of a long prompt.
LONG = 100_000
ROUNDS = 7


def tokens(rng: random.Random, blocks: int) -> bytes:
    return array("I", [rng.randrange(100, 128_000) for _ in range(blocks * BLOCK)]).tobytes()


class Stream:
    """Batches like an engine's that is full: what is stored displaces the oldest."""

    def __init__(self, seed: int, held: int = 2_000) -> None:
        self._rng = random.Random(seed)
        self._held = held
        self._hashes: list[int] = []
        self._content = tokens(self._rng, 4 * PREFILL)

    def batch(self) -> tuple[bytes, int, int]:
        """Payload, events, block events."""
        rng, events = self._rng, list[KvEvent]()
        new = [rng.getrandbits(64) for _ in range(PREFILL + DECODES)]
        if len(self._hashes) >= self._held:
            gone, self._hashes = self._hashes[: len(new)], self._hashes[len(new) :]
            events += [BlocksRemoved([digest], "GPU") for digest in gone]
        self._hashes += new
        events.append(self._store(new[:PREFILL], 0))
        for at in range(PREFILL, len(new)):
            events.append(self._store([new[at]], new[at - 1]))
        blocks = sum(len(event.hashes) for event in events if isinstance(event, BlocksStored | BlocksRemoved))
        return encode_batch(time.time(), events), len(events), blocks

    def _store(self, hashes: list[int], parent: int) -> BlocksStored:
        start = self._rng.randrange(3 * PREFILL) * BLOCK * 4
        content = self._content[start : start + len(hashes) * BLOCK * 4]
        # Another first token makes it another prompt.
        content = self._rng.randrange(100, 128_000).to_bytes(4, "little") + content[4:]
        return BlocksStored(hashes, parent, content, BLOCK, "", "GPU", kind="full_attention")


def throughput(rounds: int) -> tuple[float, float]:
    """Block events and events per second of CPU time: the best of some rounds, since others use the caches too."""
    index = KvIndex()
    index.add_slot(0)
    cache = index.rank(0, 0, "m")
    stream, decoder = Stream(1), BatchDecoder()
    best = (0.0, 0.0)
    for _ in range(rounds):
        work = [stream.batch() for _ in range(300)]
        started = time.thread_time()
        for payload, _, _ in work:
            for event in decoder.decode(payload):
                steps = apply(index, cache, event, 0.0)
                for _ in steps or ():
                    pass
        spent = time.thread_time() - started
        best = max(best, (sum(one[2] for one in work) / spent, sum(one[1] for one in work) / spent))
    counts = cache.counts
    assert not counts.malformed and not counts.removed_unknown and not counts.orphaned, counts
    return best


def fill(index: KvIndex, blocks: int) -> float:
    """Enter that many distinct blocks, evenly over the endpoints. Returns bytes per block."""
    rng = np.random.default_rng(1)
    shelves = [index.shelf(index.rank(slot, 0, "m"), 0, Tier.GPU) for slot in range(ENDPOINTS)]
    gc.collect()
    before = rss()
    entered = 0
    while entered < blocks:
        shelf = shelves[entered // 128 % ENDPOINTS]
        hashes, keys = (rng.integers(1 << 48, 1 << 63, 128, np.uint64).tolist() for _ in range(2))
        index.store(shelf, hashes, keys, 0)
        entered += 128
    del hashes, keys
    gc.collect()
    return (rss() - before) / index.entries


def lookup(index: KvIndex, prompts: int) -> float:
    """Median microseconds per question, of the best round."""
    rng = random.Random(2)
    root = index.space.root("m", "")
    chains = []
    for _ in range(prompts):
        keys = prompt_keys(root, rng.randbytes(CHAIN * BLOCK * 4), BLOCK)
        for slot in range(ENDPOINTS):
            shelf = index.shelf(index.rank(slot, 0, "m"), 0, Tier.GPU)
            depth = rng.randint(1, CHAIN) if slot else CHAIN
            index.store(shelf, [rng.getrandbits(64) for _ in range(depth)], keys[:depth].tolist(), 0)
        chains.append(BlockChain(keys, BLOCK))
    rounds = []
    for _ in range(ROUNDS):
        times = []
        for chain in chains:
            started = time.perf_counter()
            found = index.look_up(chain, ENDPOINTS)
            times.append(time.perf_counter() - started)
            assert found is not None and found.blocks[0] == CHAIN and found.blocks.min() >= 1
        rounds.append(median(times))
    return min(rounds) * 1e6


def long_prompts(index: KvIndex, prompts: int) -> dict[str, float]:
    """The same for prompts of 100,000 tokens: p99 of a question by CPU and wall clock, and hashing one, in ms."""
    rng = random.Random(3)
    root = index.space.root("m", "")
    asked, walls, hashed = [], [], []
    for _ in range(prompts):
        content = rng.randbytes(LONG * 4)
        started = time.thread_time()
        keys = prompt_keys(root, content, BLOCK)
        hashed.append(time.thread_time() - started)
        for slot in range(ENDPOINTS):
            shelf = index.shelf(index.rank(slot, 0, "m"), 0, Tier.GPU)
            depth = rng.randint(1, len(keys)) if slot else len(keys)
            for start in range(0, depth, 128):
                step = keys[start : min(start + 128, depth)].tolist()
                index.store(shelf, [rng.getrandbits(64) for _ in step], step, start)
        chain = BlockChain(keys, BLOCK)
        for _ in range(250):
            wall, cpu = time.perf_counter(), time.thread_time()
            found = index.look_up(chain, ENDPOINTS)
            asked.append(time.thread_time() - cpu)
            walls.append(time.perf_counter() - wall)
            assert found is not None and found.blocks[0] == len(keys)
    return {
        "p99_ms": percentile(asked, 99),
        "wall_p99_ms": percentile(walls, 99),
        "hash_ms": median(hashed) * 1e3,
    }


def publish(pipe: Connection, seconds: float) -> None:
    """Another process: some publishers, together `EVENTS_PER_S`."""
    context = zmq.Context()
    sockets = [context.socket(zmq.PUB) for _ in range(PUBLISHERS)]
    pipe.send([f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}" for socket in sockets])
    streams = [Stream(seed) for seed in range(PUBLISHERS)]
    work = [[stream.batch() for _ in range(int(seconds * EVENTS_PER_S / PUBLISHERS / 41) + 1)] for stream in streams]
    pipe.send("ready")
    pipe.recv()
    started, sent = time.perf_counter(), 0
    for number, turn in enumerate(zip(*work, strict=True)):
        for socket, (payload, events, _) in zip(sockets, turn, strict=True):
            while time.perf_counter() - started < sent / EVENTS_PER_S:
                time.sleep(0.0005)
            socket.send_multipart([b"", sequence(number), payload])
            sent += events
    pipe.send((sent / (time.perf_counter() - started), sent))
    pipe.recv()


async def holds(seconds: float) -> dict[str, float]:
    """Serve and listen at once."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=publish, args=(theirs, seconds), daemon=True)
    process.start()
    wall: list[float] = []
    cpu: list[float] = []
    index = KvIndex()
    loop = asyncio.get_running_loop()
    rng = random.Random(5)
    keys = [prompt_keys(index.space.root("m", ""), rng.randbytes(CHAIN * BLOCK * 4), BLOCK) for _ in range(8)]
    for slot in range(PUBLISHERS):
        index.add_slot(slot)
        index.store(
            index.shelf(index.rank(slot, 0, "m"), 0, Tier.GPU), list(range(1, CHAIN + 1)), keys[slot].tolist(), 0
        )
    async with KvSubscriber(index) as events:
        record(events.pump, wall, cpu)
        for slot, address in enumerate(await asyncio.to_thread(ours.recv)):
            events.watch(slot, KvSource(address, model="m"))
        await asyncio.to_thread(ours.recv)
        await asyncio.sleep(0.5)
        wall.clear()
        cpu.clear()
        ours.send("go")
        rate = loop.run_in_executor(None, ours.recv)
        asked, started = 0, loop.time()
        while not rate.done():
            await asyncio.sleep(max(0.0, started + asked / REQUESTS_PER_S - loop.time()))
            index.look_up(BlockChain(keys[asked % PUBLISHERS], BLOCK), PUBLISHERS)
            asked += 1
        elapsed = loop.time() - started
        sent_per_s, sent = await rate
        for _ in range(100):
            await asyncio.sleep(0.05)
            if sum(events.counts(slot)[0].events for slot in range(PUBLISHERS)) >= sent:
                break
        counts = [events.counts(slot)[0] for slot in range(PUBLISHERS)]
    ours.send("done")
    await asyncio.to_thread(process.join, 5)
    return {
        "wall_p99_ms": percentile(wall, 99),
        "wall_p50_ms": percentile(wall, 50),
        "cpu_p99_ms": percentile(cpu, 99),
        "cpu_max_ms": max(cpu) * 1e3,
        "events_per_s": sent_per_s,
        "sent": sent,
        "events": sum(count.events for count in counts),
        "lost_batches": sum(count.lost for count in counts),
        "requests_per_s": asked / elapsed,
        "cpu_share": sum(cpu) / seconds,
    }


def record(pump: Pump, wall: list[float], cpu: list[float]) -> None:
    """Note every hold, by the wall clock and by this thread's CPU clock, which knows nothing of other processes."""
    run = pump._run

    def timed() -> None:
        started, spent = time.perf_counter(), time.thread_time()
        run()
        cpu.append(time.thread_time() - spent)
        wall.append(time.perf_counter() - started)

    pump._run = timed  # type: ignore[method-assign]


def percentile(values: list[float], share: float) -> float:
    return float(np.percentile(values, share) * 1e3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="only the four figures")
    parser.add_argument("--blocks", type=int, default=2_000_000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--prompts", type=int, default=30, help="of 1,000 blocks, and an eighth as many long ones")
    parser.add_argument("--rounds", type=int, default=ROUNDS + 1, help="of reading and applying events")
    options = parser.parse_args()
    blocks_per_s, events_per_s = throughput(options.rounds)
    held = asyncio.run(holds(options.seconds))
    index = KvIndex(max_blocks=2 * options.blocks + 40 * ENDPOINTS * CHAIN)
    for slot in range(ENDPOINTS):
        index.add_slot(slot)
    size = fill(index, options.blocks)
    figures: dict[str, Any] = {
        "blocks_per_s": round(blocks_per_s),
        "lookup_1000x100_us": round(lookup(index, options.prompts), 1),
        "bytes_per_block_copy": round(size, 1),
        "loop_hold_p99_ms": round(held["cpu_p99_ms"], 3),
        "loop_hold_wall_p99_ms": round(held["wall_p99_ms"], 3),
    }
    long = long_prompts(index, options.prompts // 8 + 1)
    figures |= {f"lookup_100k_{name}": round(value, 3) for name, value in long.items()}
    print(json.dumps(figures))
    if not options.json:
        own = index.nbytes / index.entries
        print(f"events/s decoded and applied: {events_per_s:,.0f}")
        print(f"own estimate of memory: {own:.1f} bytes per copy at {index.entries:,}")
        print("holds:", ", ".join(f"{name} {value:,.3f}" for name, value in held.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
