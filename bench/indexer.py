"""What it costs to ask the indexer: `python bench/indexer.py [--json] [--questions 400]`.

An index with 100 endpoints that hold different parts of prompts of 1,000 blocks of 16 tokens, behind the real HTTP
server in a process of its own; questions come one after the other over one connection.

* `server_…`: reading a question, asking the index and writing the answer, in the server's process without HTTP:
  `hashes` (JSON with 1,000 `prompt_hash`es), `keys` (msgpack, as schedulers ask), `tokens` (JSON, 16,000 token ids).
* `http_…`: the same as a client sees it, with HTTP both ways; `client_…`: through the scheduler's own client, whose CPU
  time per question is `client_keys_cpu_ms`.
* `…_cpu_p99_ms` is the thread's CPU clock, `…_p50_ms` and `…_p99_ms` the wall clock, which measures everything else on
  the machine too.
"""

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from array import array
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from random import Random
from statistics import quantiles
from typing import Any

import aiohttp
import numpy as np

from fairlead.apis.tokens import PromptTokeniser
from fairlead.core.endpoint import Endpoint
from fairlead.core.exact import ExactKnowledge
from fairlead.core.kv.keys import prompt_keys
from fairlead.core.kv.recipe import ANY_MODEL
from fairlead.core.kv.tiers import Tier
from fairlead.server.indexer.client import IndexClient
from fairlead.server.indexer.server import IndexServer, IndexSources
from fairlead.server.indexer.service import IndexService
from fairlead.server.indexer.wire import JSON, MSGPACK, read_query, write
from fairlead.server.live.memory import settle_memory

ENDPOINTS, BLOCK, BLOCKS = 100, 16, 1000


class Prompt:
    """Of 1,000 blocks, as each kind of question names it."""

    def __init__(self, rng: Random, root: int) -> None:
        ids = array("I", [rng.randrange(100, 128_000) for _ in range(BLOCKS * BLOCK)])
        self.keys = prompt_keys(root, ids.tobytes(), BLOCK)
        self.hashes = [rng.getrandbits(64) for _ in range(BLOCKS)]
        own = {"keys": self.keys.astype("<u8").tobytes(), "block_size": BLOCK, "hits_only": True}
        self.questions = {
            "hashes": (JSON, json.dumps({"prompt_hash": self.hashes}).encode()),
            "keys": (MSGPACK, write(own, MSGPACK)),
            "tokens": (JSON, json.dumps({"token_ids": ids.tolist()}).encode()),
        }
        self.own = own


def made(count: int) -> tuple[ExactKnowledge, list[Prompt], list[tuple[int, Endpoint]]]:
    """Every endpoint holds a beginning of its own length of each prompt."""
    rng = Random(1)
    exact = ExactKnowledge()
    prompts = [Prompt(rng, exact.index.space.root(ANY_MODEL, "")) for _ in range(count)]
    endpoints = [(slot, Endpoint(f"default/server-{slot}", f"10.0.0.{slot}:8000")) for slot in range(ENDPOINTS)]
    for slot, _ in endpoints:
        exact.add_slot(slot)
        cache = exact.index.rank(slot, 0, ANY_MODEL)
        cache.block_size, cache.heard = BLOCK, True
        shelf = exact.index.shelf(cache, 0, Tier.GPU)
        for prompt in prompts:
            keys = prompt.keys.tolist()
            for at in range(0, rng.randrange(BLOCKS), 100):
                exact.index.store(shelf, prompt.hashes[at : at + 100], keys[at : at + 100], at)
    exact.refresh()
    return exact, prompts, endpoints


def service_of(exact: ExactKnowledge, endpoints: list[tuple[int, Endpoint]]) -> IndexService:
    return IndexService(exact, lambda: endpoints, PromptTokeniser)


def summary(name: str, wall: list[float], cpu: list[float] | None = None) -> dict[str, float]:
    found = {f"{name}_p50_ms": quantiles(wall, n=100)[49], f"{name}_p99_ms": quantiles(wall, n=100)[98]}
    if cpu is not None:
        found[f"{name}_cpu_p99_ms"] = quantiles(cpu, n=100)[98]
    return {key: round(value * 1e3, 3) for key, value in found.items()}


async def in_process(count: int, different: int) -> dict[str, float]:
    exact, prompts, endpoints = made(different)
    service = service_of(exact, endpoints)
    settle_memory()
    found: dict[str, float] = {}
    for kind in prompts[0].questions:
        wall, cpu = [], []
        for at in range(count):
            content_type, body = prompts[at % different].questions[kind]
            started, used = time.perf_counter(), time.thread_time()
            answer = await service.answer(read_query(body, content_type))
            write(answer, content_type)
            wall.append(time.perf_counter() - started)
            cpu.append(time.thread_time() - used)
            assert answer.total == BLOCKS and any(pod.matched for pod in answer.pods.values())
        found |= summary(f"server_{kind}", wall, cpu)
    service.close()
    return found


def serve(pipe: Connection, different: int) -> None:
    async def run() -> None:
        exact, _, endpoints = made(different)
        sources = IndexSources(metrics=list, unready=list, snapshot=list)
        server = IndexServer(service_of(exact, endpoints), sources, "127.0.0.1", 0)
        await server.start()
        settle_memory()
        pipe.send(server.port)
        await asyncio.to_thread(pipe.recv)
        await server.close()

    asyncio.run(run())


async def timed(count: int, different: int, ask: Callable[[int], Awaitable[Any]]) -> list[float]:
    wall = []
    for at in range(count + 20):
        started = time.perf_counter()
        assert await ask(at % different) is not None
        wall.append(time.perf_counter() - started)
    return wall[20:]


async def over_http(count: int, different: int, port: int) -> dict[str, float]:
    _, prompts, _ = made(different)
    url = f"http://127.0.0.1:{port}"
    found: dict[str, float] = {}
    async with aiohttp.ClientSession() as session:
        for kind in prompts[0].questions:

            async def post(at: int, kind: str = kind) -> bytes:
                content_type, body = prompts[at].questions[kind]
                async with session.post(f"{url}/query", data=body, headers={"Content-Type": content_type}) as answer:
                    assert answer.status == 200
                    return await answer.read()

            found |= summary(f"http_{kind}", await timed(count, different, post))
    client = IndexClient(url, 1.0, lambda state: None, lambda what, why: None)
    client.start()
    while not client.up:
        await asyncio.sleep(0.01)
    used = time.process_time()
    found |= summary("client_keys", await timed(count, different, lambda at: client.ask(**prompts[at].own)))
    found["client_keys_cpu_ms"] = round((time.process_time() - used) / (count + 20) * 1e3, 3)
    await client.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--prompts", type=int, default=20, help="how many different ones")
    arguments = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, arguments.prompts), daemon=True)
    child.start()
    found: dict[str, Any] = {"endpoints": ENDPOINTS, "blocks": BLOCKS, "numpy": np.__version__}
    found |= asyncio.run(in_process(arguments.questions, arguments.prompts))
    found |= asyncio.run(over_http(arguments.questions, arguments.prompts, ours.recv()))
    ours.send("stop")
    child.join(10)
    if arguments.json:
        json.dump(found, sys.stdout, indent=1)
        print()
        return
    for name, value in found.items():
        print(f"{name:<28}{value}")


if __name__ == "__main__":
    main()
