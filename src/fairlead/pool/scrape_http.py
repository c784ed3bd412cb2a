"""An HTTP/1.1 client that gets the same page of the same server repeatedly, with little CPU time.

Rules
* A connection has one request at a time. It is kept for the next request unless the server sends `close`, speaks
  HTTP/1.0, or ended the body by closing (RFC 9112 section 9.3).
* A response that is malformed (see `pool.http1`), too large, compressed, or followed by unrequested bytes ends the
  connection.
* All connections receive into one shared buffer; nothing is held between scrapes.
* Every request ends with exactly one call of `on_page` or `on_failure`, unless `abort` was called.

Measured with bench/idle.py.
"""

import asyncio
from typing import Protocol

from fairlead.pool.http1 import MalformedMessage, ResponseReader

MAX_HEAD = 16_384
#: A page of a hundred metrics arrives in one or two reads.
RECEIVE_BYTES = 65_536


class PageSink(Protocol):
    """Receives the page, or the failure."""

    def on_page(self, page: bytes) -> None: ...

    def on_failure(self, reason: str, *, retry: bool, answered: bool = False) -> None:
        """`retry`: a kept connection was closed before any byte of the answer arrived. `answered`: the server itself
        answered, see `answers`."""


class PageConnection(asyncio.BufferedProtocol):
    def __init__(self, buffer: memoryview, max_page: int) -> None:
        """`buffer` may be shared: received bytes are consumed before another connection reads."""
        self._received = buffer
        self._transport: asyncio.Transport | None = None
        self._sink: PageSink | None = None
        self._pieces: list[bytes] = []
        self._reader = ResponseReader(None, MAX_HEAD, max_page)
        self._began = self._used = False

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def get(self, request: bytes, sink: PageSink) -> None:
        """Send `request`; `sink` gets the result. The connection must be open and have no request in flight."""
        assert self._transport is not None and self._sink is None
        self._sink = sink
        self._reader.reset(self._pieces.append)
        self._began = False
        self._transport.write(request)

    def abort(self) -> None:
        """Close immediately, without calling the sink."""
        self._sink = None
        self._close()

    # ---------------- asyncio's side ----------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._received

    def buffer_updated(self, nbytes: int) -> None:
        if self._sink is None:
            self._close()  # unrequested bytes
            return
        self._began = True
        reader = self._reader
        try:
            complete = reader.feed(self._received[:nbytes])
        except MalformedMessage as error:
            self._fail(str(error))
            return
        if reader.status and reader.field(b"content-encoding") not in (b"", b"identity"):
            self._fail("the page is compressed, which was not asked for", answered=answers(reader.status))
            return
        if complete:
            self._finish(keep=reader.keep_alive and not reader.excess)

    def eof_received(self) -> bool:
        if self._sink is not None and not self._reader.end_of_input():
            self._finish(keep=False)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._sink is not None:
            why = f"connection lost: {exc}" if exc else "connection closed before the page was complete"
            self._fail(why, retry=self._used and not self._began)
        self._transport = None

    # ---------------- the answer ----------------

    def _finish(self, keep: bool) -> None:
        assert self._sink is not None
        status, page = self._reader.status, b"".join(self._pieces)
        sink, self._sink = self._sink, None
        self._pieces.clear()
        self._used = True
        if not keep:
            self._close()
        if status == 200:
            sink.on_page(page)
        else:
            sink.on_failure(f"status {status}", retry=False, answered=answers(status))

    def _fail(self, reason: str, retry: bool = False, answered: bool = False) -> None:
        sink, self._sink = self._sink, None
        self._pieces.clear()
        self._close()
        if sink is not None:
            sink.on_failure(reason, retry=retry, answered=answered)

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def answers(status: int) -> bool:
    """Whether a response with this status shows that the server itself is up. A proxy may send a 5xx for a server that
    is down."""
    return status < 500


def request_bytes(host: str, target: str, user_agent: str) -> bytes:
    """The bytes of a request, built once per endpoint. `host`: as in the Host header. `target`: path and query."""
    accepted = "Accept: text/plain\r\nAccept-Encoding: identity"
    return f"GET {target} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: {user_agent}\r\n{accepted}\r\n\r\n".encode("ascii")
