"""The index taken from one process to another, and prompts that are only counted."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from fairlead.apis.parsed import ParsedRequest
from fairlead.apis.tokens import PromptTokens
from fairlead.compat.load import load
from fairlead.core.endpoint import Endpoint
from fairlead.core.events import EndpointUp
from fairlead.core.fleet import Fleet
from fairlead.core.kv.events import BlocksStored
from fairlead.gateway.understand import PromptKnown
from fairlead.lab.stub.kv_publisher import KvEventsConfig, KvPublisher
from fairlead.pool.aio import in_turns
from fairlead.server.live.knowledge import exact_knowledge
from fairlead.server.live.kv import KvListening
from fairlead.server.live.pool_scheduler import PoolScheduler
from fairlead.server.live.prompts import PromptReading
from fairlead.server.observe.exposition import Registry


class World:
    def __init__(self, more: str) -> None:
        config = load(f"endpoints: ['10.0.0.1:8000']\nkvEvents: {{enabled: true{more}}}")
        self.fleet = Fleet(exact=exact_knowledge(config))
        self.kv = KvListening(config, self.fleet, Registry())
        self.index = self.kv.exact.index

    def up(self, name: str, address: str) -> int:
        self.fleet.up(Endpoint(name, address))
        self.kv.endpoint(EndpointUp(Endpoint(name, address)))
        slot = self.fleet.table.slot(name)
        assert slot is not None
        return slot

    async def snapshot(self) -> bytes:
        """As the scheduler saves it, in turns: a rank whose last batch is not finished is waited for."""
        await asyncio.sleep(0)  # an endpoint that was loaded has its place a turn after its last block
        return b"".join(await in_turns(self.kv.snapshot()))

    async def until(self, happened: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not happened():
                await asyncio.sleep(0.005)


@pytest.fixture
async def worlds() -> AsyncIterator[Callable[..., Any]]:
    async with AsyncExitStack() as stack:

        async def begin(more: str = "") -> World:
            world = World(more)
            await world.kv.start(stack)
            return world

        yield begin


@pytest.fixture
async def publisher() -> AsyncIterator[KvPublisher]:
    publisher = KvPublisher(KvEventsConfig(), "pod", "m")
    for digest in (1, 2, 3):
        publisher.add(BlocksStored([digest], 0, digest.to_bytes(64, "little"), 16))
        publisher.flush()
    yield publisher
    await publisher.close()


def ports(publisher: KvPublisher) -> str:
    events, replay = (a.rpartition(":")[2] for a in (publisher.events_address, publisher.replay_address))
    return f", port: {events}, replayPort: {replay}"


async def test_a_snapshot_is_taken_in(worlds: Callable[..., Any], publisher: KvPublisher) -> None:
    first = await worlds(ports(publisher))
    slot = first.up("a", "127.0.0.1:8000")
    await first.until(lambda: first.index.entries == 3)
    content = await first.snapshot()

    # Where nobody has been heard of yet it counts at once, for who is there and for who comes.
    second = await worlds()
    slot = second.up("a", "127.0.0.1:1")
    second.up("b", "127.0.0.1:2")
    with pytest.raises(ValueError, match="damaged"):
        second.kv.take(content[:-1])
    assert second.kv.take(content) == 2
    await second.until(lambda: second.index.entries == 3)
    (cache,) = second.index.caches_of(slot)
    assert (cache.provisional, cache.block_size) == (True, 16)
    third = await worlds()
    assert third.kv.take(content) == 0
    third.up("a", "127.0.0.1:1")
    await third.until(lambda: third.index.entries == 3)

    # Who was heard knows better.
    assert first.kv.take(content) == 0
    for world in (first, second, third):
        world.index.validate()


async def test_a_warm_start_from_another_process(
    worlds: Callable[..., Any], publisher: KvPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    first = await worlds(ports(publisher))
    first.up("a", "127.0.0.1:8000")
    await first.until(lambda: first.index.entries == 3)
    status = 200

    async def snapshot(request: web.Request) -> web.Response:
        return web.Response(body=await first.snapshot(), status=status)

    app = web.Application()
    app.router.add_get("/snapshot", snapshot)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    second = await worlds(f", indexer: {{warmFrom: '{url}'}}")
    second.up("a", "127.0.0.1:1")
    await second.until(lambda: second.index.entries == 3)
    # It may be ill, or gone: then it starts cold, and says so.
    status = 500
    await worlds(f", indexer: {{warmFrom: '{url}'}}")
    await runner.cleanup()
    await worlds(f", indexer: {{warmFrom: '{url}'}}")
    cold = [record.getMessage() for record in caplog.records if "no warm start" in record.getMessage()]
    assert len(cold) == 2


async def test_prompts_are_counted_without_events() -> None:
    class Tokeniser:
        def in_thread(self, parsed: ParsedRequest, model: str) -> bool:
            return parsed.prompt_bytes > 1000

        def tokens_of(self, parsed: ParsedRequest, body: bytes, model: str) -> PromptTokens:
            return PromptTokens(ids=body, total=len(body) // 4)

    engine_too = load("endpoints: ['10.0.0.1:80']\ntokens: {models: {m: {modelPath: /x}, e: {render: engine}}}").tokens
    reading = PromptReading(engine_too, None, lambda model: "10.0.0.1:80", lambda model: frozenset())
    await reading.start()
    reading.tokeniser = Tokeniser()  # type: ignore[assignment]
    assert reading.read(ParsedRequest("chat", prompt_bytes=40), bytes(40), ("m",)) == PromptKnown(10)
    task = reading.read(ParsedRequest("chat", prompt_bytes=4000), bytes(4000), ("m",))
    assert isinstance(task, asyncio.Task) and await task == PromptKnown(1000)
    # No engine is asked just to count.
    assert reading.read(ParsedRequest("chat", prompt_bytes=40), bytes(40), ("e",)) == PromptKnown(10)
    await reading.close()


async def test_a_tokeniser_that_cannot_be_used_is_a_restriction_and_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1")
    models = f"{{a: {{modelPath: /nowhere}}, b: {{modelPath: '{tmp_path}'}}, c: {{render: engine}}}}"
    pool = PoolScheduler(load(f"endpoints: ['127.0.0.1:1']\ntokens: {{models: {models}}}\n"), None)
    async with AsyncExitStack() as stack:
        await pool.start(stack)
        trouble = pool.troubles.look()["tokens"]
    assert trouble.startswith("no tokeniser of a: none (cannot read /nowhere")
    assert "; no tokeniser of b: none (" in trouble and "of c" not in trouble
    assert sum("a tokeniser cannot be used" in record.getMessage() for record in caplog.records) == 2


async def test_a_snapshot_that_cannot_be_written_is_a_restriction(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "index.kv"
    (tmp_path / "a").write_text("no directory")
    events = f"kvEvents: {{enabled: true, port: 1, snapshot: '{path}', snapshotInterval: 10ms}}"
    pool = PoolScheduler(load(f"endpoints: ['127.0.0.1:1']\n{events}\n"), None)
    async with AsyncExitStack() as stack, asyncio.timeout(30):
        await pool.start(stack)
        while "kv-snapshot" not in pool.troubles.look():
            await asyncio.sleep(0.005)
        assert str(path) in pool.troubles.look()["kv-snapshot"]
        (tmp_path / "a").unlink()
        while "kv-snapshot" in pool.troubles.look():
            await asyncio.sleep(0.005)
    assert path.exists() and path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["pipe", "device", "empty"])
async def test_what_cannot_be_a_snapshot_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """A pipe would wait for its writer, and a device may have no end. Neither is replaced by a file."""
    path = tmp_path / "index.kv"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
    events = f"kvEvents: {{enabled: true, port: 1, snapshot: '{path}'}}"
    pool = PoolScheduler(load(f"endpoints: ['127.0.0.1:1']\n{events}\n"), None)
    async with AsyncExitStack() as stack, asyncio.timeout(30):
        await pool.start(stack)
    assert "cannot use the snapshot of the KV index; the index begins empty" in caplog.text
    assert ("the next save replaces the file" in caplog.text) is (kind == "empty")
    if kind == "empty":
        assert path.read_bytes().startswith(b"fairlead-kv"), "the next one is written"
    else:
        assert not path.is_file() and "it is not a regular file" in pool.troubles.look()["kv-snapshot"]
