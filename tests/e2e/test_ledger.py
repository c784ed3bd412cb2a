"""Whatever happens to requests, nothing stays charged to an endpoint.

The scheduler runs in this process, so that the ledger can be looked into. Envoy is a real one with the configuration of
the embedded gateway, and the model servers are `fairlead stub`, twenty times faster than real ones.
"""

import asyncio
import itertools
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random

import numpy as np
import pytest
from gw_http1 import Http1
from gw_messages import JSON, Ask, Broken
from gw_modes import embedded
from gw_processes import Envoy, Stub, sees_the_scheduler, stat
from ports import free_ports

from fairlead.core.scheduler import Pipeline
from fairlead.gateway.access_log import GATEWAY_ID
from fairlead.server.live import Live

MODEL = "Qwen/Qwen3-32B"
COLUMNS = ("inflight", "pending", "pending_tokens", "kv_tokens", "queue", "active")
#: Each at a moment of its own; see `Client.act`.
ENDING = ("stream", "answer", "header only", "refused")
#: Requests in flight with which a crowd of 24 counts as busy.
BUSY = 12
ACTS = (*ENDING, "leave at once", "leave before the first token", "leave mid-stream")


def chat(words: int, tokens: int, stream: bool, model: str = MODEL) -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": "word " * words}], "max_tokens": tokens}
    return json.dumps(body | {"stream": stream, "ignore_eos": True}).encode()


class World:
    """A scheduler, its gateway and its model servers."""

    live: Live
    task: asyncio.Task[None]
    gateway: Envoy

    def __init__(self, stub: Stub, file: Path) -> None:
        self.stub = stub
        self._file = file
        self._before: Counter[str] = Counter()

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
            if not self.charged() and not np.any(list(left.values())):
                return {}
            await asyncio.sleep(0.05)
        return left

    async def until(self, happened: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not happened():
                await asyncio.sleep(0.01)

    async def warm_up(self) -> None:
        """Envoy connects its access log when it has something to say."""
        async with Http1(self.gateway.port) as client:
            await client.ask(Ask("GET", "/v1/models"))
        await self.until(lambda: self.live.host.logs.connected)
        assert await self.quiet() == {}
        self._before = self.ends()

    async def read_a_long_stream(self, begun: asyncio.Barrier) -> bytes:
        """What comes after the first event, at which it waits for `begun`, in a stream of seconds."""
        fields = [JSON, ("connection", "close")]
        async with asyncio.timeout(30), Http1(self.gateway.port) as client:
            reader = await client.begin(Ask(fields=fields, pieces=[chat(20, 20_000, stream=True)]))
            await reader.readuntil(b"data: ")
            await begun.wait()
            return await reader.read()

    def charged(self) -> int:
        return len(self.pipeline.fleet.ledger)

    def ends(self) -> Counter[str]:
        """How routed requests ended since the start of the test."""
        lines = b"".join(self.live.watch.exposition()).decode().splitlines()
        pairs = (
            line.split('cause="')[1].split('"} ') for line in lines if line.startswith("fairlead_request_end_total")
        )
        return Counter({cause: int(float(count)) for cause, count in pairs}) - self._before

    def check_all_were_told(self) -> Counter[str]:
        """No lease had to wait for its expiry, or for an endpoint that shows itself idle. Returns how they ended."""
        ends = self.ends()
        assert not ends["reconciled"] and not ends["expired"], ends
        return ends


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    """For tests that leave them as they are."""
    child = Stub(tmp_path_factory.mktemp("stub") / "stub.log")
    try:
        yield child.start(3, "--time-ratio", "20")
    finally:
        child.end()


@pytest.fixture
async def world(
    live: Callable[..., Awaitable[tuple[Live, asyncio.Task[None]]]],
    envoy: Callable[..., Envoy],
    stub: Callable[..., Stub],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> Callable[..., Awaitable[World]]:
    async def build(response_mode: str = "streamed", *nobody: str, own: bool = False, **more: object) -> World:
        """`nobody`: further addresses that are listed as endpoints; `own`: model servers of its own."""
        found = stub(3) if own else request.getfixturevalue("servers")
        built = World(found, tmp_path / "endpoints.json")
        built.list_endpoints([*found.addresses, *nobody])
        config = {"endpoints": {"file": str(tmp_path / "endpoints.json")}, "gateway": {"responseMode": response_mode}}
        built.live, built.task = await live(config | more)
        (port,) = free_ports(1)
        bootstrap = embedded(built.live.config, port, found.addresses)
        built.gateway = await asyncio.to_thread(envoy, bootstrap)  # the scheduler's loop must not stand still
        await sees_the_scheduler(built.gateway.admin)
        await built.warm_up()
        return built

    return build


class Client:
    """One client that behaves well or badly."""

    def __init__(self, port: int, chance: Random, longest: int) -> None:
        self._http = Http1(port)
        self._chance = chance
        self._longest = longest

    async def act(self, kind: str) -> bool:
        """False when the response broke."""
        try:
            async with asyncio.timeout(30):
                await self._act(kind)
            return True
        except (Broken, EOFError, OSError):  # a TimeoutError is an OSError
            return False
        finally:
            await self._http.close()

    async def _act(self, kind: str) -> None:
        words, tokens = self._chance.randint(5, 4000), self._chance.randint(1, self._longest)
        if kind == "header only":
            await self._http.ask(Ask(self._chance.choice(["GET", "HEAD"]), "/v1/models"))
        elif kind in ENDING:
            model = "no-such-model" if kind == "refused" else MODEL
            await self._http.ask(Ask(fields=[JSON], pieces=[chat(words, tokens, kind == "stream", model)]))
        else:
            await self._leave(kind, words)

    async def _leave(self, kind: str, words: int) -> None:
        stream = kind == "leave mid-stream" or self._chance.random() < 0.7
        fields = [JSON, ("connection", "close")]  # else nobody would end an error that is waited for in vain
        reader = await self._http.begin(Ask(fields=fields, pieces=[chat(words, 2000, stream)]))
        if kind == "leave before the first token":
            with suppress(TimeoutError):  # a plain answer has no headers before its end
                await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 0.02)
        elif kind == "leave mid-stream":
            await reader.readuntil(b"data: ")
            await asyncio.sleep(self._chance.uniform(0, 0.05))
        self._http.abort()


async def crowd(
    port: int, count: int, acts: Sequence[str] = ACTS, longest: int = 200, enough: asyncio.Event | None = None
) -> Counter[str]:
    """`count` random acts, 24 at a time, with answers of up to `longest` tokens; no new ones after `enough`. Returns
    what was done."""
    chance = Random(count)
    planned = itertools.takewhile(
        lambda _: not (enough and enough.is_set()), (chance.choice(acts) for _ in range(count))
    )
    done: Counter[str] = Counter()

    async def work() -> None:
        for kind in planned:
            whole = await Client(port, chance, longest).act(kind)
            done.update([kind] if whole else [kind, "broken"])

    async with asyncio.TaskGroup() as group:
        for _ in range(24):
            group.create_task(work())
    return done


@asynccontextmanager
async def crowding(at: World, *acts: str) -> AsyncIterator[asyncio.Task[Counter[str]]]:
    """A crowd that goes on while the block runs, which begins when many answers are on their way."""
    enough = asyncio.Event()
    task = asyncio.create_task(crowd(at.gateway.port, 100_000, acts, 1500, enough))
    try:
        await at.until(lambda: at.charged() > BUSY)
        yield task
    finally:
        enough.set()
        await task


@pytest.mark.parametrize("response_mode", ["streamed", "none"])
async def test_completions_and_cancels_of_every_kind(
    response_mode: str, world: Callable[..., Awaitable[World]]
) -> None:
    at = await world(response_mode)
    done = await crowd(at.gateway.port, 400)
    assert await at.quiet() == {}
    assert min(done[kind] for kind in ACTS) > 20
    assert done["broken"] == 0
    ends = at.check_all_were_told()
    assert sum(ends.values()) <= 400, "each request ends once"
    assert ends["natural"] >= done["stream"] + done["answer"] + done["refused"]
    assert ends["client-disconnect"] + ends["stream-lost"] > 50


async def test_clients_that_leave_just_when_the_pick_is_answered(world: Callable[..., Awaitable[World]]) -> None:
    """The session has left at the pick; the gateway throws it away, so its log entry names no lease, but its own id.
    What clients send in the place of that id is not believed: an id that comes twice would end nothing."""
    at = await world("none")
    logs = at.live.host.logs
    over, ended = logs.over, 0

    def counting(gateway_id: str) -> None:
        nonlocal ended
        before = at.charged()
        over(gateway_id)
        ended += before - at.charged()

    logs.over = counting  # type: ignore[method-assign]
    chance = Random(5)

    async def leave() -> None:
        client = Http1(at.gateway.port)
        fields = [JSON, (GATEWAY_ID, "mine"), (GATEWAY_ID.title(), "mine")]
        await client.begin(Ask(fields=fields, pieces=[chat(20, 2000, stream=True)]))
        await asyncio.sleep(chance.uniform(0, 0.004))
        client.abort()

    for _ in range(60):
        await asyncio.gather(*(leave() for _ in range(10)))
    assert await at.quiet() == {}
    at.check_all_were_told()
    assert ended > 0, "clients left between the pick and its use"


async def test_without_cancels_every_end_is_told(world: Callable[..., Awaitable[World]]) -> None:
    at = await world("none")
    done = await crowd(at.gateway.port, 300, acts=("stream", "answer", "refused"))
    assert await at.quiet() == {}
    assert done["broken"] == 0
    assert at.ends() == {"natural": 300}


async def test_clients_that_leave_while_the_model_server_holds_their_request(
    world: Callable[..., Awaitable[World]],
) -> None:
    at = await world(own=True)
    for index in range(3):
        await at.stub.fault(index, stall=True)
    waiting = [Http1(at.gateway.port) for _ in range(30)]
    for number, client in enumerate(waiting):
        await client.begin(Ask(fields=[JSON], pieces=[chat(500, 50, stream=bool(number % 2))]))
    await at.until(lambda: at.charged() == 30)
    async with asyncio.timeout(30):
        while await stat(at.gateway.admin, "cluster.dst.upstream_rq_active") < 30:
            await asyncio.sleep(0.02)
    for client in waiting:
        client.abort()
    assert await at.quiet() == {}
    ends = at.check_all_were_told()
    assert ends["client-disconnect"] + ends["stream-lost"] == 30


async def test_model_servers_that_hang_up_or_are_not_there(world: Callable[..., Awaitable[World]]) -> None:
    (nobody,) = free_ports(1)
    # In turn and without a look at their health: the dead one keeps its share.
    at = await world("streamed", f"127.0.0.1:{nobody}", own=True, policy="round-robin", builtinFilters=False)
    await at.stub.fault(0, disconnect_rate=1.0, disconnect_after=5)
    await at.stub.fault(1, error_rate=1.0, error_in_stream=True)
    done = await crowd(at.gateway.port, 200, acts=("stream", "answer"))
    assert await at.quiet() == {}
    assert done["broken"] > 5, "cut streams were seen"
    assert at.ends() == {"natural": 200 - done["broken"], "upstream-reset": done["broken"]}


async def test_model_servers_that_are_killed(world: Callable[..., Awaitable[World]]) -> None:
    at = await world(own=True)
    begun = asyncio.Barrier(BUSY + 1)
    async with crowding(at, "stream", "leave mid-stream"), asyncio.TaskGroup() as group:
        reading = [group.create_task(at.read_a_long_stream(begun)) for _ in range(BUSY)]
        await begun.wait()
        at.stub.signal(signal.SIGKILL)
    assert not any(each.result().endswith(b"0\r\n\r\n") for each in reading), "streams were cut"
    assert await at.quiet() == {}
    at.check_all_were_told()


async def test_endpoints_that_are_removed_while_they_answer(world: Callable[..., Awaitable[World]]) -> None:
    at = await world()
    async with crowding(at, "stream", "leave mid-stream") as crowded:
        for turn in range(3):
            await at.until(lambda: at.charged() > BUSY)
            at.list_endpoints(at.stub.addresses[turn:][:1])
            await at.until(lambda: at.pipeline.fleet.table.count == 1)
            at.list_endpoints(at.stub.addresses)
            await at.until(lambda: at.pipeline.fleet.table.count == 3)
    assert (await crowded)["broken"] == 0, "streams go on at an endpoint that was removed"
    assert await at.quiet() == {}
    assert "endpoint-gone" not in at.check_all_were_told(), "their ends are heard"


async def test_a_gateway_that_is_killed(world: Callable[..., Awaitable[World]]) -> None:
    """It takes the ends of its requests with it; that all its connections end tells them."""
    at = await world()
    async with crowding(at, "stream", "answer", "leave mid-stream"):
        at.gateway.signal(signal.SIGKILL)
    assert await at.quiet() == {}
    assert at.check_all_were_told()["stream-lost"] > 5


async def test_a_scheduler_that_ends(world: Callable[..., Awaitable[World]]) -> None:
    """It waits for the requests in flight, and for nothing else: an access log never ends by itself."""
    at = await world()
    async with crowding(at, "stream", "answer", "leave mid-stream") as crowded:
        at.live.stop()
        await at.until(lambda: not at.charged())
    assert (await crowded)["broken"] == 0, "the gateway balances without the scheduler"
    await asyncio.wait_for(at.task, 10)
    at.check_all_were_told()
    at.pipeline.validate()
