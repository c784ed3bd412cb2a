"""Chooses the reader of a response's token counts and errors, and reads those of gRPC. `usage` reads JSON."""

from fairlead.apis.engine_grpc import BYTES, VARINT, Budget, Field, Malformed, packed, walk
from fairlead.apis.usage import MAX_TOKENS, UsageScanner
from fairlead.core.apis import EMBEDDINGS, GRPC, GRPC_EMBED, POOLING, RERANK, SCORE
from fairlead.core.request import Usage

# Reads token counts from the answers of vLLM's gRPC engine service, which arrive in chunks cut anywhere.
#
# An answer is a sequence of gRPC frames (flag, four bytes of length, message). The messages have two layouts:
#
#     older: GenerateResponse 1 request_id, 2 chunk, 3 complete, 4 error {1 message, 2 http_status_code}
#            EmbedResponse    1 request_id, 2 complete {2 prompt_tokens}, 3 error
#     newer: GenerateResponse 1 chunk, 2 complete
#            EmbedResponse    1 embedding, 2 prompt_tokens
#     chunk {1 token_ids, 2 prompt_tokens, 3 completion_tokens, 4 cached_tokens}
#     complete {1 output_ids, 2 finish_reason, 3 prompt_tokens, 4 completion_tokens, 5 cached_tokens}
#
# The wire types distinguish them: `finish_reason` is a string, and a chunk has a number there. Errors of the newer
# service, and of gRPC itself, are in the trailers (`grpc-status`), which `gateway` reads.
#
# Memory is bounded: a frame longer than `MAX_FRAME` (log probabilities) is skipped, and its counts stay unknown.
# Streams repeat the prompt's counts in every message. Their `completion_tokens` are those of one completion, and depend
# on the version: of the message alone, or of all so far. `token_ids` are always those of the message.

MAX_FRAME = 262144
_HEAD = 5


class GrpcUsageScanner:
    """Takes every chunk of one response body and reports its usage. Has the interface of `usage.UsageScanner`."""

    __slots__ = ("_buffer", "_completed", "_embed", "_left", "_skip", "_streamed", "done", "error_status", "usage")

    def __init__(self, embed: bool = False, sequences: int = 1) -> None:
        """`sequences`: the completions that the request asks for. Each has a `complete` of its own."""
        self._embed = embed
        self._left = sequences
        #: Tokens of the chunks so far, and the counts of the whole completions.
        self._streamed = self._completed = 0
        self._buffer = bytearray()
        #: Bytes of the current frame that are still to be skipped.
        self._skip = 0
        #: The usage of all completions so far; `None` = none was reported.
        self.usage: Usage | None = None
        #: Status of an error inside the body; 0 = no error. The first one counts.
        self.error_status = 0
        #: The service's last message was seen. (gRPC marks the end in the trailers, which are not shown.)
        self.done = False

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes. Amortised linear in their number; never raises."""
        if self._skip:
            skipped = min(self._skip, len(chunk))
            self._skip -= skipped
            chunk = chunk[skipped:]
        buffer = self._buffer
        buffer += chunk
        start = 0
        while len(buffer) - start >= _HEAD:
            size = int.from_bytes(buffer[start + 1 : start + _HEAD], "big")
            end = start + _HEAD + size
            if size > MAX_FRAME:
                self._skip = max(end - len(buffer), 0)
                start = min(end, len(buffer))
            elif end > len(buffer):
                break
            else:
                if not buffer[start]:  # compressed frames are not read
                    self._message(bytes(buffer[start + _HEAD : end]))
                start = end
        del buffer[:start]

    @property
    def finished(self) -> bool:
        return self.done

    def _message(self, data: bytes) -> None:
        try:
            fields = {field.number: field for field in walk(data, Budget())}
            if self._embed:
                self._embedded(data, fields)
            else:
                self._generated(data, fields)
        except Malformed:
            pass

    def _generated(self, data: bytes, fields: dict[int, Field]) -> None:
        older = fields.keys() & {3, 4} or len(fields) > 1
        answer = fields.get(3) or fields.get(2) or (None if older else fields.get(1))
        if 4 in fields:
            self.error_status, self.done = self.error_status or _status(data, fields[4]), True
        if answer is None or answer.kind != BYTES:
            return
        parts = {field.number: field for field in walk(data, Budget(), answer.start, answer.end)}
        second = parts.get(2)
        # A whole answer has its finish reason, a string, in field 2, and the counts after it.
        first = 3 if second is not None and second.kind == BYTES else 2
        prompt, completion, cached = (_count(parts.get(first + i)) for i in range(3))
        if answer.number == (3 if older else 2):
            self._left -= 1
            self.done = self.done or self._left == 0
            self._completed += completion
        elif (ids := parts.get(1)) is not None and ids.kind == BYTES:
            self._streamed += packed(data, ids.start, ids.end)
        if prompt or completion:
            completion = min(max(self._streamed, self._completed, completion), MAX_TOKENS)
            self.usage = Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)

    def _embedded(self, data: bytes, fields: dict[int, Field]) -> None:
        tokens = fields.get(2)
        if tokens is not None and tokens.kind == BYTES:
            tokens = {field.number: field for field in walk(data, Budget(), tokens.start, tokens.end)}.get(2)
        self.done = True  # an embedding has only one message
        if _count(tokens):
            self.usage = Usage(prompt_tokens=_count(tokens))
        if 3 in fields and fields[3].kind == BYTES:
            self.error_status = self.error_status or 500


def _count(field: Field | None) -> int:
    """The value of a count; 0 if the field is absent, because protobuf does not send zeros."""
    return min(field.value, MAX_TOKENS) if field is not None and field.kind == VARINT else 0


def _status(data: bytes, error: Field) -> int:
    """The HTTP status of an error message, whose `http_status_code` is a string; 500 if it has none."""
    if error.kind != BYTES:
        return 500
    for field in walk(data, Budget(), error.start, error.end):
        text = data[field.start : field.end]
        if field.number == 2 and field.kind == BYTES and len(text) == 3 and text.isdigit() and b"400" <= text < b"600":
            return int(text)
    return 500


# The choice of the scanner for a response.

Scanner = UsageScanner | GrpcUsageScanner

#: APIs whose usage counts prompts only. Jina's rerankers, and older ones of vLLM, send its total alone.
_PROMPTS_ONLY = frozenset((EMBEDDINGS, SCORE, RERANK, POOLING))


def scanner_for(content_type: str, content_encoding: str = "", api: str = "", sequences: int = 1) -> Scanner | None:
    """A scanner for a response of a content type; `None` if the type reports no token counts, or it is compressed.

    `api`: the request's API, see `core.apis`. `sequences`: see `core.request`.
    """
    if content_encoding and content_encoding.strip().lower() != "identity":
        return None
    kind = content_type.lower()
    if kind.startswith("text/event-stream"):
        return UsageScanner(stream=True)
    if kind.startswith("application/grpc"):
        return GrpcUsageScanner(api == GRPC_EMBED, sequences)
    return UsageScanner(False, api in _PROMPTS_ONLY) if "json" in kind else None


def scanner_unseen(api: str, streaming: bool, sequences: int = 1) -> Scanner:
    """A scanner for a response whose headers are not shown. `streaming`: the request asked for a stream."""
    if api in (GRPC, GRPC_EMBED):
        return GrpcUsageScanner(api == GRPC_EMBED, sequences)
    return UsageScanner(streaming, api in _PROMPTS_ONLY)
