"""What every API's reader makes of a body, and the pieces that they share."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder

from fairlead.apis.body import ABSENT, Scalar, count
from fairlead.core.apis import OTHER, STREAMING
from fairlead.core.errors import ClientError

B = TypeVar("B")
#: Longer names cannot be a model's, and they would be kept as keys and labels.
MAX_MODEL_CHARS = 1024
#: Longer ones are not used as a session hint.
MAX_USER_CHARS = 1024
#: The highest `n` that vLLM takes (VLLM_MAX_N_SEQUENCES). It does not know `best_of` any more.
MAX_N = 16384

#: First bytes of a JSON string and of `null`; nothing else begins with them.
QUOTE = 0x22
NULL = 0x6E


class ParsedRequest(Struct, frozen=True, gc=False):
    """What a body says. It holds views of the body: drop `prompt` once it is hashed, or the body stays in memory."""

    #: See `core.apis`.
    api: str = OTHER
    #: As the client wrote it; empty = none named (the engine takes its default).
    model: str = ""
    #: It asks for a stream; of a body that could not be read: it may.
    stream: bool = False
    #: Output limit; 0 = none.
    max_tokens: int = 0
    #: The client wants usage in its stream (`stream_options.include_usage`).
    include_usage: bool = False
    #: Completions asked for, for all prompts together.
    n: int = 1
    #: Raw bytes that form the prompt, to be hashed one after another. A conversation that grows by appended messages,
    #: or a growing token list, keeps its former bytes as a prefix: the closing bracket is left out. Empty when nothing
    #: goes through the engine's prefix cache (token counts, audio, images).
    prompt: tuple[memoryview | bytes, ...] = ()
    #: What scopes the prompt: API, model, salt, tools, template. Different fields never give equal bytes.
    root: bytes = b""
    #: Size of the prompt as text, tools and documents included, each media item taken as `media.MEDIA_BYTES`.
    prompt_bytes: int = 0
    #: Exact number of prompt tokens when the prompt was sent as token ids; 0 = unknown.
    prompt_tokens: int = 0
    #: Who or what conversation it belongs to, as the body says: OpenAI's `conversation`, `prompt_cache_key` or `user`,
    #: Anthropic's `metadata.user_id`; empty = none, or not a short string.
    user: str = ""
    #: Why the body was not read: `path`, `no-body`, `content-type`, `content-encoding`, `grpc-encoding`, `too-large`
    #: (see `body.SALVAGE_LIMIT`); empty = it was.
    unread: str = ""
    #: Images, sounds, videos and files in the prompt.
    media: int = 0


def unread(api: str, why: str, size: int = 0) -> ParsedRequest:
    """A request whose body of `size` bytes could not be read: scheduled by its path and its size."""
    return ParsedRequest(api, stream=api in STREAMING, prompt_bytes=size, unread=why)


def named(model: str | None, salt: Raw) -> bytes:
    """Model and cache salt, for a root. Every part of a root is preceded by its length: different parts never join
    alike. Raises `ClientError`."""
    name = model_bytes(model)
    if value := sent(salt):
        return b"%d:%b salt %d:%b" % (len(name), name, len(value), value)
    return b"%d:%b" % (len(name), name)


def scope(root: bytes, *parts: tuple[bytes, Raw]) -> bytes:
    """`root` with the fields that were sent, each by name."""
    for name, raw in parts:
        if raw is not ABSENT and (value := sent(raw)):
            root += b" %b %d:%b" % (name, len(value), value)
    return root


def sent(raw: Raw) -> bytes:
    """Raw bytes of a field; empty if it is absent or null, which mean the same."""
    if raw is ABSENT:
        return b""
    value = bytes(raw)
    return b"" if value == b"null" else value


def is_sent(raw: Raw) -> bool:
    """Neither absent nor null. Looks at one byte."""
    view = memoryview(raw)
    return bool(view) and view[0] != NULL


def model_bytes(model: str | None) -> bytes:
    """Raises `ClientError` for what cannot be the name of a model."""
    if not model:
        return b""
    if len(model) > MAX_MODEL_CHARS:
        raise ClientError(f"'model' is longer than {MAX_MODEL_CHARS} characters.", param="model")
    try:
        return model.encode()
    except UnicodeEncodeError:
        raise ClientError("'model' is not valid Unicode text.", param="model") from None


_decode_str = Decoder(str).decode


def short_text(*candidates: Raw) -> str:
    """The first of some fields that is a short string; empty = none is."""
    for raw in candidates:
        if raw is ABSENT:
            continue
        try:
            text = _decode_str(raw)
        except (DecodeError, UnicodeDecodeError):
            continue
        if text and len(text) <= MAX_USER_CHARS:
            return text
    return ""


def choices(n: Scalar, prompts: int = 1) -> int:
    """Completions asked for. Raises `ClientError`."""
    return min(max(count(n, "n"), 1) * prompts, MAX_N)


class Text(NamedTuple):
    """A prompt in one of the forms that most APIs take."""

    #: Bytes to hash.
    view: memoryview
    #: Their size as text.
    size: int
    #: Exact count if they are token ids, else 0.
    tokens: int


#: What a reader returns: `None` = too large for a second reading.
Parsed = ParsedRequest | None


def reading(
    read: Callable[[bytes], B | None],
) -> Callable[[Callable[[B], ParsedRequest]], Callable[[bytes, str], Parsed]]:
    """Makes a parser, which raises `ClientError`, of a function of what `read` makes of a body."""

    def parser(parse: Callable[[B], ParsedRequest]) -> Callable[[bytes, str], Parsed]:
        def parse_body(body: bytes, content_type: str) -> Parsed:
            body_fields = read(body)
            return None if body_fields is None else parse(body_fields)

        return parse_body

    return parser
