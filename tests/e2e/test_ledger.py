"""Whatever happens to requests, nothing stays charged to an endpoint.

The scheduler runs in this process, so that the ledger can be looked into. Envoy is a real one with the configuration of
the embedded gateway, and the model servers are `fairlead stub`, twenty times faster than real ones.
"""

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
from gw_http1 import Http1
from gw_messages import JSON, Ask, Broken
from gw_modes import embedded
from gw_processes import Envoy, Stub, free_ports, sees_the_scheduler, stat

from fairlead.live import Live
from fairlead.pipeline import Pipeline

MODEL = "Qwen/Qwen3-32B"
COLUMNS = ("inflight", "pending", "pending_tokens", "kv_tokens", "queue", "active")
#: Each at a moment of its own; see `Client.act`.
LEAVING = ("leave at once", "leave before the first token", "leave mid-stream")
ACTS = ("stream", "answer", "header only", "refused", *LEAVING)


def chat(words: int, tokens: int, stream: bool, model: str = MODEL) -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": "word " * words}], "max_tokens": tokens}
    return json.dumps(body | {"stream": stream, "ignore_eos": True}).encode()


class World:
    """A scheduler, its gateway and its model servers."""

    def __init__(self, live: Live, gateway: Envoy, stub: Stub, file: Path) -> None:
        self.live, self.gateway, self.stub = live, gateway, stub
        self._file = file

    @property
    def pipeline(self) -> Pipeline:
        return self.live.pipeline

    def list_endpoints(self, addresses: Sequence[str]) -> None:
        """Change the endpoints file."""
        fresh = self._file.with_suffix(".new")
        fresh.write_text(
            json.dumps({"endpoints": [{"name": f"at-{a.split(':')[1]}", "address": a} for a in addresses]})
        )
        fresh.rename(self._file)

    async def quiet(self) -> dict[str, list[float]]:
        """Wait until no column of the ledger holds anything; returns what is left. Invariants hold throughout."""
        for _ in range(400):
            self.pipeline.validate()
            table = self.pipeline.fleet.table
            slots = [slot for slot, _ in table.slots()]
            left = {name: getattr(table, name)[slots].tolist() for name in COLUMNS}
            if not len(self.pipeline.fleet.ledger) and not np.any(list(left.values())):
                return {}
            await asyncio.sleep(0.05)
        return left

    def ends(self) -> Counter[str]:
        """How routed requests ended."""
        lines = b"".join(self.live.watch.exposition()).decode().splitlines()
        pairs = (
            line.split('cause="')[1].split('"} ') for line in lines if line.startswith("fairlead_request_end_total")
        )
        return Counter({cause: int(float(count)) for cause, count in pairs})


@pytest.fixture
async def world(
    live: Callable[..., Awaitable[Live]], envoy: Callable[..., Envoy], stub: Callable[..., Stub], tmp_path: Path
) -> Callable[..., Awaitable[World]]:
    async def build(response_mode: str = "streamed", *nobody: str, **more: object) -> World:
        """`nobody`: further addresses that are listed as endpoints."""
        servers = stub(3)
        built = World(None, None, servers, tmp_path / "endpoints.json")  # type: ignore[arg-type]
        built.list_endpoints([*servers.addresses, *nobody])
        config = {"endpoints": {"file": str(tmp_path / "endpoints.json")}, "gateway": {"responseMode": response_mode}}
        built.live = await live({**config, **more})
        (port,) = free_ports(1)
        built.gateway = envoy(embedded(built.live.config, port, servers.addresses))
        await sees_the_scheduler(built.gateway.admin)
        return built

    return build


class Client:
    """One client that behaves well or badly."""

    def __init__(self, port: int, chance: Random) -> None:
        self._http = Http1(port)
        self._chance = chance
        self.acts: Counter[str] = Counter()

    async def act(self, kind: str) -> None:
        self.acts[kind] += 1
        words, tokens = self._chance.randint(5, 4000), self._chance.randint(1, 200)
        try:
            async with asyncio.timeout(30):
                await self._act(kind, words, tokens)
        except (Broken, EOFError, OSError):  # a TimeoutError is an OSError
            self.acts["broken"] += 1
        finally:
            await self._http.close()

    async def _act(self, kind: str, words: int, tokens: int) -> None:
        if kind == "header only":
            method = self._chance.choice(["GET", "HEAD"])
            await self._http.ask(Ask(method, "/v1/models"))
        elif kind in ("stream", "answer", "refused"):
            model = "no-such-model" if kind == "refused" else MODEL
            body = chat(words, tokens, kind == "stream", model)
            await self._http.ask(Ask(fields=[JSON], pieces=[body]))
        else:
            reader = await self._http.begin(Ask(fields=[JSON], pieces=[chat(words, 2000, True)]))
            if kind == "leave before the first token":
                await reader.readuntil(b"\r\n\r\n")
            elif kind == "leave mid-stream":
                await reader.readuntil(b"data: ")
                await asyncio.sleep(self._chance.uniform(0, 0.05))
            self._http.abort()


async def crowd(port: int, count: int, seed: int, acts: Sequence[str] = ACTS, at_once: int = 24) -> Counter[str]:
    """`count` random acts, `at_once` of them at a time. Returns what was done."""
    chance = Random(seed)
    planned = iter([chance.choice(acts) for _ in range(count)])
    done: Counter[str] = Counter()

    async def work() -> None:
        for kind in planned:
            client = Client(port, chance)
            await client.act(kind)
            done.update(client.acts)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work())
    return done


@pytest.mark.parametrize("response_mode", ["streamed", "none"])
async def test_completions_and_cancels_of_every_kind(
    response_mode: str, world: Callable[..., Awaitable[World]]
) -> None:
    at = await world(response_mode)
    done = await crowd(at.gateway.port, 400, seed=1)
    assert await at.quiet() == {}
    assert min(done[kind] for kind in ACTS) > 20
    assert done["broken"] == 0
    ends = at.ends()
    assert ends["natural"] > 100
    assert ends["client-disconnect"] + ends["stream-lost"] > 50
    assert sum(ends.values()) == await stat(at.gateway.admin, "cluster.dst.upstream_rq_total")


async def test_clients_that_leave_while_the_model_server_holds_their_request(
    world: Callable[..., Awaitable[World]],
) -> None:
    at = await world()
    for index in range(3):
        await at.stub.fault(index, stall=True)
    ask = Ask(fields=[JSON], pieces=[chat(500, 50, True)])
    waiting = [Http1(at.gateway.port) for _ in range(30)]
    for client in waiting:
        await client.begin(ask)
    async with asyncio.timeout(30):
        while len(at.pipeline.fleet.ledger) < 30:
            await asyncio.sleep(0.02)
    for client in waiting:
        client.abort()
    assert await at.quiet() == {}
    ends = at.ends()
    assert ends["client-disconnect"] + ends["stream-lost"] == 30


async def test_model_servers_that_hang_up_or_are_not_there(world: Callable[..., Awaitable[World]]) -> None:
    (nobody,) = free_ports(1)
    # In turn and without a look at their health: the dead one keeps its share.
    at = await world("streamed", f"127.0.0.1:{nobody}", policy="round-robin", builtinFilters=False)
    await at.stub.fault(0, disconnect_rate=1.0, disconnect_after=5)
    await at.stub.fault(1, error_rate=1.0, error_in_stream=True)
    done = await crowd(at.gateway.port, 200, seed=2, acts=("stream", "answer", "leave mid-stream"))
    assert done["broken"] > 20, "cut streams were seen"
    assert await at.quiet() == {}


async def test_a_model_server_that_is_killed(world: Callable[..., Awaitable[World]]) -> None:
    at = await world()
    crowding = asyncio.create_task(crowd(at.gateway.port, 150, seed=3, acts=("stream", "leave mid-stream")))
    await asyncio.sleep(0.5)
    assert len(at.pipeline.fleet.ledger)
    at.stub.signal(signal.SIGKILL)
    await crowding
    assert await at.quiet() == {}


async def test_endpoints_that_are_removed_while_they_answer(world: Callable[..., Awaitable[World]]) -> None:
    at = await world()
    crowding = asyncio.create_task(crowd(at.gateway.port, 300, seed=4, acts=("stream", "leave mid-stream")))
    for turn in range(6):
        await asyncio.sleep(0.2)
        at.list_endpoints(at.stub.addresses[turn % 3 :][:1])
    done = await crowding
    at.list_endpoints(at.stub.addresses)
    assert done["broken"] == 0, "streams go on at an endpoint that was removed"
    assert await at.quiet() == {}
    assert at.ends()["endpoint-gone"] > 0


async def test_a_gateway_that_is_killed(world: Callable[..., Awaitable[World]]) -> None:
    """It takes the ends of all its requests with it."""
    at = await world()
    crowding = asyncio.create_task(crowd(at.gateway.port, 60, seed=5, acts=("stream", "answer", "leave mid-stream")))
    await asyncio.sleep(0.4)
    assert len(at.pipeline.fleet.ledger)
    at.gateway.signal(signal.SIGKILL)
    await crowding
    # The model servers' gauges tell that they are idle, but not at once: see `fairlead.fleet.account`.
    assert await at.quiet() == {}


async def test_a_scheduler_that_ends(world: Callable[..., Awaitable[World]]) -> None:
    """It waits for the requests in flight, and for nothing else: an access log never ends by itself."""
    at = await world()
    crowding = asyncio.create_task(crowd(at.gateway.port, 300, seed=6, acts=("stream", "answer", "leave mid-stream")))
    await asyncio.sleep(0.5)
    assert len(at.pipeline.fleet.ledger)
    at.live.stop()
    done = await crowding
    assert done["broken"] == 0, "the gateway balances without the scheduler"
    assert len(at.pipeline.fleet.ledger) == 0
    at.pipeline.validate()
