"""Envoy's ext_proc messages (envoy.service.ext_proc.v3), read and written by hand.

Theory
* A `ProcessingRequest` starts with its oneof, so the first tag byte tells the kind; metadata, attributes and the
  protocol configuration follow. Field numbers are those of the descriptors inside Envoy 1.40.
* `HttpBody` and `StreamedBodyResponse` share fields 1 (body) and 2 (end_of_stream). So under full duplex a chunk is
  handed back by putting other tags before the bytes that came.
* Answers that say "continue" are two constant bytes.
* Headers are written as `raw_value`, never `value`, because values need not be UTF-8. No append action is set: Envoy
  1.40 overwrites in every case.
"""

from collections.abc import Iterable, Mapping
from enum import IntEnum
from functools import lru_cache
from struct import Struct as BinaryStruct
from struct import error as StructError
from typing import NamedTuple

from msgspec import Struct

from fairlead.core.errors import ProtocolError
from fairlead.core.headers import DESTINATION
from fairlead.gateway.protobuf import (
    BYTES,
    Json,
    field,
    fields,
    nested_struct,
    number,
    read_struct,
    read_varint,
    string_struct,
    varint,
    walk,
)


class Kind(IntEnum):
    """Field numbers of the oneof in `ProcessingRequest`."""

    REQUEST_HEADERS = 2
    RESPONSE_HEADERS = 3
    REQUEST_BODY = 4
    RESPONSE_BODY = 5
    REQUEST_TRAILERS = 6
    RESPONSE_TRAILERS = 7


#: Field number → kind, looked up a million times a minute. Calling the enum is ten times slower.
KINDS = {int(kind): kind for kind in Kind}
#: First byte of a message (its tag) → kind.
_FIRST_BYTES = {kind << 3 | BYTES: kind for kind in Kind}


class BodyMode(IntEnum):
    """ProcessingMode.BodySendMode."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX = 4


#: "Continue, nothing to change", for each kind of message.
CONTINUE = {
    Kind.REQUEST_HEADERS: b"\x0a\x00",
    Kind.RESPONSE_HEADERS: b"\x12\x00",
    Kind.REQUEST_BODY: b"\x1a\x00",
    Kind.RESPONSE_BODY: b"\x22\x00",
    Kind.REQUEST_TRAILERS: b"\x2a\x00",
    Kind.RESPONSE_TRAILERS: b"\x32\x00",
}

#: Kind → field number of its answer in `ProcessingResponse`.
_ANSWER = {kind: CONTINUE[kind][0] >> 3 for kind in Kind}

#: Bytes in one streamed body answer. The protocol asks for less than 64 KiB (Envoy 1.40 takes 1 MB); the reference
#: picker cuts at this size.
MAX_CHUNK = 62_000

SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = f"{DESTINATION}-subset"
SERVED_KEY = f"{DESTINATION}-served"
_SUBSET_KEY, _SERVED_KEY = SUBSET_KEY.encode(), SERVED_KEY.encode()
LB_NAMESPACE = "envoy.lb"
#: Key in that namespace for the lease of a routed request.
LEASE_KEY = "fairlead-lease"

_HEADERS = (Kind.REQUEST_HEADERS, Kind.RESPONSE_HEADERS)
_CLEAR_ROUTE_CACHE, _CONTINUE_AND_REPLACE = number(5, 1), number(1, 1)


#: Longest accepted ProtocolConfiguration, in bytes. It has seven short fields, and decoded ones are cached.
_MAX_CONFIG = 256

#: Request body mode, response body mode, and whether the body is sent without waiting for the answer to the headers.
Modes = tuple[BodyMode, BodyMode, bool]


@lru_cache(maxsize=64)
def _read_modes(config: bytes) -> Modes:
    """Decode a ProtocolConfiguration. A gateway sends the same few bytes with every stream."""
    request = response = eager = 0
    for key, value, end in fields(config):
        if end >= 0:
            continue
        if key == 1:
            request = value
        elif key == 2:
            response = value
        elif key == 3:
            eager = value
    try:
        return BodyMode(request), BodyMode(response), bool(eager)
    except ValueError:
        raise ProtocolError(f"body modes {request}/{response} are not supported") from None


class Beside(NamedTuple):
    """The encoded parts of a message beside its headers, body or trailers. `None` = absent."""

    config: bytes | None = None
    metadata: bytes | None = None
    attributes: tuple[bytes, ...] = ()
    #: Kind, start and end of the headers, body or trailers, if they are not the first part.
    late: tuple[Kind, int, int] | None = None


_NOTHING_BESIDE = Beside()
#: Longest cached encoding, in bytes. Longer ones are decoded each time.
_MAX_BESIDE = 256


def _read_beside(data: bytes) -> Beside:
    config, metadata, attributes, late = _NOTHING_BESIDE
    for key, start, end in walk(data, 0, len(data)):
        if key == 11:
            config = data[start:end]
        elif key == 8:
            metadata = data[start:end]
        elif key == 9:
            attributes += (data[start:end],)
        elif key in KINDS:
            late = KINDS[key], start, end
    return Beside(config, metadata, attributes, late)


#: These bytes are mostly empty or only the ProtocolConfiguration, so they repeat.
_known_beside = lru_cache(maxsize=64)(_read_beside)


class Incoming:
    """One `ProcessingRequest`: its parts are located but not decoded."""

    __slots__ = ("beside", "data", "end", "kind", "start")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.beside = _NOTHING_BESIDE
        length = len(data)
        kind = _FIRST_BYTES.get(data[0]) if length > 2 else None
        if kind is not None:
            size, start = data[1], 2
            if size > 0x7F:
                if data[2] < 0x80:  # the common case
                    size, start = size & 0x7F | data[2] << 7, 3
                else:
                    size, start = read_varint(data, 1, length)
            end = start + size
            if end <= length:
                self.kind, self.start, self.end = kind, start, end
                if end < length:
                    tail = data[end:]
                    self.beside = beside = _known_beside(tail) if length - end <= _MAX_BESIDE else _read_beside(tail)
                    if beside.late is not None:
                        self.kind, start, stop = beside.late
                        self.start, self.end = end + start, end + stop
                return
        self.beside = beside = _read_beside(data)
        if beside.late is None:
            raise ProtocolError("an ext_proc message without headers, body or trailers")
        self.kind, self.start, self.end = beside.late

    def modes(self) -> Modes | None:
        """How the gateway sends bodies; `None` = not stated. Only the first message states it."""
        config = self.beside.config
        if config is None:
            return None
        if len(config) > _MAX_CONFIG:
            raise ProtocolError(f"a ProtocolConfiguration of more than {_MAX_CONFIG} bytes")
        return _read_modes(config)

    def first_field(self) -> tuple[int, int]:
        """Start and end of field 1 (header map or chunk) if the part begins with it, as Envoy writes it. Otherwise the
        start of the part, twice."""
        data, start, end = self.data, self.start, self.end
        if end - start < 2 or data[start] != 0x0A:
            return start, start
        size, first = data[start + 1], start + 2
        if size > 0x7F:
            if first < end and data[first] < 0x80:  # the common case
                size, first = size & 0x7F | data[first] << 7, first + 1
            else:
                size, first = read_varint(data, start + 1, end)
        if first + size > end:
            raise ProtocolError("malformed protobuf: a field runs past its message")
        return first, first + size

    def headers(self) -> tuple[dict[str, str], bool]:
        """(headers, end of stream). Names are in lower case; a repeated header keeps its last value."""
        data, end = self.data, self.end
        first, pos = self.first_field()
        out: dict[str, str] = {}
        read_headers(data, first, pos, out)
        eos = False
        for key, a, b in fields(data, pos, end) if pos < end else ():  # if a body follows, this is empty
            if key == 1 and b >= 0:
                read_headers(data, a, b, out)
            elif key == 3 and b < 0:
                eos = bool(a)
        return out, eos

    def body(self) -> tuple[bytes, bool]:
        """(chunk, end of stream)."""
        data, end = self.data, self.end
        first, pos = self.first_field()
        chunk = data[first:pos]
        if end - pos == 2 and data[pos] == 0x10 and data[pos + 1] < 0x80:
            return chunk, data[pos + 1] > 0
        eos = False
        for key, a, b in fields(data, pos, end) if pos < end else ():
            if key == 1 and b >= 0:
                chunk = data[a:b]
            elif key == 2 and b < 0:
                eos = bool(a)
        return chunk, eos

    def attributes(self) -> dict[str, Json]:
        """The request's CEL attributes, merged over all filters. Empty when none were sent."""
        out: dict[str, Json] = {}
        for attributes in self.beside.attributes:
            for key, a, b in fields(attributes):
                if key == 2 and b >= 0:
                    out.update(read_struct(attributes, a, b))
        return out

    def subset(self) -> frozenset[str] | None:
        """The gateway's subset hint: addresses to choose from; `None` = no hint, or the hint is not a list."""
        hint = self._metadata(SUBSET_NAMESPACE, SUBSET_KEY, _SUBSET_KEY)
        return frozenset(entry.strip() for entry in hint if isinstance(entry, str)) if isinstance(hint, list) else None

    def served(self) -> str:
        """`ip:port` of the endpoint that served, from the gateway's metadata beside a response; empty = not stated."""
        served = self._metadata(LB_NAMESPACE, SERVED_KEY, _SERVED_KEY)
        return served if isinstance(served, str) else ""

    def _metadata(self, namespace: str, key: str, encoded: bytes) -> Json:
        """The gateway's value of `key` (as bytes: `encoded`) in a namespace; `None` = not sent."""
        metadata = self.beside.metadata
        if not metadata or encoded not in metadata:
            return None
        sent = (values[key] for name, values in _namespaces(metadata) if name == namespace and key in values)
        return next(sent, None)


def opens_tunnel(headers: Mapping[str, str], ended: bool) -> bool:
    """Whether this is a WebSocket or CONNECT. Then both sides send at any time, and the request's end is unknown."""
    method = headers.get(":method")
    return not ended and (method == "CONNECT" or (method == "GET" and "upgrade" in headers))


# Fast paths for the two messages of nearly every request, in the form in which Envoy writes them.


class Opening(Struct, frozen=True, eq=False, gc=False):
    """What a first message says apart from the two ids. Equal messages share one object, hashed by identity."""

    headers: Mapping[str, str]
    ended: bool
    modes: Modes | None
    subset: frozenset[str] | None


def read_opening(data: bytes) -> tuple[Opening, str, str] | None:
    """Read a first message of an embedded gateway: its opening, the gateway's own id of the request, the x-request-id.
    `None` = the message has another form and must be read with `Incoming`."""
    start = data.rfind(_GATEWAY_ENTRY)
    try:
        gateway_id, request_entry, request_id = _two_ids(data, start)
    except StructError:  # the ids are missing or cut short
        return None
    if request_entry != _REQUEST_ENTRY or len(data) > _MAX_OPENING:
        return None
    known = _known_opening(data[:start], data[start + _BOTH_SIZE :])
    if known is None:
        return None
    return known, str(gateway_id, "latin-1"), str(request_id, "latin-1")


@lru_cache(maxsize=256)  # clients choose some of these bytes
def _known_opening(before: bytes, behind: bytes) -> Opening | None:
    """Decode a first message whose bytes before and behind the two ids are these. `None` = the ids are not the last
    entries of the header map, or the message is malformed. The result does not depend on the ids."""
    placeholder = bytes(_ID_SIZE)
    data = b"".join((before, _GATEWAY_ENTRY, placeholder, _REQUEST_ENTRY, placeholder, behind))
    try:
        message = Incoming(data)
        first, end = message.first_field()
        if message.kind is not Kind.REQUEST_HEADERS or end != len(data) - len(behind) or first > len(before):
            return None
        if known_entries(before[first:]) is None:
            return None
        headers, ended = message.headers()
        ids = headers.pop(_GATEWAY_ID), headers.pop(_REQUEST_ID)
        if ids != (placeholder.decode(), placeholder.decode()):
            return None
        if opens_tunnel(headers, ended):
            return None
        return Opening(headers, ended, message.modes(), message.subset())
    except ProtocolError:
        return None


#: The end of a message with a body's last chunk: end_of_stream, then an empty `metadata_context`.
_LAST_CHUNK = b"\x10\x01B\x00"


def read_last_chunk(data: bytes) -> bytes | None:
    """The last chunk of a request body; `None` = the message has another form and must be read with `Incoming`."""
    head, chunk = _last_chunk(len(data))
    if data.startswith(head) and data.endswith(_LAST_CHUNK):
        return data[chunk]
    return None


@lru_cache(maxsize=4096)
def _last_chunk(size: int) -> tuple[bytes, slice]:
    """For a message of `size` bytes that ends with `_LAST_CHUNK`: the tags and lengths that it must begin with, and the
    slice of its chunk."""
    for lengths in range(2, 20):  # the number of bytes that both lengths take
        chunk = size - 2 - lengths - len(_LAST_CHUNK)
        if chunk >= 0:
            part = b"\x0a" + varint(chunk)
            head = b"\x22" + varint(len(part) + chunk + 2) + part
            if len(head) == 2 + lengths:
                return head, slice(len(head), size - len(_LAST_CHUNK))
    return b"\xff", slice(0)  # no such message has this size


def _namespaces(metadata: bytes) -> Iterable[tuple[str, dict[str, Json]]]:
    """The entries of `Metadata.filter_metadata`."""
    for key, start, stop in walk(metadata, 0, len(metadata)):
        if key != 1:
            continue
        name, values = "", {}
        for n, a, b in walk(metadata, start, stop):
            if n == 1:
                name = metadata[a:b].decode("utf-8", "replace")
            elif n == 2:
                values = read_struct(metadata, a, b)
        yield name, values


def set_header(name: str, value: bytes) -> bytes:
    """One `set_headers` entry of a HeaderMutation."""
    return field(1, field(1, field(1, name.encode()) + field(3, value)))


def remove_headers(names: Iterable[str]) -> bytes:
    """`remove_headers` entries of a HeaderMutation."""
    return b"".join(field(2, name.encode()) for name in names)


def lb_metadata(entries: Mapping[str, bytes]) -> bytes:
    """The `dynamic_metadata` field with these strings in namespace `envoy.lb`."""
    return field(8, nested_struct(LB_NAMESPACE, string_struct(dict(entries))))


def answer(
    kind: Kind, mutation: bytes = b"", metadata: bytes = b"", body: bytes | None = None, reroute: bool = False
) -> bytes:
    """Answer a headers or body message. `mutation`: HeaderMutation content; `metadata`: from `lb_metadata`; `body`:
    a whole new body; `reroute`: choose the route anew. In the answer to headers, `body` replaces the whole body of the
    message, and Envoy sends no more of the old one."""
    common = _CONTINUE_AND_REPLACE if body is not None and kind in _HEADERS else b""
    if mutation:
        common += field(2, mutation)
    if body is not None:
        common += field(3, field(1, body))
    if reroute:
        common += _CLEAR_ROUTE_CACHE
    return field(_ANSWER[kind], field(1, common)) + metadata


def streamed_body(kind: Kind, chunk: bytes, end_of_stream: bool) -> list[bytes]:
    """Hand a body chunk back under full duplex, cut to pieces that Envoy accepts. An empty chunk gives one message."""
    pieces = [chunk[i : i + MAX_CHUNK] for i in range(0, len(chunk), MAX_CHUNK)] or [b""]
    last = len(pieces) - 1
    tag = _ANSWER[kind]
    messages = []
    for i, piece in enumerate(pieces):
        content = field(1, piece) if piece else b""
        if end_of_stream and i == last:
            content += number(2, 1)
        messages.append(field(tag, field(1, field(3, field(3, content)))))
    return messages


def echo(message: Incoming) -> list[bytes]:
    """Hand a body message back unchanged, under full duplex."""
    size = message.end - message.start
    if size > MAX_CHUNK:
        return streamed_body(message.kind, *message.body())
    return [_echo_head(message.kind, size) + message.data[message.start : message.end]]


@lru_cache(maxsize=4096)
def _echo_head(kind: Kind, size: int) -> bytes:
    """The tags and lengths before `size` bytes that are handed back. Cached: chunks of a stream repeat their sizes."""
    content = bytes(size)
    return field(_ANSWER[kind], field(1, field(3, field(3, content))))[: -size or None]


def immediate(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    details: str = "",
    grpc_status: int = -1,
    metadata: bytes = b"",
) -> bytes:
    """Answer the client directly. `details` appears in Envoy's response code details. A `grpc_status` of 0 or more is
    sent to clients that speak gRPC, with the body as its message; -1 = none. `metadata`: from `lb_metadata`."""
    mutation = b"".join(set_header(name, value.encode("latin-1", "replace")) for name, value in headers.items())
    content = field(1, number(1, status)) + field(2, mutation) + field(3, body)
    if grpc_status >= 0:
        content += field(4, number(1, grpc_status))
    if details:
        content += field(5, details.encode())
    return field(7, content) + metadata


def message_timeout(seconds: float) -> bytes:
    """A message that only asks for more time (`override_message_timeout`). Envoy honours one per awaited message."""
    whole_seconds = int(seconds)
    return field(10, number(1, whole_seconds) + number(2, int((seconds - whole_seconds) * 1e9)))


# ---- header maps (envoy.config.core.v3.HeaderMap) ----

#: Tags of HeaderValue.value and .raw_value.
_VALUE_TAGS = b"\x12\x1a"


#: The header map of an embedded gateway ends with two entries whose ids of 36 bytes differ in every request.
_GATEWAY_ID, _REQUEST_ID = "x-fairlead-id", "x-request-id"
_ID_SIZE = 36
_GATEWAY_ENTRY, _REQUEST_ENTRY = b"\x0a\x35\x0a\x0dx-fairlead-id\x1a\x24", b"\x0a\x34\x0a\x0cx-request-id\x1a\x24"
_REQUEST_SIZE = len(_REQUEST_ENTRY) + _ID_SIZE
_GATEWAY_SIZE = len(_GATEWAY_ENTRY) + _ID_SIZE
_BOTH_SIZE = _GATEWAY_SIZE + _REQUEST_SIZE
#: Unpacks the two entries: the gateway's id, the bytes between the ids, the x-request-id.
_two_ids = BinaryStruct(f"{len(_GATEWAY_ENTRY)}x{_ID_SIZE}s{len(_REQUEST_ENTRY)}s{_ID_SIZE}s").unpack_from
#: Longest cached first message, in bytes. Longer ones are decoded each time.
_MAX_OPENING = 2048
#: The entries before the ids repeat between requests. Above this size, in bytes, they are decoded each time.
_MAX_KNOWN_SIZE = 1024


def read_headers(data: bytes, start: int, end: int, out: dict[str, str]) -> None:
    """Decode a HeaderMap into `out`. Latin-1 keeps every byte and cannot fail. Raises `ProtocolError`."""
    ids = end - _BOTH_SIZE
    if (
        start <= ids <= start + _MAX_KNOWN_SIZE
        and data.startswith(_GATEWAY_ENTRY, ids)
        and data.startswith(_REQUEST_ENTRY, end - _REQUEST_SIZE)
        and (known := known_entries(data[start:ids])) is not None
    ):
        out.update(known)
        out[_GATEWAY_ID] = data[ids + len(_GATEWAY_ENTRY) : end - _REQUEST_SIZE].decode("latin-1")
        out[_REQUEST_ID] = data[end - _ID_SIZE : end].decode("latin-1")
    else:
        _read_entries(data, start, end, out)


@lru_cache(maxsize=256)  # clients choose some of these bytes
def known_entries(entries: bytes) -> dict[str, str] | None:
    """Decode whole header entries; `None` = the bytes do not end where an entry ends. The result is shared: copy it."""
    out: dict[str, str] = {}
    try:
        _read_entries(entries, 0, len(entries), out)
    except ProtocolError:
        return None
    return out


def _read_entries(data: bytes, pos: int, end: int, out: dict[str, str]) -> None:
    """Decode entries. Envoy nearly always writes `0a size 0a size name 1a size value` with one-byte sizes. That form is
    decoded in place, any other by the general walk."""
    while pos < end:
        try:
            size = data[pos + 1]
            stop = pos + 2 + size
            middle = pos + 4 + data[pos + 3]
            # If an inner size took two bytes, the sum below would run past `stop`.
            if (
                size < 0x80
                and middle + 2 + data[middle + 1] == stop <= end
                and data[middle] in _VALUE_TAGS
                and data[pos] == 0x0A == data[pos + 2]
            ):
                out[data[pos + 4 : middle].decode("latin-1").lower()] = data[middle + 2 : stop].decode("latin-1")
                pos = stop
                continue
        except IndexError:
            pass
        pos = _read_header(data, pos, end, out)


def _read_header(data: bytes, pos: int, end: int, out: dict[str, str]) -> int:
    """Decode the entry at `pos` field by field; returns the position behind it. Raises `ProtocolError`."""
    tag, pos = read_varint(data, pos, end)
    size, pos = read_varint(data, pos, end)
    stop = pos + size
    if tag != 0x0A or stop > end:
        raise ProtocolError("malformed header map")
    name = value = ""
    for inner, x, y in fields(data, pos, stop):
        if y < 0:
            continue
        if inner == 1:
            name = data[x:y].decode("latin-1")
        elif y > x:  # 2 = value, 3 = raw_value; Envoy fills one of them
            value = data[x:y].decode("latin-1")
    out[name.lower()] = value
    return stop


# Answers that change a body, for every body mode of Envoy's ext_proc in which that is safe.
#
# Theory (measured on Envoy 1.40; tests/integration/pitfalls/README.md, "Changing bodies")
# * A content length that does not fit the body shifts all later messages of an HTTP/1.1 connection: surplus bytes are
#   read as the next request. Envoy compares the two only where it holds the whole body (BUFFERED). So length and body
#   leave in one answer, or the length is removed before the first byte and the body is sent chunked.
# * CONTINUE_AND_REPLACE in the answer to headers replaces the whole message at once: Envoy drops the length and the
#   part of the body that it has, and sends us nothing more of that message. The answer is applied entirely or not at
#   all, even if the scheduler dies while 5 MB of it are in flight. That matters for a gateway that fails open: a new
#   length with the old body would be worse than no rewrite.
# * Under full duplex the gateway keeps no part of the body, so nothing can be half applied: the length is set in the
#   answer to the headers, then the new bytes are sent in place of the old ones.

_CONTENT_LENGTH = "content-length"

#: HeaderMutation content for an answer to headers: the body's length is unknown, so the body is sent chunked.
UNKNOWN_LENGTH = remove_headers((_CONTENT_LENGTH,))


def content_length(size: int) -> bytes:
    """HeaderMutation content: the body has `size` bytes."""
    return set_header(_CONTENT_LENGTH, b"%d" % size)


def rewrite_request(
    modes: Modes, body: bytes, mutation: bytes = b"", metadata: bytes = b"", trailers: bool = False
) -> list[bytes]:
    """The pick, with another body: all answers to the request, to be sent in one write.

    `mutation`, `metadata`: those of the pick; the route is chosen anew. `trailers`: request trailers have arrived and
    wait for their answer. Raises `ValueError` in modes where the headers were answered without the body (NONE, and
    STREAMED without sending ahead).
    """
    mode, _, eager = modes
    if mode is BodyMode.FULL_DUPLEX:
        head = answer(Kind.REQUEST_HEADERS, mutation + content_length(len(body)), metadata, reroute=True)
        tail = [CONTINUE[Kind.REQUEST_TRAILERS]] if trailers else []
        return [head, *streamed_body(Kind.REQUEST_BODY, body, end_of_stream=not trailers), *tail]
    if mode is BodyMode.BUFFERED or mode is BodyMode.BUFFERED_PARTIAL:
        mutation += content_length(len(body))
        return [answer(Kind.REQUEST_BODY, mutation, metadata, body, reroute=True)]
    if mode is BodyMode.STREAMED and eager:
        return [answer(Kind.REQUEST_HEADERS, mutation, metadata, body, reroute=True)]
    raise ValueError(f"the body of a request cannot be changed in mode {mode.name}")


def resizable_response() -> bytes:
    """The answer to the response headers when the chunks will be rewritten: it removes the content length.

    A response whose headers are not sent to us (`response_header_mode: SKIP`) keeps its length: its chunks may only be
    replaced by others of the same size.
    """
    return answer(Kind.RESPONSE_HEADERS, UNKNOWN_LENGTH)


def rewrite_chunk(mode: BodyMode, chunk: bytes, end_of_stream: bool) -> list[bytes]:
    """Answers to one response body message in response body mode `mode`: these bytes instead of the original ones.

    `chunk` may be empty or longer than the original: to hold bytes back, send fewer now and add them to a later chunk.
    `end_of_stream`: that of the message. In modes BUFFERED and BUFFERED_PARTIAL the message is the whole body (or its
    beginning), and `resizable_response` must have been sent before as well.
    """
    if mode is BodyMode.FULL_DUPLEX:
        return streamed_body(Kind.RESPONSE_BODY, chunk, end_of_stream)
    return [answer(Kind.RESPONSE_BODY, body=chunk)]
