"""The HTTP client of the load generator: keep-alive connections to a server, which time its responses.

Rules
* A connection has one request at a time. `start` leads to exactly one later call of the client's `ended(connection,
  reusable, now)`; the record is then complete. Nothing that a peer does raises.
* A response may arrive before the request has been sent completely (an early 413). It counts, but the connection is not
  reused.
* A failed send does not decide the result: the peer may have answered before it closed. Its answer is read first.

Values of `Record.error`: `status_<code>` (not 2xx) · `body_error_<code>` (an error inside a 200) · `sse_incomplete`
(stream without `[DONE]`) · `connect_<errno>` · `reset` · `closed_before_response` · `closed_in_headers` · `short_body`
· `chunked_unterminated` · `malformed` · `extra_bytes` · `timeout` · `time_limit` (in flight at the run's hard time
bound) · `not_sent` (scheduled, but still held back then) · `cancelled` (given up, as the workload says)."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable
from time import monotonic
from typing import cast
from urllib.parse import urlsplit

from fairlead.apis.usage import UsageScanner
from fairlead.core.endpoint import host_port
from fairlead.core.errors import ConfigError
from fairlead.core.request import Usage
from fairlead.lab.load.reactor import READABLE, WRITABLE, Reactor
from fairlead.lab.load.spec import CANCELLED, Histogram, Options, Record
from fairlead.lab.load.workload import Call
from fairlead.pool.http1 import MalformedMessage, ResponseReader

# What the generator reads from a response body: token usage, errors inside a 200.
#
# vLLM 0.32 answers a stream with 200 immediately and reports overload or a dead engine inside it, as an SSE event
# `data: {"error": …}`, so the status alone does not show success. It may also send `: keep-alive` comments while a
# request is queued; these are not tokens.
#
# Usage and errors are in the last events of a stream, so only its tail is kept and read once. That costs 0.2 µs per
# chunk; scanning each chunk costs 0.8 µs.


#: Bytes at the end of a stream that are searched for usage, errors and `[DONE]`.
STREAM_TAIL = 4096


class BodyWatch:
    """One response body. A `ResponseReader` appends to `pieces`; `look` processes them from time to time."""

    __slots__ = ("_reader", "_scanner", "_stream", "_tail", "data_seen", "pieces")

    def __init__(self, reader: ResponseReader) -> None:
        self._reader = reader
        self._scanner: UsageScanner | None = None
        self._stream = False
        self._tail = b""
        self.pieces: list[bytes] = []
        #: Whether the processed part has anything other than SSE comments.
        self.data_seen = False

    def look(self) -> None:
        """Process the `pieces` and clear them."""
        if not self.pieces:
            return
        new = b"".join(self.pieces)
        self.pieces.clear()
        if self._scanner is None:
            self._stream = self._reader.field(b"content-type").startswith(b"text/event-stream")
            self._scanner = UsageScanner(self._stream)
        if not self.data_seen:
            self.data_seen = not new.startswith(b":") or b"\ndata:" in new
        if self._stream:
            tail = self._tail + new
            if len(tail) > STREAM_TAIL:
                # Start at the next line, because half an event cannot be read.
                tail = tail[tail.find(b"\n", len(tail) - STREAM_TAIL) + 1 :]
            self._tail = tail
        else:
            self._scanner.feed(new)

    def close(self) -> tuple[Usage | None, str]:
        """The token usage in the whole, processed body, and an error despite a 2xx status (empty = none)."""
        scanner = self._scanner
        if scanner is None:
            return None, ""
        if self._stream:
            scanner.feed(self._tail)
        status = scanner.error_status
        if status:
            return scanner.usage, f"body_error_{status}"
        # A server that shuts down cleanly ends its chunked body but does not send [DONE].
        return scanner.usage, "sse_incomplete" if self._stream and not scanner.done else ""


#: Enough for every response head and body on the fast path.
RECEIVE_BYTES = 262144
#: Pieces of a body that may accumulate before they are processed.
_UNREAD_PIECES = 16

SocketAddress = tuple[str, int] | tuple[str, int, int, int]
Address = tuple[socket.AddressFamily, SocketAddress]


class Connection:
    """One keep-alive connection. It is created closed; `start` connects it if needed."""

    __slots__ = ("_connecting", "_out", "_owner", "_reader", "_socket", "_watch", "idle_since", "record")

    def __init__(self, owner: "Client") -> None:
        self._owner = owner
        self._socket: socket.socket | None = None
        self._connecting = False
        self._out: memoryview | None = None
        self._reader = ResponseReader()
        self._watch: BodyWatch | None = None
        self.record: Record | None = None
        self.idle_since = 0.0

    @property
    def connected(self) -> bool:
        return self._socket is not None

    def start(self, record: Record, message: bytes, address: Address) -> None:
        """Send `message`, a complete request. The record's times are filled in as events occur."""
        self.record = record
        self._watch = BodyWatch(self._reader) if self._owner.options.read_usage else None
        self._reader.reset(self._watch.pieces.append if self._watch else None)
        record.sent = monotonic()
        if self._socket is None:
            self._out = memoryview(message)
            self._connect(record, address)
            return
        try:
            sent = self._socket.send(message)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            # The pending error makes the socket readable, so `_read` handles it. `_out` prevents reuse of the socket.
            self._out = memoryview(message)
            return
        if sent < len(message):
            self._out = memoryview(message)[sent:]
            self._owner.reactor.change(self._socket.fileno(), READABLE | WRITABLE)

    def abort(self, error: str, now: float) -> None:
        """End the request in flight with `error`."""
        if self.record is not None:
            self._end(error, now)

    def close(self) -> None:
        """Close the socket. A request in flight gets no result. Safe to call again."""
        if self._socket is not None:
            self._owner.reactor.forget(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _connect(self, record: Record, address: Address) -> None:
        family, where = address
        try:
            self._socket = opened = socket.socket(family, socket.SOCK_STREAM)
            opened.setblocking(False)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = opened.connect_ex(where)
            self._owner.reactor.watch(opened.fileno(), READABLE | WRITABLE, self.on_event)
        except OSError as error:
            code = error.errno or errno.EIO
        self._connecting = True
        if code not in (0, errno.EINPROGRESS):
            # Loopback refuses immediately. Answering from within `start` would let a closed loop recurse without end.
            self._owner.loop.call_soon(self._refuse, record, code)

    def _refuse(self, record: Record, code: int) -> None:
        if self.record is record:
            self._end(_connect_error(code), monotonic())

    def on_event(self, events: int, now: float) -> None:
        if self._socket is None:
            return
        if (events & WRITABLE or self._connecting) and not self._write(now):
            return
        if events & ~WRITABLE:
            self._read(now)

    def _write(self, now: float) -> bool:
        """Send pending bytes; False once the request is over."""
        opened = self._socket
        assert opened is not None
        if self._connecting:
            code = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._end(_connect_error(code), now)
                return False
            self._connecting = False
        if self._out is not None:
            try:
                self._out = self._out[opened.send(self._out) :]
            except (BlockingIOError, InterruptedError):
                return True
            except OSError:
                pass  # an early answer can still be read; `_out` stays set, which prevents reuse
            else:
                if self._out:
                    return True
                self._out = None
        self._owner.reactor.change(opened.fileno(), READABLE)
        return True

    def _read(self, now: float) -> None:
        opened, owner = self._socket, self._owner
        assert opened is not None
        try:
            size = opened.recv_into(owner.buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._end("reset", now)
            return
        record = self.record
        if record is None:
            self.close()  # idle, and the peer closed it or sent unexpected bytes
            return
        reader = self._reader
        if not size:
            self._end(reader.end_of_input(), now, closed=True)
            return
        before = reader.body_bytes
        try:
            complete = reader.feed(owner.received[:size])
        except MalformedMessage:
            self._end("malformed", now)
            return
        if not record.headers and reader.status:
            record.headers = now
        if reader.body_bytes > before:
            self._note_arrival(record, now)
        if complete:
            self._end("extra_bytes" if reader.excess else "", now)

    def _note_arrival(self, record: Record, now: float) -> None:
        watch = self._watch
        if watch is not None and (not record.first_data or len(watch.pieces) > _UNREAD_PIECES):
            watch.look()
        if record.first_data:
            if self._owner.options.gaps:
                self._owner.new_gaps.append(now - record.last_data)
        else:
            if not record.first_byte:
                record.first_byte = now
            if watch is None or watch.data_seen:
                record.first_data = now
                self._owner.new_ttfts.append(now - record.scheduled)
        record.last_data = now

    def _end(self, error: str, now: float, closed: bool = False) -> None:
        record, reader, watch = self.record, self._reader, self._watch
        assert record is not None
        record.end = now
        record.status = reader.status
        record.body_bytes = reader.body_bytes
        record.chunks = reader.chunks
        reusable = not error and not closed and reader.keep_alive and self._out is None
        if watch is not None:
            watch.look()
            error = error or _judge_body(record, watch)
        if not 200 <= record.status < 300 and not error:
            error = f"status_{record.status}"
        record.error = error
        self._watch = self._out = None
        reader.reset()
        if not reusable:
            self.close()
        self.idle_since = now
        self._owner.ended(self, reusable, now)


def _judge_body(record: Record, watch: BodyWatch) -> str:
    usage, error = watch.close()
    if usage is not None:
        record.prompt_tokens = usage.prompt_tokens
        record.completion_tokens = usage.completion_tokens
        record.cached_tokens = usage.cached_tokens
    return error if 200 <= record.status < 300 else ""


def _connect_error(code: int) -> str:
    return f"connect_{errno.errorcode.get(code, str(code)).lower()}"


# A pool of keep-alive connections to one gateway: one per request in flight. The most recently used is reused first.

#: Common servers close an idle connection after 5 s (uvicorn), so a connection that was idle longer is not reused.
MAX_IDLE_S = 4.0
_SWEEP_S = 0.05
#: How long one of several addresses has to accept a connection.
_CONNECT_S = 2.0

Done = Callable[[Record, float], object]


class Client:
    """Sends requests and times their responses. Use it on one running loop: `await open()`, `send(…)`, `close()`."""

    def __init__(self, target: str, options: Options, reactor: Reactor) -> None:
        """`target`: `http://host:port`. Raises ConfigError for any other form."""
        self.loop = asyncio.get_running_loop()
        self.reactor = reactor
        self.options = options
        #: Of all requests: seconds between arrivals of body bytes, and TTFT. Complete after a call of `count`.
        self.gaps = Histogram()
        self.ttfts = Histogram()
        #: Seconds between arrivals of body bytes, and from schedule to first token, since the last call of `count`.
        self.new_gaps: list[float] = []
        self.new_ttfts: list[float] = []
        #: Receive buffer, shared by all connections: received bytes are processed before the next connection reads.
        self.buffer = bytearray(RECEIVE_BYTES)
        #: The same bytes, for access without a copy.
        self.received = memoryview(self.buffer)
        self._host, self._port = _split_target(target)
        self._address: Address | None = None
        self._heads: dict[tuple[str, str], bytes] = {}
        self._fields = _render_fields({"host": host_port(self._host, self._port), **options.headers})
        self._fixed = {name.lower() for name in options.headers}
        self._idle: list[Connection] = []
        # In the order of sending, so the oldest request is first.
        self._busy: dict[int, tuple[Connection, Done]] = {}
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def in_flight(self) -> int:
        return len(self._busy)

    async def open(self) -> None:
        """Resolve the host. Raises ConfigError if it has no address. Of several addresses the first that accepts a
        connection is used: `localhost` is `::1` first where hosts files list that, and servers listen on 127.0.0.1."""
        try:
            infos = await self.loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ConfigError(f"cannot resolve {self._host!r}: {error}", "$.target") from None
        addresses = [(info[0], cast(SocketAddress, info[4])) for info in infos]
        self._address = addresses[0]
        for address in addresses if len(addresses) > 1 else ():
            if await self._accepts(address):
                self._address = address
                break
        self._sweep = self.loop.call_later(_SWEEP_S, self._on_sweep)

    async def _accepts(self, address: Address) -> bool:
        family, where = address
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            async with asyncio.timeout(_CONNECT_S):
                await self.loop.sock_connect(probe, where)
            return True
        return False

    def send(self, call: Call, record: Record, done: Done) -> None:
        """Send a request; `done(record, now)` is called once, later. Raises ConfigError for an invalid header."""
        assert self._address is not None, "open the client first"
        message = self._message(call)
        connection = self._take_connection()
        self._busy[record.index] = connection, done
        connection.start(record, message, self._address)
        if call.patience_s:
            self.loop.call_at(record.scheduled + call.patience_s, self._give_up, record)

    def _give_up(self, record: Record) -> None:
        if record.index in self._busy:
            self._busy[record.index][0].abort(CANCELLED, monotonic())

    def abort(self, error: str) -> None:
        """End every request in flight with `error`."""
        now = monotonic()
        for connection, _ in list(self._busy.values()):
            connection.abort(error, now)

    def close(self) -> None:
        """Close all connections. Requests in flight get no result. Safe to call again."""
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
        """Called by a connection when its request has ended."""
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
        own = {name: value for name, value in call.headers.items() if name.lower() not in self._fixed}
        fields = _render_fields(own)
        return b"%bcontent-length: %d\r\n%b\r\n%b" % (head, len(call.body), fields, call.body)

    def count(self) -> None:
        """Add the new values to `gaps` and `ttfts`. Adding many at a time is cheaper than adding each on arrival."""
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
        # The oldest idle connections are at the bottom of the stack.
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


def _render_fields(fields: dict[str, str]) -> bytes:
    lines = []
    for name, value in fields.items():
        line = f"{name}: {value}\r\n".encode("latin-1", "replace")
        if line.count(b"\r") != 1 or line.count(b"\n") != 1:
            raise ConfigError(f"header {name!r} contains a line break", "$.options.headers")
        lines.append(line)
    return b"".join(lines)
