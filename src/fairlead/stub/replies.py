"""Response heads, byte for byte in the order in which vLLM 0.32 (uvicorn) sends its headers."""

from email.utils import formatdate
from http import HTTPStatus

JSON_TYPE = b"application/json"
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


class Heads:
    """Heads of one replica's responses."""

    __slots__ = ("_date", "_identity", "_second")

    def __init__(self, identity: tuple[tuple[str, str], ...] = ()) -> None:
        self._identity = b"".join(f"{name}: {value}\r\n".encode("latin-1") for name, value in identity)
        self._second = -1
        self._date = b""

    def date(self, unix: float) -> bytes:
        second = int(unix)
        if second != self._second:
            self._second = second
            self._date = formatdate(second, usegmt=True).encode()
        return self._date

    def plain(
        self,
        unix: float,
        status: int,
        length: int,
        *,
        content_type: bytes = JSON_TYPE,
        before: bytes = b"",
        request_id: str = "",
        close: bool = False,
    ) -> bytes:
        """A response of known length. `before` are header lines that come before the length (`allow`, ORCA)."""
        kind = b"content-type: %b\r\n" % content_type if content_type else b""
        return b"HTTP/1.1 %d %b\r\ndate: %b\r\nserver: uvicorn\r\n%bcontent-length: %d\r\n%b%b\r\n" % (
            status,
            _REASONS.get(status, b""),
            self.date(unix),
            before,
            length,
            kind,
            self._end(request_id, close),
        )

    def stream(self, unix: float, *, request_id: str = "", close: bool = False, chunked: bool = True) -> bytes:
        """The head of server-sent events."""
        return b"HTTP/1.1 200 OK\r\ndate: %b\r\nserver: uvicorn\r\ncontent-type: %b\r\n%b%b\r\n" % (
            self.date(unix),
            b"text/event-stream; charset=utf-8",
            self._end(request_id, close or not chunked),
            b"transfer-encoding: chunked\r\n" if chunked else b"",
        )

    def _end(self, request_id: str, close: bool) -> bytes:
        echoed = f"x-request-id: {request_id}\r\n".encode("latin-1", "replace") if request_id else b""
        return b"vary: Origin\r\n%b%b%b" % (echoed, self._identity, b"connection: close\r\n" if close else b"")


def malformed(message: str, status: int = 400) -> bytes:
    """The whole answer to bytes that are no request; the connection is closed after it (as uvicorn does)."""
    body = message.encode()
    return (
        b"HTTP/1.1 %d %b\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
        b"connection: close\r\n\r\n%b" % (status, _REASONS.get(status, b""), len(body), body)
    )
