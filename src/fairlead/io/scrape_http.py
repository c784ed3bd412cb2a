"""A hand-made HTTP/1.1 client for one thing: GET the same page of the same server again and again, for little CPU.

Rules
* One request at a time per connection; the connection is kept for the next unless the server says `close`, speaks
  HTTP/1.0, or ended the body by closing (RFC 9112 section 9.3).
* The body ends by Content-Length, by the last chunk, or by the end of the connection (RFC 9112 section 6.3); of the
  first two, chunks win. Both at once, or two unequal lengths, is a broken or hostile server: the scrape fails.
* Bytes are received straight into a pooled buffer that grows up to the cap; nothing is held between scrapes.
* Every request is answered exactly once, by `on_page` or by `on_failure`, unless `abort` was called.

Measured with bench/idle.py: 89 us of CPU per 58 kB page over loopback with everything around it (event loop, timers,
reading the page); 35 us of that is the kernel's `send`.
"""

import asyncio
import re
from typing import Protocol

from fairlead.io.scrape_chunks import ChunkError, Chunks

MAX_HEAD = 16_384
_INITIAL = 65_536
_KEPT_BUFFERS = 16
_KEPT_SIZE = 1 << 20

_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [^\r\n]*)?\r\n")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n]*?)[ \t]*\r\n")


class BufferPool:
    """Receive buffers, shared by all connections: a scrape borrows one from its first byte to its last."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def take(self) -> bytearray:
        return self._free.pop() if self._free else bytearray(_INITIAL)

    def give(self, buffer: bytearray) -> None:
        if len(self._free) < _KEPT_BUFFERS and len(buffer) <= _KEPT_SIZE:
            self._free.append(buffer)


class PageSink(Protocol):
    """Who asked for the page."""

    def on_page(self, page: bytes) -> None: ...

    def on_failure(self, reason: str, *, retry: bool, answered: bool = False) -> None:
        """`retry`: a kept connection turned out to be gone before any byte of the answer came. `answered`: the server
        did, see `answers`."""


class _Head:
    """Status line and the headers that matter here."""

    __slots__ = ("chunked", "end", "keep", "length", "status")

    def __init__(self, status: int, end: int, length: int, chunked: bool, keep: bool) -> None:
        self.status = status
        self.end = end
        #: -1 = not given.
        self.length = length
        self.chunked = chunked
        self.keep = keep


class PageConnection(asyncio.BufferedProtocol):
    """One connection to one server."""

    def __init__(self, pool: BufferPool, max_page: int) -> None:
        self._pool = pool
        self._max_page = max_page
        self._transport: asyncio.Transport | None = None
        self._sink: PageSink | None = None
        self._buffer: bytearray | None = None
        self._view: memoryview | None = None
        self._filled = 0
        self._head: _Head | None = None
        #: The bytes of the last response's head and what they say: the next one is the same, until its date changes.
        self._known: tuple[bytes, _Head] | None = None
        self._chunks: Chunks | None = None
        self._used = False

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def waiting(self) -> bool:
        return self._sink is not None

    def get(self, request: bytes, sink: PageSink) -> None:
        """Send `request` and answer `sink`. The connection must be open and no request under way."""
        assert self._transport is not None and self._sink is None
        self._sink = sink
        self._transport.write(request)

    def abort(self) -> None:
        """Close at once; whoever waits is told nothing."""
        self._sink = None
        self._close()

    # ---------------- asyncio's side ----------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._buffer is None:
            self._buffer = self._pool.take()
            self._view = memoryview(self._buffer)
        elif self._filled == len(self._buffer):
            self._grow(len(self._buffer) * 2)
        assert self._view is not None
        return self._view[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._sink is None:
            self._close()  # bytes that nobody asked for
            return
        try:
            self._received()
        except (ValueError, ChunkError) as error:
            self._fail(str(error))

    def eof_received(self) -> bool:
        head = self._head
        if self._sink is not None and head is not None and head.length < 0 and not head.chunked:
            self._finish(head, head.end, self._filled, keep=False)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._sink is not None:
            unanswered = self._filled == 0
            why = f"connection lost: {exc}" if exc else "connection closed before the page was complete"
            self._fail(why, retry=self._used and unanswered)
        self._release()
        self._transport = None

    # ---------------- reading ----------------

    def _received(self) -> None:
        buffer, head = self._buffer, self._head
        assert buffer is not None
        if head is None:
            head = self._parse_head(buffer)
            if head is None:
                return
            self._head = head
            if head.chunked:
                self._chunks = Chunks(head.end, self._max_page)
            elif head.length > self._max_page:
                raise ValueError(f"the page is larger than {self._max_page} bytes")
            elif head.end + head.length > len(buffer):
                self._grow(head.end + head.length)
                assert self._buffer is not None
                buffer = self._buffer
        if self._chunks is not None:
            if self._chunks.feed(buffer, self._filled):
                chunks, self._chunks = self._chunks, None
                self._finish(head, head.end, chunks.end, keep=head.keep and chunks.consumed == self._filled)
            else:
                self._filled = self._chunks.compact(buffer, self._filled)
        elif head.length >= 0:
            end = head.end + head.length
            if self._filled >= end:
                self._finish(head, head.end, end, keep=head.keep and self._filled == end)
        elif self._filled - head.end > self._max_page:
            raise ValueError(f"the page is larger than {self._max_page} bytes")

    def _parse_head(self, buffer: bytearray) -> "_Head | None":
        known = self._known
        if known is not None and buffer.startswith(known[0], 0, self._filled):
            return known[1]
        while (end := buffer.find(b"\r\n\r\n", 0, self._filled)) >= 0:
            head = parse_head(bytes(buffer[: end + 2]), end + 4)
            if head.status >= 200:
                self._known = bytes(buffer[: end + 4]), head
                return head
            rest = self._filled - head.end  # an interim response (100, 103): the real one follows
            buffer[:rest] = buffer[head.end : self._filled]
            self._filled = rest
        if self._filled > MAX_HEAD:
            raise ValueError("the response head is too large")
        return None

    def _grow(self, size: int) -> None:
        old = self._buffer
        assert old is not None
        new = bytearray(size)
        new[: self._filled] = memoryview(old)[: self._filled]
        self._buffer = new
        self._view = memoryview(new)
        self._pool.give(old)

    def _finish(self, head: _Head, start: int, end: int, keep: bool) -> None:
        assert self._view is not None and self._sink is not None
        page = bytes(self._view[start:end]) if head.status == 200 else b""
        sink, self._sink = self._sink, None
        self._release()
        self._used = True
        if not keep:
            self._close()
        if head.status == 200:
            sink.on_page(page)
        else:
            sink.on_failure(f"status {head.status}", retry=False, answered=answers(head.status))

    def _fail(self, reason: str, retry: bool = False) -> None:
        sink, self._sink = self._sink, None
        self._close()
        if sink is not None:
            sink.on_failure(reason, retry=retry)

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _release(self) -> None:
        if self._buffer is not None:
            self._pool.give(self._buffer)
        self._buffer = self._view = self._head = self._chunks = None
        self._filled = 0


def answers(status: int) -> bool:
    """Whether a response with this status shows that the server itself is well: not if a proxy may have made it because
    the server is not there."""
    return status < 500


def parse_head(head: bytes, end: int) -> _Head:
    """Status line and header lines, up to and with the last line's CRLF. Raises `ValueError` on anything malformed."""
    status = _STATUS.match(head)
    if status is None:
        raise ValueError("not an HTTP/1.1 response")
    length = -1
    chunked = False
    keep = status[1] == b"1"
    at = status.end()
    while at < len(head):
        header = _HEADER.match(head, at)
        if header is None:
            raise ValueError("a malformed header in the response")
        at = header.end()
        name, value = header[1].lower(), header[2]
        if name == b"content-length":
            length = _length(value, length)
        elif name == b"transfer-encoding":
            if value.lower() != b"chunked" or chunked:
                raise ValueError("an unknown transfer encoding in the response")
            chunked = True
        elif name == b"connection" and b"close" in value.lower():
            keep = False
        elif name == b"content-encoding" and value.lower() not in (b"", b"identity"):
            raise ValueError("the page is compressed, which was not asked for")
    if chunked and length >= 0:
        raise ValueError("both a content length and chunks in the response")
    code = int(status[2])
    if code in (204, 304):
        length = 0
    return _Head(code, end, length, chunked, keep)


def _length(value: bytes, before: int) -> int:
    if not value.isdigit() or len(value) > 12 or before not in (-1, int(value)):
        raise ValueError("a malformed content length in the response")
    return int(value)


def request_bytes(host: str, target: str, user_agent: str) -> bytes:
    """The request, made once per endpoint. `host` as in the Host header, `target` path and query."""
    lines = (f"GET {target} HTTP/1.1", f"Host: {host}", f"User-Agent: {user_agent}", "Accept: text/plain", "", "")
    return "\r\n".join(lines).encode("ascii")
