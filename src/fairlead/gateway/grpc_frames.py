"""gRPC over HTTP/2: messages in DATA frames, and the header blocks that begin and end a response.

A message is a prefix of five bytes (compressed flag, 32 bits of length) and its content. Frames may split it anywhere,
and may contain several messages. The server offers no compression, so a set flag is answered with UNIMPLEMENTED, as the
gRPC specification demands.

Header blocks are written without the dynamic table and without Huffman coding (RFC 7541, 6.2.2). So the same bytes are
valid on every connection and can be constants.
"""

import re
from enum import IntEnum
from struct import Struct

from fairlead.core.errors import ProtocolError

PREFIX_SIZE = 5
PREFIX = Struct(">BI")


class Status(IntEnum):
    """The gRPC status codes that the transport uses."""

    OK = 0
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


_LAST_STATUS = 16


class MessageReader:
    """Assembles messages. Copies each byte at most twice, and holds at most one unfinished message."""

    __slots__ = ("_buffer", "_limit", "_need")

    def __init__(self, limit: int) -> None:
        self._buffer = bytearray()
        self._limit = limit
        #: Bytes of the unfinished message with its prefix; of the prefix alone while it is incomplete.
        self._need = PREFIX_SIZE

    @property
    def partial(self) -> bool:
        """Whether bytes of an unfinished message are held."""
        return bool(self._buffer)

    @property
    def size(self) -> int:
        """The size of the unfinished message in bytes, with its prefix; of the prefix alone while it is incomplete."""
        return self._need

    def feed(self, data: bytes, pos: int, end: int) -> list[bytes]:
        """The messages that `data[pos:end]` completes. Raises a `ProtocolError` with a gRPC status code.

        On an error, the complete messages before it are lost: the stream has failed.
        """
        messages: list[bytes] = []
        buffer = self._buffer
        while True:
            if not buffer and end - pos >= PREFIX_SIZE:
                stop = pos + PREFIX_SIZE + self._size(data, pos)
                if stop <= end:
                    messages.append(data[pos + PREFIX_SIZE : stop])
                    pos = stop
                    continue
                self._need = stop - pos
            if pos == end:
                return messages
            taken = min(self._need - len(buffer), end - pos)
            buffer += memoryview(data)[pos : pos + taken]
            pos += taken
            if len(buffer) < self._need:
                return messages
            if self._need == PREFIX_SIZE:
                self._need += self._size(buffer, 0)
            if len(buffer) == self._need:
                messages.append(bytes(memoryview(buffer)[PREFIX_SIZE:]))
                self._need = PREFIX_SIZE
                self._buffer = buffer = bytearray()

    def _size(self, data: bytes | bytearray, pos: int) -> int:
        compressed, size = PREFIX.unpack_from(data, pos)
        if compressed:
            raise ProtocolError("compressed messages are not supported", Status.UNIMPLEMENTED)
        if size > self._limit:
            raise ProtocolError(
                f"a message of {size} bytes is larger than the limit of {self._limit}", Status.RESOURCE_EXHAUSTED
            )
        return int(size)


def prefixed(message: bytes) -> bytes:
    return PREFIX.pack(0, len(message)) + message


def literal(name: bytes, value: bytes) -> bytes:
    """A header field without indexing (RFC 7541, 6.2.2); `name` and `value` as plain octets."""
    return b"\x00" + _octets(name) + _octets(value)


def _octets(value: bytes) -> bytes:
    size = len(value)
    if size < 127:
        return bytes((size,)) + value
    # RFC 7541, 5.1: seven bits of prefix, then groups of seven bits.
    size -= 127
    out = bytearray(b"\x7f")
    while size > 127:
        out.append(size & 127 | 128)
        size >>= 7
    out.append(size)
    return bytes(out) + value


#: Sets the dynamic table's size to zero (RFC 7541, 6.3). Starts the next block after a peer has lowered its limit.
TABLE_SIZE_ZERO = b"\x20"

_STATUS_200 = b"\x88"  # static table, 8
_CONTENT_TYPE = b"\x0f\x10" + _octets(b"application/grpc")  # name: static table, 31

#: The block that begins a response.
RESPONSE = _STATUS_200 + _CONTENT_TYPE


def trailers(code: int, message: str = "") -> bytes:
    """The block that ends a response after `RESPONSE`. Codes that gRPC does not define become UNKNOWN."""
    block = literal(b"grpc-status", b"%d" % (code if 0 <= code <= _LAST_STATUS else Status.UNKNOWN))
    return block + literal(b"grpc-message", percent_encode(message)) if message else block


#: The block that ends nearly every stream.
TRAILERS_OK = trailers(Status.OK)


def trailers_only(code: int, message: str = "") -> bytes:
    """The only block of a response without messages."""
    return RESPONSE + trailers(code, message)


def http_error(status: int) -> bytes:
    """The only block of an answer to a request that is not gRPC."""
    block = b"\x08" + _octets(b"%d" % status)  # name: static table, 8
    return block + literal(b"allow", b"POST") if status == 405 else block


#: Status messages are cut to this length: they are sent in a header, and peers limit headers (8 KiB in grpc-core).
_MAX_MESSAGE = 1024
_ENCODED = re.compile(rb"\A | \Z|[^ -$&-~]")


def percent_encode(message: str) -> bytes:
    """Encode a status message as gRPC does: visible ASCII and space except `%` stay, other UTF-8 bytes become %XX. So
    does a space at either end: HTTP/2 does not allow it there (RFC 9113, 8.2.1), and a gateway may drop the stream."""
    raw = message[:_MAX_MESSAGE].encode("utf-8", "replace")
    return _ENCODED.sub(lambda match: b"%%%02X" % match[0][0], raw)
