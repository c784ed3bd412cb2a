"""vLLM's gRPC engine service: `vllm.grpc.engine.VllmEngine/Generate` and `/Embed`.

A request body is one gRPC frame (a flag byte, four bytes of length, a message). The fields that matter:

    GenerateRequest  2 tokenized {1 original_text, 2 input_ids}, 3 text, 4 sampling_params {8 max_tokens, 15 n},
                     5 stream, 7 mm_inputs and 11 extra_mm_inputs {6 mm_hashes}, 10 media_refs {1 items}
    EmbedRequest     2 tokenized

There is no model in it: a server of this kind serves one. Answers are `grpc_usage`'s.
"""

from fairlead.model.errors import ClientError
from fairlead.parse.api import GRPC, GRPC_EMBED
from fairlead.parse.body import MAX_COUNT
from fairlead.parse.media import MEDIA_BYTES
from fairlead.parse.parsed import MAX_N, Parsed, ParsedRequest, unread
from fairlead.parse.protobuf import BYTES, VARINT, Budget, Field, Malformed, packed, walk

FRAME_HEAD = 5


class _Found:
    """What was found in a message so far."""

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


def parse_grpc_generate(body: bytes, content_type: str = "") -> Parsed:
    """Raises `ClientError`."""
    return _parse(GRPC, body)


def parse_grpc_embed(body: bytes, content_type: str = "") -> Parsed:
    """Raises `ClientError`."""
    return _parse(GRPC_EMBED, body)


def _parse(api: str, body: bytes) -> ParsedRequest:
    if len(body) < FRAME_HEAD or int.from_bytes(body[1:FRAME_HEAD], "big") != len(body) - FRAME_HEAD or body[0] > 1:
        raise ClientError("The request body is not one gRPC frame.")
    if body[0]:
        return unread(api, "grpc-encoding", len(body))
    found = _Found()
    try:
        for field in walk(body, found.budget, FRAME_HEAD):
            _take(found, body, field)
    except Malformed as error:
        raise ClientError(f"The gRPC message is malformed: {error}.") from None
    if not any(found.prompt):
        raise ClientError("Missing required field: 'tokenized' with 'input_ids', or 'text'.", param="tokenized")
    root = api.encode()
    for hash_ in found.hashes:
        root += b" media %d:%b" % (len(hash_), hash_)
    return ParsedRequest(
        api,
        stream=found.stream,
        max_tokens=found.limit,
        # Every message of an answer counts.
        include_usage=True,
        n=found.n,
        prompt=tuple(found.prompt),
        root=root,
        prompt_bytes=sum(map(len, found.prompt)) + (0 if found.tokens else found.media * MEDIA_BYTES),
        prompt_tokens=found.tokens,
        media=found.media,
    )


def _take(found: _Found, body: bytes, field: Field) -> None:
    """A field of GenerateRequest or EmbedRequest."""
    number, kind, value, start, end = field
    if kind == VARINT:
        if number == 5:
            found.stream = bool(value)
    elif kind != BYTES:
        return
    elif number == 2:
        _tokenized(found, body, start, end)
    elif number == 3:
        # One of the two, and the last one counts.
        found.prompt, found.tokens = [memoryview(body)[start:end]], 0
    elif number == 4:
        _sampling(found, body, start, end)
    elif number in (7, 11):
        hashes = [
            body[f.start : f.end] for f in walk(body, found.budget, start, end) if f.number == 6 and f.kind == BYTES
        ]
        found.hashes += hashes
        found.media += len(hashes)
    elif number == 10:
        found.hashes.append(body[start:end])
        found.media += sum(1 for f in walk(body, found.budget, start, end) if f.number == 1 and f.kind == BYTES)


def _tokenized(found: _Found, body: bytes, start: int, end: int) -> None:
    view = memoryview(body)
    found.prompt, found.tokens = [], 0
    for field in walk(body, found.budget, start, end):
        if field.number != 2 or field.kind not in (BYTES, VARINT):
            continue
        # A list of numbers may also come one by one, or packed in several pieces.
        found.prompt.append(view[field.start : field.end])
        found.tokens += packed(body, field.start, field.end) if field.kind == BYTES else 1


def _sampling(found: _Found, body: bytes, start: int, end: int) -> None:
    for field in walk(body, found.budget, start, end):
        if field.kind == VARINT and field.number == 8:
            found.limit = min(field.value, MAX_COUNT)
        elif field.kind == VARINT and field.number == 15:
            found.n = min(max(field.value, 1), MAX_N)
