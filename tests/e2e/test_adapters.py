"""Adapters that several servers have loaded, where metrics pages name an adapter only while it runs."""

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from itertools import chain
from itertools import count as counted
from statistics import mean
from typing import Any

import aiohttp
from gw_http1 import Http1
from gw_processes import Serve, Stub, sees_the_scheduler
from gw_site import post

NUMBERS = counted()


async def told(port: int, path: str, body: dict[str, Any]) -> int:
    """The status that the model server at `port` answers."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"})
    try:
        with await asyncio.to_thread(urllib.request.urlopen, request, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


async def statuses(serve: Serve, model: str, count: int) -> Counter[int]:
    """Of `count` requests, eight at a time, each with a prompt of its own that takes longer than to load an adapter."""

    async def some(first: int) -> list[int]:
        async with Http1(serve.port) as client:
            found = []
            for _ in range(first, count, 8):
                text = f"{next(NUMBERS)} " * 1500
                body = {"model": model, "max_tokens": 20, "messages": [{"role": "user", "content": text}]}
                found.append((await client.ask(post(json.dumps(body).encode()))).status)
            return found

    return Counter(chain.from_iterable(await asyncio.gather(*map(some, range(8)))))


async def served(stub: Stub) -> list[int]:
    """Requests that each server has ended well."""
    counts = []
    for port in stub.ports:
        with await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
            lines = [
                line for line in page.read().decode().splitlines() if line.startswith("vllm:request_success_total")
            ]
        counts.append(round(sum(float(line.rsplit(" ", 1)[1]) for line in lines)))
    return counts


async def first_tokens(port: int, model: str, first: int, count: int) -> list[float]:
    """Milliseconds to the first text of so many streamed answers, eight clients at a time, each with its own prompt."""

    async def client(session: aiohttp.ClientSession, numbers: range) -> list[float]:
        found = []
        for number in numbers:
            message = {"role": "user", "content": f"{number} " * 1500}
            body = {"model": model, "max_tokens": 30, "stream": True, "messages": [message]}
            begun = time.perf_counter()
            async with session.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as answer:
                assert answer.status == 200
                async for line in answer.content:
                    if b'"content":"' in line and b'"content":""' not in line:
                        found.append((time.perf_counter() - begun) * 1e3)
                        break
                await answer.read()
        return found

    async with aiohttp.ClientSession() as session:
        parts = await asyncio.gather(*(client(session, range(first + i, first + count, 8)) for i in range(8)))
    return [ms for part in parts for ms in part]


async def test_an_adapter_that_only_pages_tell_of_is_spread_like_the_base_model(
    stub: Callable[..., Stub], serve: Callable[..., Serve], figures: list[str]
) -> None:
    """Pages name it only while it runs, and lists of models are not read: no reason to keep it at the one that runs
    it."""
    servers = stub(3, "--model", "base", "--lora", "poet", "--max-loras", "1")
    scheduler = serve({"endpoints": servers.addresses, "metrics": {"modelsInterval": "0s"}})
    await sees_the_scheduler(scheduler.gateway)
    times: dict[str, list[float]] = {"base": [], "poet": []}
    for turn in range(3):
        before = await served(servers)
        for model, found in times.items():
            found += await first_tokens(scheduler.port, model, turn * 1000 + 500 * (model == "poet"), 48)
            after = await served(servers)
            there = [now - then for now, then in zip(after, before, strict=True)]
            assert min(there) >= 5, (model, there)
            before = after
    means = {model: mean(found) for model, found in times.items()}
    figures.append(f"TTFT of a static adapter / of the base model: {means['poet']:.0f} / {means['base']:.0f} ms")


async def test_an_adapter_is_served_by_all_that_have_it_and_found_again(
    stub: Callable[..., Stub], serve: Callable[..., Serve]
) -> None:
    servers = stub(3, "--lora", "poet", "--max-loras", "2")
    third = servers.ports[2]
    assert await told(third, "/v1/unload_lora_adapter", {"lora_name": "poet"}) == 200
    scheduler = serve({"endpoints": servers.addresses, "metrics": {"modelsInterval": "600s"}})
    await sees_the_scheduler(scheduler.gateway)
    assert await statuses(scheduler, "poet", 40) == {200: 40}
    before = await served(servers)
    assert before[2] == 0 and min(before[:2]) >= 4, before

    async def settles(wanted: Callable[[list[int]], bool]) -> None:
        """Lists are read again only because of a 404, and within a second or two of it."""
        async with asyncio.timeout(20):
            while not wanted(await served(servers)):
                await statuses(scheduler, "poet", 8)

    # Another one has it now, and one of those that had it no longer does.
    assert await told(third, "/v1/load_lora_adapter", {"lora_name": "poet", "lora_path": "/x"}) == 200
    assert await told(servers.ports[0], "/v1/unload_lora_adapter", {"lora_name": "poet"}) == 200
    await settles(lambda counts: counts[2] > 0)
    between = await served(servers)
    assert await statuses(scheduler, "poet", 30) == {200: 30}
    after = await served(servers)
    assert after[0] == between[0] and after[2] > between[2]
