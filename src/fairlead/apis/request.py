"""A request body, understood just enough to schedule it.

Fairlead refuses only what cannot be read as JSON or cannot be scheduled sensibly; all else is the model server's to
answer, in its own words. Measured answers of vLLM 0.32 and what is done here:

| body                                             | vLLM                | here |
|--------------------------------------------------|---------------------|------|
| not JSON, not an object, broken UTF-8            | 400                 | 400  |
| `messages` missing, empty, not a list            | 400                 | 400  |
| `prompt` (and `prompt_embeds`) missing           | 400                 | 400  |
| wrong type: `model`, `stream`, `max_tokens`, `n`, `stream_options` | 400 | 400  |
| `prompt` empty, `max_tokens` < 1, token ids out of range | 400         | pass |
| `stream_options` without `stream`, wrong temperature, wrong content type | 400 | pass |
| `model` missing; unknown fields; too large `max_tokens`  | 200         | pass |
| unknown model                                    | 404                 | pass |

The same holds for the other APIs. Their parsers are in this folder; docs/apis.md has the table.
"""

from collections.abc import Callable, Mapping

from fairlead.apis.anthropic import parse_count, parse_messages
from fairlead.apis.engine_grpc import parse_grpc_embed, parse_grpc_generate
from fairlead.apis.generate import parse_generate, parse_sglang
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

#: Their bodies are not JSON, or need not be.
_OTHER_TYPES = frozenset((apis.AUDIO, apis.IMAGES, apis.GRPC, apis.GRPC_EMBED))

#: Takes a body and its content type; raises `ClientError`.
Parser = Callable[[bytes, str], Parsed]

_PARSERS: Mapping[str, Parser] = {
    apis.CHAT: parse_chat,
    apis.COMPLETIONS: parse_completion,
    apis.EMBEDDINGS: parse_embeddings,
    apis.RESPONSES: parse_responses,
    apis.CONVERSATIONS: parse_conversation,
    apis.MESSAGES: parse_messages,
    apis.COUNT_TOKENS: parse_count,
    apis.SCORE: parse_score,
    apis.RERANK: parse_rerank,
    apis.POOLING: parse_pooling,
    apis.AUDIO: parse_audio,
    apis.IMAGES: parse_images,
    apis.GENERATE: parse_generate,
    apis.SGLANG: parse_sglang,
    apis.GRPC: parse_grpc_generate,
    apis.GRPC_EMBED: parse_grpc_embed,
    apis.TOKENIZE: parse_tokenize,
    apis.RENDER: parse_render,
}

UNREAD_PATH = ParsedRequest(unread="path")


def parse_request(path: str, body: bytes, content_type: str = "", *, content_encoding: str = "") -> ParsedRequest:
    """Understand one whole request body.

    `content_type` tells forms from JSON where both are taken. Elsewhere it only sharpens the error message: a JSON body
    under a wrong type is the model server's to refuse.
    `content_encoding` other than `identity` makes the body unreadable; it is scheduled unread.
    Raises `ClientError` (400) for what cannot be read; no other exception for any bytes. Time is linear in the body.
    """
    api = EXACT.get(path) or api_of(path)
    parser = _PARSERS.get(api)
    if parser is None:
        return UNREAD_PATH if api == OTHER else unread(api, "path")
    if content_encoding and content_encoding.strip().lower() != "identity":
        return unread(api, "content-encoding", len(body))
    if not body:
        raise ClientError("The request has no body.")
    try:
        return parser(body, content_type) or too_large(path, body)
    except ClientError as error:
        raise explained(error, path, content_type) from None


def parser_of(path: str, content_encoding: str = "") -> Parser | None:
    """What `parse_request` would have read a body that is not empty; `None` = it reads none of these.

    For whoever reads many bodies of one path: what the parser returns or raises goes to `too_large` or `explained`.
    """
    return None if content_encoding else _PARSERS.get(api_of(path))


def explained(error: ClientError, path: str, content_type: str) -> ClientError:
    """What a parser raised, with a hint where the body may be of another type."""
    if not content_type or "json" in content_type.lower() or api_of(path) in _OTHER_TYPES:
        return error
    hint = f"{error.message} Its content type is {content_type[:80]!r}; application/json is expected."
    return ClientError(hint, error.status, error.param, error.code)


def too_large(path: str, body: bytes) -> ParsedRequest:
    """In place of what a parser returned nothing for: the body is too large for a second reading."""
    return unread(api_of(path), "too-large", len(body))
