"""What an HTTP/2 connection sends, and its gRPC streams. They are one state machine; `h2_connection` reads.

H2Stream
States: open → finished (by us, or lost) → ended (trailers sent) → forgotten by the connection. The handler hears
nothing after `finished`. A finished stream whose messages still wait for windows stays until they have left.

H2Sender
* What is written while input is being handled is corked and leaves in one `transport.write` when that input is done.
  What is written at other times leaves in one write on the next turn of the loop.
* A stream sends at once while both windows and the transport allow. Otherwise its messages wait in the stream, and the
  stream waits here (`blocked`) if the connection's window or the transport is what is missing. Streams that wait take
  turns of `_TURN` bytes; one that waits for its own window is not here, so a tiny connection window costs no search.
* The transport is paused above `write_high_water`; from then on only frames that are not flow-controlled go to it.
  All that waits is counted; above `max_pending` the connection is aborted.

Merged wake-ups
Envoy ends every ext_proc stream with a lone RST_STREAM of 13 bytes. At low rates each of them costs a turn of epoll and
a read: at 200 exchanges/s about 10 of 65 µs (bench/transport.py). With SO_RCVLOWAT = 14 the kernel does not report
fewer than 14 bytes, so the reset is read together with the next request. 14 bytes is also the smallest DATA frame that
holds a gRPC message.
This is safe only while nothing that we wait for can be shorter, so the mark is back at 1 whenever
  * output waits for a window (WINDOW_UPDATE has 13 bytes) or for the transport,
  * part of a frame was read (its rest may be short),
  * a handler wants to know of cancels and half-closes at once (every unfinished stream, unless it said
    `watch_cancel(False)`), or a message of an unfinished stream is incomplete,
  * the handshake is not done, or the connection is draining.
FIN and RST of TCP are reported regardless. Whatever else arrives short (an empty SETTINGS has 9 bytes) is read after a
second or two at the latest: `tick` lowers the mark of silent connections.
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
#: DATA frame header and gRPC prefix at once.
_message_head = Struct(">IBIBI").pack
#: The same behind the HEADERS frame that opens the response.
_first_head = Struct(f">IBI{len(grpc.RESPONSE)}sIBIBI").pack
#: And the frame that ends it with OK behind both.
_last_head = Struct(f">IBI{len(grpc.TRAILERS_OK)}s").pack
_RESPONSE_LENGTH = len(grpc.RESPONSE) << 8 | h2.HEADERS
_OK_LENGTH = len(grpc.TRAILERS_OK) << 8 | h2.HEADERS
_RESPONSE, _TRAILERS_OK = grpc.RESPONSE, grpc.TRAILERS_OK
_END_HEADERS, _LAST = h2.END_HEADERS, h2.END_HEADERS | h2.END_STREAM
_ALL = 1 << 62
_PREFIX_SIZE = grpc.PREFIX_SIZE

#: Bytes of one stream before the next one has its turn.
_TURN = 64 << 10
#: Bytes after which a long batch is handed to the transport, to learn whether it takes more.
_BATCH = 1 << 20

#: One byte more than RST_STREAM and WINDOW_UPDATE.
_MERGING_MARK = 14


class H2Sender:
    """Base of `H2Connection`. Its streams reach into it."""

    def __init__(
        self, limits: H2Limits, merge_wakeups: bool, loop: asyncio.AbstractEventLoop, budget: ByteBudget | None
    ) -> None:
        self.limits = limits
        #: Of all connections; `None` = none is kept.
        self.budget = budget
        self.loop = loop
        self.transport: asyncio.Transport
        #: Frames that leave with the next write.
        self.out: list[bytes | memoryview] = []
        self.out_size = 0
        #: The peer's connection window, its initial stream window and its largest frame.
        self.window = h2.DEFAULT_WINDOW
        self.peer_window = h2.DEFAULT_WINDOW
        self.peer_frame = h2.MIN_FRAME_SIZE
        #: Due in front of the next header block.
        self.table_update = b""
        #: Open streams, and finished ones whose messages or trailers have not left.
        self.streams: dict[int, H2Stream] = {}
        #: Finished exchanges whose peer has not ended its side, to the bytes that it may still send.
        self.lingering: OrderedDict[int, int] = OrderedDict()
        #: Streams that wait for the connection's window or the transport, in the order of their turns.
        self.blocked: OrderedDict[int, H2Stream] = OrderedDict()
        #: Message bytes that wait in streams.
        self.queued = 0
        #: Unfinished streams whose handlers need not know of cancels at once.
        self.quiet = 0
        #: Streams that hold part of a message.
        self.partial = 0
        self.corked = False
        self.paused = False
        self.draining = False
        #: The connection is over: input is dropped, nothing is written any more.
        self.closing = False
        #: Nothing is half-read and the peer has acknowledged our SETTINGS.
        self.settled = False
        #: The receive mark may have to change though nothing is written.
        self.restless = False
        self._flushing = False
        self._merge = merge_wakeups
        self._mark = 1
        self._socket: socket.socket | None = None

    @property
    def watched(self) -> int:
        """Streams of which something must be heard at once: of a cancel, or that what waits in them may leave."""
        return len(self.streams) - self.quiet

    def flush_soon(self) -> None:
        """Something was written: see that it leaves."""
        if not (self.corked or self._flushing):
            self._flushing = True
            self.loop.call_soon(self._flush_now)

    def _flush_now(self) -> None:
        self._flushing = False
        self.flush()

    def flush(self) -> None:
        """Write what waits, and say how little the next read may bring."""
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
        """Our side of the stream is over: its trailers are written."""
        self.streams.pop(stream.id, None)
        if not stream.remote_closed:
            self.lingering[stream.id] = stream.receive_window
            if len(self.lingering) > self.limits.max_streams:
                self.send_reset(self.lingering.popitem(last=False)[0], ErrorCode.NO_ERROR)

    def send_reset(self, stream_id: int, code: int) -> None:
        """RST_STREAM, for a stream that is not open any more."""
        raise NotImplementedError

    def credit(self, stream: "H2Stream") -> None:
        """The stream may go on: give its window back."""

    def close_if_idle(self) -> None:
        """Draining: close once the last stream has ended."""

    def overflow(self) -> None:
        """The peer does not read what it asks for."""
        self.abort("the peer reads too slowly")

    def abort(self, why: str) -> None:
        """Close without a word; `connection_lost` follows."""
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
        """The connection's window has grown or the transport takes data again."""
        blocked = self.blocked
        while blocked and self.window > 0 and not self.paused:
            blocked.popitem(last=False)[1].pump(_TURN)
            if self.out_size > _BATCH:
                self.flush()

    # ---- merged wake-ups ----

    def merge_on(self, sock: socket.socket) -> None:
        """Called for plaintext TCP only: TLS reads records, and Unix sockets ignore the mark."""
        self._socket = sock

    def _put_mark(self, mark: int) -> None:
        if mark != self._mark and self._socket is not None:
            self._mark = mark
            try:
                # Lowering it reports what is already there (Linux: tcp_set_rcvlowat).
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, mark)
            except OSError:  # the socket is gone or the platform refuses
                self._socket = None


class H2Stream:
    """A `ServerStream`. The connection calls the methods of the second part."""

    # What a stream begins with; most of it stays so.
    handler: StreamHandler | None = None
    #: Takes a message that came whole in one frame; `None` where that is not all there is to do.
    take: Callable[[bytes], None] | None = None
    finished = False
    remote_closed = False
    _opened = False
    _queue: deque[bytes] | None = None
    _offset = 0
    #: The trailers block that waits behind the queue.
    _tail = b""
    #: Holds part of a message; `None` between messages.
    _reader: grpc.MessageReader | None = None
    _received = 0
    _watching = True
    #: Its place in the budget, once it has one; what it consists of: a message that is coming, what the handler keeps.
    claim: Claim | None = None
    _coming = _kept = 0
    #: The handler waits for more than it has.
    _expecting = False

    def __init__(self, connection: H2Sender, stream_id: int) -> None:
        self.id = stream_id
        #: What the peer takes, and what it may still send before we credit it.
        self.window = connection.peer_window
        self.receive_window = connection.limits.stream_window
        self._connection = connection

    # ---- ServerStream ----

    def send(self, *messages: bytes) -> None:
        if self.finished or not messages:
            return
        connection = self._connection
        first = messages[0]
        # The others follow in the same frame, each behind its prefix.
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
        """Have the budget know what is held."""
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
        """It ended: the budget has all of it back."""
        if self._connection.budget is not None:
            self._connection.budget.count(claim, 0)

    def granted(self) -> None:
        """There is room for what comes."""
        if not self.finished:
            self._connection.credit(self)

    @property
    def starved(self) -> bool:
        """What it sends has to wait for room."""
        budget = self._connection.budget
        return budget is not None and self.claim is not None and budget.starved(self.claim)

    @property
    def watching(self) -> bool:
        """Its handler wants to hear of a cancellation at once."""
        return self._watching

    @property
    def partial(self) -> bool:
        """The beginning of a message has come."""
        return self._reader is not None

    @property
    def queued(self) -> int:
        """Bytes that wait to be sent."""
        return sum(map(len, self._queue or ())) - self._offset

    def validate(self) -> None:
        """Raises `AssertionError` where it waits without a reason."""
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
        """Answer with one header block, without a handler."""
        self._leave()
        self._end(block)

    def receive(self, data: bytes, pos: int, end: int) -> None:
        """The payload `data[pos:end]` of one DATA frame."""
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
            while end - pos >= _PREFIX_SIZE and self._reader is None:  # nearly always a frame holds whole messages
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
        if messages or self._coming <= _PREFIX_SIZE:  # not for each frame in the middle of a message
            coming = self._reader.size if self._reader is not None else 0
            if coming != self._coming or self.claim is not None:
                self._coming = coming
                self._claim()
        complete = self._reader is None and not (self.remote_closed or self._connection.limits.max_stream_bytes)
        if complete and not self.finished:
            self.take = handler.on_message

    def half_close(self) -> None:
        """The peer's side has ended."""
        self.take = None
        if self._reader is not None and not self.finished:
            self.fail(grpc.Status.INTERNAL, "the stream ended inside a message")
        elif self.handler is not None:
            try:
                self.handler.on_half_close()
            except Exception:
                self.crashed()

    def fail(self, code: int, why: str) -> None:
        """The transport ends the stream; the handler loses it."""
        handler = self.handler
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
            handler = self.handler
            self._leave()
            _tell_lost(handler, why)

    def crashed(self) -> None:
        """Its handler raised."""
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
