"""An aiohttp application on a TCP port of its own, and its access control.

Access
* An attacker can point a foreign host name at our address (DNS rebinding). A browser then sends that name as `Host`, so
  only our own names are answered, and literal addresses, which scrapers and probes use. Requests from a page of another
  origin carry `Origin`, and are refused.
* A bearer token may be required; browsers send it as the password of HTTP basic authentication. The file may hold
  several tokens, one per line, and is read again when it changes, so that an old and a new token can overlap. A file
  without tokens lets nobody in. While it cannot be read, the tokens read before stay valid.
* Paths that probes use are answered without checks.

Connections
* There are at most `MOST_CONNECTIONS`, so that they cannot exhaust the process's file descriptors. A new connection
  replaces the oldest one without a request in progress; those whose client still reads an answer go last. So clients
  that send or read nothing cannot keep probes out.
* A client that sends no complete request head within `IDLE_S` seconds is disconnected.
"""

import asyncio
import base64
import binascii
import hmac
import logging
import os
import re
import socket
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from ssl import SSLContext
from typing import cast
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage
from aiohttp.typedefs import Handler

from fairlead.core.errors import ConfigError
from fairlead.core.text import plain
from fairlead.gateway.ports import listening_sockets
from fairlead.gateway.tls import Handshakes, ServerTls

MOST_CONNECTIONS = 256
IDLE_S, _HANDSHAKE_S = 30.0, 10.0
_TLS_LOOK_S = 5.0
_BACKLOG = 128


#: Characters that separate the host from other parts of a URL. A `Host` header has none of them (RFC 9110, 7.2).
_NO_HOST = re.compile(r"[@/\\?#]")


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether a line of aiohttp's server is about an error of ours. The others quote the bytes of malformed requests,
    which may hold a token."""
    return record.exc_info is None or not isinstance(record.exc_info[1], BadHttpMessage)


logging.getLogger("aiohttp.server").addFilter(_is_ours)


def read_tokens(file: Path) -> list[bytes]:
    """The tokens in a file, one per line; other lines are empty or begin with `#`. Raises `OSError`."""
    lines = map(bytes.strip, file.read_bytes().removeprefix(BOM_UTF8).splitlines())
    return [line for line in lines if line and not line.startswith(b"#")]


class Tokens:
    """The tokens in a file. The constructor raises `ConfigError` if the file is `required` and cannot be read or holds
    no token."""

    def __init__(self, file: str, required: bool = True) -> None:
        self._file = Path(file)
        self._identity: tuple[int, int, int] | None = None
        self._known: list[bytes] = []
        if required:
            self._look()
            if not self._known:
                raise ConfigError(f"{file} holds no token; write one token per line", "$.admin.tokenFile")

    def accept(self, authorization: str) -> bool:
        """Whether this `Authorization` header has one of the tokens, as bearer token or as password."""
        self.problem()
        kind, _, given = authorization.partition(" ")
        # Headers may hold bytes that are no UTF-8. aiohttp keeps them as surrogates; encode them back to compare.
        offered = given.strip().encode(errors="surrogateescape")
        if kind.lower() == "basic":
            try:
                offered = base64.b64decode(offered, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif kind.lower() != "bearer":
            return False
        # Compare with all tokens, so that the time reveals nothing about them.
        return sum(hmac.compare_digest(offered, known) for known in self._known) > 0

    def problem(self) -> str:
        """Read the file again if it has changed. Return what is wrong with it; empty = its tokens are in force."""
        try:
            self._look()
        except ConfigError as error:
            return f"{error.message}; {'the admin tokens read before stay valid' if self._known else 'nobody gets in'}"
        return "" if self._known else f"{self._file} holds no token: nobody gets in until it has one per line"

    def _look(self) -> None:
        try:
            status = os.stat(self._file)
            identity = status.st_ino, status.st_mtime_ns, status.st_size
            if identity == self._identity:
                return
            known = read_tokens(self._file)
        except OSError as error:
            raise ConfigError(f"cannot read {self._file}: {error.strerror}", "$.admin.tokenFile") from None
        self._identity, self._known = identity, known


def _host_of(origin: str) -> str:
    """Host and port of an origin; empty if it is not a valid one."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


class Access:
    """Access control of a port. `hosts`: further names of this server; a leading dot = all names with that ending."""

    def __init__(self, hosts: Iterable[str] = (), tokens: Tokens | None = None, free: Collection[str] = ()) -> None:
        """`tokens`: one of them is required; `None` = none. `free`: paths that are answered without checks."""
        names = {"localhost", socket.gethostname().lower(), *(host.lower() for host in hosts)}
        self._names = {name for name in names if not name.startswith(".")}
        self._endings = (".localhost", *(name for name in names if name.startswith(".")))
        self._tokens = tokens
        self._free = free

    def refusal(self, request: web.Request) -> web.Response | None:
        """The answer that refuses a request; `None` = it is allowed."""
        if request.path in self._free:
            return None
        host = request.headers.get("Host")
        if host is not None and not self.ours(host):
            return web.Response(status=403, text=f"{host[:80]!r} is not a name of this server; see admin.hosts\n")
        origin = request.headers.get("Origin")
        if origin is not None and _host_of(origin) != host:
            return web.Response(status=403, text="requests from pages of other origins are refused\n")
        if self._tokens is not None and not self._tokens.accept(request.headers.get("Authorization", "")):
            # For Basic, browsers ask the user, for scripts too. Those of the dashboard name what they accept.
            scheme = "Basic" if "*/*" in request.headers.get("Accept", "*/*") else "Bearer"
            challenge = {"WWW-Authenticate": f'{scheme} realm="fairlead"'}
            return web.Response(status=401, text="a token is needed\n", headers=challenge)
        return None

    def problem(self) -> str:
        """What is wrong with the file of tokens; empty = nothing."""
        return "" if self._tokens is None else self._tokens.problem()

    def ours(self, host: str) -> bool:
        """Whether a `Host` header names this server: a literal address or one of its names, with or without a port."""
        if _NO_HOST.search(host):
            return False
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        name = name.removesuffix(".")
        try:
            ip_address(name)
        except ValueError:
            return name in self._names or name.endswith(self._endings)
        return True

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        return self.refusal(request) or await handler(request)


Busy = set[web.RequestHandler]


class _Connections:
    """The connections of a port, which are limited. `busy`: those with a request in progress."""

    def __init__(self, runner: web.AppRunner, busy: Busy) -> None:
        self._runner, self._busy = runner, busy
        # aiohttp forgets the transport of a connection that it closes, but the transport stays open until its client
        # has read everything.
        self._open: dict[web.RequestHandler, asyncio.Transport] = {}

    def admit(self, transport: asyncio.Transport) -> web.RequestHandler | None:
        """Serve a new connection, or close it if all others are busy. Return its protocol; `None` = it is closed."""
        server = self._runner.server
        assert server is not None
        connected = set(server.connections)
        self._open = {connection: its for connection, its in self._open.items() if connection in connected}
        if len(self._open) >= MOST_CONNECTIONS:
            idle = [connection for connection in self._open if connection not in self._busy]
            if not idle:
                transport.abort()
                return None
            # The oldest connection goes first, but those with an answer that is not read yet go last.
            oldest = min(idle, key=lambda connection: self._open[connection].get_write_buffer_size() > 0)
            oldest.force_close()
            self._open.pop(oldest).abort()
        protocol = server()
        self._open[protocol] = transport
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        return protocol


class _Entry(asyncio.Protocol):
    """The protocol of a new connection until `_Connections` admits it."""

    def __init__(self, connections: _Connections) -> None:
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connections.admit(cast(asyncio.Transport, transport))


class _Site(web.SockSite):
    def __init__(
        self, runner: web.AppRunner, sock: socket.socket, tls: SSLContext | None, connections: _Connections
    ) -> None:
        super().__init__(runner, sock, ssl_context=tls)
        self._connections = connections
        self._handshakes: Handshakes | None = None

    async def stop(self) -> None:
        await super().stop()
        if self._handshakes is not None:
            self._handshakes.close()

    async def start(self) -> None:
        await web.BaseSite.start(self)
        accept: Callable[[], asyncio.Protocol] = partial(_Entry, self._connections)
        if self._ssl_context is not None:
            self._handshakes = Handshakes(self._ssl_context, _HANDSHAKE_S, self._connections.admit)
            accept = self._handshakes.accept
        self._server = await asyncio.get_running_loop().create_server(accept, sock=self._sock)


#: Receives a page's path and its exception.
OnError = Callable[[str, Exception], object]


def reported(handler: Handler, on_error: OnError, route: str = "") -> Handler:
    """A handler that reports the exceptions of `handler` and answers 500. `route`: shown in place of the request's
    path."""

    async def guarded(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except (web.HTTPException, asyncio.CancelledError):
            raise
        except Exception as error:
            path = route or request.path
            on_error(path, error)
            return web.Response(status=500, text=f"{path} failed: {type(error).__name__}\n")

    return guarded


async def send(
    request: web.Request,
    pieces: Collection[bytes],
    headers: dict[str, str],
    *,
    chunk: int = 64 << 10,
    whole_s: float | None = None,
    chunk_s: float | None = None,
) -> web.StreamResponse:
    """Send the pieces as one response. A client is disconnected if it takes longer than `whole_s` seconds for all or
    `chunk_s` seconds for `chunk` bytes; `None` = no limit."""

    async def write(response: web.StreamResponse) -> None:
        for piece in pieces:
            for start in range(0, len(piece), chunk):
                async with asyncio.timeout(chunk_s):
                    await response.write(piece[start : start + chunk])

    return await _respond(request, headers, sum(map(len, pieces)), write, whole_s)


async def send_file(request: web.Request, path: Path, chunk_s: float, chunk: int = 256 << 10) -> web.StreamResponse:
    """Send a file as it is now, read in a thread. A client is disconnected if it takes longer than `chunk_s` seconds
    for `chunk` bytes, or if the file becomes shorter. Raises `OSError`."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size

        async def write(response: web.StreamResponse) -> None:
            left = size
            while left:
                piece = await asyncio.to_thread(file.read, min(left, chunk))
                if not piece:
                    raise TimeoutError
                left -= len(piece)
                async with asyncio.timeout(chunk_s):
                    await response.write(piece)

        return await _respond(request, {"Content-Type": "application/octet-stream"}, size, write)


async def _respond(
    request: web.Request,
    headers: dict[str, str],
    length: int,
    write: Callable[[web.StreamResponse], Awaitable[None]],
    whole_s: float | None = None,
) -> web.StreamResponse:
    """Send a response whose `length` bytes are written by `write`. A `TimeoutError` disconnects the client."""
    response = web.StreamResponse(headers=headers)
    response.content_length = length
    try:
        async with asyncio.timeout(whole_s):
            await response.prepare(request)
            if request.method != "HEAD":
                await write(response)
            await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
    except ConnectionError:
        pass  # the client left
    return response


async def healthz(request: web.Request) -> web.Response:
    """The page `/healthz`: 200 while the process is alive."""
    return web.Response(text="ok\n")


def readiness(reasons: Iterable[str], notes: Iterable[str] = ()) -> web.Response:
    """The page `/readyz`. `reasons`: why requests cannot be served; empty = they can, and `notes` are shown. Each is
    one line without control characters, because others choose the names in it."""
    if listed := _lines(reasons):
        return web.Response(status=503, text="not ready\n" + listed)
    return web.Response(text="ready\n" + _lines(notes))


def _lines(texts: Iterable[str]) -> str:
    return "".join(f"- {plain(' '.join(text.split()))}\n" for text in texts)


class HttpPort:
    """Call `await start()`, then read `port`; `await close()` at the end.

    `grace_s`: seconds that requests in progress get to finish at `close`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        grace_s: float,
        tls: ServerTls | None = None,
        make_app: Callable[[], web.Application] | None = None,
    ) -> None:
        """Port 0 = any free port. `tls`: `None` = plain HTTP. `make_app`: makes the application; default: empty."""
        self._host = host
        self._wanted_port = port
        self._grace_s = grace_s
        self._tls = tls
        self._make_app = make_app
        self._runner: web.AppRunner | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._busy: Busy = set()
        #: The port in use, once started.
        self.port = 0

    def make_app(self) -> web.Application:
        """The application, also for callers with their own server."""
        return web.Application() if self._make_app is None else self._make_app()

    async def start(self) -> None:
        """Raises `OSError` if the port is taken."""
        app = self.make_app()
        app.middlewares.insert(0, self._serve)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=self._grace_s, keepalive_timeout=IDLE_S)
        await runner.setup()
        sockets: list[socket.socket] = []
        try:
            tls = None if self._tls is None else self._tls.context
            connections = _Connections(runner, self._busy)
            sockets = listening_sockets(self._host, self._wanted_port, _BACKLOG)
            for sock in sockets:
                await _Site(runner, sock, tls, connections).start()
        except BaseException:
            await runner.cleanup()
            for sock in sockets:
                sock.close()
            raise
        self._runner = runner
        self.port = int(runner.addresses[0][1])
        if self._tls is not None:
            self._look()

    @web.middleware
    async def _serve(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._busy.add(request.protocol)
        try:
            return await handler(request)
        finally:
            self._busy.discard(request.protocol)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._looking = loop.call_later(_TLS_LOOK_S, self._look)
        if self._tls is not None:
            self._tls.refresh(loop.time())

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
