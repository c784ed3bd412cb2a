"""A pool of keep-alive connections to one gateway: one per request in flight, the most recently used one first."""

import asyncio
import socket
from collections.abc import Callable
from time import monotonic
from typing import cast
from urllib.parse import urlsplit

from fairlead.core.errors import ConfigError
from fairlead.lab.load.connection import RECEIVE_BYTES, Address, Connection, SocketAddress
from fairlead.lab.load.reactor import Reactor
from fairlead.lab.load.spec import Histogram, Options, Record
from fairlead.lab.load.workload import Call

#: Common servers close an idle connection after 5 s (uvicorn); one that old is not trusted with a request.
MAX_IDLE_S = 4.0
_SWEEP_S = 0.05

Done = Callable[[Record, float], object]


class Client:
    """Sends requests and times their responses. Use on one running loop: `await open()`, `send(…)`, `close()`."""

    def __init__(self, target: str, options: Options, reactor: Reactor) -> None:
        """`target`: `http://host:port`. Raises ConfigError for anything else."""
        self.loop = asyncio.get_running_loop()
        self.reactor = reactor
        self.options = options
        #: Of all requests: gaps between arrivals of body bytes; first tokens. Up to date after `count`.
        self.gaps = Histogram()
        self.ttfts = Histogram()
        self.new_gaps: list[float] = []
        self.new_ttfts: list[float] = []
        self.buffer = bytearray(RECEIVE_BYTES)
        self.received = memoryview(self.buffer)
        self.digest_field = options.digest_header.lower().encode("latin-1")
        self._host, self._port = _split_target(target)
        self._address: Address | None = None
        self._heads: dict[tuple[str, str], bytes] = {}
        self._fields = _render_fields({"host": _authority(self._host, self._port), **options.headers})
        self._idle: list[Connection] = []
        # In the order of sending, so the oldest request comes first.
        self._busy: dict[int, tuple[Connection, Done]] = {}
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def in_flight(self) -> int:
        return len(self._busy)

    async def open(self) -> None:
        """Resolve the host. Raises ConfigError if it has no address."""
        try:
            infos = await self.loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ConfigError(f"cannot resolve {self._host!r}: {error}", "$.target") from None
        family, _, _, _, where = infos[0]
        self._address = family, cast(SocketAddress, where)
        self._sweep = self.loop.call_later(_SWEEP_S, self._on_sweep)

    def send(self, call: Call, record: Record, done: Done) -> None:
        """Send now; `done(record, now)` is called once, later. Raises ConfigError for a header that cannot be sent."""
        assert self._address is not None, "open the client first"
        message = self._message(call)
        connection = self._take_connection()
        self._busy[record.index] = connection, done
        connection.start(record, message, self._address)

    def abort(self, error: str) -> None:
        """Every request in flight ends now with `error`."""
        now = monotonic()
        for connection, _ in list(self._busy.values()):
            connection.abort(error, now)

    def close(self) -> None:
        """Drop all connections. Requests in flight get no verdict. Harmless when repeated."""
        self.count()
        if self._sweep is not None:
            self._sweep.cancel()
        for connection, _ in self._busy.values():
            connection.close()
        for connection in self._idle:
            connection.close()
        self._busy.clear()
        self._idle.clear()

    def ended(self, connection: Connection, reusable: bool, now: float) -> None:
        """A connection reports the end of its request."""
        record = connection.record
        assert record is not None
        connection.record = None
        _, done = self._busy.pop(record.index)
        if reusable:
            self._idle.append(connection)
        done(record, now)

    def _take_connection(self) -> Connection:
        trusted = monotonic() - MAX_IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.connected and connection.idle_since > trusted:
                return connection
            connection.close()
        return Connection(self)

    def _message(self, call: Call) -> bytes:
        key = call.path, call.method
        head = self._heads.get(key)
        if head is None:
            line = f"{call.method} {call.path} HTTP/1.1\r\n"
            head = line.encode("latin-1") + self._fields + b"content-type: application/json\r\n"
            self._heads[key] = head
        fields = _render_fields(call.headers) if call.headers else b""
        return b"%bcontent-length: %d\r\n%b\r\n%b" % (head, len(call.body), fields, call.body)

    def count(self) -> None:
        """Bring `gaps` and `ttfts` up to date; many at once are cheaper than each when it comes."""
        self.gaps.add_all(self.new_gaps)
        self.ttfts.add_all(self.new_ttfts)
        self.new_gaps.clear()
        self.new_ttfts.clear()

    def _on_sweep(self) -> None:
        self.count()
        now = monotonic()
        due = now - self.options.timeout_s
        while self._busy:
            connection, _ = next(iter(self._busy.values()))
            if connection.record is None or connection.record.sent > due:
                break
            connection.abort("timeout", now)
        # The oldest idle connections lie at the bottom of the stack.
        while self._idle and self._idle[0].idle_since < now - MAX_IDLE_S:
            self._idle.pop(0).close()
        self._sweep = self.loop.call_later(_SWEEP_S, self._on_sweep)


def _split_target(target: str) -> tuple[str, int]:
    try:
        parts = urlsplit(target)
        port = parts.port or 80
    except ValueError as error:
        raise ConfigError(f"{target!r}: {error}", "$.target") from None
    if parts.scheme != "http" or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ConfigError(f"{target!r} is not http://host:port", "$.target")
    return parts.hostname, port


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _render_fields(fields: dict[str, str]) -> bytes:
    lines = []
    for name, value in fields.items():
        line = f"{name}: {value}\r\n".encode("latin-1", "replace")
        if line.count(b"\r") != 1 or line.count(b"\n") != 1:
            raise ConfigError(f"header {name!r} contains a line break", "$.options.headers")
        lines.append(line)
    return b"".join(lines)
