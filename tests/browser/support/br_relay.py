"""Passes bytes on between a browser and the admin port, as a port-forward does, and fails as that does."""

import asyncio
import contextlib
from typing import Self

from tcp import TcpServer


class Relay:
    """`async with Relay(port)`, then its `url`. It removes the `prefix` from the paths of requests."""

    def __init__(self, port: int, prefix: str = "/") -> None:
        self._port = port
        self._prefix = prefix
        self._server = TcpServer(self._relay)
        self._passes: set[asyncio.Event] = set()

    async def __aenter__(self) -> Self:
        await self._server.start()
        self.url = f"http://{self._server.address}{self._prefix}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    def silence(self) -> None:
        """Pass nothing more on in the connections that are open, without closing them. New connections work."""
        for passes in self._passes:
            passes.clear()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passes = asyncio.Event()
        passes.set()
        self._passes.add(passes)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                await asyncio.gather(self._pump(reader, back, passes), self._pump(there, writer, passes))
            finally:
                back.close()
        finally:
            self._passes.discard(passes)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passes: asyncio.Event) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if data.startswith(b"GET "):
                    data = data.replace(b"GET %b" % self._prefix.encode(), b"GET /", 1)
                await passes.wait()
                writer.write(data)
                await writer.drain()
            await passes.wait()
            writer.close()
