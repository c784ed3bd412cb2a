"""Servers that say whatever a test wants."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
from tcp import TcpServer

Start = Callable[..., Awaitable[int]]


@pytest.fixture
async def server() -> AsyncIterator[Start]:
    """`await server(bytes, pause)` answers every request with these bytes after that time; gives its port."""
    async with AsyncExitStack() as stack:

        async def start(answer: bytes, pause: float = 0.0) -> int:
            async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.read(1000)
                await asyncio.sleep(pause)
                writer.write(answer)

            return (await stack.enter_async_context(TcpServer(talk))).port

        yield start
