"""Passes bytes on between a browser and the admin port, as a port-forward does, and fails as that does."""

import asyncio
import contextlib
from types import TracebackType
from typing import Self

_Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Relay:
    """`async with Relay(port)`, then its `url`. It removes the `prefix` from the paths of requests."""

    def __init__(self, port: int, prefix: str = "/") -> None:
        self._port = port
        self._prefix = prefix
        self._open: dict[asyncio.Task[None], asyncio.Event] = {}
        self._streams: set[asyncio.Task[None]] = set()

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
        """Pass nothing more on in the open connections with a stream, without closing them. Close the idle ones, as
        servers do after a while. New connections work."""
        for task, passes in self._open.items():
            if task in self._streams:
                passes.clear()
            else:
                task.cancel()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = passes = asyncio.Event()
        passes.set()
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            await asyncio.gather(self._pump(task, (reader, back), passes), self._pump(task, (there, writer), passes))
        except asyncio.CancelledError:
            pass  # `silence` or the end of the test
        finally:
            for end in (writer, back):
                end.close()
            del self._open[task]

    async def _pump(self, task: asyncio.Task[None], ends: _Ends, passes: asyncio.Event) -> None:
        reader, writer = ends
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if data.startswith(b"GET "):
                    data = data.replace(b"GET %b" % self._prefix.encode(), b"GET /", 1)
                if data.startswith(b"GET /dashboard/stream "):
                    self._streams.add(task)
                await passes.wait()
                writer.write(data)
                await writer.drain()
            await passes.wait()
            writer.close()
