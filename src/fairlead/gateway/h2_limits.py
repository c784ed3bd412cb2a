"""What one HTTP/2 connection may cost us, and what we tell the peer about it."""

from collections.abc import Callable

from msgspec import Struct

from fairlead.gateway import h2


class H2Limits(Struct, frozen=True, kw_only=True):
    """Sizes in bytes, times in seconds. The first group is announced in our SETTINGS."""

    #: Streams that a peer may have open at once; more are refused. Envoy opens further connections when this is low.
    max_streams: int = 4096
    stream_window: int = 1 << 20
    connection_window: int = 16 << 20
    max_frame: int = 1 << 20
    #: Decoded header list; encoded blocks may not be longer either.
    max_header_list: int = 64 << 10

    #: One gRPC message. A gateway that buffers bodies sends a whole one in a message.
    max_message: int = (64 << 20) + (64 << 10)
    #: Payload that one stream may send in its life; 0 = any amount (access logs never end).
    max_stream_bytes: int = 0
    #: Output that waits for a slow reader, per connection; above this the connection is aborted.
    max_pending: int = 256 << 20
    #: Output handed to the socket before sending pauses.
    write_high_water: int = 256 << 10
    #: Connections of one server; more are closed at once.
    max_connections: int = 1024

    #: Resets of unfinished streams: per second, and at once. CVE-2023-44487 ("rapid reset").
    resets_per_second: int = 1000
    reset_burst: int = 8192
    #: Frames that only cost us time: PING, SETTINGS, PRIORITY, unknown, empty DATA, CONTINUATION. CVE-2019-9512 … 9518.
    control_per_second: int = 1000
    control_burst: int = 2000

    #: From accept to the peer's SETTINGS.
    handshake_timeout: float = 10.0
    #: Silence after which a PING is sent, and then again until the connection counts as dead; 0 = never.
    keepalive: float = 60.0

    def settings(self) -> bytes:
        """Our first SETTINGS. Table size 0 makes header blocks self-contained: see `gateway.h2_headers`."""
        return h2.settings(
            {
                h2.HEADER_TABLE_SIZE: 0,
                h2.MAX_CONCURRENT_STREAMS: self.max_streams,
                h2.INITIAL_WINDOW_SIZE: self.stream_window,
                h2.MAX_FRAME_SIZE: self.max_frame,
                h2.MAX_HEADER_LIST_SIZE: self.max_header_list,
            }
        )


class Budget:
    """A token bucket that looks at the clock only when it is empty."""

    __slots__ = ("_burst", "_filled", "_left", "_now", "_rate")

    def __init__(self, rate: float, burst: float, now: Callable[[], float]) -> None:
        self._rate = rate
        self._burst = burst
        self._now = now
        self._left = burst
        self._filled = now()

    def spend(self) -> bool:
        """Take one; False when none is left."""
        if self._left < 1:
            now = self._now()
            self._left = min(self._left + (now - self._filled) * self._rate, self._burst)
            self._filled = now
            if self._left < 1:
                return False
        self._left -= 1
        return True
