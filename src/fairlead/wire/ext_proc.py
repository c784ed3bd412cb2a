"""Envoy's ext_proc messages (envoy.service.ext_proc.v3), read and written by hand.

Theory
* A `ProcessingRequest` starts with its oneof, so the first tag byte tells the kind; metadata, attributes and the
  protocol configuration follow. Numbers are those of the descriptors inside Envoy 1.40.
* `HttpBody` and `StreamedBodyResponse` share fields 1 (body) and 2 (end_of_stream): under full duplex a chunk is handed
  back by putting other tags in front of the very bytes that came.
* Answers that say "go on" are two constant bytes.
* `raw_value` is written, never `value`: values need not be UTF-8. No append action is set: Envoy 1.40 overwrites in
  every case.
"""

from collections.abc import Iterable, Mapping
from enum import IntEnum
from functools import lru_cache

from fairlead.model.errors import ProtocolError
from fairlead.wire.ext_proc_headers import read_headers
from fairlead.wire.protobuf import (
    BYTES,
    Json,
    field,
    fields,
    nested_struct,
    number,
    read_struct,
    read_varint,
    string_struct,
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


#: Looked up a million times a minute; calling an enum is ten times slower.
KINDS = {int(kind): kind for kind in Kind}


class BodyMode(IntEnum):
    """ProcessingMode.BodySendMode."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX = 4


#: "Go on, nothing to change", for each kind of request message.
CONTINUE = {
    Kind.REQUEST_HEADERS: b"\x0a\x00",
    Kind.RESPONSE_HEADERS: b"\x12\x00",
    Kind.REQUEST_BODY: b"\x1a\x00",
    Kind.RESPONSE_BODY: b"\x22\x00",
    Kind.REQUEST_TRAILERS: b"\x2a\x00",
    Kind.RESPONSE_TRAILERS: b"\x32\x00",
}

#: Field of `ProcessingResponse` that answers each kind.
_ANSWER = {kind: CONTINUE[kind][0] >> 3 for kind in Kind}

#: The protocol wants streamed body answers below 64 KiB (Envoy 1.40 takes 1 MB); the reference picker cuts at this.
MAX_CHUNK = 62_000

DESTINATION = "x-gateway-destination-endpoint"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"
SERVED_KEY = "x-gateway-destination-endpoint-served"
LB_NAMESPACE = "envoy.lb"

_CLEAR_ROUTE_CACHE = number(5, 1)


#: Bytes of a ProtocolConfiguration: it has seven short fields, and those that were seen are kept.
_MAX_CONFIG = 256

#: Request body mode, response body mode, whether the body is sent without waiting for the headers answer.
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


@lru_cache(maxsize=64)
def _read_rest(rest: bytes) -> list[tuple[int, int, int]]:
    """The parts behind the first one. Mostly the ProtocolConfiguration alone, and with it the same few bytes again."""
    return walk(rest, 0, len(rest))


class Incoming:
    """One `ProcessingRequest`, its parts found but not decoded."""

    __slots__ = ("_attributes", "_metadata", "data", "end", "kind", "protocol_config", "start")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.protocol_config: tuple[int, int] | None = None
        self._metadata: tuple[int, int] | None = None
        self._attributes: tuple[tuple[int, int], ...] = ()
        kind = KINDS.get(data[0] >> 3) if data else None
        if kind is not None and len(data) > 1 and data[0] & 7 == BYTES:
            size, start = (data[1], 2) if data[1] < 0x80 else read_varint(data, 1, len(data))
            self.kind, self.start, self.end = kind, start, start + size
            if self.end == len(data):
                return
            if self.end < len(data):
                rest = data[self.end :]
                self._rest(_read_rest(rest) if len(rest) <= _MAX_CONFIG else walk(rest, 0, len(rest)), self.end)
                return
        self.kind, self.start, self.end = Kind.REQUEST_HEADERS, 0, -1
        self._rest(walk(data, 0, len(data)), 0)
        if self.end < 0:
            raise ProtocolError("an ext_proc message without headers, body or trailers")

    def _rest(self, parts: list[tuple[int, int, int]], offset: int) -> None:
        """Note what stands beside (or, in an order that Envoy does not use, before) the headers, body or trailers."""
        for key, start, end in parts:
            if key == 11:
                self.protocol_config = start + offset, end + offset
            elif key == 8:
                self._metadata = start + offset, end + offset
            elif key == 9:
                self._attributes += ((start + offset, end + offset),)
            elif key in KINDS:
                self.kind, self.start, self.end = KINDS[key], start + offset, end + offset

    def modes(self) -> Modes | None:
        """How the gateway works; on the first message only."""
        if self.protocol_config is None:
            return None
        start, end = self.protocol_config
        if end - start > _MAX_CONFIG:
            raise ProtocolError("an endless ProtocolConfiguration")
        return _read_modes(self.data[start:end])

    def headers(self) -> tuple[dict[str, str], bool]:
        """(headers, end of stream). Names in lower case; of a repeated header the last value."""
        out: dict[str, str] = {}
        eos = False
        data, start, end = self.data, self.start, self.end
        if start < end and data[start] == 0x0A:
            size, first = read_varint(data, start + 1, end)
            if first + size == end:  # with a body to come there is nothing else
                read_headers(data, first, end, out)
                return out, False
        for key, a, b in fields(data, start, end):
            if key == 1 and b >= 0:
                read_headers(data, a, b, out)
            elif key == 3 and b < 0:
                eos = bool(a)
        return out, eos

    def body(self) -> tuple[bytes, bool]:
        """(chunk, end of stream)."""
        data, pos, end = self.data, self.start, self.end
        chunk = b""
        if pos < end and data[pos] == 0x0A:  # Envoy writes the body first, then end_of_stream
            size, pos = read_varint(data, pos + 1, end)
            if pos + size > end:
                raise ProtocolError("malformed protobuf: a field runs past its message")
            chunk = data[pos : pos + size]
            pos += size
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
        """Attributes of the request (CEL), of all filters merged. Empty when none were sent."""
        out: dict[str, Json] = {}
        for start, stop in self._attributes:
            for key, a, b in fields(self.data, start, stop):
                if key == 2 and b >= 0:
                    out.update(read_struct(self.data, a, b))
        return out

    def subset(self) -> frozenset[str] | None:
        """The gateway's subset hint: addresses to choose from; `None` = no hint (or not a list)."""
        if self._metadata is None or SUBSET_KEY.encode() not in self.data:
            return None
        for namespace, values in self._namespaces():
            if namespace == SUBSET_NAMESPACE:
                hint = values.get(SUBSET_KEY)
                if isinstance(hint, list):
                    return frozenset(entry.strip() for entry in hint if isinstance(entry, str))
        return None

    def served(self) -> str:
        """Who served, as the gateway says beside a response: `ip:port`; empty = it does not."""
        if self._metadata is None or SERVED_KEY.encode() not in self.data:
            return ""
        for namespace, values in self._namespaces():
            if namespace == LB_NAMESPACE:
                served = values.get(SERVED_KEY)
                return served if isinstance(served, str) else ""
        return ""

    def _namespaces(self) -> Iterable[tuple[str, dict[str, Json]]]:
        assert self._metadata is not None
        for key, start, stop in fields(self.data, *self._metadata):
            if key != 1 or stop < 0:
                continue
            name, values = "", {}
            for n, a, b in fields(self.data, start, stop):
                if n == 1 and b >= 0:
                    name = self.data[a:b].decode("utf-8", "replace")
                elif n == 2 and b >= 0:
                    values = read_struct(self.data, a, b)
            yield name, values


def set_header(name: str, value: bytes) -> bytes:
    """One `set_headers` entry of a HeaderMutation."""
    return field(1, field(1, field(1, name.encode()) + field(3, value)))


def remove_headers(names: Iterable[str]) -> bytes:
    """`remove_headers` entries of a HeaderMutation."""
    return b"".join(field(2, name.encode()) for name in names)


def lb_metadata(entries: Mapping[str, bytes]) -> bytes:
    """The `dynamic_metadata` field with strings in namespace `envoy.lb`."""
    return field(8, nested_struct(LB_NAMESPACE, string_struct(dict(entries))))


def answer(
    kind: Kind, mutation: bytes = b"", metadata: bytes = b"", body: bytes | None = None, reroute: bool = False
) -> bytes:
    """Answer a headers or body message: HeaderMutation content, `lb_metadata`, a whole new body."""
    common = field(2, mutation) if mutation else b""
    if body is not None:
        common += field(3, field(1, body))
    if reroute:
        common += _CLEAR_ROUTE_CACHE
    return field(_ANSWER[kind], field(1, common)) + metadata


def streamed_body(kind: Kind, chunk: bytes, end_of_stream: bool) -> list[bytes]:
    """Hand a body chunk back under full duplex, cut to what Envoy accepts. An empty chunk gives one message."""
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
    """Hand a body message back as it came."""
    size = message.end - message.start
    if size > MAX_CHUNK:
        return streamed_body(message.kind, *message.body())
    content = message.data[message.start : message.end]
    return [field(_ANSWER[message.kind], field(1, field(3, field(3, content))))]


def immediate(status: int, headers: Mapping[str, str], body: bytes, details: str = "", grpc_status: int = -1) -> bytes:
    """Answer the client directly. `details` shows up in Envoy's response code details. With a `grpc_status` a client
    that speaks gRPC gets that, and the body as its message."""
    mutation = b"".join(set_header(name, value.encode("latin-1", "replace")) for name, value in headers.items())
    content = field(1, number(1, status)) + field(2, mutation) + field(3, body)
    if grpc_status >= 0:
        content += field(4, number(1, grpc_status))
    if details:
        content += field(5, details.encode())
    return field(7, content)


def message_timeout(seconds: float) -> bytes:
    """A message that only asks for more time (`override_message_timeout`); Envoy honours one per message it awaits."""
    whole = int(seconds)
    return field(10, number(1, whole) + number(2, int((seconds - whole) * 1e9)))
