"""A scheduler that asks `fairlead indexer`: a real Envoy, four model servers with events, the indexer as a process.

What the indexer said is held against what each answer reports; then it is killed, stopped and started again.
"""

import asyncio
import json
import re
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from gw_conversations import MODEL, Conversations, StubTokeniser
from gw_modes import embedded
from gw_processes import Child, Envoy, Stub, sees_the_scheduler
from ports import free_ports

from fairlead.core.records import OutcomeRecord
from fairlead.server.live import Live
from fairlead.server.live.kv_lookup import KvLookup

Start = Callable[..., Awaitable[tuple[Live, asyncio.Task[None]]]]


class Indexer(Child):
    """`fairlead indexer` on a port of its own."""

    def __init__(self, directory: Path, addresses: list[str], port: int, name: str = "indexer") -> None:
        super().__init__(name, directory / f"{name}.log")
        self.url = f"http://127.0.0.1:{port}"
        self._file = directory / "indexer.json"
        # It calls endpoints otherwise than the scheduler; addresses tell which they are.
        endpoints = [{"name": f"server-{at}", "address": address} for at, address in enumerate(addresses)]
        self._file.write_text(json.dumps({"endpoints": endpoints, "kvEvents": {"enabled": True}}))
        self._listen = f"127.0.0.1:{port}"

    async def start(self, *arguments: str) -> "Indexer":
        self.spawn(
            sys.executable, "-m", "fairlead", "indexer", str(self._file), "--listen", self._listen, *arguments
        )  # fmt: skip
        async with asyncio.timeout(30), aiohttp.ClientSession() as session:
            while await self._status(session) != 200:
                assert self.code is None, self.said()
                await asyncio.sleep(0.05)
        return self

    async def _status(self, session: aiohttp.ClientSession) -> int:
        try:
            async with session.get(f"{self.url}/readyz") as answer:
                return answer.status
        except aiohttp.ClientError:
            return 0

    async def get(self, path: str) -> bytes:
        async with aiohttp.ClientSession() as session, session.get(self.url + path) as answer:
            assert answer.status == 200
            return await answer.read()

    async def query(self, **fields: Any) -> dict[str, Any]:
        async with aiohttp.ClientSession() as session, session.post(f"{self.url}/query", json=fields) as answer:
            assert answer.status == 200, await answer.text()
            found: dict[str, Any] = await answer.json()
            return found


class World:
    def __init__(self, stub: Stub, indexer: Indexer, live: Live, port: int) -> None:
        self.stub, self.indexer, self.live, self.port = stub, indexer, live, port
        self.outcomes: list[OutcomeRecord] = []
        tell = live.watch.on_outcome

        def heard(record: OutcomeRecord) -> None:
            self.outcomes.append(record)
            tell(record)

        live.watch.on_outcome = heard  # type: ignore[method-assign]

    @property
    def knowledge(self) -> KvLookup:
        assert isinstance(self.live.core.kv, KvLookup)
        return self.live.core.kv

    @property
    def ends(self) -> dict[str, int]:
        return self.knowledge.client.ends

    def agreeing(self, since: int) -> float:
        pairs = [(one.hit_tokens, one.cached_tokens) for one in self.outcomes[since:] if one.cached_tokens >= 0]
        return sum(predicted == reported for predicted, reported in pairs) / len(pairs)

    def metric(self, name: str) -> dict[str, float]:
        page = b"".join(self.live.watch.exposition()).decode()
        return {labels: float(value) for labels, value in re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", page, re.M)}

    def sources(self) -> set[str]:
        found = self.metric("fairlead_kv_source")
        return {labels.split('source="')[1].split('"')[0] for labels, value in found.items() if value}

    async def until(self, happened: Callable[[], object], seconds: float = 15) -> None:
        async with asyncio.timeout(seconds):
            while not happened():
                await asyncio.sleep(0.02)


@pytest.fixture
async def world(
    tmp_path: Path,
    stub: Callable[..., Stub],
    envoy: Callable[..., Envoy],
    live: Start,
    ending: Callable[[Child], Child],
) -> World:
    arguments = ("--model", MODEL, "--kv-tokens", "40000", "--max-model-len", "16384", "--kv-events")
    servers = await asyncio.to_thread(stub, 4, *arguments, "--kv-events-port", "0")
    indexer_port, port = free_ports(2)
    indexer = Indexer(tmp_path, servers.addresses, indexer_port)
    ending(indexer)
    await indexer.start()
    scheduler, _ = await live(
        {
            "endpoints": [{"name": f"e{at}", "address": address} for at, address in enumerate(servers.addresses)],
            "inspect": {"usageSampling": 1},
            "seed": 1,
            # Far more than it takes: the machine may be busy with other tests.
            "kvEvents": {"enabled": True, "check": 1, "indexer": {"url": indexer.url, "budget": "400ms"}},
        }
    )
    world = World(servers, indexer, scheduler, port)
    world.knowledge.prompts.tokeniser = StubTokeniser()  # type: ignore[assignment]
    gateway = await asyncio.to_thread(envoy, embedded(scheduler.config, port, servers.addresses))
    await sees_the_scheduler(gateway.admin)
    return world


@pytest.mark.slow
async def test_an_indexer_that_is_killed_costs_no_request(world: World, figures: list[str]) -> None:
    talk = Conversations(world.port, 1)
    await talk.run(120)
    # An endpoint is relied on once enough of its answers agreed. Which one gets how many is the scheduler's choice.
    for _ in range(6):
        if world.sources() == {"exact"}:
            break
        await talk.run(60)
    since = len(world.outcomes)
    await talk.run(150)
    await world.until(lambda: len(world.outcomes) >= since + 150)
    assert world.sources() == {"exact"}
    steady = world.agreeing(since)
    assert steady >= 0.95
    assert world.ends["answered"] >= 250

    # It dies in the middle of traffic.
    async with asyncio.TaskGroup() as group:
        group.create_task(talk.run(80))
        await asyncio.sleep(0.3)
        world.indexer.end(gently=False)
    await talk.run(40)
    await world.until(lambda: not world.knowledge.client.up)
    assert world.ends["down"] >= 40
    assert world.metric("fairlead_indexer_up") == {"": 0}
    assert world.metric("fairlead_indexer_questions_total")['result="down"'] == world.ends["down"]

    # It comes again, with what the engines still have to tell.
    await world.indexer.start()
    await world.until(lambda: world.knowledge.client.up)
    await talk.run(40)
    since, answered = len(world.outcomes), world.ends["answered"]
    await talk.run(100)
    await world.until(lambda: len(world.outcomes) >= since + 100)
    assert world.ends["answered"] >= answered + 90
    again = world.agreeing(since)
    assert again >= 0.95
    assert set(talk.statuses) == {200}
    figures.append(f"indexer: predicted = reported for {steady:.1%}, {again:.1%} after it was killed and started again")


async def test_an_indexer_that_hangs_is_left_alone(world: World) -> None:
    talk = Conversations(world.port, 2)
    await talk.run(40)
    world.indexer.signal(signal.SIGSTOP)
    await talk.run(60)
    assert world.ends["late"] >= 3
    # Only as many were late as were open when the third one was.
    assert world.ends["late"] <= 3 + 2 * 6
    assert world.ends["down"] >= 30
    world.indexer.signal(signal.SIGCONT)
    await world.until(lambda: world.knowledge.client.up)
    answered = world.ends["answered"]
    await talk.run(20)
    assert world.ends["answered"] >= answered + 15
    assert set(talk.statuses) == {200}


async def test_an_indexer_that_starts_warm_answers_at_once(
    world: World, tmp_path: Path, ending: Callable[[Child], Child]
) -> None:
    talk = Conversations(world.port, 3)
    await talk.run(40)
    body = json.dumps({"model": MODEL, "messages": [{"role": "system", "content": talk.systems[0]}]}).encode()
    ids = StubTokeniser().tokens_of(None, body, MODEL).ids  # type: ignore[arg-type]
    tokens = [int.from_bytes(ids[at : at + 4], "little") for at in range(0, len(ids), 4)]
    known = await world.indexer.query(token_ids=tokens)
    assert max(pod["matched"] for pod in known["pods"].values()) >= known["total"] - 1 > 10
    # The engines are gone when the other one starts: all it knows comes from the first.
    world.stub.end(gently=False)
    other = Indexer(tmp_path, world.stub.addresses, *free_ports(1), "other")
    ending(other)
    await other.start("--warm-from", world.indexer.url)
    async with asyncio.timeout(10):
        while (await other.query(token_ids=tokens))["pods"] != known["pods"]:
            await asyncio.sleep(0.05)
    pages = [(await one.get("/metrics")).decode() for one in (world.indexer, other)]
    sizes = [re.search(r"^index_size (\d+)$", page, re.M) for page in pages]
    assert sizes[0] and sizes[1] and sizes[0][1] == sizes[1][1] != "0"
