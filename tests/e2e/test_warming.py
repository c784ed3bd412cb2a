"""A restarted model server computes what clients' prompts have in common before they ask it again."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from gw_modes import embedded
from gw_processes import Envoy, sees_the_scheduler
from ports import free_ports

from fairlead.lab.stub.config import StubConfig
from fairlead.lab.stub.pool import StubPool
from fairlead.server.live import Live

Start = Callable[..., Awaitable[tuple[Live, asyncio.Task[None]]]]
SYSTEM = "You answer questions about ships and harbours, briefly. " * 200


async def asked(port: int, question: str, key: str = "", model: str = "tiny") -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 4}).encode()
    url, headers = f"http://127.0.0.1:{port}/v1/chat/completions", {"content-type": "application/json"}
    headers["authorization"] = f"Bearer {key}"
    async with aiohttp.ClientSession() as session, session.post(url, data=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()


def page(scheduler: Live) -> str:
    return b"".join(scheduler.watch.exposition()).decode()


async def until(happened: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not happened():
            await asyncio.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("enabled", "key"), [(True, ""), (True, "engine-key"), (False, "")])
async def test_a_restarted_replica_has_the_shared_beginning(
    enabled: bool, key: str, live: Start, envoy: Callable[..., Envoy], tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    async with StubPool(StubConfig(model="tiny", time_ratio=20.0, api_key=key), replicas=2) as pool:
        endpoints = [{"name": f"e{at}", "address": address} for at, address in enumerate(pool.addresses)]
        settings: dict[str, Any] = {"endpoints": endpoints, "seed": 1, "warming": {"enabled": enabled}}
        if key:
            (tmp_path / "key").write_text(key)
            settings["gateway"] = {"upstreamTokenFile": str(tmp_path / "key")}
        scheduler, _ = await live(settings)
        gateway = await asyncio.to_thread(envoy, embedded(scheduler.config, port, pool.addresses))
        await sees_the_scheduler(gateway.admin)
        await asyncio.gather(*(asked(port, f"Question {number}?", key) for number in range(12)))
        table = scheduler.fleet.table
        await until(lambda: all((one.prefix_queries or 0.0) > 0.0 for one in table.samples if one is not None))
        await pool.restart(0)
        engine = pool.replica(0).engine
        await until(lambda: table.samples[0].prefix_queries == engine.stats.prefix_queries)
        if enabled:
            await until(lambda: engine.stats.prefix_queries)
            await until(lambda: 'warming_requests_total{result="sent"} 1' in page(scheduler))
            assert engine.stats.prefix_hits == 0
        before = engine.stats.prefix_hits, engine.stats.prefix_queries
        await asked(int(pool.addresses[0].rpartition(":")[2]), "And the next one?", key)
        hits, queries = engine.stats.prefix_hits - before[0], engine.stats.prefix_queries - before[1]
        assert (hits > 0.9 * queries) is enabled
        assert SYSTEM[:20] not in page(scheduler)


@pytest.mark.slow
async def test_beginnings_for_models_of_other_endpoints_are_passed_over(
    live: Start, envoy: Callable[..., Envoy]
) -> None:
    (port,) = free_ports(1)
    tiny, large = (StubPool(StubConfig(model=name, time_ratio=20.0)) for name in ("tiny", "large"))
    async with tiny, large:
        endpoints = [{"name": f"e{at}", "address": pool.addresses[0]} for at, pool in enumerate((tiny, large))]
        scheduler, _ = await live({"endpoints": endpoints, "seed": 1, "warming": {"enabled": True}})
        addresses = [*tiny.addresses, *large.addresses]
        gateway = await asyncio.to_thread(envoy, embedded(scheduler.config, port, addresses))
        await sees_the_scheduler(gateway.admin)
        for model, questions in (("large", 16), ("tiny", 8)):  # the beginning for `large` is shared by more
            await asyncio.gather(*(asked(port, f"Question {number}?", model=model) for number in range(questions)))
        table = scheduler.fleet.table
        await until(lambda: all((one.prefix_queries or 0.0) > 0.0 for one in table.samples if one is not None))
        await tiny.restart(0)
        await until(lambda: 'warming_requests_total{result="sent"} 1' in page(scheduler))
        assert tiny.replica(0).engine.stats.prefix_queries and 'result="failed"} 0' in page(scheduler)
