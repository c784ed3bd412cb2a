"""The gRPC server on the built-in HTTP/2: listeners, their connections, draining.

    server = H2Server({"/package.Service/Method": factory})
    await server.listen("", 9002)
    ...
    server.drain()
    await server.close(grace_s=30)

`bench/transport.py` measures it and compares it with grpc.aio.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

from fairlead.core.endpoint import host_port
from fairlead.gateway.h2_connection import H2Connection, Scratch
from fairlead.gateway.h2_control import H2Control
from fairlead.gateway.h2_limits import ByteBudget, H2Limits
from fairlead.gateway.ports import listening_sockets
from fairlead.gateway.stream import Routes
from fairlead.gateway.tls import Handshakes, ServerTls

log = logging.getLogger(__name__)

_TICK = 1.0
#: Seconds between log lines about connections that broke the protocol.
_LOG_GAP = 60.0
_BACKLOG = 1024


class H2Server:
    """Serves `Routes` over HTTP/2. Call all methods on the loop that listens."""

    def __init__(
        self,
        routes: Routes,
        limits: H2Limits | None = None,
        *,
        tls: ServerTls | None = None,
        merge_wakeups: bool = False,
        budget: ByteBudget | None = None,
    ) -> None:
        """`budget`: the bytes that all streams may hold. `merge_wakeups`: read single RST_STREAM frames together with
        the next data (`h2_stream`); only on Linux and plaintext TCP."""
        self.limits = limits or H2Limits()
        #: The listening addresses: `127.0.0.1:9002`, `[::]:9002` or a path.
        self.addresses: list[str] = []
        self._routes = routes
        self._tls = tls
        self._merge = merge_wakeups and hasattr(socket, "SO_RCVLOWAT")
        self._budget = budget
        self._scratch = Scratch()
        #: Connections that broke the protocol since the last log line about them, and the time of that line.
        self._broke, self._broke_logged_at = 0, -_LOG_GAP
        self._crowded_logged_at = -_LOG_GAP
        self._listeners: list[asyncio.Server] = []
        self._handshakes: list[Handshakes] = []
        self._paths: list[str] = []
        #: Oldest first.
        self._connections: dict[H2Control, None] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._ticker: asyncio.TimerHandle | None = None
        self._draining = self._closing = False
        self._streams = 0

    @property
    def connections(self) -> frozenset[H2Control]:
        return frozenset(self._connections)

    # ---- listening ----

    async def listen(self, host: str = "", port: int = 0) -> int:
        """Listen on every address of `host`; empty = all, IPv4 and IPv6. Return the port. Raises `OSError`."""
        sockets = listening_sockets(host, port, _BACKLOG)
        for sock in sockets:
            await self._start(sock)
            address, bound = sock.getsockname()[:2]
            self.addresses.append(host_port(address, bound))
        return int(sockets[0].getsockname()[1])

    async def listen_unix(self, path: str) -> None:
        """Listen on a Unix socket that only its owner may use. A stale socket file is replaced."""
        with contextlib.suppress(FileNotFoundError):
            if Path(path).is_socket():
                os.unlink(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # No client can connect before listen(), and by then the permissions are set.
            sock.bind(path)
            os.chmod(path, 0o600)
        except OSError:
            sock.close()
            raise
        await self._start(sock)
        self._paths.append(path)
        self.addresses.append(path)

    async def _start(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        context = None if self._tls is None else self._tls.context
        start = loop.create_unix_server if sock.family == socket.AF_UNIX else loop.create_server
        accept: Callable[[], asyncio.BaseProtocol] = self._connection
        if context is not None:
            handshakes = Handshakes(context, self.limits.handshake_timeout, self._secured)
            self._handshakes.append(handshakes)
            accept = handshakes.accept
        self._listeners.append(await start(accept, sock=sock, backlog=_BACKLOG))
        if self._ticker is None:
            self._ticker = loop.call_later(_TICK, self._tick)

    def _connection(self) -> H2Connection:
        return H2Connection(self._routes, self, self.limits, self._scratch, self._merge, self._budget)

    def _secured(self, transport: asyncio.Transport) -> H2Connection:
        connection = self._connection()
        transport.set_protocol(connection)
        connection.connection_made(transport)
        return connection

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._ticker = loop.call_later(_TICK, self._tick)
        now = loop.time()
        for connection in list(self._connections):
            connection.tick(now)
        if self._budget is not None:
            self._budget.tick()
        if self._tls is not None:
            self._tls.refresh(now)

    # ---- reports of connections ----

    def made(self, connection: H2Control) -> None:
        if len(self._connections) >= self.limits.max_connections:
            self._make_room()
        self._connections[connection] = None
        self._empty.clear()
        # It may have been accepted while the listeners closed. It is drained after its SETTINGS were sent.
        if self._closing:
            asyncio.get_running_loop().call_soon(connection.abort, "the server closes")
        elif self._draining:
            asyncio.get_running_loop().call_soon(connection.drain)

    def _make_room(self) -> None:
        """Close some connections of the address that has most, or of all if none has many: those that had the fewest
        streams, the oldest first. So clients that only hold connections keep no gateway out."""
        there = list(self._connections)
        few = len(there) // 16
        [(address, count)] = Counter(connection.address for connection in there).most_common(1)
        if count > few:
            there = [connection for connection in there if connection.address == address]
        for connection in sorted(there, key=attrgetter("opened"))[: max(1, len(there) // 16)]:
            connection.abort("others need its place")
            del self._connections[connection]
        now = asyncio.get_running_loop().time()
        if now - self._crowded_logged_at >= _LOG_GAP:
            holder = (address or "a local socket") if count > few else "many addresses"
            log.warning("too many connections: closed some of %d from %s", len(there), holder)
            self._crowded_logged_at = now

    def lost(self, connection: H2Control) -> None:
        self._connections.pop(connection, None)
        self._streams += connection.opened
        if not self._connections:
            self._empty.set()

    def broke(self, peer: str, why: str) -> None:
        """Count a protocol error, and log at most one line per minute."""
        self._broke += 1
        now = asyncio.get_running_loop().time()
        if now - self._broke_logged_at >= _LOG_GAP:
            log.info("closed %d connections that broke the protocol, the last from %s: %s", self._broke, peer, why)
            self._broke, self._broke_logged_at = 0, now

    @property
    def streams(self) -> int:
        """The number of streams in the server's life, those of closed connections included."""
        return self._streams + sum(connection.opened for connection in self._connections)

    # ---- the end ----

    def drain(self) -> None:
        """Accept no more connections, and send GOAWAY on the open ones. Running streams continue."""
        if not self._draining:
            self._draining = True
            for listener in self._listeners:
                listener.close()
            for connection in list(self._connections):
                connection.drain()

    async def close(self, grace_s: float = 0.0) -> None:
        """Drain, give running streams `grace_s` seconds, then end the rest: their handlers get `on_lost`."""
        self.drain()
        try:
            if grace_s > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(grace_s):
                        await self._empty.wait()
        finally:
            self._closing = True
            for handshakes in self._handshakes:
                handshakes.close()
            for connection in list(self._connections):
                connection.abort("the server closes")
            await self._empty.wait()
            if self._ticker is not None:
                self._ticker.cancel()
                self._ticker = None
            for path in self._paths:
                with contextlib.suppress(OSError):
                    os.unlink(path)
            self._paths.clear()
