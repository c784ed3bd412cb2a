"""One client connection: receives requests and answers them one at a time, in order. Handles back-pressure and
disconnects.

Rules
* A request is passed on only when the answer to the request before it is complete, so pipelined requests are answered
  in order. While an answer is in progress, or the client does not read, the client may send `_AHEAD` bytes ahead; then
  reading pauses.
* A stream never buffers more than the transport's high-water mark. Above it `paused` is set, and the exchange must not
  write until `Exchange.writable` is called. Other answers are bounded by their own size.
* When the client disconnects, `Exchange.lost` is called once, and nothing more is written.
"""

import asyncio
import time
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple, Protocol

from fairlead.pool.http1 import HttpError, HttpRequest, RequestParser

JSON_TYPE = b"application/json"
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


class Heads:
    """Heads of one replica's responses: vLLM 0.32's (uvicorn's) headers, byte for byte and in the same order."""

    __slots__ = ("_date", "_date_of", "_identity")

    def __init__(self, identity: tuple[tuple[str, str], ...] = ()) -> None:
        self._identity = b"".join(f"{name}: {value}\r\n".encode("latin-1") for name, value in identity)
        self._date_of = -1
        self._date = b""

    def date(self, unix: float) -> bytes:
        unix_s = int(unix)
        if unix_s != self._date_of:
            self._date_of = unix_s
            self._date = formatdate(unix_s, usegmt=True).encode()
        return self._date

    def plain(
        self,
        unix: float,
        status: int,
        length: int,
        *,
        content_type: bytes = JSON_TYPE,
        before: bytes = b"",
        request_id: str = "",
        close: bool = False,
    ) -> bytes:
        """The head of a response of known length. `before`: header lines that precede the length (`allow`, ORCA)."""
        kind = b"content-type: %b\r\n" % content_type if content_type else b""
        return b"HTTP/1.1 %d %b\r\ndate: %b\r\nserver: uvicorn\r\n%bcontent-length: %d\r\n%b%b\r\n" % (
            status,
            _REASONS.get(status, b""),
            self.date(unix),
            before,
            length,
            kind,
            self._end(request_id, close),
        )

    def stream(self, unix: float, *, request_id: str = "", close: bool = False, chunked: bool = True) -> bytes:
        """The head of a stream of server-sent events."""
        return b"HTTP/1.1 200 OK\r\ndate: %b\r\nserver: uvicorn\r\ncontent-type: %b\r\n%b%b\r\n" % (
            self.date(unix),
            b"text/event-stream; charset=utf-8",
            self._end(request_id, close or not chunked),
            b"transfer-encoding: chunked\r\n" if chunked else b"",
        )

    def _end(self, request_id: str, close: bool) -> bytes:
        echoed = f"x-request-id: {request_id}\r\n".encode("latin-1", "replace") if request_id else b""
        return b"vary: Origin\r\n%b%b%b" % (echoed, self._identity, b"connection: close\r\n" if close else b"")


def malformed(message: str, status: int = 400) -> bytes:
    """The complete response to bytes that are not a request. The connection is closed after it (as uvicorn does)."""
    body = message.encode()
    return (
        b"HTTP/1.1 %d %b\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
        b"connection: close\r\n\r\n%b" % (status, _REASONS.get(status, b""), len(body), body)
    )


_AHEAD = 256 * 1024
_HIGH_WATER = 64 * 1024
_LINGER_S = 1.0


class Held(NamedTuple):
    """What a connection buffers: bytes of answers that the client has not read, and bytes of requests not served yet.
    `waits`: the answer is paused until the client reads; `reads`: the connection reads from the client."""

    unsent: int
    unserved: int
    waits: bool
    reads: bool


class Exchange(Protocol):
    """Produces an answer that is not complete yet."""

    def lost(self) -> None:
        """The client has disconnected."""

    def writable(self) -> None:
        """The connection can be written to again after it was `paused`."""


class Server(Protocol):
    """What a connection needs from its server."""

    heads: Heads
    max_head: int
    max_body: int

    def opened(self, connection: "Connection") -> None: ...
    def closed(self, connection: "Connection") -> None: ...
    def serve(self, connection: "Connection", request: HttpRequest) -> None:
        """Answer, now or later, through `reply` or `begin_stream`."""

    def answered(self, request: HttpRequest, status: int, seconds: float) -> None:
        """The complete answer was written, `seconds` after the request was complete."""


class Connection(asyncio.Protocol):
    __slots__ = (
        "_began", "_busy", "_chunked", "_close_after", "_parser", "_refused", "_request", "_server", "_transport",
        "_turning", "active_at", "exchange", "paused", "request_id", "responded",
    )  # fmt: skip

    def __init__(self, server: Server) -> None:
        self._server = server
        self._parser = RequestParser(server.max_head, server.max_body)
        self._transport: asyncio.Transport | None = None
        self._busy = False
        self._turning = False
        self._request: HttpRequest | None = None
        self._began = 0.0
        self._close_after = False
        self._refused = False
        self._chunked = True
        self.exchange: Exchange | None = None
        self.paused = False
        #: The value of the `x-request-id` response header, set by the server per request; empty = not sent.
        self.request_id = ""
        #: The status of the answer that was begun last; 0 before the first.
        self.responded = 0
        #: When the last byte arrived or the last answer ended, on the monotonic clock.
        self.active_at = time.monotonic()

    # ---------------------------------------------------------------- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=_HIGH_WATER)
        self._server.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._server.closed(self)
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.lost()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self.active_at = time.monotonic()
        self._parser.feed(data)
        self._turn()
        waits = self._busy or self.paused
        if waits and self._parser.buffered > _AHEAD and self._transport is not None:
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        # Not immediately: a transport that is closed during this callback reports its end twice (asyncio, Python 3.11).
        asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        if self.paused or self._transport is None:
            return
        if self.exchange is not None:
            self.exchange.writable()
        else:
            self._read_on()

    # ---------------------------------------------------------------- called by the server

    @property
    def quiet_since(self) -> float | None:
        """Since when the connection has been waiting for the client; `None` while an answer is due."""
        return None if self._busy else self.active_at

    @property
    def held(self) -> Held:
        transport = self._transport
        unsent, reads = (transport.get_write_buffer_size(), transport.is_reading()) if transport else (0, False)
        return Held(unsent, self._parser.buffered, self.paused, reads)

    @property
    def mid_request(self) -> bool:
        """Whether part of a request has arrived."""
        return not self._parser.idle

    def reply(
        self, status: int, body: bytes, content_type: bytes = JSON_TYPE, before: bytes = b"", head_only: bool = False
    ) -> None:
        """Send a complete answer."""
        head = self._server.heads.plain(
            time.time(),
            status,
            len(body),
            content_type=content_type,
            before=before,
            request_id=self.request_id,
            close=self._close_after,
        )
        self.responded = status
        self.write(head if head_only else head + body)
        self._answered()

    def begin_stream(self) -> None:
        """Send the head of a stream immediately."""
        self.responded = 200
        self.write(
            self._server.heads.stream(
                time.time(), request_id=self.request_id, close=self._close_after, chunked=self._chunked
            )
        )

    def event(self, data: bytes) -> bytes:
        """One server-sent event as sent on the wire."""
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data

    def write(self, data: bytes) -> None:
        # A transport reports a disconnect in a later turn of the loop. It would log a warning for writes before that.
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def end_stream(self, last: bytes = b"") -> None:
        """End the stream. `last` is sent before the end, in the same write."""
        self.write(last + b"0\r\n\r\n" if self._chunked else last)
        self._answered()

    def close(self) -> None:
        """Close the connection after everything written has been sent."""
        if self._transport is not None:
            self._transport.close()

    def cut(self) -> None:
        """Abort the connection immediately. Unsent bytes are lost and nothing more is written."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    # ---------------------------------------------------------------- serving requests

    def _answered(self) -> None:
        self.exchange = None
        self._busy = False
        request, self._request = self._request, None
        self.active_at = time.monotonic()
        if request is not None:
            self._server.answered(request, self.responded, self.active_at - self._began)
        if self._close_after:
            self.close()
            return
        self._read_on()

    def _read_on(self) -> None:
        self._turn()
        transport = self._transport
        if transport is not None and not transport.is_reading() and not transport.is_closing():
            transport.resume_reading()

    def _turn(self) -> None:
        """Serve requests as long as complete ones are buffered and answers are immediate."""
        if self._turning:
            return
        self._turning = True
        try:
            while not (self._busy or self.paused or self._close_after) and self._transport is not None:
                request = self._parser.next()
                if request is None:
                    if self._parser.wants_continue:
                        self._parser.wants_continue = False
                        self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    return
                self._busy = True
                self._request = request
                self._began = self.active_at
                self._close_after = not request.keep_alive
                self._chunked = request.version11
                self.responded = 0
                self._server.serve(self, request)
        except HttpError as error:
            self._refuse(error)
        finally:
            self._turning = False

    def _refuse(self, error: HttpError) -> None:
        """Answer a malformed request, and close. Unread bytes would make the kernel reset the connection and lose the
        answer, so further input is read and dropped for a moment (RFC 9112 §9.6)."""
        self._refused = self._close_after = True
        self.write(malformed(str(error), error.status))
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()
        asyncio.get_running_loop().call_later(_LINGER_S, self.close)
