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
"""

from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder

from fairlead.model.errors import ClientError
from fairlead.parse.api import CHAT, COMPLETIONS, OTHER, api_of
from fairlead.parse.body import ABSENT, Body, ChatBody, Scalar, count, flag, read_chat, read_completion
from fairlead.parse.prompt import MEDIA_FLOOR, list_prefix, media_excess, token_ids
from fairlead.parse.span import model_span

__all__ = ["ParsedRequest", "model_span", "parse_request"]

#: Longer names cannot be a model's, and they would be kept as keys and labels.
MAX_MODEL_CHARS = 1024
#: Longer ones are not used as a session hint.
MAX_USER_CHARS = 1024
#: The highest `n` that vLLM takes (VLLM_MAX_N_SEQUENCES).
MAX_N = 16384

_QUOTE = 0x22
#: First byte of `null`; nothing else begins with it.
_NULL = 0x6E


class ParsedRequest(Struct, frozen=True, gc=False):
    """What a body says. It holds views of the body: drop `prompt` once it is hashed, or the body stays in memory."""

    #: `chat`, `completions`, or `other`: passed through unread, still scheduled.
    api: str = OTHER
    #: As the client wrote it; empty = none named (the engine takes its default).
    model: str = ""
    stream: bool = False
    #: Output limit; 0 = none.
    max_tokens: int = 0
    #: The client wants usage in its stream (`stream_options.include_usage`).
    include_usage: bool = False
    #: Completions asked for.
    n: int = 1
    #: Raw JSON bytes that form the prompt, to be hashed one after another. A conversation that grows by appended
    #: messages, or a growing token list, keeps its former bytes as a prefix: the closing bracket is left out.
    prompt: tuple[memoryview, ...] = ()
    #: What scopes the prompt: API, model, salt, tools, template. Different fields never give equal bytes.
    root: bytes = b""
    #: Size of the prompt as text, tools and documents included, inline media taken as `prompt.MEDIA_BYTES` each.
    prompt_bytes: int = 0
    #: Exact number of prompt tokens when the prompt was sent as token ids; 0 = unknown.
    prompt_tokens: int = 0
    #: OpenAI's `user`; empty = none, or not a short string.
    user: str = ""
    #: Why the body was not read: `path`, `content-encoding`, `too-large` (see `body.SALVAGE_LIMIT`); empty = it was.
    unread: str = ""


UNREAD_PATH = ParsedRequest(unread="path")


def parse_request(
    path: str, body: bytes, content_type: str = "", *, content_encoding: str = "", prefix: str | None = None
) -> ParsedRequest:
    """Understand one whole request body.

    `content_type` only sharpens the error message: a JSON body under a wrong type is the model server's to refuse.
    `content_encoding` other than `identity` makes the body unreadable; it is scheduled unread. `prefix`: see `api_of`.
    Raises `ClientError` (400) for what cannot be read; no other exception for any bytes. Time is linear in the body.
    """
    api = api_of(path, prefix)
    if api == OTHER:
        return UNREAD_PATH
    if content_encoding and content_encoding.strip().lower() != "identity":
        return ParsedRequest(prompt_bytes=len(body), unread="content-encoding")
    if not body:
        raise ClientError("The request has no body.")
    try:
        parsed = _chat(body) if api == CHAT else _completion(body)
    except ClientError as exc:
        if not content_type or "json" in content_type.lower():
            raise
        hint = f"{exc.message} Its content type is {content_type[:80]!r}; application/json is expected."
        raise ClientError(hint, exc.status, exc.param, exc.code) from None
    return parsed or ParsedRequest(prompt_bytes=len(body), unread="too-large")


def _chat(body: bytes) -> ParsedRequest | None:
    read = read_chat(body)
    if read is None:
        return None
    messages = list_prefix(read.messages)
    if messages is None:
        raise ClientError("Missing required parameter: 'messages' must be a list.", param="messages")
    if len(messages) == 1:
        raise ClientError("'messages' is empty. Provide at least one message.", param="messages")
    limit = read.max_tokens if read.max_completion_tokens is None else read.max_completion_tokens
    root, scope_bytes = _chat_root(read)
    size = len(messages) + scope_bytes
    if len(body) > MEDIA_FLOOR:
        size = max(size - media_excess(body), 1)
    return _parsed(CHAT, read, limit, messages, root, size, 0)


def _completion(body: bytes) -> ParsedRequest | None:
    read = read_completion(body)
    if read is None:
        return None
    root = b"completions %b" % _named(read)
    text = memoryview(read.prompt)
    if text and text[0] == _QUOTE:
        return _parsed(COMPLETIONS, read, read.max_tokens, text[1:-1], root, len(text) - 2, 0)
    array = list_prefix(read.prompt)
    if array is not None:
        return _parsed(COMPLETIONS, read, read.max_tokens, array, root, len(array), token_ids(array))
    if text and text[0] != _NULL:
        raise ClientError("Invalid type for 'prompt': expected a string or a list.", param="prompt")
    embeds = memoryview(read.prompt_embeds)
    if not embeds or embeds[0] == _NULL:
        raise ClientError("Missing required parameter: 'prompt'.", param="prompt")
    # Embeddings are hashed like text, but their size says nothing about tokens.
    return _parsed(COMPLETIONS, read, read.max_tokens, list_prefix(read.prompt_embeds) or embeds, root, 0, 0)


def _parsed(
    api: str, read: Body, limit: Scalar, prompt: memoryview, root: bytes, size: int, token_ids: int
) -> ParsedRequest:
    stream, options = read.stream, read.stream_options
    return ParsedRequest(
        api,
        read.model or "",
        stream if stream is True or stream is False else flag(stream, "stream"),
        count(limit, "max_tokens"),
        options is not None and flag(options.include_usage, "stream_options"),
        1 if read.n is None else min(max(count(read.n, "n"), 1), MAX_N),
        (prompt,),
        root,
        size,
        token_ids,
        "" if read.user is ABSENT else _user(read.user),
    )


def _named(read: Body) -> bytes:
    """Model and cache salt. Every part of a root is preceded by its length: different parts never join alike."""
    model = _model_bytes(read.model)
    if salt := _sent(read.cache_salt):
        return b"%d:%b salt %d:%b" % (len(model), model, len(salt), salt)
    return b"%d:%b" % (len(model), model)


def _chat_root(read: ChatBody) -> tuple[bytes, int]:
    """Root, and how many bytes of it the chat template renders into the prompt.

    `add_generation_prompt`, `continue_final_message` and `tool_choice` are left out: they change only the prompt's end.
    """
    root = b"chat %b" % _named(read)
    tools, documents = _sent(read.tools), _sent(read.documents)
    if tools:
        root += b" tools %d:%b" % (len(tools), tools)
    if documents:
        root += b" documents %d:%b" % (len(documents), documents)
    template, kwargs, effort, media = (
        read.chat_template,
        read.chat_template_kwargs,
        read.reasoning_effort,
        read.mm_processor_kwargs,
    )
    if not template is kwargs is effort is media is ABSENT:
        for name, raw in ((b"template", template), (b"kwargs", kwargs), (b"effort", effort), (b"media", media)):
            if value := _sent(raw):
                root += b" %b %d:%b" % (name, len(value), value)
    return root, len(tools) + len(documents)


def _sent(raw: Raw) -> bytes:
    """Raw bytes of a field; empty if it is absent or null, which mean the same."""
    if raw is ABSENT:
        return b""
    value = bytes(raw)
    return b"" if value == b"null" else value


def _model_bytes(model: str | None) -> bytes:
    if not model:
        return b""
    if len(model) > MAX_MODEL_CHARS:
        raise ClientError(f"'model' is longer than {MAX_MODEL_CHARS} characters.", param="model")
    try:
        return model.encode()
    except UnicodeEncodeError:
        raise ClientError("'model' is not valid Unicode text.", param="model") from None


_decode_str = Decoder(str).decode


def _user(raw: Raw) -> str:
    try:
        user = _decode_str(raw)
    except (DecodeError, UnicodeDecodeError):
        return ""
    return user if len(user) <= MAX_USER_CHARS else ""
