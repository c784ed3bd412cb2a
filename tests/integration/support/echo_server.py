"""An echo service over the HTTP/2 server, for tests that speak to it in different ways."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fairlead.gateway.h2_limits import H2Limits
from fairlead.gateway.h2_server import H2Server
from fairlead.gateway.stream import ServerStream

PATH = "/test.Service/Echo"
NO_LIMIT = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Echo:
    """Sends every message back, ends when the peer ends."""

    def __init__(self, stream: ServerStream, headers: Mapping[str, str]) -> None:
        self.stream = stream
        self.lost: list[str] = []
        MADE.append(self)

    def on_message(self, message: bytes) -> None:
        self.stream.send(message)

    def on_half_close(self) -> None:
        self.stream.finish()

    def on_lost(self, why: str) -> None:
        self.lost.append(why)


MADE: list[Echo] = []


Serve = Callable[..., Awaitable[tuple[H2Server, str]]]


@asynccontextmanager
async def serving() -> AsyncIterator[Serve]:
    """Starts an echo server on a free port; gives it and its target."""
    servers: list[H2Server] = []

    async def start(limits: H2Limits | None = None, **options: Any) -> tuple[H2Server, str]:
        server = H2Server({PATH: Echo}, limits, **options)
        servers.append(server)
        return server, f"127.0.0.1:{await server.listen('127.0.0.1')}"

    yield start
    for server in servers:
        await server.close()
        assert not server.connections


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)
