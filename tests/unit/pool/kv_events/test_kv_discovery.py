"""Where an engine says that it publishes, and what is made of it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from tcp import TcpServer

from fairlead.core.endpoint import Endpoint
from fairlead.pool.kv_events.discovery import KvSource, ask, configured, source_at, without_events


def source(port: int, replay: int | None = None, **more: object) -> dict[str, object]:
    replays = f"tcp://*:{replay}" if replay else None
    found = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
    return {**found, "replay_endpoint": replays, **more}


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[bytes], Any]]:
    """`await serve(answer)` answers each connection with these bytes, and gives its address."""
    async with AsyncExitStack() as stack:

        async def start(answer: bytes) -> str:
            async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(answer)
                await writer.drain()

            return (await stack.enter_async_context(TcpServer(handle))).address

        yield start


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


async def asked(address: str) -> KvSource | None:
    async with aiohttp.ClientSession() as session:
        return await ask(session, address, "*", None)


async def test_ports_are_taken_and_nothing_else(serve: Callable[[bytes], Any]) -> None:
    address = await serve(ok(json.dumps({"0": source(5557, 5558)}).encode()))
    assert await asked(address) == KvSource("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", "*")
    elsewhere = source(5557, endpoint="tcp://10.1.1.1:7000", replay_endpoint="tcp://evil.example:7001")
    address = await serve(ok(json.dumps({"0": elsewhere}).encode()))
    assert await asked(address) == KvSource("tcp://127.0.0.1:7000", "tcp://127.0.0.1:7001", "*")


async def test_ranks(serve: Callable[[bytes], Any]) -> None:
    address = await serve(ok(json.dumps({"²": {}, "1": source(5557), "0": source(5557)}).encode()))
    found = await asked(address)
    assert found is not None
    assert (found.ranks, found.of_rank(1)) == (2, ("tcp://127.0.0.1:5558", ""))


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 302 Found\r\nlocation: http://169.254.169.254/\r\ncontent-length: 0\r\n\r\n",
        ok(b"{}"),
        ok(b"[]"),
        ok(b"\xff\xfe"),
        ok(b'{"0": 7}'),
        ok(b'{"x": {}}'),
        ok(json.dumps({"0": source(5557, enable_kv_cache_events=False)}).encode()),
        ok(json.dumps({"0": source(5557, publisher="null")}).encode()),
        ok(json.dumps({"0": source(99999)}).encode()),
        ok(json.dumps({"0": source(5557, endpoint="ipc:///tmp/x")}).encode()),
        ok(json.dumps({"9" * 5000: source(5557)}).encode()),
        ok(b"[" * 200_000),
        ok(b'{"0": {"x": ' + b"[" * 60_000),
        b"garbage\r\n\r\n",
        b"",
    ],
)
async def test_everything_else_means_none(serve: Callable[[bytes], Any], answer: bytes) -> None:
    assert await asked(await serve(answer)) is None


async def test_an_engine_says_that_it_has_no_events(serve: Callable[[bytes], Any]) -> None:
    answers = {
        b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}": True,
        ok(b"{}"): True,
        ok(json.dumps({"0": source(5557, enable_kv_cache_events=False)}).encode()): True,
        ok(json.dumps({"0": source(5557)}).encode()): False,
        ok(b"\xff\xfe"): False,
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n": False,
        b"": False,
    }
    async with aiohttp.ClientSession() as session:
        assert [await without_events(session, await serve(answer)) for answer in answers] == list(answers.values())


async def test_nobody_listens() -> None:
    assert await asked("127.0.0.1:1") is None


def test_configured_ports() -> None:
    assert source_at("[fd00::1]:8000", 5557, 0, 2, "*", None) == KvSource("tcp://[fd00::1]:5557", "", "*", 2)
    for rank, ranks, ports in ((0, 1, (5557, 5657)), (1, 1, (5558, 5658)), (2, 4, (5565, 5665))):
        found = configured(Endpoint(f"pod-rank-{rank}", "10.0.0.1:8000", rank=rank), 5557, 5657, ranks, "*", None)
        events, replay = (f"tcp://10.0.0.1:{port}" for port in ports)
        assert found == KvSource(events, replay, "*", ranks)
    assert not configured(Endpoint("pod-rank-1", "10.0.0.1:8001", rank=1), 5557, 0, 1, "*", None).replay
