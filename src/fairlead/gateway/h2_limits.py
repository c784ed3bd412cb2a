"""The limits of an HTTP/2 connection, and the bytes that all connections together may hold."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from fairlead.gateway import h2


class H2Limits(Struct, frozen=True, kw_only=True):
    """Limits of a connection. Sizes in bytes, times in seconds. The first group is announced in SETTINGS."""

    #: Streams that a peer may have open at the same time; more are refused. Envoy then opens further connections.
    max_streams: int = 4096
    stream_window: int = 1 << 20
    connection_window: int = 16 << 20
    max_frame: int = 1 << 20
    #: Size of a decoded header list. Encoded blocks may not be longer either.
    max_header_list: int = 64 << 10

    #: Size of a gRPC message. A gateway that buffers bodies sends a whole body in one message.
    max_message: int = (64 << 20) + (64 << 10)
    #: Payload of a stream in its whole life; 0 = unlimited (access logs never end).
    max_stream_bytes: int = 0
    #: Output that waits for a slow peer, per connection. Beyond this the connection is aborted.
    max_pending: int = 256 << 20
    #: Output passed to the socket before sending pauses.
    write_high_water: int = 256 << 10
    #: Connections of a server. For another, some of those with the fewest streams are closed, of the address that has
    #: most if it has many.
    max_connections: int = 1024

    #: Resets of unfinished streams: per second, and in a burst. CVE-2023-44487 ("rapid reset").
    resets_per_second: int = 1000
    reset_burst: int = 8192
    #: Frames that only cost time: PING, SETTINGS, PRIORITY, unknown, empty DATA, CONTINUATION. CVE-2019-9512 … 9518.
    control_per_second: int = 1000
    control_burst: int = 2000

    #: Time from accepting the connection to the peer's SETTINGS.
    handshake_timeout: float = 10.0
    #: Silence after which a PING is sent; after twice this time, the connection is aborted. 0 = never.
    keepalive: float = 60.0

    def settings(self) -> bytes:
        """The first SETTINGS to send. Table size 0 makes header blocks self-contained: see `gateway.h2_headers`."""
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
    """A token bucket that reads the clock only when it is empty."""

    __slots__ = ("_burst", "_filled", "_left", "_now", "_rate")

    def __init__(self, rate: float, burst: float, now: Callable[[], float]) -> None:
        self._rate = rate
        self._burst = burst
        self._now = now
        self._left = burst
        self._filled = now()

    def spend(self) -> bool:
        """Take a token; return false if none is left."""
        if self._left < 1:
            now = self._now()
            self._left = min(self._left + (now - self._filled) * self._rate, self._burst)
            self._filled = now
            if self._left < 1:
                return False
        self._left -= 1
        return True


class Holder(Protocol):
    """The stream or connection that holds the bytes of a claim."""

    def granted(self) -> None:
        """Continue: there is now room for what the holder asked for."""

    def fail(self, code: int, why: str) -> None:
        """End the stream, which held room for too long while others waited."""


class Claim:
    """The bytes of a `ByteBudget` that a stream or connection holds. `wanted` is larger while it waits for room."""

    __slots__ = ("coming", "holder", "since", "size", "wanted")

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        self.size = self.wanted = 0
        #: The message is incomplete; since when, or since when it has room.
        self.coming = False
        self.since = 0.0


class ByteBudget:
    """Limits the bytes of incomplete and waiting requests in the process.

    Rules
    * The size of a message is known at its start. Then room for all of it is taken, or for no more than its stream's
      window, which the peer may use anyway. So a message with room can always be completed, and no message waits for
      another that waits.
    * A message without room waits in line and gets no flow-control credit. A quarter of the limit is kept for messages
      of up to `SMALL` bytes, which never wait. If even that is used up, a message is refused.
    * While others wait, an incomplete message with room must be completed within `PATIENCE` seconds, plus one second
      per `PACE` bytes.
    * Bytes that have arrived are counted even beyond the limit; later messages wait until they are released.
    """

    SMALL = 64 << 10
    PATIENCE, PACE = 10.0, 4 << 20

    def __init__(self, limit: int, now: Callable[[], float]) -> None:
        self.limit = limit
        self.used = 0
        #: Messages that were refused for lack of room, and messages that were cut off because others waited.
        self.refused = self.cut = 0
        self._now = now
        self._pressed_at = -self.PATIENCE
        self._waiting: OrderedDict[Claim, None] = OrderedDict()
        self._coming: dict[Claim, None] = {}

    def resize(self, limit: int) -> None:
        """Set another limit, in bytes."""
        self.limit = limit

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def pressed(self) -> bool:
        """Whether a message waits, or was refused within the last second."""
        return bool(self._waiting) or self._now() - self._pressed_at < 1.0

    def starved(self, claim: Claim) -> bool:
        """Whether a claim waits for room, and so gets no credit."""
        return claim in self._waiting

    def ask(self, claim: Claim, size: int, window: int = 0) -> bool:
        """Ask for room for `size` bytes in total, not all of which have arrived. Return false if refused. `window`:
        bytes that may arrive even without credit."""
        if not claim.coming:
            claim.coming, claim.since = True, self._now()
            self._coming[claim] = None
        claim.wanted = size
        if size <= claim.size:
            self._take(claim, size)
            return True
        free = self.limit - self.used - (size - claim.size)
        if size <= self.SMALL:
            if free >= 0:
                self._take(claim, size)
                return True
        elif free >= self.limit // 4 and not self._waiting:
            self._take(claim, size)
            return True
        elif claim in self._waiting:
            return True
        elif size <= self.limit - self.limit // 4:
            first = max(claim.size, min(size, window))
            if self.used + first - claim.size <= self.limit - self.limit // 8:
                self._take(claim, first)
                self._waiting[claim] = None
                return True
        self.refused += 1
        self._pressed_at = self._now()
        return False

    def count(self, claim: Claim, size: int) -> None:
        """Count a complete message: the claim holds `size` bytes in total, and no more will arrive."""
        claim.coming = False
        self._coming.pop(claim, None)
        waited = self._waiting.pop(claim, self) is None
        claim.wanted = size
        less = size < claim.size
        self._take(claim, size)
        if less or waited:
            self._grant()

    def _take(self, claim: Claim, size: int) -> None:
        self.used += size - claim.size
        claim.size = size

    def _grant(self) -> None:
        while self._waiting:
            claim = next(iter(self._waiting))
            if self.used + claim.wanted - claim.size > self.limit - self.limit // 4:
                return
            del self._waiting[claim]
            self._take(claim, claim.wanted)
            claim.since = self._now()
            claim.holder.granted()

    def tick(self) -> None:
        """Cut off messages that make others wait for too long; about once a second."""
        if not self.pressed():
            return
        now = self._now()
        held = [claim for claim in self._coming if claim not in self._waiting]
        for claim in [claim for claim in held if now - claim.since > self.PATIENCE + claim.size / self.PACE]:
            self.cut += 1
            claim.holder.fail(8, "the message came too slowly while others waited for memory")
