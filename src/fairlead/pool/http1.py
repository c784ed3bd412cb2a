"""Parse HTTP/1.1 messages (RFC 9112) from pieces of any size, without I/O: requests for servers, responses for clients.
httptools (llhttp, the parser of Node.js) parses the syntax; framing, limits and errors are handled here.

Rules
* Messages are refused where two lenient readers could disagree: Content-Length together with Transfer-Encoding, a
  repeated Content-Length, a transfer coding other than chunked, folded lines, bare line feeds, spaces before a colon
  and chunk sizes that are not plain hex digits.
* A message is complete only if its framing says so: its length is reached, its last chunk and trailers are read, or,
  for a response without either, the connection is closed (`end_of_input`). Otherwise it is truncated.
* Heads, trailers, chunk-size lines and bodies are limited. Memory never exceeds the limits plus one read.
* After an error nothing more is read, because the start of the next message is unknown.
* Empty lines in front of a message are skipped (RFC 9112, 2.2).
"""

from collections import deque
from collections.abc import Callable

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser, HttpResponseParser
from msgspec import Struct

#: Limit of a message's head, and of its trailers, in bytes.
MAX_HEAD = 64 * 1024
MAX_BODY = 64 * 1024 * 1024

Payload = Callable[[bytes], object]


class HttpError(Exception):
    """The request cannot be served, with a `status` and a short reason. The connection ends after the answer."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


def _malformed() -> HttpError:
    return HttpError(400, "Invalid HTTP request received.")


def _head_too_large() -> HttpError:
    return HttpError(431, "Request header fields too large.")


class HttpRequest(Struct, eq=False):
    """A request. It is complete unless it is its parser's `current` request."""

    method: str
    #: The path without the query string.
    path: str
    #: Values by lower-case name; repeated fields are joined by commas. Bytes beyond ASCII are read as Latin-1.
    headers: dict[str, str]
    keep_alive: bool
    #: False for HTTP/1.0, which has no chunked coding.
    version11: bool
    #: Bytes of target, header fields and body.
    size: int
    body: bytes = b""


class RequestParser:
    """Takes bytes (`feed`) and returns complete requests in order (`next`)."""

    def __init__(self, max_head: int = MAX_HEAD, max_body: int = MAX_BODY) -> None:
        self._max_head = max_head
        self._max_body = max_body
        self._parser = HttpRequestParser(self)
        self._requests: deque[HttpRequest] = deque()
        self._error: HttpError | None = None
        self._broken = False
        self._begun = False
        self._target = b""
        self._headers: dict[str, str] = {}
        self._pieces: list[bytes] = []
        #: Complete requests so far.
        self._completed = 0
        #: Bytes of the body so far, of the head or trailers so far, and bytes fed since the last progress.
        self._body_bytes = self._head_bytes = self._silent = 0
        #: The request whose head is complete and whose body is not.
        self.current: HttpRequest | None = None
        #: Bytes of the requests that were not yet taken and whose heads are complete.
        self.buffered = 0
        #: The client waits for `100 Continue` before it sends the body (RFC 9110 §10.1.1). Reset when that is sent.
        self.wants_continue = False

    @property
    def idle(self) -> bool:
        """Whether no byte of a further request has arrived, and none waits to be taken."""
        return not (self._begun or self._requests)

    def feed(self, data: bytes) -> None:
        """Take received bytes. If they are malformed, `next` raises after the requests before them."""
        if self._broken:
            return
        unfinished, complete, body, fields = self.current, self._completed, self._body_bytes, self._head_bytes
        try:
            self._parser.feed_data(data)
            if self._begun:
                # An endless line causes no callback of the parser.
                trailers = self.current is not None and self._head_bytes > fields
                if self._completed != complete or self.current is not unfinished or self._body_bytes > body or trailers:
                    self._silent = 0
                else:
                    self._silent += len(data)
                    if self._silent > self._max_head:
                        raise _malformed() if self.current is not None else _head_too_large()
        except HttpParserUpgrade as upgrade:
            # Upgrades are not supported: the request is answered without one, and others may follow (RFC 9110 §7.8).
            self._parser = HttpRequestParser(self)
            self.feed(data[upgrade.args[0] :])
        except HttpError as error:
            self._refuse(error)
        except HttpParserError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, HttpError) else _malformed())

    def next(self) -> HttpRequest | None:
        """The next request, or `None` if more bytes are needed. Raises `HttpError` once."""
        if self._requests:
            request = self._requests.popleft()
            self.buffered -= request.size
            return request
        error, self._error = self._error, None
        if error is not None:
            raise error
        return None

    def _refuse(self, error: HttpError) -> None:
        self._broken, self._error = True, error
        self.current = None
        self.buffered = sum(request.size for request in self._requests)
        self._pieces = []
        self.wants_continue = False

    # ---- httptools calls ----

    def on_message_begin(self) -> None:
        self._begun = True
        self._target = b""
        self._headers = {}
        self._pieces = []
        self._body_bytes = self._head_bytes = self._silent = 0

    def on_url(self, piece: bytes) -> None:
        self._target += piece
        self._count(len(piece))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if self.current is not None:
            return  # a trailer
        key, text = name.decode("latin-1").lower(), value.decode("latin-1").strip(" \t")
        headers = self._headers
        headers[key] = f"{headers[key]}, {text}" if key in headers else text

    def on_headers_complete(self) -> None:
        parser, headers = self._parser, self._headers
        version = parser.get_http_version()
        coding, length = headers.get("transfer-encoding"), headers.get("content-length", "0")
        if version not in ("1.1", "1.0"):
            raise _malformed()
        version11 = version == "1.1"
        if coding is not None and (coding.lower() != "chunked" or not version11):
            raise _malformed()
        if len(length) > 15 or int(length) > self._max_body:
            raise HttpError(413, "Request body too large.")
        keep_alive = parser.should_keep_alive()
        method, path, size = parser.get_method().decode(), _path(self._target), self._head_bytes
        self.current = HttpRequest(method, path, headers, keep_alive, version11, size)
        self.buffered += self._head_bytes
        self._head_bytes = 0
        self.wants_continue = version11 and headers.get("expect", "").lower() == "100-continue"

    def on_body(self, piece: bytes) -> None:
        self.wants_continue = False
        self._body_bytes += len(piece)
        self.buffered += len(piece)
        if self._body_bytes > self._max_body:
            raise HttpError(413, "Request body too large.")
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        request, self.current = self.current, None
        assert request is not None
        request.body = b"".join(self._pieces)
        request.size += len(request.body)
        self._pieces = []
        self._requests.append(request)
        self._completed += 1
        self._begun = self.wants_continue = False

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._max_head:
            raise _head_too_large()


def _path(target: bytes) -> str:
    text = target.decode("latin-1")
    if text.startswith(("http://", "https://")):  # absolute form (RFC 9112 §3.2.2)
        text = "/" + text.split("//", 1)[1].partition("/")[2]
    if not text.startswith("/"):
        raise _malformed()
    return text.partition("?")[0].partition("#")[0]


class MalformedMessage(ValueError):
    """The peer's bytes are not an HTTP/1.1 response, or exceed a limit."""


_HEAD, _LENGTH, _CHUNKED, _UNTIL_CLOSE, _DONE = range(5)


class ResponseReader:
    """Reads a response and the interim responses (1xx) before it. `reset` prepares for the next response."""

    __slots__ = (
        "_chunk_begun", "_fed", "_fields", "_max_body", "_max_head", "_parser", "_payload", "_silent", "_state",
        "body_bytes", "chunks", "excess", "headers", "keep_alive", "status",
    )  # fmt: skip

    def __init__(self, payload: Payload | None = None, max_head: int = MAX_HEAD, max_body: int = 1 << 62) -> None:
        """`payload` is called with each piece of the body (framing removed), in order."""
        self._max_head, self._max_body = max_head, max_body
        self._state = _HEAD
        self.keep_alive = True
        #: The peer sent bytes behind the message.
        self.excess = False
        self.reset(payload)

    def reset(self, payload: Payload | None = None) -> None:
        """Prepare for the next response, on the same connection if this response is complete and `keep_alive`."""
        if self._state != _DONE or not self.keep_alive or self.excess:
            self._parser = HttpResponseParser(self)
        self._payload = payload
        self._state = _HEAD
        self._fed = self._silent = 0
        self._chunk_begun = False
        #: Names and values as received.
        self.headers: list[tuple[bytes, bytes]] = []
        self._fields: dict[bytes, bytes] = {}
        #: Status of the final response; 0 until its head is complete.
        self.status = 0
        self.body_bytes = 0
        #: Body pieces as the sender framed them; 0 for a message that is not chunked.
        self.chunks = 0
        self.keep_alive = True
        self.excess = False

    def feed(self, data: bytes | bytearray | memoryview) -> bool:
        """Take received bytes, which are not kept. Return whether the message is complete. Raises MalformedMessage;
        then only `reset` may follow."""
        before, size = self.body_bytes, len(data)
        in_body = self._state != _HEAD
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            raise MalformedMessage("the peer changes protocols, which was not asked for") from None
        except HttpParserError as error:
            if self._state != _DONE:
                cause = error.__context__
                raise MalformedMessage(str(cause if isinstance(cause, MalformedMessage) else error)) from None
            self.excess = True
        if self._state == _DONE:
            return True
        self._fed += size
        self._silent = 0 if self.body_bytes > before else self._silent + size
        # An endless line causes no callback of the parser.
        if self._silent > self._max_head and (in_body or self._state == _HEAD):
            raise MalformedMessage(f"no end of line or head within {self._max_head} bytes")
        return False

    def end_of_input(self) -> str:
        """Take note that the peer closed. Return what is missing; empty if this completes the message."""
        if self._state == _UNTIL_CLOSE:
            self._state = _DONE
        if self._state == _DONE:
            return ""
        if self._state == _HEAD:
            return "closed_in_headers" if self._fed else "closed_before_response"
        return "short_body" if self._state == _LENGTH else "chunked_unterminated"

    def field(self, name: bytes) -> bytes:
        """The first value of a header field, stripped and in lower case; empty if absent. `name` is in lower case."""
        return self._fields.get(name, b"").strip(b" \t").lower()

    # ---- httptools calls ----

    def on_message_begin(self) -> None:
        self.excess = self._state == _DONE

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._state == _HEAD:
            self.headers.append((name, value))
            if len(self.headers) * 4 > self._max_head:
                raise MalformedMessage("too many header fields")

    def on_headers_complete(self) -> None:
        if self._state == _DONE:
            return
        fields, size = self._fields, 0
        for name, value in self.headers:
            size += len(name) + len(value) + 4
            name = name.lower()
            if name not in fields:
                fields[name] = value
            elif name == b"transfer-encoding":
                raise MalformedMessage("two transfer encodings in the response")
        if size > self._max_head:
            raise MalformedMessage("the response head is too large")
        status = self._parser.get_status_code()
        if status < 200:  # an interim response: the real one follows
            self.headers, self._fields = [], {}
            return
        self.status = status
        self.keep_alive = self._parser.should_keep_alive()
        if b"transfer-encoding" in fields:
            if self.field(b"transfer-encoding") != b"chunked":
                raise MalformedMessage("an unknown transfer encoding in the response")
            self._state = _CHUNKED
        elif b"content-length" in fields:
            if int(fields[b"content-length"]) > self._max_body and status not in (204, 304):
                raise MalformedMessage(f"the page is larger than {self._max_body} bytes")
            self._state = _LENGTH
        else:
            self._state = _UNTIL_CLOSE

    def on_chunk_header(self) -> None:
        self._chunk_begun = True

    def on_body(self, piece: bytes) -> None:
        if self._state == _DONE:
            return
        if self._chunk_begun:
            self._chunk_begun = False
            self.chunks += 1
        self.body_bytes += len(piece)
        if self.body_bytes > self._max_body:
            raise MalformedMessage(f"the page is larger than {self._max_body} bytes")
        if self._payload is not None:
            self._payload(piece)

    def on_message_complete(self) -> None:
        if self._state != _HEAD:  # otherwise an interim response
            self._state = _DONE
