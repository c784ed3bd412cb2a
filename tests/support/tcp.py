"""TCP servers of tests."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Self

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

#: Turns of the event loop in which an accepted connection gets its handler.
_ACCEPT_TURNS = 4


class TcpServer:
    """Gives each connection to `handle`, and closes it afterwards. A peer that leaves ends the handler in silence.

    `async with TcpServer(handle) as server`, then `server.address`. After `close` no connection and no handler is left,
    one that was accepted in that moment included: asyncio forgets its socket if the port is closed first.
    """

    def __init__(self, handle: Handler, host: str = "127.0.0.1", port: int = 0, **options: Any) -> None:
        """`options`: of `asyncio.start_server`."""
        self._handle = handle
        self._host, self.port, self._options = host, port, options
        self._open: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self._closed = False

    async def start(self) -> Self:
        self._server = await asyncio.start_server(self._serve, self._host, self.port, **self._options)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def address(self) -> str:
        return f"[{self._host}]:{self.port}" if ":" in self._host else f"{self._host}:{self.port}"

    @property
    def writers(self) -> set[asyncio.StreamWriter]:
        """Of the connections that are open."""
        return set(self._open.values())

    async def refuse(self) -> None:
        """Accept no more connections. Those that are open stay."""
        loop = asyncio.get_running_loop()
        for sock in self._server.sockets:
            loop.remove_reader(sock.fileno())
        for _ in range(_ACCEPT_TURNS):
            await asyncio.sleep(0)
        self._server.close()

    def hang_up(self) -> None:
        """Cut the connections that are open."""
        for writer in self.writers:
            writer.transport.abort()

    async def close(self) -> None:
        await self.refuse()
        self._closed = True
        self.hang_up()
        while self._open:
            for task in self._open:
                task.cancel()
            await asyncio.wait(list(self._open))
        await asyncio.sleep(0)  # in the next turn of the loop, the sockets are closed

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = writer
        try:
            await self._handle(reader, writer)
        except (OSError, EOFError):
            pass
        except asyncio.CancelledError:
            if not self._closed:
                raise
        finally:
            self._open.pop(task)
            writer.close()
