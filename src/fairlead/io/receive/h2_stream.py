"""One gRPC stream on an HTTP/2 connection: cuts messages out of DATA, puts messages into DATA, ends with trailers.

States: open → finished (by us, or lost) → ended (trailers sent) → forgotten by the connection. The handler hears
nothing after `finished`. A finished stream whose messages still wait for windows stays until they have left.
"""

import logging
from collections import deque
from struct import Struct
from typing import TYPE_CHECKING

from fairlead.io.receive.stream import StreamHandler
from fairlead.model.errors import ProtocolError
from fairlead.wire import grpc_frames as grpc
from fairlead.wire import h2

if TYPE_CHECKING:
    from fairlead.io.receive.h2_connection import H2Connection

log = logging.getLogger(__name__)

_head = h2.HEAD.pack
_u32 = h2.U32.unpack_from
#: DATA frame header and gRPC prefix at once.
_message_head = Struct(">IBIBI").pack
_RESPONSE_LENGTH = len(grpc.RESPONSE) << 8 | h2.HEADERS
_OK_LENGTH = len(grpc.TRAILERS_OK) << 8 | h2.HEADERS
_LAST = h2.END_HEADERS | h2.END_STREAM
_ALL = 1 << 62
_PREFIX_SIZE = grpc.PREFIX_SIZE


class H2Stream:
    """A `ServerStream`. The connection calls the methods of the second part."""

    __slots__ = (
        "_connection", "_handler", "_offset", "_opened", "_queue", "_reader", "_received", "_tail", "_watching",
        "finished", "id", "receive_window", "remote_closed", "window",
    )  # fmt: skip

    def __init__(self, connection: "H2Connection", stream_id: int) -> None:
        self.id = stream_id
        #: What the peer takes, and what it may still send before we credit it.
        self.window = connection.peer_window
        self.receive_window = connection.limits.stream_window
        self.finished = False
        self.remote_closed = False
        self._connection = connection
        self._handler: StreamHandler | None = None
        self._opened = False
        self._queue: deque[bytes] | None = None
        self._offset = 0
        #: The trailers block that waits behind the queue.
        self._tail = b""
        #: Holds part of a message; `None` between messages.
        self._reader: grpc.MessageReader | None = None
        self._received = 0
        self._watching = True
        connection.watched += 1

    # ---- ServerStream ----

    def send(self, *messages: bytes) -> None:
        if self.finished or not messages:
            return
        connection = self._connection
        data = messages[0] if len(messages) == 1 else grpc.joined(messages)
        whole = len(data) + _PREFIX_SIZE
        if (
            whole <= self.window
            and whole <= connection.window
            and whole <= connection.peer_frame
            and not (self._queue or connection.paused)
        ):
            if not self._opened:
                self._open()
            self.window -= whole
            connection.window -= whole
            connection.out += (_message_head(whole << 8, 0, self.id, 0, len(messages[0])), data)
        else:
            for message in messages:
                self._enqueue(message)
        if not connection.corked:
            connection.flush_soon()

    def finish(self, code: int = 0, message: str = "") -> None:
        if self.finished:
            return
        self._leave()
        if self._queue:
            self._tail = grpc.trailers(code, message)
        elif not self._opened:
            self._end(grpc.trailers_only(code, message))
        elif code or message or self._connection.table_update:
            self._end(grpc.trailers(code, message))
        else:
            self._connection.out += (_head(_OK_LENGTH, _LAST, self.id), grpc.TRAILERS_OK)
            self._connection.ended(self)
        if not self._connection.corked:
            self._connection.flush_soon()

    def room(self) -> int:
        connection = self._connection
        if self.finished or self._queue or connection.paused or connection.transport.get_write_buffer_size():
            return 0
        return max(0, min(self.window, connection.window) - grpc.PREFIX_SIZE)

    def connected(self) -> bool:
        return not self._connection.closing

    def watch_cancel(self, on: bool) -> None:
        """Whether a reset or a half-close by the peer must reach the handler at once (the default) or may arrive
        together with the peer's next data. Only matters with merged wake-ups."""
        if on != self._watching and not self.finished:
            self._watching = on
            self._connection.watched += 1 if on else -1
            self._connection.flush_soon()

    # ---- the connection calls ----

    def attach(self, handler: StreamHandler) -> None:
        """The handler that the factory made; it may have finished the stream already."""
        if not self.finished:
            self._handler = handler

    def refuse(self, block: bytes) -> None:
        """Answer with one header block, without a handler."""
        self._leave()
        self._end(block)

    def receive(self, data: bytes, pos: int, end: int) -> None:
        """The payload `data[pos:end]` of one DATA frame."""
        handler = self._handler
        if handler is None:
            return
        size = end - pos
        limits = self._connection.limits
        self._received += size
        if limits.max_stream_bytes and self._received > limits.max_stream_bytes:
            self.fail(grpc.Status.RESOURCE_EXHAUSTED, f"more than {limits.max_stream_bytes} bytes on one stream")
            return
        try:
            if self._reader is None:  # nearly always a frame holds whole messages
                while end - pos >= _PREFIX_SIZE and not data[pos]:
                    start = pos + _PREFIX_SIZE
                    stop = start + _u32(data, pos + 1)[0]
                    if stop > end or stop - start > limits.max_message:
                        break
                    handler.on_message(data[start:stop])
                    if stop == end or self.finished:
                        return
                    pos = stop
            self._assemble(handler, data, pos, end)
        except Exception:
            self._crashed()

    def _assemble(self, handler: StreamHandler, data: bytes, pos: int, end: int) -> None:
        reader = self._reader
        if reader is None:
            reader = self._reader = grpc.MessageReader(self._connection.limits.max_message)
            self._connection.partial += 1
        try:
            messages = reader.feed(data, pos, end)
        except ProtocolError as error:
            self.fail(error.code, str(error))
            return
        if not reader.partial:
            self._reader = None
            self._connection.partial -= 1
        for message in messages:
            if self.finished:
                break
            handler.on_message(message)

    def half_close(self) -> None:
        """The peer's side has ended."""
        if self._reader is not None and not self.finished:
            self.fail(grpc.Status.INTERNAL, "the stream ended inside a message")
        elif self._handler is not None:
            try:
                self._handler.on_half_close()
            except Exception:
                self._crashed()

    def fail(self, code: int, why: str) -> None:
        """The transport ends the stream; the handler loses it."""
        handler = self._handler
        self.finish(code, why)
        _tell_lost(handler, why)

    def lost(self, why: str) -> None:
        """The stream is gone without trailers: drop what waits, tell the handler."""
        connection = self._connection
        if self._queue:
            connection.queued -= sum(map(len, self._queue)) - self._offset
            connection.blocked.pop(self.id, None)
            self._queue = None
        self._tail = b""
        if not self.finished:
            handler = self._handler
            self._leave()
            _tell_lost(handler, why)

    def _crashed(self) -> None:
        log.exception("a stream handler raised")
        self.fail(grpc.Status.INTERNAL, "internal error")

    def _leave(self) -> None:
        self.finished = True
        self._handler = None  # breaks the cycle with the handler, which holds this stream
        if self._reader is not None:
            self._reader = None
            self._connection.partial -= 1
        if self._watching:
            self._connection.watched -= 1

    # ---- output ----

    def _open(self) -> None:
        self._opened = True
        connection = self._connection
        if connection.table_update:
            self._headers(grpc.RESPONSE, h2.END_HEADERS)
        else:
            connection.out += (_head(_RESPONSE_LENGTH, h2.END_HEADERS, self.id), grpc.RESPONSE)

    def _headers(self, block: bytes, flags: int) -> None:
        connection = self._connection
        if connection.table_update:
            block = connection.table_update + block
            connection.table_update = b""
        connection.out += (_head(len(block) << 8 | h2.HEADERS, flags, self.id), block)

    def _end(self, block: bytes) -> None:
        self._headers(block, _LAST)
        self._connection.ended(self)

    def _enqueue(self, message: bytes) -> None:
        connection = self._connection
        if connection.closing:
            return
        waits = bool(self._queue)
        if self._queue is None:
            self._queue = deque()
        self._queue.append(grpc.PREFIX.pack(0, len(message)) + message)
        connection.queued += len(message) + grpc.PREFIX_SIZE
        if not waits:
            self.pump()
        if connection.queued > connection.limits.max_pending:
            connection.overflow()

    def pump(self, turn: int = _ALL) -> None:
        """Send what waits, as far as windows, the transport and `turn` (bytes) allow."""
        connection = self._connection
        queue = self._queue
        while queue:
            head = queue[0]
            size = min(len(head) - self._offset, self.window, connection.window, connection.peer_frame)
            if connection.paused or size <= 0 or turn <= 0:
                if self.window > 0:
                    connection.blocked[self.id] = self
                return
            if not self._opened:
                self._open()
            stop = self._offset + size
            connection.out += (_head(size << 8, 0, self.id), memoryview(head)[self._offset : stop])
            connection.out_size += size
            connection.queued -= size
            connection.window -= size
            self.window -= size
            turn -= size
            if stop == len(head):
                queue.popleft()
                stop = 0
            self._offset = stop
        if self._tail:
            self._end(self._tail)
            self._tail = b""


def _tell_lost(handler: StreamHandler | None, why: str) -> None:
    if handler is not None:
        try:
            handler.on_lost(why)
        except Exception:
            log.exception("a stream handler raised in on_lost")
