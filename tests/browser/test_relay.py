"""The relay between the browser and the admin port, without a browser."""

import asyncio

import pytest
from br_relay import Relay
from tcp import TcpServer


@pytest.mark.parametrize("turns", range(8))
async def test_a_connection_that_is_just_being_made_does_not_outlive_the_relay(turns: int) -> None:
    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with TcpServer(answers) as server:
        async with Relay(server.port) as relay:
            port = int(relay.url.rpartition(":")[2].rstrip("/"))
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(turns):
                await asyncio.sleep(0)
        writer.close()
        await writer.wait_closed()
