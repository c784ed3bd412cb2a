"""The state of a connection: handshake, settings, windows, pings, draining, errors (numbers: sections of RFC 9113).

Rules
* The peer's first frame is SETTINGS (3.4). The windows of open streams change by the difference to its initial window,
  and may become negative (6.9.2). The acknowledgment is sent before anything that the new values allow.
* Frames that cost the server more than the peer are limited (`H2Limits`): control frames here, resets in
  `h2_connection`.
* Draining (6.8) begins with a GOAWAY with the highest id and a PING. When the PING is answered, everything that the
  peer sent before it got the GOAWAY has arrived, and a second GOAWAY names the last stream. The connection closes after
  the last exchange.
* After an error, the server sends GOAWAY, ends all streams, reads no more frames, and closes once the peer has had time
  to read. Closing immediately would reset TCP if there is unread input, and the peer would lose the GOAWAY.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any, Protocol

from fairlead.core.errors import ProtocolError
from fairlead.gateway import grpc_frames as grpc
from fairlead.gateway import h2
from fairlead.gateway.h2 import ErrorCode
from fairlead.gateway.h2_headers import HeaderBlocks
from fairlead.gateway.h2_limits import Budget, ByteBudget, H2Limits
from fairlead.gateway.h2_stream import H2Sender, H2Stream

log = logging.getLogger(__name__)

_DRAIN_PING = b"fairlead"
_ALIVE_PING = b"keepaliv"
#: Seconds that a peer has to answer the drain's PING, and to read the last GOAWAY.
_PATIENCE = 1.0
_DEFAULT_TABLE = 4096

_u32 = h2.U32.unpack_from


#: Takes a frame as (flags, stream, data, pos, end). Its payload is `data[pos:end]`.
FrameHandler = Callable[[int, int, bytes, int, int], None]


def only(kind: int, handler: FrameHandler, why: str) -> tuple[FrameHandler, ...]:
    """A table of handlers in which every other type of frame is a protocol error."""

    def refuse(flags: int, stream: int, data: bytes, pos: int, end: int) -> None:
        raise ProtocolError(why, ErrorCode.PROTOCOL_ERROR)

    return (refuse,) * kind + (handler,) + (refuse,) * (255 - kind)


class Owner(Protocol):
    """The server that accepted the connection."""

    def made(self, connection: "H2Control") -> None:
        """Take note of a new connection."""

    def lost(self, connection: "H2Control") -> None:
        """Take note that a connection is gone. Its streams' handlers were already told."""

    def broke(self, peer: str, why: str) -> None:
        """Take note that a peer broke the protocol."""


class H2Control(H2Sender):
    """The base class of `H2Connection`, which reads the frames of streams."""

    def __init__(self, owner: Owner, limits: H2Limits, merge_wakeups: bool, budget: ByteBudget | None = None) -> None:
        super().__init__(limits, merge_wakeups, asyncio.get_running_loop(), budget)
        self._owner = owner
        self._blocks = HeaderBlocks(limits.max_header_list)
        self._last_stream = 0
        #: Streams with higher ids arrived after this side's last GOAWAY and are ignored.
        self._last_accepted = h2.MAX_STREAM_ID
        #: The last GOAWAY was sent, or the peer has sent one.
        self._goodbye = False
        self._acknowledged = False
        self._peer_table = _DEFAULT_TABLE
        self._control = Budget(limits.control_per_second, limits.control_burst, self.loop.time)
        self._received_at = self._changed = self.loop.time()
        self._shaken = False
        self._silent = False
        self._pinged = False
        self._farewell: asyncio.TimerHandle | None = None
        self._peer = ""
        #: The peer's IP address; empty = it has none.
        self.address = ""
        #: Handlers by frame type: the regular table, and the current one, which allows only one type at some points.
        self._table: tuple[FrameHandler, ...] = ()
        self.handlers = only(h2.SETTINGS, self._on_first_settings, "the first frame is not SETTINGS")

    @property
    def opened(self) -> int:
        """The number of streams that the peer has begun. Their ids are odd, and skipped ids count too."""
        return (self._last_stream + 1) // 2

    # ---- asyncio ----

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        peer = transport.get_extra_info("peername")
        self._peer = str(peer or "a local socket")
        self.address = str(peer[0]) if isinstance(peer, tuple) else ""
        tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        self._owner.made(self)
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            self.abort("the TLS peer did not choose h2")
            return
        sock = transport.get_extra_info("socket")
        if tls is None and sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            self.merge_on(sock)
        transport.set_write_buffer_limits(high=self.limits.write_high_water)
        self.out.append(self.limits.settings())
        if self.limits.connection_window > h2.DEFAULT_WINDOW:
            self.out.append(h2.window_update(0, self.limits.connection_window - h2.DEFAULT_WINDOW))
        self.flush()

    def eof_received(self) -> bool:
        return False  # the transport closes once its buffer is written

    def connection_lost(self, exc: Exception | None) -> None:
        self.closing = True
        if self._farewell is not None:
            self._farewell.cancel()
        self._end_streams("the connection was lost")
        self.out.clear()
        self._owner.lost(self)

    def tick(self, now: float) -> None:
        """Check timeouts and the peer's silence, about once a second."""
        if self.closing:
            return
        if self._silent:
            self._put_mark(1)
        else:
            self._received_at = now
            self._pinged = False
        if not self._shaken and now - self._changed > self.limits.handshake_timeout:
            self.fail(ErrorCode.SETTINGS_TIMEOUT, "no SETTINGS in time")
        elif self.draining and not self._goodbye and now - self._changed > _PATIENCE:
            self._say_goodbye()
        elif self.limits.keepalive and self._silent and now - self._received_at > self.limits.keepalive:
            self._check_alive(now)
        self._silent = True

    # ---- frames ----

    def _on_first_settings(self, flags: int, stream_id: int, data: bytes, pos: int, end: int) -> None:
        if flags & h2.ACK:
            raise ProtocolError("the first frame is not SETTINGS", ErrorCode.PROTOCOL_ERROR)
        self._shaken = True
        self.handlers = self._table
        self._on_settings(flags, stream_id, data, pos, end)

    def _on_settings(self, flags: int, stream_id: int, data: bytes, pos: int, end: int) -> None:
        _expect(stream_id == 0, "SETTINGS on a stream")
        self._spend_control()
        if flags & h2.ACK:
            _expect(pos == end, "SETTINGS acknowledgement with a payload", ErrorCode.FRAME_SIZE_ERROR)
            if not self._acknowledged:
                self._acknowledged = True
                self._blocks.forbid_table()
            return
        entries = h2.read_settings(data[pos:end])
        self.out.append(h2.SETTINGS_ACK)
        grown = False
        for key, value in entries:
            if key == h2.INITIAL_WINDOW_SIZE:
                self._shift_windows(value - self.peer_window)
                self.peer_window = value
                grown = True
            elif key == h2.MAX_FRAME_SIZE:
                self.peer_frame = value
            elif key == h2.HEADER_TABLE_SIZE and value < self._peer_table:
                # The table is not used, but a smaller limit must be confirmed (RFC 7541, 4.2); zero fits every limit.
                self._peer_table = 0
                self.table_update = grpc.TABLE_SIZE_ZERO
        if grown:  # after the loop: messages sent must obey all new values
            for stream in list(self.streams.values()):
                stream.pump()

    def _shift_windows(self, difference: int) -> None:
        for stream in self.streams.values():
            stream.window += difference
            _expect(stream.window <= h2.MAX_WINDOW, "a stream's window overflows", ErrorCode.FLOW_CONTROL_ERROR)

    def _on_window_update(self, flags: int, stream_id: int, data: bytes, pos: int, end: int) -> None:
        _expect(end - pos == 4, "WINDOW_UPDATE is not four bytes", ErrorCode.FRAME_SIZE_ERROR)
        increment = _u32(data, pos)[0] & h2.MAX_WINDOW
        if not stream_id:
            _expect(increment > 0, "WINDOW_UPDATE with increment 0")
            self.window += increment
            _expect(self.window <= h2.MAX_WINDOW, "the connection's window overflows", ErrorCode.FLOW_CONTROL_ERROR)
            if self.blocked:
                self.pump_blocked()
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            self._refuse_idle(stream_id)
        elif not increment:
            self.reset(stream, ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE with increment 0")
        elif stream.window + increment > h2.MAX_WINDOW:
            self.reset(stream, ErrorCode.FLOW_CONTROL_ERROR, "the stream's window overflows")
        else:
            stream.window += increment
            stream.pump()

    def _on_ping(self, flags: int, stream_id: int, data: bytes, pos: int, end: int) -> None:
        _expect(stream_id == 0, "PING on a stream")
        _expect(end - pos == 8, "PING is not eight bytes", ErrorCode.FRAME_SIZE_ERROR)
        self._spend_control()
        if not flags & h2.ACK:
            self.out.append(h2.ping(data[pos:end], ack=True))
        elif data[pos:end] == _DRAIN_PING and self.draining and not self._goodbye:
            self._say_goodbye()

    def _on_goaway(self, flags: int, stream_id: int, data: bytes, pos: int, end: int) -> None:
        _expect(stream_id == 0, "GOAWAY on a stream")
        _expect(end - pos >= 8, "GOAWAY is too short", ErrorCode.FRAME_SIZE_ERROR)
        self.draining = self._goodbye = True

    def _on_priority(self, flags: int, stream_id: int, data: bytes, pos: int, end: int) -> None:
        _expect(stream_id != 0, "PRIORITY without a stream")
        _expect(end - pos == 5, "PRIORITY is not five bytes", ErrorCode.FRAME_SIZE_ERROR)
        self._spend_control()

    def _on_forbidden(self, flags: int, stream_id: int, data: bytes, pos: int, end: int) -> None:
        raise ProtocolError("PUSH_PROMISE from a client, or CONTINUATION without HEADERS", ErrorCode.PROTOCOL_ERROR)

    def _on_unknown(self, flags: int, stream_id: int, data: bytes, pos: int, end: int) -> None:
        self._spend_control()

    def _spend_control(self) -> None:
        if not self._control.spend():
            raise ProtocolError("too many control frames", ErrorCode.ENHANCE_YOUR_CALM)

    # ---- streams ----

    def _refuse_idle(self, stream_id: int) -> None:
        if stream_id > self._last_stream or not stream_id & 1:
            raise ProtocolError(f"a frame on idle stream {stream_id}", ErrorCode.PROTOCOL_ERROR)

    def reset(self, stream: H2Stream, code: int, why: str) -> None:
        """A stream error (5.4.2)."""
        self.streams.pop(stream.id, None)
        self.send_reset(stream.id, code)
        stream.lost(why)
        self._spend_control()

    # ---- the end ----

    def drain(self) -> None:
        """Let running exchanges end, accept no new ones, then close."""
        if self.draining or self.closing:
            return
        self.draining = True
        self._changed = self.loop.time()
        self.out += (h2.goaway(h2.MAX_STREAM_ID, ErrorCode.NO_ERROR), h2.ping(_DRAIN_PING))
        self.flush_soon()

    def _say_goodbye(self) -> None:
        self._goodbye = True
        self._last_accepted = self._last_stream
        self.out.append(h2.goaway(self._last_stream, ErrorCode.NO_ERROR))
        self.flush_soon()

    def close_if_idle(self) -> None:
        if self._goodbye and not (self.streams or self.lingering or self.closing):
            self._part(self.transport.close)

    def fail(self, code: int, why: str) -> None:
        """End the connection because of a connection error (5.4.1)."""
        if self.closing:
            return
        self._owner.broke(self._peer, why)
        self._end_streams(why)
        self.out.append(h2.goaway(self._last_stream, code, why))
        self.flush()
        if not self.closing:
            self._part(self.transport.abort)

    def _part(self, hang_up: Callable[[], None]) -> None:
        """Stop writing, and close after giving the peer time to close first."""
        self.closing = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._farewell = self.loop.call_later(_PATIENCE, hang_up)
        else:
            self.transport.close()

    def _end_streams(self, why: str) -> None:
        streams = list(self.streams.values())
        self.streams.clear()
        self.lingering.clear()
        for stream in streams:
            stream.lost(why)

    def _check_alive(self, now: float) -> None:
        if now - self._received_at > 2 * self.limits.keepalive:
            self.abort("the peer is silent")
        elif not self._pinged:
            self._pinged = True
            self.out.append(h2.ping(_ALIVE_PING))
            self.flush()


def _expect(condition: bool, why: str, code: int = ErrorCode.PROTOCOL_ERROR) -> None:
    if not condition:
        raise ProtocolError(why, code)
