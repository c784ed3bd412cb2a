"""The sending side of an HTTP/2 connection, and its gRPC streams, as one state machine. `h2_connection` reads.

H2Stream
States: open → finished (by us, or lost) → ended (trailers sent) → forgotten by the connection. The handler is not
called after `finished`. A finished stream whose messages still wait for windows stays until they have left.

H2Sender
* What is written while input is handled is corked, and leaves in one `transport.write` when that input is done. What is
  written at other times leaves in one write on the next turn of the loop.
* A stream sends at once while both windows and the transport allow. Otherwise its messages wait in the stream. If the
  connection's window or the transport holds them back, the stream also waits in `blocked`. Streams there take turns of
  `_TURN` bytes. A stream that waits for its own window is not in `blocked`, so a small one costs no search.
* The transport is paused above `write_high_water`. From then on only frames that are not flow-controlled go to it. All
  waiting bytes are counted; above `max_pending` the connection is aborted.

Merged wake-ups
Envoy ends every ext_proc stream with a lone RST_STREAM of 13 bytes. At low rates each of them costs a turn of epoll and
a read: at 200 exchanges/s about 10 of 65 µs (bench/transport.py). With SO_RCVLOWAT = 14 the kernel does not report
fewer than 14 bytes, so the reset is read together with the next request. 14 bytes is also the smallest DATA frame that
holds a gRPC message.
Merging is safe only while no awaited input can be shorter. So the mark is 1 whenever
  * output waits for a window (WINDOW_UPDATE has 13 bytes) or for the transport,
  * part of a frame was read (the rest may be short),
  * a handler must hear of cancels and half-closes at once (every unfinished stream, unless its handler called
    `watch_cancel(False)`), or a message of an unfinished stream is incomplete,
  * the handshake is not done, or the connection is draining.
FIN and RST of TCP are reported regardless. Other short input (an empty SETTINGS has 9 bytes) is read within one or two
seconds: `tick` lowers the mark of silent connections.
"""

import asyncio
import logging
import socket
from collections import OrderedDict, deque
from collections.abc import Callable
from struct import Struct

from fairlead.core.errors import ProtocolError
from fairlead.gateway import grpc_frames as grpc
from fairlead.gateway import h2
from fairlead.gateway.h2 import ErrorCode
from fairlead.gateway.h2_limits import ByteBudget, Claim, H2Limits
from fairlead.gateway.stream import StreamHandler

log = logging.getLogger(__name__)

_head = h2.HEAD.pack
_prefix, _put_prefix = grpc.PREFIX.unpack_from, grpc.PREFIX.pack
#: Packs a DATA frame header and the gRPC prefix.
_message_head = Struct(">IBIBI").pack
#: Packs the HEADERS frame that opens the response, then the same.
_first_head = Struct(f">IBI{len(grpc.RESPONSE)}sIBIBI").pack
#: Packs the HEADERS frame that ends the response with OK.
_last_head = Struct(f">IBI{len(grpc.TRAILERS_OK)}s").pack
_RESPONSE_LENGTH = len(grpc.RESPONSE) << 8 | h2.HEADERS
_OK_LENGTH = len(grpc.TRAILERS_OK) << 8 | h2.HEADERS
_RESPONSE, _TRAILERS_OK = grpc.RESPONSE, grpc.TRAILERS_OK
_END_HEADERS, _LAST = h2.END_HEADERS, h2.END_HEADERS | h2.END_STREAM
_ALL = 1 << 62
_PREFIX_SIZE = grpc.PREFIX_SIZE

#: Bytes that a stream may send before the next blocked stream has its turn.
_TURN = 64 << 10
#: Bytes of output after which a long batch is passed to the transport, to learn whether it takes more.
_BATCH = 1 << 20

#: One byte more than RST_STREAM and WINDOW_UPDATE.
_MERGING_MARK = 14


class H2Sender:
    """Base class of `H2Connection`. `H2Stream` uses its attributes directly."""

    def __init__(
        self, limits: H2Limits, merge_wakeups: bool, loop: asyncio.AbstractEventLoop, budget: ByteBudget | None
    ) -> None:
        self.limits = limits
        #: The byte budget that all connections share; `None` = no limit.
        self.budget = budget
        self.loop = loop
        self.transport: asyncio.Transport
        #: Frames that leave with the next write, and the bytes of those that `pump` added.
        self.out: list[bytes | memoryview] = []
        self.out_size = 0
        #: What the peer accepts: its connection window, initial stream window and largest frame, in bytes.
        self.window = h2.DEFAULT_WINDOW
        self.peer_window = h2.DEFAULT_WINDOW
        self.peer_frame = h2.MIN_FRAME_SIZE
        #: A dynamic table size update that must begin the next header block; empty = none is due.
        self.table_update = b""
        #: Open streams, and finished ones whose messages or trailers have not left yet.
        self.streams: dict[int, H2Stream] = {}
        #: Streams that we have finished but the peer has not → the bytes that the peer may still send on them.
        self.lingering: OrderedDict[int, int] = OrderedDict()
        #: Streams that wait for the connection's window or the transport, in the order of their turns.
        self.blocked: OrderedDict[int, H2Stream] = OrderedDict()
        #: Total message bytes that wait in streams.
        self.queued = 0
        #: How many unfinished streams have handlers that need not hear of cancels at once.
        self.quiet = 0
        #: How many streams hold part of a message.
        self.partial = 0
        self.corked = False
        self.paused = False
        self.draining = False
        #: The connection is over: input is dropped, and nothing is written any more.
        self.closing = False
        #: No frame is half-read, and the peer has acknowledged our SETTINGS.
        self.settled = False
        #: The receive mark may have to change although nothing is written.
        self.restless = False
        self._flushing = False
        self._merge = merge_wakeups
        self._mark = 1
        self._socket: socket.socket | None = None

    @property
    def watched(self) -> int:
        """How many streams need input at once: their handlers watch for cancels, or their messages wait for windows."""
        return len(self.streams) - self.quiet

    def flush_soon(self) -> None:
        """Schedule a flush after something was written, unless one is due anyway."""
        if not (self.corked or self._flushing):
            self._flushing = True
            self.loop.call_soon(self._flush_now)

    def _flush_now(self) -> None:
        self._flushing = False
        self.flush()

    def flush(self) -> None:
        """Write all waiting frames, and set the receive mark: how many bytes the next read must bring."""
        if self.out:
            data = b"".join(self.out)
            self.out, self.out_size = [], 0
            if self.closing:
                return
            self.transport.write(data)
            if self.paused and self.transport.get_write_buffer_size() > self.limits.max_pending:
                self.overflow()
        if self._merge:
            mark = _MERGING_MARK
            if (
                len(self.streams) > self.quiet
                or self.partial
                or self.queued
                or self.paused
                or self.draining
                or self.closing
                or not self.settled
            ):
                mark = 1
            if mark != self._mark:
                self._put_mark(mark)
        self.restless = False
        if self.draining:
            self.restless = True
            self.close_if_idle()

    def ended(self, stream: "H2Stream") -> None:
        """Our side of the stream is over: its trailers were written."""
        self.streams.pop(stream.id, None)
        if not stream.remote_closed:
            self.lingering[stream.id] = stream.receive_window
            if len(self.lingering) > self.limits.max_streams:
                self.send_reset(self.lingering.popitem(last=False)[0], ErrorCode.NO_ERROR)

    def send_reset(self, stream_id: int, code: int) -> None:
        """Send RST_STREAM for a stream that is no longer open."""
        raise NotImplementedError

    def credit(self, stream: "H2Stream") -> None:
        """Give the stream's receive window back: there is room for the rest of its message."""

    def close_if_idle(self) -> None:
        """If the connection drains and its last stream has ended, close it."""

    def overflow(self) -> None:
        """Abort the connection: more than `max_pending` bytes wait because the peer does not read."""
        self.abort("the peer reads too slowly")

    def abort(self, why: str) -> None:
        """Close without GOAWAY; asyncio then calls `connection_lost`."""
        self.closing = True
        self.transport.abort()

    # ---- slow readers ----

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        if self.blocked:
            self.pump_blocked()
            self.flush_soon()

    def pump_blocked(self) -> None:
        """Let blocked streams send: the connection's window has grown, or the transport accepts data again."""
        blocked = self.blocked
        while blocked and self.window > 0 and not self.paused:
            blocked.popitem(last=False)[1].pump(_TURN)
            if self.out_size > _BATCH:
                self.flush()

    # ---- merged wake-ups ----

    def merge_on(self, sock: socket.socket) -> None:
        """Merge wake-ups on a socket. For plaintext TCP only: TLS reads records, and Unix sockets ignore the mark."""
        self._socket = sock

    def _put_mark(self, mark: int) -> None:
        if mark != self._mark and self._socket is not None:
            self._mark = mark
            try:
                # After lowering the mark, the kernel reports data that is already there (Linux: tcp_set_rcvlowat).
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, mark)
            except OSError:  # the socket is gone or the platform refuses
                self._socket = None


class H2Stream:
    """A `ServerStream`. The second part has the methods that the connection calls."""

    # Initial values as class attributes: an instance stores only what changes.
    handler: StreamHandler | None = None
    #: Takes a message that came whole in one frame; `None` = `receive` must handle the frame.
    take: Callable[[bytes], None] | None = None
    finished = False
    remote_closed = False
    _opened = False
    _queue: deque[bytes] | None = None
    _offset = 0
    #: The trailers block to send after the queue.
    _tail = b""
    #: Assembles a message that came in part; `None` between messages.
    _reader: grpc.MessageReader | None = None
    _received = 0
    _watching = True
    #: The stream's claim in the byte budget, and the two parts of its size: the message that is arriving, and what the
    #: handler keeps.
    claim: Claim | None = None
    _coming = _kept = 0
    #: Whether the handler waits for more bytes than it keeps now.
    _expecting = False

    def __init__(self, connection: H2Sender, stream_id: int) -> None:
        self.id = stream_id
        #: The bytes that the peer accepts, and the bytes that it may still send before we give it credit.
        self.window = connection.peer_window
        self.receive_window = connection.limits.stream_window
        self._connection = connection

    # ---- ServerStream ----

    def send(self, *messages: bytes) -> None:
        if self.finished or not messages:
            return
        connection = self._connection
        first = messages[0]
        # Further messages follow in the same frame, each behind its own prefix.
        data = first if len(messages) == 1 else b"".join([first, *map(grpc.prefixed, messages[1:])])
        framed = len(data) + _PREFIX_SIZE
        waits = self._queue or connection.paused
        if not waits and framed <= min(self.window, connection.window, connection.peer_frame):
            self.window -= framed
            connection.window -= framed
            if not self._opened:
                self._open()
            connection.out += (_message_head(framed << 8, 0, self.id, 0, len(first)), data)
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

    def send_last(self, first: bytes, *more: bytes) -> None:
        connection, data = self._connection, first
        for message in more:
            data += _put_prefix(0, len(message)) + message
        framed = len(data) + _PREFIX_SIZE
        if (
            self._opened
            or self.finished
            or self._reader
            or connection.paused
            or connection.table_update
            or framed > min(self.window, connection.window, connection.peer_frame)
        ):
            self.send(first, *more)
            self.finish()
            return
        number = self.id
        connection.window -= framed
        connection.out += (
            _first_head(_RESPONSE_LENGTH, _END_HEADERS, number, _RESPONSE, framed << 8, 0, number, 0, len(first)),
            data,
            _last_head(_OK_LENGTH, _LAST, number, _TRAILERS_OK),
        )
        if self.claim is not None:
            self._release(self.claim)
        self.finished = True
        self.handler = self.take = None
        if not self._watching:
            connection.quiet -= 1
        connection.ended(self)
        if not connection.corked:
            connection.flush_soon()

    def writable_bytes(self) -> int:
        connection = self._connection
        if self.finished or self._queue or connection.paused or connection.transport.get_write_buffer_size():
            return 0
        return max(0, min(self.window, connection.window) - grpc.PREFIX_SIZE)

    def connected(self) -> bool:
        return not self._connection.closing

    def hold(self, size: int, expected: int = 0) -> None:
        self._kept, self._expecting = max(size, expected), expected > size
        self._claim()

    def _claim(self) -> None:
        """Report the bytes that the stream holds to the budget. If the budget refuses, the stream fails."""
        budget = self._connection.budget
        if budget is None or self.finished:
            return
        if self.claim is None:
            self.claim = Claim(self)
        size = self._coming + self._kept
        if not (self._coming or self._expecting):
            budget.count(self.claim, size)
        elif not budget.ask(self.claim, size, self._connection.limits.stream_window):
            self.fail(grpc.Status.RESOURCE_EXHAUSTED, "too many unfinished requests are held already")

    def _release(self, claim: Claim) -> None:
        """Give all bytes of an ended stream back to the budget."""
        if self._connection.budget is not None:
            self._connection.budget.count(claim, 0)

    def granted(self) -> None:
        """The budget has room for the message that waited: let the peer continue."""
        if not self.finished:
            self._connection.credit(self)

    @property
    def starved(self) -> bool:
        """Whether the peer must wait for room in the budget before it may send more."""
        budget = self._connection.budget
        return budget is not None and self.claim is not None and budget.starved(self.claim)

    @property
    def watching(self) -> bool:
        """Whether the handler must hear of a cancellation at once."""
        return self._watching

    @property
    def partial(self) -> bool:
        """Whether part of a message has arrived."""
        return self._reader is not None

    @property
    def queued(self) -> int:
        """The number of bytes that wait to be sent."""
        return sum(map(len, self._queue or ())) - self._offset

    def validate(self) -> None:
        """For tests. Raises `AssertionError` if messages wait without a reason."""
        connection = self._connection
        if self._queue:
            assert self.window <= 0 or connection.closing or connection.blocked.get(self.id) is self
            assert self.window <= 0 or connection.closing or connection.paused or connection.window <= 0
        else:
            assert self.id not in connection.blocked and not self._tail

    def watch_cancel(self, on: bool) -> None:
        """Whether a reset or a half-close by the peer must reach the handler at once (the default) or may arrive
        together with the peer's next data. Only matters with merged wake-ups."""
        if on != self._watching and not self.finished:
            self._watching = on
            self._connection.quiet += -1 if on else 1
            self._connection.restless = True
            self._connection.flush_soon()

    # ---- the connection calls ----

    def refuse(self, block: bytes) -> None:
        """Answer with a single header block, without a handler."""
        self._leave()
        self._end(block)

    def receive(self, data: bytes, pos: int, end: int) -> None:
        """Take the payload `data[pos:end]` of a DATA frame."""
        handler = self.handler
        if handler is None:
            return
        limits = self._connection.limits
        if limits.max_stream_bytes:
            self._received += end - pos
            if self._received > limits.max_stream_bytes:
                self.fail(grpc.Status.RESOURCE_EXHAUSTED, f"more than {limits.max_stream_bytes} bytes on one stream")
                return
        try:
            while end - pos >= _PREFIX_SIZE and self._reader is None:  # most frames hold whole messages only
                compressed, size = _prefix(data, pos)
                start = pos + _PREFIX_SIZE
                pos = start + size
                if pos > end or compressed or size > limits.max_message:
                    pos = start - _PREFIX_SIZE
                    break
                handler.on_message(data[start:pos])
                if pos == end or self.finished:
                    return
            self._assemble(handler, data, pos, end)
        except Exception:
            self.crashed()

    def _assemble(self, handler: StreamHandler, data: bytes, pos: int, end: int) -> None:
        reader = self._reader
        if reader is None:
            self.take = None
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
                return
            self._coming = 0
            handler.on_message(message)
        if messages or self._coming <= _PREFIX_SIZE:  # skip frames in the middle of a message
            coming = self._reader.size if self._reader is not None else 0
            if coming != self._coming or self.claim is not None:
                self._coming = coming
                self._claim()
        complete = self._reader is None and not (self.remote_closed or self._connection.limits.max_stream_bytes)
        if complete and not self.finished:
            self.take = handler.on_message

    def half_close(self) -> None:
        """The peer has ended its side of the stream."""
        self.take = None
        if self._reader is not None and not self.finished:
            self.fail(grpc.Status.INTERNAL, "the stream ended inside a message")
        elif self.handler is not None:
            try:
                self.handler.on_half_close()
            except Exception:
                self.crashed()

    def fail(self, code: int, why: str) -> None:
        """End the stream because of an error that the transport found. The handler gets `on_lost`."""
        handler = self.handler
        self.finish(code, why)
        _tell_lost(handler, why)

    def lost(self, why: str) -> None:
        """The stream is gone without trailers: drop its waiting messages, and tell the handler."""
        connection = self._connection
        if self._queue:
            connection.queued -= sum(map(len, self._queue)) - self._offset
            connection.blocked.pop(self.id, None)
            self._queue = None
        self._tail = b""
        if not self.finished:
            handler = self.handler
            self._leave()
            _tell_lost(handler, why)

    def crashed(self) -> None:
        """The handler raised an exception: log it, and end the stream with INTERNAL."""
        log.exception("a stream handler raised")
        self.fail(grpc.Status.INTERNAL, "internal error")

    def _leave(self) -> None:
        if self.claim is not None:
            self._release(self.claim)
        self.finished = True
        self.handler = self.take = None  # breaks the cycle with the handler, which holds this stream
        if self._reader is not None:
            self._reader = None
            self._connection.partial -= 1
        if not self._watching:
            self._connection.quiet -= 1

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
        self._queue.append(grpc.prefixed(message))
        connection.queued += len(message) + grpc.PREFIX_SIZE
        if not waits:
            self.pump()
        if connection.queued > connection.limits.max_pending:
            connection.overflow()

    def pump(self, turn: int = _ALL) -> None:
        """Send waiting messages as far as the windows, the transport and `turn` (bytes) allow."""
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
