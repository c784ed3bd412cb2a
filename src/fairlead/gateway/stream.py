"""The contract between a gRPC transport and the code that serves a stream.

Both transports (the built-in HTTP/2 in `h2_server`, grpc.aio in `grpc_server`) provide `ServerStream` and call
`StreamHandler`. So sessions do not depend on the transport, and a differential test can compare the two.

Rules
* All calls are made on the event loop's thread. None of them may block or await.
* `on_lost` is called at most once, never after `finish`, and nothing is called after it.
* `send` is ignored after `finish` or `on_lost`.
* Writes during the delivery of messages leave in one system call, after all bytes that were read are delivered.
"""

from collections.abc import Callable, Mapping
from typing import Protocol


class ServerStream(Protocol):
    """The transport's side of a gRPC stream."""

    def send(self, *messages: bytes) -> None:
        """Queue whole gRPC messages, in order. They wait in the transport for flow-control windows. Never raises."""

    def send_last(self, first: bytes, *more: bytes) -> None:
        """Send at least one message, then `finish`."""

    def finish(self, code: int = 0, message: str = "") -> None:
        """End the stream with a gRPC status once all queued messages have left. Drop later messages of the peer."""

    def watch_cancel(self, on: bool) -> None:
        """Set whether a reset by the peer must reach the handler immediately (the default). Otherwise it may arrive
        with the peer's next data, which can save the transport a wake-up."""

    def hold(self, size: int, expected: int = 0) -> None:
        """Report that the handler keeps `size` bytes of the peer's messages; 0 = none any more. `expected`: it will
        keep this many, and cannot continue before they have arrived. The transport gives credit as memory allows, or
        ends the stream."""

    def writable_bytes(self) -> int:
        """The message bytes (without framing) that would leave in one write now; 0 if messages are still queued."""
        ...

    def connected(self) -> bool:
        """Whether the connection of the stream, even of a finished stream, is still up. A transport that does not know
        returns true."""
        ...


class StreamHandler(Protocol):
    """The server's side of a gRPC stream."""

    def on_message(self, message: bytes) -> None:
        """Take a gRPC message. Must not raise; the transport answers an exception with INTERNAL and logs it."""

    def on_half_close(self) -> None:
        """Take note that the peer has sent its last message."""

    def on_lost(self, why: str) -> None:
        """Release all resources: the stream was reset by the peer, or the connection was lost or closed."""


#: Called for every new stream with the request's headers (lower-case names, last value wins).
HandlerFactory = Callable[[ServerStream, Mapping[str, str]], StreamHandler]

#: Factories by gRPC path, e.g. `/grpc.health.v1.Health/Check`. Unknown paths are answered with UNIMPLEMENTED (12).
Routes = Mapping[str, HandlerFactory]
