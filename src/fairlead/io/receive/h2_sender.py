"""The sending half of an HTTP/2 connection: one write per batch, the connection's window, slow readers, wake-ups.

Rules
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
import socket
from collections import OrderedDict
from typing import TYPE_CHECKING

from fairlead.io.receive.h2_limits import H2Limits
from fairlead.wire import h2

if TYPE_CHECKING:
    from fairlead.io.receive.h2_stream import H2Stream

#: Bytes of one stream before the next one has its turn.
_TURN = 64 << 10
#: Bytes after which a long batch is handed to the transport, to learn whether it takes more.
_BATCH = 1 << 20

#: One byte more than RST_STREAM and WINDOW_UPDATE.
_MERGING_MARK = 14


class H2Sender:
    """Base of `H2Connection`. Streams reach into it: both are one state machine, split for reading."""

    def __init__(self, limits: H2Limits, merge_wakeups: bool, loop: asyncio.AbstractEventLoop) -> None:
        self.limits = limits
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
        #: Streams that wait for the connection's window or the transport, in the order of their turns.
        self.blocked: OrderedDict[int, H2Stream] = OrderedDict()
        #: Message bytes that wait in streams.
        self.queued = 0
        #: Unfinished streams that want to know of cancels at once.
        self.watched = 0
        #: Streams that hold part of a message.
        self.partial = 0
        self.corked = False
        self.paused = False
        self.draining = False
        #: The connection is over: input is dropped, nothing is written any more.
        self.closing = False
        #: Nothing is half-read and the peer has acknowledged our SETTINGS.
        self.settled = False
        self._flushing = False
        self._merge = merge_wakeups
        self._mark = 1
        self._socket: socket.socket | None = None
        #: How often the receive mark was changed.
        self.mark_changes = 0

    def flush_soon(self) -> None:
        """Something was written: see that it leaves."""
        if not (self.corked or self._flushing):
            self._flushing = True
            self.loop.call_soon(self._flush_now)

    def _flush_now(self) -> None:
        self._flushing = False
        self.flush()

    def flush(self) -> None:
        if self.out:
            data = b"".join(self.out)
            self.out.clear()
            self.out_size = 0
            if self.closing:
                return
            self.transport.write(data)
            if self.paused and self.transport.get_write_buffer_size() > self.limits.max_pending:
                self.overflow()
        if self._merge:
            self._set_mark()
        if self.draining:
            self.close_if_idle()

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

    def _set_mark(self) -> None:
        busy = self.watched or self.partial or self.queued or self.paused or self.draining or self.closing
        quiet = self.settled and not busy
        self._put_mark(_MERGING_MARK if quiet else 1)

    def _put_mark(self, mark: int) -> None:
        if mark != self._mark and self._socket is not None:
            self._mark = mark
            self.mark_changes += 1
            try:
                # Lowering it reports what is already there (Linux: tcp_set_rcvlowat).
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, mark)
            except OSError:  # the socket is gone or the platform refuses
                self._socket = None
