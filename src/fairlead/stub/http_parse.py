"""HTTP/1.1 requests from bytes, without I/O (RFC 9112). Strict where leniency would let two readers disagree.

Rules
* Feed bytes as they come, in any cut; take whole requests out. What does not parse raises `HttpError` once, and the
  connection must be closed after the answer, since nobody knows where the next request would begin.
* A message with both Content-Length and Transfer-Encoding, two different lengths, a transfer coding other than chunked,
  or a line folded or with a space before its colon is refused (RFC 9112 §5.1, §5.2, §6.1, §6.3).
* Head and body are limited; memory never exceeds the limits plus one read.
"""

from collections.abc import Mapping
from enum import IntEnum

MAX_HEAD = 64 * 1024
MAX_BODY = 64 * 1024 * 1024
#: A chunk-size line or trailer line is never this long.
_MAX_LINE = 4096
_TOKEN = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_HEX = frozenset(b"0123456789abcdefABCDEF")


class HttpError(Exception):
    """The request cannot be served: `status` and a short reason. The connection ends after it."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class HttpRequest:
    """One whole request."""

    __slots__ = ("body", "headers", "keep_alive", "method", "path", "version11")

    def __init__(self, method: str, path: str, headers: Mapping[str, str], keep_alive: bool, version11: bool) -> None:
        self.method = method
        #: Without query string.
        self.path = path
        #: Lower-case names; repeated ones joined with a comma.
        self.headers = headers
        self.keep_alive = keep_alive
        #: False for HTTP/1.0, which knows no chunked coding.
        self.version11 = version11
        self.body = b""


class _State(IntEnum):
    HEAD = 0
    BODY = 1
    CHUNK_SIZE = 2
    CHUNK_DATA = 3
    TRAILER = 4
    BROKEN = 5


class RequestParser:
    """Bytes in (`feed`), requests out (`next`)."""

    def __init__(self, max_head: int = MAX_HEAD, max_body: int = MAX_BODY) -> None:
        self._max_head = max_head
        self._max_body = max_body
        self._buffer = bytearray()
        self._state = _State.HEAD
        self._request: HttpRequest | None = None
        #: Bytes still missing of the body or chunk, its CRLF included.
        self._missing = 0
        self._body = bytearray()
        self._trailer = 0
        self._searched = 0
        #: The client waits for `100 Continue` before it sends the body (RFC 9110 §10.1.1). Reset by whoever answers it.
        self.wants_continue = False

    @property
    def buffered(self) -> int:
        """Bytes fed and not yet part of a request that was taken out."""
        return len(self._buffer) + len(self._body)

    @property
    def idle(self) -> bool:
        """Nothing of a request has come yet."""
        return self._state is _State.HEAD and not self._buffer

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> HttpRequest | None:
        """The next request, or `None` when more bytes are needed. Raises `HttpError`."""
        try:
            while True:
                before = self._state
                if before is _State.HEAD and not self._read_head():
                    return None
                if self._state is _State.BODY:
                    return self._read_body()
                if self._state is _State.CHUNK_SIZE and not self._read_chunk_size():
                    return None
                if self._state is _State.CHUNK_DATA and not self._read_chunk_data():
                    return None
                if self._state is _State.TRAILER:
                    return self._read_trailer()
                if self._state is _State.BROKEN:
                    return None
        except HttpError:
            self._state = _State.BROKEN
            self._buffer.clear()
            self._body.clear()
            raise

    # ---------------------------------------------------------------- head

    def _read_head(self) -> bool:
        buffer = self._buffer
        if buffer[:2] == b"\r\n":  # an empty line before the request line is ignored (RFC 9112 §2.2)
            del buffer[:2]
        end = buffer.find(b"\r\n\r\n", self._searched)
        if end < 0:
            if len(buffer) > self._max_head:
                raise HttpError(431, "Request header fields too large.")
            self._searched = max(0, len(buffer) - 3)
            return False
        if end > self._max_head:
            raise HttpError(431, "Request header fields too large.")
        self._searched = 0
        lines = buffer[:end].decode("latin-1").split("\r\n")
        del buffer[: end + 4]
        request = self._start(lines)
        self._request = request
        self._frame(request)
        if self._missing or self._state is _State.CHUNK_SIZE:
            expects = request.headers.get("expect", "").lower() == "100-continue"
            self.wants_continue = expects and request.version11 and not buffer
        return True

    def _start(self, lines: list[str]) -> HttpRequest:
        parts = lines[0].split(" ")
        if len(parts) != 3 or not parts[0].isalpha() or not parts[0].isupper() or not parts[0].isascii():
            raise HttpError(400, "Invalid HTTP request received.")
        method, target, version = parts
        if version not in ("HTTP/1.1", "HTTP/1.0"):
            raise HttpError(400, "Invalid HTTP request received.")
        headers = _headers(lines)
        version11 = version == "HTTP/1.1"
        connection = headers.get("connection", "").lower()
        keep_alive = "close" not in connection if version11 else "keep-alive" in connection
        return HttpRequest(method, _path(target), headers, keep_alive, version11)

    def _frame(self, request: HttpRequest) -> None:
        headers = request.headers
        coding = headers.get("transfer-encoding")
        length = headers.get("content-length")
        if coding is not None:
            if length is not None or not request.version11 or coding.lower() != "chunked":
                raise HttpError(400, "Invalid HTTP request received.")
            self._state = _State.CHUNK_SIZE
            return
        self._missing = 0
        if length is not None:
            values = {value.strip() for value in length.split(",")}
            value = values.pop()
            if values or not value.isascii() or not value.isdigit():
                raise HttpError(400, "Invalid HTTP request received.")
            if len(value) > 15 or int(value) > self._max_body:
                raise HttpError(413, "Request body too large.")
            self._missing = int(value)
        self._state = _State.BODY

    # ---------------------------------------------------------------- body

    def _read_body(self) -> HttpRequest | None:
        if len(self._buffer) < self._missing:
            return None
        body = bytes(self._buffer[: self._missing])
        del self._buffer[: self._missing]
        return self._finish(body)

    def _read_chunk_size(self) -> bool:
        line = self._line()
        if line is None:
            return False
        size = line.partition(b";")[0].strip(b" \t")
        if not size or len(size) > 12 or not _HEX.issuperset(size):
            raise HttpError(400, "Invalid HTTP request received.")
        self._missing = int(size, 16)
        if len(self._body) + self._missing > self._max_body:
            raise HttpError(413, "Request body too large.")
        self._trailer = 0
        self._state = _State.CHUNK_DATA if self._missing else _State.TRAILER
        return True

    def _read_chunk_data(self) -> bool:
        buffer, missing = self._buffer, self._missing
        if len(buffer) < missing + 2:
            return False
        if buffer[missing : missing + 2] != b"\r\n":
            raise HttpError(400, "Invalid HTTP request received.")
        self._body += buffer[:missing]
        del buffer[: missing + 2]
        self._state = _State.CHUNK_SIZE
        return True

    def _read_trailer(self) -> HttpRequest | None:
        while (line := self._line()) is not None:
            if not line:
                body = bytes(self._body)
                self._body = bytearray()
                return self._finish(body)
            self._trailer += len(line)
            if self._trailer > self._max_head:
                raise HttpError(431, "Request header fields too large.")
        return None

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n", 0, _MAX_LINE)
        if end < 0:
            if len(self._buffer) >= _MAX_LINE:
                raise HttpError(400, "Invalid HTTP request received.")
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def _finish(self, body: bytes) -> HttpRequest:
        request = self._request
        assert request is not None
        request.body = body
        self._request = None
        self._state = _State.HEAD
        self.wants_continue = False
        return request


def _path(target: str) -> str:
    if target.startswith(("http://", "https://")):  # absolute form (RFC 9112 §3.2.2)
        target = "/" + target.split("//", 1)[1].partition("/")[2]
    if not target.startswith("/"):
        raise HttpError(400, "Invalid HTTP request received.")
    return target.partition("?")[0].partition("#")[0]


def _headers(lines: list[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not name or not _TOKEN.issuperset(name):
            raise HttpError(400, "Invalid HTTP request received.")
        if "\r" in value or "\n" in value or "\0" in value:
            raise HttpError(400, "Invalid HTTP request received.")
        name = name.lower()
        value = value.strip(" \t")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers
