"""What a gRPC transport and the code that serves one stream promise each other.

Both transports (own HTTP/2 in `h2_server`, grpc.aio in `grpc_server`) offer `ServerStream` and drive `StreamHandler`,
so a session cannot tell them apart, and a differential test can compare them.

Rules
* All calls happen on the event loop's thread; none of them may block or await.
* `on_lost` is called at most once, never after `finish`, and nothing is called after it.
* `send` after `finish` or after `on_lost` is ignored.
* Writes made while a transport is delivering messages leave in one system call when it is done with what it read.
"""

from collections.abc import Callable, Mapping
from typing import Protocol


class ServerStream(Protocol):
    """The transport's side of one gRPC stream."""

    def send(self, *messages: bytes) -> None:
        """Queue whole gRPC messages, in order. Waits inside the transport for flow-control windows, never raises."""

    def send_last(self, *messages: bytes) -> None:
        """One message or more, and then `finish`."""

    def finish(self, code: int = 0, message: str = "") -> None:
        """End the stream with a gRPC status once everything queued has left. Later messages of the peer are dropped."""

    def watch_cancel(self, on: bool) -> None:
        """Whether a reset by the peer must reach the handler at once (the default), or may arrive together with the
        peer's next data: a transport may then save the wake-up."""

    def hold(self, size: int, expected: int = 0) -> None:
        """The handler keeps `size` bytes of what the peer sent; 0 = nothing any more. `expected`: it will keep so many,
        and cannot go on before they have come: the transport lets them come as memory allows, or loses the stream."""

    def room(self) -> int:
        """Message bytes (without framing) that would leave in one write right now; 0 when anything is still queued."""
        ...

    def connected(self) -> bool:
        """Whether the connection that carries (or, once finished, carried) the stream is there. A transport that cannot
        tell says yes."""
        ...


class StreamHandler(Protocol):
    """Our side of one gRPC stream."""

    def on_message(self, message: bytes) -> None:
        """One whole gRPC message. Must not raise; the transport answers an exception with INTERNAL and logs it."""

    def on_half_close(self) -> None:
        """The peer has sent its last message."""

    def on_lost(self, why: str) -> None:
        """The stream is gone: reset by the peer, connection lost or closed. Release what it holds."""


#: Called for every new stream with the request's headers (lower-case names, last value wins).
HandlerFactory = Callable[[ServerStream, Mapping[str, str]], StreamHandler]

#: gRPC path, e.g. `/grpc.health.v1.Health/Check`, to its factory. Unknown paths are answered UNIMPLEMENTED (12).
Routes = Mapping[str, HandlerFactory]
