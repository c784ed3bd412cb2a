"""One HTTP/2 connection of a gRPC peer: what its streams send. `h2_control` is the connection as a whole.

Rules (numbers are sections of RFC 9113)
* A stream id is idle (above the highest seen), open, or over. Frames on idle streams break the connection (5.1).
  HEADERS and its CONTINUATIONs are one unit (6.10). Header blocks are decoded even where they are ignored (4.3).
* An exchange that we finished while the peer's side is open lingers: all that is kept is how much the peer may still
  send. Late DATA is swallowed and its connection window given back; RST_STREAM or END_STREAM ends it. Nothing is sent:
  Envoy resets by itself, and grpc clients do too. At most `max_streams` linger; beyond that the oldest is reset with
  NO_ERROR (8.1).
* Streams that we reset are remembered for a while, because frames for them may be on their way (5.4.2).
* Receive windows are given back in big steps, when half of a window is used up. A peer that sends more than it was
  given breaks the connection (connection window) or loses its stream (stream window).
"""

import logging
from collections import OrderedDict

from fairlead.io.receive.h2_control import H2Control, Owner
from fairlead.io.receive.h2_limits import Budget, H2Limits
from fairlead.io.receive.h2_reader import FrameHandler, Scratch, only
from fairlead.io.receive.h2_stream import H2Stream
from fairlead.io.receive.stream import Routes
from fairlead.model.errors import ProtocolError
from fairlead.wire import grpc_frames as grpc
from fairlead.wire import h2
from fairlead.wire.h2 import ErrorCode
from fairlead.wire.h2_headers import Opening

log = logging.getLogger(__name__)

#: Streams that we reset and still remember.
_REMEMBERED = 256

_u32 = h2.U32.unpack_from


class H2Connection(H2Control):
    """An asyncio protocol; one per accepted socket."""

    def __init__(
        self, routes: Routes, owner: Owner, limits: H2Limits, scratch: Scratch, merge_wakeups: bool = False
    ) -> None:
        super().__init__(owner, limits, scratch, merge_wakeups)
        self._routes = routes
        #: What the peer may still send before we credit the connection.
        self._credit = limits.connection_window
        #: Streams that we reset, oldest first.
        self._reset: OrderedDict[int, None] = OrderedDict()
        self._resets = Budget(limits.resets_per_second, limits.reset_burst, self.loop.time)
        #: A header block in pieces: flags of its HEADERS, stream, bytes so far.
        self._pieces: tuple[int, int, bytearray] = (0, 0, bytearray())
        known: tuple[FrameHandler, ...] = (
            self._on_data, self._on_headers, self._on_priority, self._on_rst_stream, self._on_settings,
            self._on_forbidden, self._on_ping, self._on_goaway, self._on_window_update, self._on_forbidden,
        )  # fmt: skip
        self._table = known + (self._on_unknown,) * (256 - len(known))
        self._continuation = only(h2.CONTINUATION, self._on_continuation, "a header block was interrupted")

    # ---- HEADERS ----

    def _on_headers(self, flags: int, stream_id: int, data: bytes, pos: int, end: int) -> None:
        if not stream_id & 1:
            raise ProtocolError("HEADERS on a stream that clients cannot open", ErrorCode.PROTOCOL_ERROR)
        if flags & (h2.PADDED | h2.HAS_PRIORITY):
            pos, end = h2.unpad(flags, data, pos, end)
        if end - pos > self.limits.max_header_list:
            raise ProtocolError("the header block is too large", ErrorCode.ENHANCE_YOUR_CALM)
        if flags & h2.END_HEADERS:
            self._on_block(flags, stream_id, data[pos:end])
        else:
            self._pieces = (flags, stream_id, bytearray(data[pos:end]))
            self.handlers = self._continuation

    def _on_continuation(self, flags: int, stream_id: int, data: bytes, pos: int, end: int) -> None:
        first_flags, first_stream, block = self._pieces
        if stream_id != first_stream:
            raise ProtocolError("a header block was interrupted", ErrorCode.PROTOCOL_ERROR)
        self._spend_control()
        if len(block) + end - pos > self.limits.max_header_list:
            raise ProtocolError("the header block is too large", ErrorCode.ENHANCE_YOUR_CALM)
        block += memoryview(data)[pos:end]
        if flags & h2.END_HEADERS:
            self._pieces = (0, 0, bytearray())
            self.handlers = self._table
            self._on_block(first_flags, stream_id, bytes(block))

    def _on_block(self, flags: int, stream_id: int, block: bytes) -> None:
        opening = self._blocks.read(block)
        if stream_id <= self._last_stream:
            self._on_late_block(flags, stream_id, opening)
            return
        self._last_stream = stream_id
        if stream_id > self._last_accepted:
            return
        if len(self.streams) >= self.limits.max_streams:
            self._send_reset(stream_id, ErrorCode.REFUSED_STREAM)
            self._spend_control()
        elif opening.malformed:
            self._send_reset(stream_id, ErrorCode.PROTOCOL_ERROR)
            self._spend_control()
        else:
            self._open(flags, stream_id, opening)

    def _open(self, flags: int, stream_id: int, opening: Opening) -> None:
        self.opened += 1
        stream = self.streams[stream_id] = H2Stream(self, stream_id)
        stream.remote_closed = bool(flags & h2.END_STREAM)
        factory = self._routes.get(opening.path)
        if opening.http_status:
            stream.refuse(grpc.http_error(opening.http_status))
        elif factory is None:
            stream.refuse(grpc.trailers_only(grpc.Status.UNIMPLEMENTED, f"unknown method {opening.path}"))
        else:
            try:
                stream.attach(factory(stream, opening.headers))
            except Exception:
                log.exception("no handler could be made for %s", opening.path)
                stream.fail(grpc.Status.INTERNAL, "internal error")
            if stream.remote_closed:
                stream.half_close()

    def _on_late_block(self, flags: int, stream_id: int, opening: Opening) -> None:
        """HEADERS on a stream that was opened before: trailers, or an error."""
        stream = self.streams.get(stream_id)
        if stream is not None:
            if stream.remote_closed:
                self.reset(stream, ErrorCode.STREAM_CLOSED, "frames after the stream's end")
            elif not flags & h2.END_STREAM or not opening.trailers:
                self.reset(stream, ErrorCode.PROTOCOL_ERROR, "malformed trailers")
            else:
                stream.remote_closed = True
                stream.half_close()
        elif self.lingering.pop(stream_id, None) is None and stream_id not in self._reset:
            raise ProtocolError("HEADERS on a closed stream", ErrorCode.STREAM_CLOSED)

    # ---- DATA ----

    def _on_data(self, flags: int, stream_id: int, data: bytes, pos: int, end: int) -> None:
        size = end - pos
        self._credit -= size
        if self._credit <= self.limits.connection_window >> 1:
            self._give_credit()
        stream = self.streams.get(stream_id)
        if stream is None:
            self._on_stray_data(flags, stream_id, size)
            return
        if stream.remote_closed:
            self.reset(stream, ErrorCode.STREAM_CLOSED, "frames after the stream's end")
            return
        if flags & h2.PADDED:
            pos, end = h2.unpad(h2.PADDED, data, pos, end)
        stream.receive_window -= size
        if flags & h2.END_STREAM:
            stream.remote_closed = True  # first: a stream that the handler finishes now does not linger
        if stream.receive_window <= self.limits.stream_window >> 1 and not self._give_stream_credit(stream):
            return
        if pos != end:
            stream.receive(data, pos, end)
        elif not flags & h2.END_STREAM:
            self._spend_control()
        if flags & h2.END_STREAM:
            stream.half_close()

    def _give_credit(self) -> None:
        if self._credit < 0:
            raise ProtocolError("the peer exceeded the connection's window", ErrorCode.FLOW_CONTROL_ERROR)
        self.out.append(h2.window_update(0, self.limits.connection_window - self._credit))
        self._credit = self.limits.connection_window

    def _give_stream_credit(self, stream: H2Stream) -> bool:
        if stream.receive_window < 0:
            self.reset(stream, ErrorCode.FLOW_CONTROL_ERROR, "the peer exceeded the stream's window")
            return False
        if not (stream.remote_closed or stream.finished):
            self.out.append(h2.window_update(stream.id, self.limits.stream_window - stream.receive_window))
            stream.receive_window = self.limits.stream_window
        return True

    def _on_stray_data(self, flags: int, stream_id: int, size: int) -> None:
        """DATA on a stream that is not open any more; its connection window is given back already."""
        left = self.lingering.get(stream_id)
        if left is not None:
            if flags & h2.END_STREAM:
                del self.lingering[stream_id]
            elif left < size:
                del self.lingering[stream_id]
                self._send_reset(stream_id, ErrorCode.FLOW_CONTROL_ERROR)
            else:
                self.lingering[stream_id] = left - size
                if not size:
                    self._spend_control()
        elif stream_id not in self._reset and stream_id <= self._last_accepted:
            self._refuse_idle(stream_id)
            self._send_reset(stream_id, ErrorCode.STREAM_CLOSED)
            self._spend_control()

    # ---- the end of a stream ----

    def _on_rst_stream(self, flags: int, stream_id: int, data: bytes, pos: int, end: int) -> None:
        if end - pos != 4:
            raise ProtocolError("RST_STREAM is not four bytes", ErrorCode.FRAME_SIZE_ERROR)
        if self.lingering.pop(stream_id, None) is not None:
            return
        stream = self.streams.pop(stream_id, None)
        if stream is None:
            self._refuse_idle(stream_id)
            return
        unfinished = not stream.finished
        stream.lost(f"reset by the peer (code {_u32(data, pos)[0]})")
        # Only what we still worked on counts: Envoy resets every finished exchange.
        if unfinished and not self._resets.spend():
            raise ProtocolError("too many resets", ErrorCode.ENHANCE_YOUR_CALM)

    def _refuse_idle(self, stream_id: int) -> None:
        if stream_id > self._last_stream or not stream_id & 1:
            raise ProtocolError(f"a frame on idle stream {stream_id}", ErrorCode.PROTOCOL_ERROR)

    def ended(self, stream: H2Stream) -> None:
        """Our side of the stream is over: its trailers are written."""
        self.streams.pop(stream.id, None)
        if not stream.remote_closed:
            self.lingering[stream.id] = stream.receive_window
            if len(self.lingering) > self.limits.max_streams:
                self._send_reset(self.lingering.popitem(last=False)[0], ErrorCode.NO_ERROR)

    def reset(self, stream: H2Stream, code: int, why: str) -> None:
        """A stream error (5.4.2)."""
        self.streams.pop(stream.id, None)
        self._send_reset(stream.id, code)
        stream.lost(why)
        self._spend_control()

    def _send_reset(self, stream_id: int, code: int) -> None:
        self.out.append(h2.rst_stream(stream_id, code))
        self._reset[stream_id] = None
        if len(self._reset) > _REMEMBERED:
            self._reset.popitem(last=False)
