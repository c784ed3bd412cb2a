"""Reads a request body, only as far as scheduling needs.

Fairlead refuses only a body that is not valid JSON or cannot be scheduled sensibly. Everything else goes to the model
server, which answers in its own words. What vLLM 0.32 answers (measured), and what happens here:

| body                                             | vLLM                | here |
|--------------------------------------------------|---------------------|------|
| not JSON, not an object, broken UTF-8            | 400                 | 400  |
| `messages` missing, empty, not a list            | 400                 | 400  |
| `prompt` (and `prompt_embeds`) missing           | 400                 | 400  |
| wrong type: `model`, `stream`, `max_tokens`, `n`, `stream_options` | 400 | 400  |
| `prompt` empty, `max_tokens` < 1, token ids out of range | 400         | pass |
| `kv_transfer_params` and the like (`body.TRANSFERS`) | 200             | 400  |
| `stream_options` without `stream`, wrong temperature, wrong content type | 400 | pass |
| `model` missing; unknown fields; too large `max_tokens`  | 200         | pass |
| unknown model                                    | 404                 | pass |

The same holds for the other APIs. Their parsers are in this folder; docs/apis.md has the table.
"""

from collections.abc import Callable, Mapping
from functools import partial

from fairlead.apis.anthropic import parse_count, parse_messages
from fairlead.apis.body import refuse_transfers
from fairlead.apis.engine_grpc import parse_grpc
from fairlead.apis.generate import parse_generate, parse_sglang, parse_sglang_stream
from fairlead.apis.multipart import parse_audio, parse_images
from fairlead.apis.openai import (
    parse_chat,
    parse_completion,
    parse_conversation,
    parse_embeddings,
    parse_pooling,
    parse_render,
    parse_rerank,
    parse_responses,
    parse_score,
    parse_tokenize,
)
from fairlead.apis.parsed import Parsed, ParsedRequest, unread
from fairlead.core import apis
from fairlead.core.apis import EXACT, OTHER, api_of
from fairlead.core.errors import ClientError

#: APIs whose bodies are not JSON, or may also be of another type.
_OTHER_TYPES = frozenset((apis.AUDIO, apis.IMAGES, apis.GRPC, apis.GRPC_EMBED))

#: APIs whose paths have bodies of different forms.
_BY_PATH = frozenset((apis.CONVERSATIONS, apis.SGLANG))

#: Takes a body and its content type. Returns `None` for a body that is too large to read a second time. Raises
#: `ClientError`.
Parser = Callable[[bytes, str], Parsed]

_PARSERS: Mapping[str, Parser] = {
    apis.CHAT: parse_chat,
    apis.COMPLETIONS: parse_completion,
    apis.EMBEDDINGS: parse_embeddings,
    apis.RESPONSES: parse_responses,
    apis.MESSAGES: parse_messages,
    apis.COUNT_TOKENS: parse_count,
    apis.SCORE: parse_score,
    apis.RERANK: parse_rerank,
    apis.POOLING: parse_pooling,
    apis.AUDIO: parse_audio,
    apis.IMAGES: parse_images,
    apis.GENERATE: parse_generate,
    apis.GRPC: partial(parse_grpc, apis.GRPC),
    apis.GRPC_EMBED: partial(parse_grpc, apis.GRPC_EMBED),
    apis.TOKENIZE: parse_tokenize,
    apis.RENDER: parse_render,
}

UNREAD_PATH = ParsedRequest(unread="path")


def parse_request(path: str, body: bytes, content_type: str = "", *, content_encoding: str = "") -> ParsedRequest:
    """Understand one whole request body.

    `content_type` tells forms from JSON for APIs that take both. For the others it only adds a hint to error messages:
    the model server decides whether to refuse JSON with a wrong content type.
    A body with a `content_encoding` other than `identity` is not read; the request is scheduled without it.
    Raises `ClientError` (400) for a body that cannot be read, and no other exception. Time is linear in the body.
    """
    api = EXACT.get(path) or api_of(path)
    parser = _parser(api, path)
    if parser is None:
        if api != OTHER:
            return unread(api, "path")
        if "json" in content_type.lower():  # vLLM has more paths for chats, e.g. `/invocations`
            refuse_transfers(body)
        return UNREAD_PATH
    if content_encoding and content_encoding.strip().lower() != "identity":
        return unread(api, "content-encoding", len(body))
    if not body:
        raise ClientError("The request has no body.")
    try:
        return parser(body, content_type) or too_large(path, body)
    except ClientError as error:
        raise explained(error, path, content_type) from None


def parser_of(path: str, content_encoding: str = "") -> Parser | None:
    """The parser that `parse_request` would use for a body that is not empty; `None` = the body would not be read.

    For callers that read many bodies of one path. They must pass a `None` that the parser returns to `too_large`, and a
    `ClientError` that it raises to `explained`.
    """
    return None if content_encoding else _parser(api_of(path), path)


def _parser(api: str, path: str) -> Parser | None:
    return _PARSERS.get(api) if api not in _BY_PATH else _parser_by_path(api, path)


def _parser_by_path(api: str, path: str) -> Parser | None:
    if api == apis.SGLANG:
        return parse_sglang_stream if path.startswith("/generate_stream") else parse_sglang
    return None if apis.names_stored(path) else parse_conversation


def explained(error: ClientError, path: str, content_type: str) -> ClientError:
    """The error that a parser raised, with a hint added if the content type may be the cause."""
    if not content_type or "json" in content_type.lower() or api_of(path) in _OTHER_TYPES:
        return error
    hint = f"{error.message} Its content type is {content_type[:80]!r}; application/json is expected."
    return ClientError(hint, error.status, error.param, error.code)


def too_large(path: str, body: bytes) -> ParsedRequest:
    """The result for a body that is too large to read a second time: the parser returned `None`."""
    return unread(api_of(path), "too-large", len(body))
