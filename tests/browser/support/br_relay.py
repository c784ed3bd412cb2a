"""Passes bytes on between a browser and the admin port, as a port-forward does, and fails as that does."""

import asyncio
import contextlib
from types import TracebackType
from typing import Self


class Relay:
    """`async with Relay(port)`, then its `url`. It removes the `prefix` from the paths of requests."""

    def __init__(self, port: int, prefix: str = "/") -> None:
        self._port = port
        self._prefix = prefix
        self._open: dict[asyncio.Task[None], asyncio.Event] = {}

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}{self._prefix}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open)

    def silence(self) -> None:
        """Pass nothing more on in the connections that are open, without closing them. New connections work."""
        for passes in self._open.values():
            passes.clear()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = passes = asyncio.Event()
        passes.set()
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            await asyncio.gather(self._pump(reader, back, passes), self._pump(there, writer, passes))
        except asyncio.CancelledError:
            pass  # the test is over
        finally:
            for end in (writer, back):
                end.close()
            del self._open[task]

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
