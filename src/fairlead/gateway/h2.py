"""HTTP/2 frames as bytes (RFC 9113): constants, encoding, and the checks that need only the frame itself.

A frame is a header of nine bytes (24 bits length, 8 bits type, 8 bits flags, 31 bits stream) and `length` bytes of
payload. `HEAD` reads the header as (length << 8 | type, flags, stream), in one call of C code per frame.

Errors are `ProtocolError`s with an HTTP/2 error code. They are connection errors (RFC 9113, 5.4.1).
"""

from enum import IntEnum
from struct import Struct

from fairlead.core.errors import ProtocolError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

#: Frame types (RFC 9113, 6).
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

#: Flags. ACK shares its bit with END_STREAM.
END_STREAM = ACK = 0x01
END_HEADERS = 0x04
PADDED = 0x08
HAS_PRIORITY = 0x20

#: Settings (RFC 9113, 6.5.2).
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = (
    range(1, 7)
)

DEFAULT_WINDOW = 65_535
MAX_WINDOW = 2**31 - 1
MIN_FRAME_SIZE = 16_384
MAX_STREAM_ID = 2**31 - 1
#: The most entries accepted in a SETTINGS frame. An honest peer needs one for each known setting.
MAX_SETTINGS = 64

HEAD_SIZE = 9
HEAD = Struct(">IBI")
U32 = Struct(">I")


class ErrorCode(IntEnum):
    """Error codes (RFC 9113, 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return HEAD.pack(len(payload) << 8 | kind, flags, stream) + payload


def settings(values: dict[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(key.to_bytes(2, "big") + U32.pack(value) for key, value in values.items()))


SETTINGS_ACK = frame(SETTINGS, ACK, 0)


def window_update(stream: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, U32.pack(increment))


def rst_stream(stream: int, code: int) -> bytes:
    return frame(RST_STREAM, 0, stream, U32.pack(code))


def goaway(last_stream: int, code: int, why: str = "") -> bytes:
    """Encode a GOAWAY. `why`: debug data for people, cut to 200 bytes."""
    return frame(GOAWAY, 0, 0, U32.pack(last_stream) + U32.pack(code) + why.encode()[:200])


def ping(payload: bytes, ack: bool = False) -> bytes:
    return frame(PING, ACK if ack else 0, 0, payload)


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """The entries of SETTINGS in order, unknown settings included. Raises `ProtocolError` for a value out of range
    (RFC 9113, 6.5.2)."""
    size = len(payload)
    if size % 6:
        raise ProtocolError("SETTINGS is not a multiple of six bytes", ErrorCode.FRAME_SIZE_ERROR)
    if size > 6 * MAX_SETTINGS:
        raise ProtocolError("too many settings in one frame", ErrorCode.ENHANCE_YOUR_CALM)
    entries = [
        (int.from_bytes(payload[pos : pos + 2], "big"), int.from_bytes(payload[pos + 2 : pos + 6], "big"))
        for pos in range(0, size, 6)
    ]
    for key, value in entries:
        _check_setting(key, value)
    return entries


def _check_setting(key: int, value: int) -> None:
    if key == ENABLE_PUSH and value > 1:
        raise ProtocolError("ENABLE_PUSH is neither 0 nor 1", ErrorCode.PROTOCOL_ERROR)
    if key == INITIAL_WINDOW_SIZE and value > MAX_WINDOW:
        raise ProtocolError("INITIAL_WINDOW_SIZE is above 2^31-1", ErrorCode.FLOW_CONTROL_ERROR)
    if key == MAX_FRAME_SIZE and not MIN_FRAME_SIZE <= value < 2**24:
        raise ProtocolError("MAX_FRAME_SIZE is out of range", ErrorCode.PROTOCOL_ERROR)


def unpad(flags: int, data: bytes, pos: int, end: int) -> tuple[int, int]:
    """The bounds of the payload without padding and priority fields (RFC 9113, 6.1 and 6.2)."""
    padding = 0
    if flags & PADDED:
        if pos >= end:
            raise ProtocolError("a padded frame without padding length", ErrorCode.FRAME_SIZE_ERROR)
        padding = data[pos]
        pos += 1
    if flags & HAS_PRIORITY:
        pos += 5
    if pos + padding > end:
        if padding:
            raise ProtocolError("padding is longer than the frame", ErrorCode.PROTOCOL_ERROR)
        raise ProtocolError("the frame is too short for its priority fields", ErrorCode.FRAME_SIZE_ERROR)
    return pos, end - padding
