"""Servers that say whatever a test wants."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

Start = Callable[..., Awaitable[int]]


@pytest.fixture
async def server() -> AsyncIterator[Start]:
    """`await server(bytes, pause)` answers every request with these bytes after that time; gives its port."""
    talks: list[asyncio.Task[None]] = []
    async with AsyncExitStack() as stack:

        async def start(answer: bytes, pause: float = 0.0) -> int:
            async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = asyncio.current_task()
                assert task is not None
                talks.append(task)
                await reader.read(1000)
                await asyncio.sleep(pause)
                writer.write(answer)
                writer.close()

            listening = await stack.enter_async_context(await asyncio.start_server(talk, "127.0.0.1", 0))
            return int(listening.sockets[0].getsockname()[1])

        yield start
        await asyncio.gather(*talks)
