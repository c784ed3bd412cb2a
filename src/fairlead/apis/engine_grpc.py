"""Requests to vLLM's gRPC engine service, read field by field."""

from collections.abc import Iterator
from typing import NamedTuple

from fairlead.apis.body import MAX_COUNT
from fairlead.apis.parsed import MAX_N, Parsed, ParsedRequest, unread
from fairlead.apis.prompt import MEDIA_BYTES
from fairlead.core.errors import ClientError

# A reader of protobuf messages that yields one field at a time and builds no objects for the others.
#
# Unlike a generated class, it reads both layouts of a message whose field numbers changed, and skips tensors of any
# size at no cost. The gateway's messages have another reader (`gateway/protobuf`), which builds lists of all fields.
# Here the sender is a client, and its message of 64 MB may have 32 million fields.

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_MASK = (1 << 64) - 1
#: The most fields read in one message, nested ones included: about 30 ms. Every code generator packs a list of numbers
#: into one field.
MAX_FIELDS = 65536
#: The bytes that do not end a varint.
_CONTINUED = bytes(range(0x80, 0x100))


class Malformed(Exception):
    """The bytes are not a protobuf message."""


class Budget:
    """How many fields may still be read. A message and its nested messages share one budget."""

    __slots__ = ("left",)

    def __init__(self, left: int = MAX_FIELDS) -> None:
        self.left = left


class Field(NamedTuple):
    number: int
    kind: int
    #: The value of a varint; 0 for all other kinds.
    value: int
    #: Offsets of the content in the data.
    start: int
    end: int


def walk(data: bytes, budget: Budget, start: int = 0, end: int | None = None) -> Iterator[Field]:
    """Yield the fields of the message `data[start:end]`. Raises `Malformed`."""
    end = len(data) if end is None else end
    while start < end:
        budget.left -= 1
        if budget.left < 0:
            raise Malformed(f"more than {MAX_FIELDS} fields")
        tag, start = varint(data, start, end)
        number, kind = tag >> 3, tag & 7
        if not number or tag >= 1 << 32:
            raise Malformed("a bad tag")
        value, begin = 0, start
        if kind == VARINT:
            value, stop = varint(data, start, end)
        elif kind == BYTES:
            size, begin = varint(data, start, end)
            stop = begin + size
        elif kind in (FIXED64, FIXED32):
            stop = start + (8 if kind == FIXED64 else 4)
        else:
            raise Malformed(f"wire type {kind}")
        if stop > end:
            raise Malformed("a field runs past its message")
        yield Field(number, kind, value, begin, stop)
        start = stop


def varint(data: bytes, start: int, end: int) -> tuple[int, int]:
    """Read a varint; return its value and the offset behind it. Raises `Malformed`."""
    value = shift = 0
    while start < end and shift < 70:
        byte = data[start]
        start += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _MASK, start
        shift += 7
    raise Malformed("a bad varint")


def packed(data: bytes, start: int, end: int) -> int:
    """The number of varints packed into `data[start:end]`. Raises `Malformed`."""
    if start < end and data[end - 1] >= 0x80:
        raise Malformed("a packed list breaks off")
    return len(data[start:end].translate(None, _CONTINUED))


# vLLM's gRPC engine service: `vllm.grpc.engine.VllmEngine/Generate` and `/Embed`.
#
# A request body is one gRPC frame (a flag byte, four bytes of length, a message). The fields that matter:
#
#     GenerateRequest  2 tokenized {1 original_text, 2 input_ids}, 3 text, 4 sampling_params {8 max_tokens, 15 n},
#                      5 stream, 7 mm_inputs and 11 extra_mm_inputs {6 mm_hashes}, 10 media_refs {1 items}
#     EmbedRequest     2 tokenized
#
# Requests name no model: such a server serves only one. `response.GrpcUsageScanner` reads the answers.

FRAME_HEAD = 5


class _Fields:
    """The fields found in a message so far."""

    __slots__ = ("budget", "hashes", "limit", "media", "n", "prompt", "stream", "tokens")

    def __init__(self) -> None:
        self.budget = Budget()
        self.prompt: list[memoryview] = []
        self.tokens = 0
        self.limit = 0
        self.n = 1
        self.stream = False
        self.media = 0
        self.hashes: list[bytes] = []


def parse_grpc(api: str, body: bytes, content_type: str = "") -> Parsed:
    """Parse a body of `Generate` or `Embed`. Raises `ClientError`."""
    if len(body) < FRAME_HEAD or int.from_bytes(body[1:FRAME_HEAD], "big") != len(body) - FRAME_HEAD or body[0] > 1:
        raise ClientError("The request body is not one gRPC frame.")
    if body[0]:
        return unread(api, "grpc-encoding", len(body))
    fields = _Fields()
    try:
        for field in walk(body, fields.budget, FRAME_HEAD):
            _take(fields, body, field)
    except Malformed as error:
        raise ClientError(f"The gRPC message is malformed: {error}.") from None
    if not any(fields.prompt):
        raise ClientError("Missing required field: 'tokenized' with 'input_ids', or 'text'.", param="tokenized")
    root = api.encode()
    for hash_ in fields.hashes:
        root += b" media %d:%b" % (len(hash_), hash_)
    return ParsedRequest(
        api,
        stream=fields.stream,
        max_tokens=fields.limit,
        # Every message of an answer reports the usage.
        include_usage=True,
        n=fields.n,
        prompt=tuple(fields.prompt),
        root=root,
        prompt_bytes=sum(map(len, fields.prompt)) + (0 if fields.tokens else fields.media * MEDIA_BYTES),
        prompt_tokens=fields.tokens,
        media=fields.media,
    )


def _take(fields: _Fields, body: bytes, field: Field) -> None:
    """Take a field of a GenerateRequest or EmbedRequest."""
    number, kind, value, start, end = field
    if kind == VARINT:
        if number == 5:
            fields.stream = bool(value)
    elif kind != BYTES:
        return
    elif number == 2:
        _tokenized(fields, body, start, end)
    elif number == 3:
        # A prompt is either tokenized or text; the last one sent counts.
        fields.prompt, fields.tokens = [memoryview(body)[start:end]], 0
    elif number == 4:
        _sampling(fields, body, start, end)
    elif number in (7, 11):
        hashes = [
            body[f.start : f.end] for f in walk(body, fields.budget, start, end) if f.number == 6 and f.kind == BYTES
        ]
        fields.hashes += hashes
        fields.media += len(hashes)
    elif number == 10:
        fields.hashes.append(body[start:end])
        fields.media += sum(1 for f in walk(body, fields.budget, start, end) if f.number == 1 and f.kind == BYTES)


def _tokenized(fields: _Fields, body: bytes, start: int, end: int) -> None:
    view = memoryview(body)
    fields.prompt, fields.tokens = [], 0
    for field in walk(body, fields.budget, start, end):
        if field.number != 2 or field.kind not in (BYTES, VARINT):
            continue
        # A list of numbers may also arrive one by one, or packed in several pieces.
        fields.prompt.append(view[field.start : field.end])
        fields.tokens += packed(body, field.start, field.end) if field.kind == BYTES else 1


def _sampling(fields: _Fields, body: bytes, start: int, end: int) -> None:
    for field in walk(body, fields.budget, start, end):
        if field.kind == VARINT and field.number == 8:
            fields.limit = min(field.value, MAX_COUNT)
        elif field.kind == VARINT and field.number == 15:
            fields.n = min(max(field.value, 1), MAX_N)
