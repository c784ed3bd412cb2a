"""A peer for the HTTP/2 connection: raw frames in, parsed frames out, over a transport that is a list."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hpack import Decoder, Encoder

from fairlead.gateway import h2
from fairlead.gateway.h2_connection import H2Connection, Scratch
from fairlead.gateway.h2_control import H2Control
from fairlead.gateway.h2_limits import ByteBudget, H2Limits
from fairlead.gateway.stream import ServerStream

PATH = "/s/M"
Frame = tuple[int, int, int, bytes]


class ListTransport:
    """Keeps every write; takes it all at once unless told to hold it."""

    def __init__(self, sock: Any = None) -> None:
        self.writes: list[bytes] = []
        self.held = 0
        self.eof = self.closed = self.aborted = False
        self.sock = sock

    def get_extra_info(self, name: str) -> Any:
        return self.sock if name == "socket" else None

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return self.held

    def can_write_eof(self) -> bool:
        return True

    def write(self, data: bytes) -> None:
        assert not self.eof and data
        self.writes.append(data)

    def write_eof(self) -> None:
        self.eof = True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True


class Recorder:
    """A handler that notes what it hears; `on` is called with each message."""

    def __init__(self, stream: ServerStream, headers: Mapping[str, str]) -> None:
        self.stream: Any = stream
        self.headers = headers
        self.heard: list[Any] = []
        self.on: Callable[[bytes], None] = lambda message: None

    def on_message(self, message: bytes) -> None:
        self.heard.append(message)
        self.on(message)

    def on_half_close(self) -> None:
        self.heard.append("half-close")

    def on_lost(self, why: str) -> None:
        self.heard.append(("lost", why))


class Peer:
    """The client: raw frames in, parsed frames out."""

    def __init__(
        self,
        limits: H2Limits | None = None,
        *,
        merge: bool = False,
        sock: Any = None,
        budget: ByteBudget | None = None,
    ) -> None:
        self.handlers: list[Recorder] = []
        self.alive = True
        self.make: Callable[[ServerStream, Mapping[str, str]], Recorder] = Recorder
        self.connection = H2Connection({PATH: self._handler}, self, limits or H2Limits(), Scratch(), merge, budget)
        self.transport = ListTransport(sock)
        self.connection.connection_made(self.transport)
        self.encoder = Encoder()
        self.encoder.header_table_size = 0
        self.decoder = Decoder()
        self._read = 0

    def _handler(self, stream: ServerStream, headers: Mapping[str, str]) -> Recorder:
        handler = self.make(stream, headers)
        self.handlers.append(handler)
        return handler

    def made(self, connection: H2Control) -> bool:
        return True

    def lost(self, connection: H2Control) -> None:
        self.alive = False

    def broke(self, peer: str, why: str) -> None:
        self.why = why

    def feed(self, *frames: bytes) -> None:
        """One read of the socket for as much as its buffer takes."""
        data, size = b"".join(frames), len(self.connection.get_buffer(-1))
        for pos in range(0, len(data), size):
            part = data[pos : pos + size]
            self.connection.get_buffer(-1)[: len(part)] = part
            self.connection.buffer_updated(len(part))

    def shake(self, settings: dict[int, int] | None = None) -> "Peer":
        self.feed(h2.PREFACE, h2.settings(settings or {}), h2.SETTINGS_ACK)
        self.frames()
        return self

    def block(self, path: str = PATH, **more: str) -> bytes:
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), ("content-type", "application/grpc")]
        return bytes(self.encoder.encode(fields + list(more.items())))

    def headers(self, stream: int = 1, flags: int = h2.END_HEADERS, **more: str) -> bytes:
        return h2.frame(h2.HEADERS, flags, stream, self.block(**more))

    def open(self, stream: int = 1) -> Recorder:
        self.feed(self.headers(stream))
        return self.handlers[-1]

    def frames(self) -> list[Frame]:
        """What was written since the last call."""
        data = b"".join(self.transport.writes[self._read :])
        self._read = len(self.transport.writes)
        return split(data)

    def goaway(self) -> int:
        """The error code of the GOAWAY that was written last."""
        kind, _, _, payload = self.frames()[-1]
        assert kind == h2.GOAWAY
        return int.from_bytes(payload[4:8], "big")

    def trailers(self) -> dict[str, str]:
        kind, flags, _, payload = self.frames()[-1]
        assert kind == h2.HEADERS and flags & h2.END_STREAM
        return {str(name): str(value) for name, value in self.decoder.decode(payload)}


def split(data: bytes) -> list[Frame]:
    frames, pos = [], 0
    while pos < len(data):
        length, flags, stream = h2.HEAD.unpack_from(data, pos)
        end = pos + 9 + (length >> 8)
        frames.append((length & 255, flags, stream, data[pos + 9 : end]))
        pos = end
    assert pos == len(data)
    return frames


@pytest.fixture
def connect() -> type[Peer]:
    """Makes a peer whose connection is accepted; `Peer.shake` goes through the handshake."""
    return Peer
