"""Reading one HTTP/1.1 message out of whatever pieces a socket delivers (RFC 9112), for clients and servers.

The reader looks at bytes where they were received and copies only what its owner asked for.

Rules
* `feed` gets a buffer and how much of it is filled; it keeps no reference to it. What it cannot use yet (half a head,
  half a chunk-size line) is kept in `_pending`, which is bounded by `MAX_HEAD`.
* A message is complete only when its own framing says so: content-length reached, last chunk and trailers read, or, for
  a response without either, the connection closed (`end_of_input`). Anything else is truncation, and `end_of_input`
  names it.
* Malformed framing raises `MalformedMessage`; afterwards the reader must not be fed again before `reset`.
* Bytes after the end of the message are handed over in `rest`, never dropped silently.
* Strict where leniency would hide a gateway's fault: chunk sizes are plain hex digits, lengths plain digits, every
  chunk ends in CRLF.
"""

from collections.abc import Callable
from functools import lru_cache

#: Head, chunk-size line or trailers beyond this are refused, bytes.
MAX_HEAD = 65536
_MAX_SIZE_LINE = 1024

_HEAD, _LENGTH, _CHUNKED, _TRAILERS, _UNTIL_CLOSE, _DONE = range(6)
_DIGITS = frozenset(b"0123456789")
_HEX_DIGITS = frozenset(b"0123456789abcdefABCDEF")

Payload = Callable[[bytearray], object]


class MalformedMessage(ValueError):
    """The peer's bytes are not an HTTP/1.1 message."""


@lru_cache(maxsize=4096)
def _chunk_size(line: bytes) -> int:
    digits = line.split(b";", 1)[0].rstrip(b" \t")
    if not 0 < len(digits) <= 15 or not _HEX_DIGITS.issuperset(digits):
        raise MalformedMessage(f"chunk size {line[:40]!r}")
    return int(digits, 16)


class MessageReader:
    """Reads one message; `reset` makes it ready for the next one on the connection."""

    __slots__ = (
        "_need",
        "_payload",
        "_pending",
        "_response",
        "_state",
        "body_bytes",
        "chunks",
        "head",
        "keep_alive",
        "rest",
        "status",
    )

    def __init__(self, response: bool, payload: Payload | None = None) -> None:
        """`response=False` reads requests. `payload` is called with each piece of body (framing removed), in order."""
        self._response = response
        self._pending = bytearray()
        self.reset(payload)

    def reset(self, payload: Payload | None = None) -> None:
        self._payload = payload
        self._state = _HEAD
        self._need = 0
        self._pending.clear()
        #: Start line and header fields in lower case up to and including the last field's CRLF; empty until complete.
        self.head = b""
        #: Of a final response; 0 until its head is complete, and always for requests.
        self.status = 0
        self.body_bytes = 0
        #: Body pieces as the sender framed them; 0 for a message that is not chunked.
        self.chunks = 0
        self.keep_alive = True
        self.rest = b""

    def feed(self, buffer: bytearray, size: int) -> bool:
        """Take `buffer[:size]`. True once the message is complete. Raises MalformedMessage."""
        if self._state == _CHUNKED and not self._need and not self._pending and self._take_chunk(buffer, size):
            return False
        if self._pending:
            buffer = self._pending + buffer[:size]
            size = len(buffer)
            self._pending.clear()
        start = 0
        if self._state == _HEAD:
            start = self._read_head(buffer, size)
        if self._state == _CHUNKED:
            start = self._read_chunks(buffer, start, size)
        elif self._state == _LENGTH or self._state == _UNTIL_CLOSE:
            start = self._read_plain(buffer, start, size)
        if self._state == _TRAILERS:
            start = self._read_trailers(buffer, start, size)
        if self._state != _DONE:
            return False
        if start < size:
            self.rest = bytes(buffer[start:size])
        return True

    def end_of_input(self) -> str:
        """The peer closed. Empty if the message is complete with that, else what is missing."""
        if self._state == _UNTIL_CLOSE:
            self._state = _DONE
        if self._state == _DONE:
            return ""
        if self._state == _HEAD:
            return "closed_in_headers" if self._pending else "closed_before_response"
        return "short_body" if self._state == _LENGTH else "chunked_unterminated"

    def field(self, name: bytes) -> bytes:
        """Value of a header field (`name` in lower case), stripped, in lower case; empty if absent. First one wins."""
        at = self.head.find(b"\r\n" + name + b":")
        if at < 0:
            return b""
        at += len(name) + 3
        return self.head[at : self.head.index(b"\r\n", at)].strip(b" \t")

    def _keep(self, buffer: bytearray, start: int, size: int, limit: int) -> int:
        if size - start > limit:
            raise MalformedMessage(f"no end of line within {limit} bytes")
        self._pending += buffer[start:size]
        return size

    def _read_head(self, buffer: bytearray, size: int) -> int:
        start = 0
        while True:
            end = buffer.find(b"\r\n\r\n", start, size)
            if end < 0:
                return self._keep(buffer, start, size, MAX_HEAD)
            self.head = bytes(buffer[start : end + 2]).lower()
            start = end + 4
            if not self._response or self._read_status():
                break
        self._choose_framing()
        return start

    def _read_status(self) -> bool:
        """False for an interim response (1xx), which is read over."""
        head = self.head
        code = head[9:12]
        if not head.startswith(b"http/1.") or len(code) != 3 or not _DIGITS.issuperset(code) or head[8:9] != b" ":
            raise MalformedMessage(f"status line {head[:40]!r}")
        status = int(code)
        if 100 <= status < 200:
            self.head = b""
            return False
        self.status = status
        return True

    def _choose_framing(self) -> None:
        head = self.head
        first_line = head[: head.index(b"\r\n")]
        connection = self.field(b"connection")
        old = first_line.startswith(b"http/1.0") if self._response else first_line.endswith(b"http/1.0")
        self.keep_alive = connection != b"close" and (not old or connection == b"keep-alive")
        if self._response and (self.status == 204 or self.status == 304):
            self._state = _DONE
        elif coding := self.field(b"transfer-encoding"):
            if coding != b"chunked":
                raise MalformedMessage(f"transfer-encoding {coding[:40]!r}")
            self._state = _CHUNKED
        elif length := self.field(b"content-length"):
            if len(length) > 18 or not _DIGITS.issuperset(length):
                raise MalformedMessage(f"content-length {length[:40]!r}")
            self._need = int(length)
            self._state = _LENGTH if self._need else _DONE
        elif self._response:
            self._state = _UNTIL_CLOSE
            self.keep_alive = False
        else:
            self._state = _DONE

    def _read_plain(self, buffer: bytearray, start: int, size: int) -> int:
        take = size - start
        if self._state == _LENGTH:
            take = min(take, self._need)
            self._need -= take
            if not self._need:
                self._state = _DONE
        if take:
            self.body_bytes += take
            if self._payload is not None:
                self._payload(buffer[start : start + take])
        return start + take

    def _take_chunk(self, buffer: bytearray, size: int) -> bool:
        """The common case of a stream, in half the time: exactly one whole chunk was received. False = it was not."""
        start = buffer.find(b"\r\n", 0, size) + 2
        end = size - 2
        if not 2 < start < end or _chunk_size(bytes(buffer[: start - 2])) != end - start:
            return False
        if buffer[end] != 13 or buffer[end + 1] != 10:
            return False
        self.chunks += 1
        self.body_bytes += end - start
        if self._payload is not None:
            self._payload(buffer[start:end])
        return True

    def _read_chunks(self, buffer: bytearray, start: int, size: int) -> int:
        """`_need` counts what is left of the current chunk including its CRLF; 0 = a size line comes next."""
        need = self._need
        while start < size:
            if not need:
                end = buffer.find(b"\r\n", start, size)
                if end < 0:
                    self._need = 0
                    return self._keep(buffer, start, size, _MAX_SIZE_LINE)
                need = _chunk_size(bytes(buffer[start:end])) + 2
                start = end + 2
                if need == 2:
                    self._state = _TRAILERS
                    break
                self.chunks += 1
            if need > 2 and start < size:
                end = min(start + need - 2, size)
                self.body_bytes += end - start
                if self._payload is not None:
                    self._payload(buffer[start:end])
                need -= end - start
                start = end
            if need <= 2 and start < size:
                end = min(start + need, size)
                if buffer[start:end] != b"\r\n"[2 - need : 2 - need + end - start]:
                    raise MalformedMessage("chunk does not end in CRLF")
                need -= end - start
                start = end
        self._need = need
        return start

    def _read_trailers(self, buffer: bytearray, start: int, size: int) -> int:
        if buffer.startswith(b"\r\n", start, size):
            self._state = _DONE
            return start + 2
        end = buffer.find(b"\r\n\r\n", start, size)
        if end < 0:
            return self._keep(buffer, start, size, MAX_HEAD)
        self._state = _DONE
        return end + 4
