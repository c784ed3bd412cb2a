"""What one HTTP/2 connection may cost us, and what we tell the peer about it; what all of them may hold together."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

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


class Holder(Protocol):
    """Whose bytes a claim stands for."""

    def granted(self) -> None:
        """There is room for what it asked for: it may go on."""

    def fail(self, code: int, why: str) -> None:
        """It held room for too long while others waited."""


class Claim:
    """Bytes of a `ByteBudget` that one stream or connection holds. `wanted` is more while it waits for room."""

    __slots__ = ("coming", "holder", "since", "size", "wanted")

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        self.size = self.wanted = 0
        #: Not all of it is here yet. Since when it is so, or since when there is room.
        self.coming = False
        self.since = 0.0


class ByteBudget:
    """One for the process: bytes of requests that are not whole yet, or wait.

    Rules
    * A message tells its size at its beginning, and then its whole room is taken or nothing beyond the window that its
      stream has anyway. Thus whoever has room can finish, and nobody waits for somebody who waits.
    * Who asks for room waits in line, without flow-control credit. A quarter is kept for messages of up to `SMALL`
      bytes, which are never made to wait. Where not even that is left, a message is refused.
    * Whoever holds room for something unfinished while others wait must be done in `PATIENCE` seconds and one more for
      each `PACE` bytes.
    * What is here already is counted even beyond the limit; the next ones wait for it to go.
    """

    SMALL = 64 << 10
    PATIENCE, PACE = 10.0, 4 << 20

    def __init__(self, limit: int, now: Callable[[], float]) -> None:
        self.limit = limit
        self.used = 0
        #: Messages that were refused for want of room, and those that were cut off because others waited.
        self.refused = self.cut = 0
        self._now = now
        self._pressed_at = -self.PATIENCE
        self._waiting: OrderedDict[Claim, None] = OrderedDict()
        self._coming: dict[Claim, None] = {}

    def resize(self, limit: int) -> None:
        """From now on so many bytes."""
        self.limit = limit

    @property
    def waiting(self) -> int:
        """Messages that wait for room."""
        return len(self._waiting)

    def pressed(self) -> bool:
        """Somebody waits, or was refused within the last second."""
        return bool(self._waiting) or self._now() - self._pressed_at < 1.0

    def starved(self, claim: Claim) -> bool:
        """It waits for room: no credit for it."""
        return claim in self._waiting

    def ask(self, claim: Claim, size: int, window: int = 0) -> bool:
        """Room for `size` bytes in all, of which more is to come; false = refused. `window`: bytes that come even
        without credit."""
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
        """It holds `size` bytes in all, and nothing more is to come."""
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
        """About once a second: who holds up others is cut off."""
        if not self.pressed():
            return
        now = self._now()
        held = [claim for claim in self._coming if claim not in self._waiting]
        for claim in [claim for claim in held if now - claim.since > self.PATIENCE + claim.size / self.PACE]:
            self.cut += 1
            claim.holder.fail(8, "the message came too slowly while others waited for memory")
