"""gRPC calls with one request: `Unary` answers it, `Watch` also sends the answer again whenever it changes."""

from collections.abc import Callable

from fairlead.core.errors import ProtocolError
from fairlead.gateway.grpc_frames import Status
from fairlead.gateway.stream import ServerStream


class Unary:
    """`answer` returns the answer to a message, or the status and the text that refuse it. Raises `ProtocolError` if
    the message cannot be used."""

    def __init__(self, stream: ServerStream, answer: Callable[[bytes], bytes | tuple[Status, str]]) -> None:
        self._stream, self._answer = stream, answer

    def on_message(self, message: bytes) -> None:
        try:
            answer = self._answer(message)
        except ProtocolError as error:
            answer = Status.INVALID_ARGUMENT, str(error)
        if isinstance(answer, bytes):
            self._stream.send(answer)
            self._stream.finish()
        else:
            self._stream.finish(*answer)

    def on_half_close(self) -> None:
        self._stream.finish(Status.INVALID_ARGUMENT, "no request")

    def on_lost(self, why: str) -> None:
        pass


class Watch:
    """A stream that sends the answer to its first message immediately and at every change, until the peer leaves.
    Meanwhile it is in `watches`. `read(message)` returns a function that returns the current answer; it may raise
    `ProtocolError`, as in `Unary`."""

    def __init__(
        self, stream: ServerStream, watches: "set[Watch]", read: Callable[[bytes], Callable[[], bytes]]
    ) -> None:
        self._stream, self._watches, self._read = stream, watches, read
        self._answer: Callable[[], bytes] | None = None
        self._sent = b""

    def on_message(self, message: bytes) -> None:
        if self._answer is not None:
            return  # the method takes only one request
        try:
            self._answer = self._read(message)
        except ProtocolError as error:
            self._stream.finish(Status.INVALID_ARGUMENT, str(error))
            return
        self._watches.add(self)
        self.look()

    def look(self) -> None:
        """Send the answer if it has changed."""
        if self._answer is not None and (answer := self._answer()) != self._sent:
            self._sent = answer
            self._stream.send(answer)

    def end(self, why: str) -> None:
        self._watches.discard(self)
        self._stream.finish(Status.UNAVAILABLE, why)

    def on_half_close(self) -> None:
        if self._answer is None:
            self._stream.finish(Status.INVALID_ARGUMENT, "no request")

    def on_lost(self, why: str) -> None:
        self._watches.discard(self)
