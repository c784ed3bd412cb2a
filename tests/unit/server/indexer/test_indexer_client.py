"""Asking an indexer that answers, is late, hangs, talks nonsense, and is gone."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from time import perf_counter
from typing import Any

import pytest
from aiohttp import web

from fairlead.server.indexer import client as module
from fairlead.server.indexer.client import FAILURES, IndexClient
from fairlead.server.indexer.wire import MSGPACK, Answer, PodAnswer, StateAnswer, read_query, write

ANSWER = Answer(total=4, pods={"a": PodAnswer(matched=2, hit_rate=0.5, tiers={"gpu": 2})})
QUESTION = {"keys": bytes(32), "block_size": 16}


class Indexer:
    """Does as it is told to."""

    def __init__(self) -> None:
        self.runner: web.AppRunner | None = None
        self.port = 0
        self.asked: list[Any] = []
        self.tellings = 0
        self.query: Callable[[web.Request], Awaitable[web.StreamResponse]] = self.good
        self.state: Callable[[web.Request], Awaitable[web.StreamResponse]] = self.told
        self.hung = asyncio.Event()

    async def start(self) -> str:
        app = web.Application()
        app.router.add_post("/query", self._query)
        app.router.add_get("/state", self._state)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self.runner.addresses[0][1]
        return f"http://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        self.hung.set()
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def _query(self, request: web.Request) -> web.StreamResponse:
        return await self.query(request)

    async def _state(self, request: web.Request) -> web.StreamResponse:
        return await self.state(request)

    async def good(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(read_query(await request.read(), request.content_type))
        return web.Response(body=write(ANSWER, MSGPACK), content_type=MSGPACK)

    async def told(self, request: web.Request) -> web.StreamResponse:
        self.tellings += 1
        return web.Response(body=write(StateAnswer(space="own-1", index_size=3)))

    async def hang(self, request: web.Request) -> web.StreamResponse:
        await self.hung.wait()
        return web.Response()


class World:
    def __init__(self) -> None:
        self.indexer = Indexer()
        self.states: list[StateAnswer | None] = []
        self.said: list[str] = []
        #: Instead of the real clock.
        self.now: float | None = None
        self.client: IndexClient

    async def start(self, budget: float = 5.0) -> IndexClient:
        url = await self.indexer.start()
        say = lambda what, why: self.said.append(f"{what}|{why}")  # noqa: E731
        self.client = IndexClient(url, budget, self.states.append, say, now=self.clock)
        self.client.start()
        await self.until(lambda: self.client.up)
        return self.client

    def clock(self) -> float:
        return perf_counter() if self.now is None else self.now

    async def until(self, happened: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not happened():
                await asyncio.sleep(0.005)


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(module, "POLL", 0.02)
    monkeypatch.setattr(module, "POLL_MOST", 0.1)
    monkeypatch.setattr(module, "PAUSE", 0.02)
    world = World()
    yield world
    await world.client.close()
    await world.indexer.stop()
    # A connection that was just being accepted would be left to the garbage collector.
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others, timeout=5)


async def test_questions_and_answers(world: World) -> None:
    client = await world.start()
    assert await client.ask(**QUESTION) == ANSWER
    (query,) = world.indexer.asked
    assert (query.keys, query.block_size) == (bytes(32), 16)
    assert client.ends == {"answered": 1, "late": 0, "failed": 0, "down": 0, "busy": 0}
    assert world.states[0] == StateAnswer(space="own-1", index_size=3)
    assert world.said == ["the indexer answers|"]


async def nonsense(request: web.Request) -> web.StreamResponse:
    return web.Response(body=b"\xff\x00nonsense")


async def error(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"status": 400, "message": "no"}}, status=400)


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    try:
        for _ in range(200):
            await response.write(bytes(1 << 16))
    except ConnectionError:
        pass
    return response


async def elsewhere(request: web.Request) -> web.StreamResponse:
    raise web.HTTPTemporaryRedirect("http://127.0.0.1:1/query")


@pytest.mark.parametrize("answer", [nonsense, error, endless, elsewhere])
async def test_broken_answers_are_none_and_after_three_it_is_left_alone(world: World, answer: Any) -> None:
    client = await world.start()
    world.indexer.query = world.indexer.state = answer
    while client.up:
        assert await client.ask(**QUESTION) is None
    assert client.ends["failed"] <= FAILURES
    assert await client.ask(**QUESTION) is None
    assert client.ends["down"] == 1
    assert world.states[-1] is None
    assert "learned prefixes are used" in world.said[-1]
    # It is well again, which its state shows.
    world.indexer.query, world.indexer.state = world.indexer.good, world.indexer.told
    await world.until(lambda: client.up)
    assert await client.ask(**QUESTION) == ANSWER
    assert [line.partition("|")[0] for line in world.said].count("the indexer answers") == 2


async def test_late_answers_are_not_waited_for(world: World) -> None:
    client = await world.start(0.05)
    world.now = 0.0
    world.indexer.query = world.indexer.hang
    assert [await client.ask(**QUESTION) for _ in range(FAILURES)] == [None] * FAILURES
    assert client.ends["late"] == FAILURES
    # Its state is still told, but it rests, twice as long each time: it must not be asked what hangs all the time.
    for rest in (0.02, 0.04, 0.08):
        assert await client.ask(**QUESTION) is None
        world.now += 0.9 * rest
        told = world.indexer.tellings
        await world.until(lambda told=told: world.indexer.tellings > told + 3)
        assert not client.up
        world.now += 0.2 * rest
        await world.until(lambda: client.up)
        late = client.ends["late"]
        assert await client.ask(**QUESTION) is None
        assert (client.up, client.ends["late"]) == (False, late + 1)  # one is enough now
    world.now += 1.0
    world.indexer.query = world.indexer.good
    client.budget = 5.0
    await world.until(lambda: client.up)
    assert await client.ask(**QUESTION) == ANSWER


async def test_one_that_is_gone_and_comes_back(world: World) -> None:
    client = await world.start()
    assert await client.ask(**QUESTION) == ANSWER
    await world.indexer.stop()
    await world.until(lambda: not client.up)
    assert [await client.ask(**QUESTION) for _ in range(50)] == [None] * 50
    assert client.ends["down"] == 50
    await world.indexer.start()
    await world.until(lambda: client.up)
    assert await client.ask(**QUESTION) == ANSWER


async def test_questions_do_not_gather(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ASKED", 4)
    client = await world.start()
    world.indexer.query = world.indexer.hang
    asked = [asyncio.ensure_future(client.ask(**QUESTION)) for _ in range(10)]
    await world.until(lambda: client.ends["busy"] == 6)
    for one in asked:
        one.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    world.indexer.query = world.indexer.good
    assert await client.ask(**QUESTION) == ANSWER


async def test_nothing_is_asked_before_it_was_heard_of() -> None:
    said: list[str] = []
    states: list[object] = []
    client = IndexClient("http://127.0.0.1:1", 5.0, states.append, lambda what, why: said.append(what))
    assert await client.ask(**QUESTION) is None
    client.start()
    async with asyncio.timeout(20):
        while not said:
            await asyncio.sleep(0.005)
    assert (client.up, states, client.ends["down"]) == (False, [None], 1)
    await client.close()
    await client.close()
