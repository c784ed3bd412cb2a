"""HTTP/1.1 messages out of whatever pieces a socket delivers (RFC 9112), without I/O: requests for servers, responses
for clients. The syntax is httptools' (llhttp, the parser of Node.js); framing, limits and verdicts are here.

Rules
* Strict where leniency would let two readers disagree: Content-Length together with Transfer-Encoding, a repeated
  Content-Length, a transfer coding other than chunked, folded lines, bare line feeds, spaces before a colon and chunk
  sizes that are not plain hex digits are refused.
* A message is complete only when its own framing says so: length reached, last chunk and trailers read, or, for a
  response without either, the connection closed (`end_of_input`). Anything else is truncation.
* Heads, trailers, lines of chunk sizes and bodies are limited; memory never exceeds the limits plus one read.
* After an error nothing more is read: nobody knows where the next message would begin.
* Empty lines in front of a message are skipped (RFC 9112, 2.2).
"""

from collections import deque
from collections.abc import Callable

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser, HttpResponseParser

#: Head, or trailers, of a message, bytes.
MAX_HEAD = 64 * 1024
MAX_BODY = 64 * 1024 * 1024

Payload = Callable[[bytes], object]


class HttpError(Exception):
    """The request cannot be served: `status` and a short reason. The connection ends after it."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


def _malformed() -> HttpError:
    return HttpError(400, "Invalid HTTP request received.")


def _head_too_large() -> HttpError:
    return HttpError(431, "Request header fields too large.")


class HttpRequest:
    """One request; whole unless its parser calls it `current`."""

    __slots__ = ("body", "headers", "keep_alive", "method", "path", "size", "version11")

    def __init__(self, method: str, path: str, headers: dict[str, str], keep_alive: bool, version11: bool) -> None:
        self.method = method
        #: Without query string.
        self.path = path
        #: Lower-case names; repeated ones joined with a comma. Bytes beyond ASCII are read as Latin-1.
        self.headers = headers
        self.keep_alive = keep_alive
        #: False for HTTP/1.0, which knows no chunked coding.
        self.version11 = version11
        self.body = b""
        #: Bytes of target, header fields and body.
        self.size = 0


class RequestParser:
    """Bytes in (`feed`), whole requests out (`next`), in order."""

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
        #: Requests so far.
        self._whole = 0
        #: Bytes of the body so far, of head or trailers so far, and fed since the last that meant progress.
        self._body_bytes = self._head_bytes = self._silent = 0
        #: Its head has come, its body has not.
        self.current: HttpRequest | None = None
        #: Bytes of requests that were not taken out, as far as their heads are whole.
        self.buffered = 0
        #: The client waits for `100 Continue` before it sends the body (RFC 9110 §10.1.1). Reset by whoever answers it.
        self.wants_continue = False

    @property
    def idle(self) -> bool:
        """Nothing of a request has come yet."""
        return not (self._begun or self._requests)

    def feed(self, data: bytes) -> None:
        """What is wrong with `data` is told by `next`, after the requests before it."""
        if self._broken:
            return
        unfinished, complete, body, fields = self.current, self._whole, self._body_bytes, self._head_bytes
        try:
            self._parser.feed_data(data)
            if self._begun:
                # An endless line is no event for the parser.
                trailers = self.current is not None and self._head_bytes > fields
                if self._whole != complete or self.current is not unfinished or self._body_bytes > body or trailers:
                    self._silent = 0
                else:
                    self._silent += len(data)
                    if self._silent > self._max_head:
                        raise _malformed() if self.current is not None else _head_too_large()
        except HttpParserUpgrade as upgrade:
            # Nobody here changes protocols: the request is answered as it is, and others may follow (RFC 9110 §7.8).
            self._parser = HttpRequestParser(self)
            self.feed(data[upgrade.args[0] :])
        except HttpError as error:
            self._refuse(error)
        except HttpParserError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, HttpError) else _malformed())

    def next(self) -> HttpRequest | None:
        """The next request, or `None` when more bytes are needed. Raises `HttpError`, once."""
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
        self.current = HttpRequest(parser.get_method().decode(), _path(self._target), headers, keep_alive, version11)
        self.current.size = self._head_bytes
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
        self._whole += 1
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
    """Reads one response, interim ones (1xx) before it included; `reset` makes it ready for the next one."""

    __slots__ = (
        "_chunk_begun", "_fed", "_fields", "_max_body", "_max_head", "_parser", "_payload", "_silent", "_state",
        "body_bytes", "chunks", "excess", "headers", "keep_alive", "status",
    )  # fmt: skip

    def __init__(self, payload: Payload | None = None, max_head: int = MAX_HEAD, max_body: int = 1 << 62) -> None:
        """`payload` is called with each piece of the body (framing removed), in order."""
        self._max_head, self._max_body = max_head, max_body
        self._state = _HEAD
        self.keep_alive = True
        #: Something came behind the message.
        self.excess = False
        self.reset(payload)

    def reset(self, payload: Payload | None = None) -> None:
        """For the next response: on the same connection if this one is complete and `keep_alive`."""
        if self._state != _DONE or not self.keep_alive or self.excess:
            self._parser = HttpResponseParser(self)
        self._payload = payload
        self._state = _HEAD
        self._fed = self._silent = 0
        self._chunk_begun = False
        #: Names and values as they came.
        self.headers: list[tuple[bytes, bytes]] = []
        self._fields: dict[bytes, bytes] = {}
        #: Of the final response; 0 until its head is complete.
        self.status = 0
        self.body_bytes = 0
        #: Body pieces as the sender framed them; 0 for a message that is not chunked.
        self.chunks = 0
        self.keep_alive = True
        self.excess = False

    def feed(self, data: bytes | bytearray | memoryview) -> bool:
        """True once the message is complete. Raises MalformedMessage; then only `reset` helps. `data` is not kept."""
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
        # An endless line is no event for the parser.
        if self._silent > self._max_head and (in_body or self._state == _HEAD):
            raise MalformedMessage(f"no end of line or head within {self._max_head} bytes")
        return False

    def end_of_input(self) -> str:
        """The peer closed. Empty if the message is complete with that, else what is missing."""
        if self._state == _UNTIL_CLOSE:
            self._state = _DONE
        if self._state == _DONE:
            return ""
        if self._state == _HEAD:
            return "closed_in_headers" if self._fed else "closed_before_response"
        return "short_body" if self._state == _LENGTH else "chunked_unterminated"

    def field(self, name: bytes) -> bytes:
        """Value of a header field (`name` in lower case), stripped, in lower case; empty if absent. First one wins."""
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
        if self._state != _HEAD:  # else an interim response
            self._state = _DONE
