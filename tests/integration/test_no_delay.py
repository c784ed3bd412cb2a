"""Nobody waits 40 ms for a delayed ACK: every TCP connection that is accepted, or that sends load, has TCP_NODELAY."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from stat import S_ISSOCK

import pytest
from echo_server import PATH, Echo

from fairlead.gateway.grpc_server import GrpcServer
from fairlead.gateway.h2_server import H2Server
from fairlead.lab.engine.spec import EngineSpec, LatencyModel
from fairlead.lab.load.connection import Client
from fairlead.lab.load.reactor import Reactor
from fairlead.lab.load.spec import Options, Record
from fairlead.lab.load.workload import Call
from fairlead.lab.stub.config import StubConfig
from fairlead.lab.stub.pool import StubPool
from fairlead.server.http_port import HttpPort
from fairlead.server.sdk.server import SchedulerServer, policy_maker


def own_socket(peer_port: int) -> socket.socket | None:
    """A copy of this process's socket that is connected to that port of 127.0.0.1, whoever opened it."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                continue
            copy = socket.socket(fileno=os.dup(int(name)))
            if copy.family != socket.AF_UNIX and is_peer(copy, peer_port):
                return copy
            copy.close()
    return None


def is_peer(sock: socket.socket, port: int) -> bool:
    with suppress(OSError):
        return sock.getpeername()[:2] in (("127.0.0.1", port), ("::ffff:127.0.0.1", port))
    return False


async def has_no_delay(peer_port: int) -> bool:
    async with asyncio.timeout(10):
        while (found := own_socket(peer_port)) is None:
            await asyncio.sleep(0.005)
    with found:
        return bool(found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))


@asynccontextmanager
async def own_http2() -> AsyncIterator[int]:
    server = H2Server({PATH: Echo})
    try:
        yield await server.listen("127.0.0.1")
    finally:
        await server.close()


@asynccontextmanager
async def own_http2_everywhere() -> AsyncIterator[int]:
    server = H2Server({PATH: Echo})
    try:
        yield await server.listen()
    finally:
        await server.close()


@asynccontextmanager
async def grpc_aio() -> AsyncIterator[int]:
    pytest.importorskip("grpc", reason="the reference transport is not installed")
    server = GrpcServer({PATH: Echo})
    try:
        yield await server.listen("127.0.0.1")
    finally:
        await server.close()


@asynccontextmanager
async def pages() -> AsyncIterator[int]:
    """What admin, dashboard and indexer listen with."""
    port = HttpPort("127.0.0.1", 0, grace_s=0.0)
    await port.start()
    try:
        yield port.port
    finally:
        await port.close()


@asynccontextmanager
async def scheduler_sdk() -> AsyncIterator[int]:
    server = SchedulerServer(policy_maker("round-robin"))
    try:
        yield int((await server.start("127.0.0.1:0")).rpartition(":")[2])
    finally:
        await server.close()


@asynccontextmanager
async def stub() -> AsyncIterator[int]:
    config = StubConfig(engine=EngineSpec(latency=LatencyModel(1.0), num_blocks=100, max_model_len=1000), model="tiny")
    async with StubPool(config, replicas=1) as pool:
        yield int(pool.addresses[0].rpartition(":")[2])


SERVERS: list[Callable[[], AbstractAsyncContextManager[int]]] = [
    own_http2,
    own_http2_everywhere,
    grpc_aio,
    pages,
    scheduler_sdk,
    stub,
]


@pytest.mark.parametrize("serve", SERVERS)
async def test_accepted_connections_send_at_once(serve: Callable[[], AbstractAsyncContextManager[int]]) -> None:
    async with serve() as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            assert await has_no_delay(writer.get_extra_info("sockname")[1])
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


async def test_the_load_generator_sends_at_once() -> None:
    reactor = Reactor(asyncio.get_running_loop())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        client = Client(f"http://127.0.0.1:{port}", Options(requests=1), reactor)
        await client.open()
        client.send(Call(path="/v1/models", method="GET"), Record(0, 0.0), lambda record, now: None)
        assert await has_no_delay(port)
        client.close()
    reactor.close()
