"""`ParsedRequest`, which the reader of every API returns, and the helpers that the readers share."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder
from msgspec.structs import replace

from fairlead.apis.body import ABSENT, Scalar, count
from fairlead.core.apis import OTHER, STREAMING
from fairlead.core.errors import ClientError

B = TypeVar("B")
#: Longest accepted model name, in characters. No model has a longer one, and names are kept as keys and labels.
MAX_MODEL_CHARS = 1024
#: A longer user name is not used as a session hint.
MAX_USER_CHARS = 1024
#: The highest `n` that vLLM accepts (VLLM_MAX_N_SEQUENCES). vLLM has dropped `best_of`.
MAX_N = 16384

#: First bytes of a JSON string and of `null`; nothing else begins with them.
QUOTE = 0x22
NULL = 0x6E


class ParsedRequest(Struct, frozen=True, gc=False):
    """What was read from a body. It holds views of the body: drop `prompt` once hashed to free the body's memory."""

    #: See `core.apis`.
    api: str = OTHER
    #: The model as the client wrote it; empty = none named (the engine uses its default).
    model: str = ""
    #: Whether the request asks for a stream. If the body could not be read: whether its API can stream.
    stream: bool = False
    #: Output limit in tokens; 0 = none.
    max_tokens: int = 0
    #: Whether the client wants the usage in its stream (`stream_options.include_usage`).
    include_usage: bool = False
    #: Number of completions requested, for all prompts together.
    n: int = 1
    #: Raw bytes that form the prompt, to be hashed one after another. The closing bracket is left out, so that a
    #: growing conversation or token list keeps its former bytes as a prefix. Empty if nothing goes through the
    #: engine's prefix cache (token counts, audio, images).
    prompt: tuple[memoryview | bytes, ...] = ()
    #: The scope of the prompt: API, model, salt, tools, template. Different fields never give equal bytes.
    root: bytes = b""
    #: Size of the prompt as text, tools and documents included. Each media item counts as `prompt.MEDIA_BYTES`.
    prompt_bytes: int = 0
    #: Exact number of prompt tokens when the prompt was sent as token ids; 0 = unknown.
    prompt_tokens: int = 0
    #: The user or conversation that the body names: OpenAI's `conversation`, `prompt_cache_key` or `user`, Anthropic's
    #: `metadata.user_id`; empty = none, or not a short string.
    user: str = ""
    #: Why the body was not read: `path`, `no-body` (it may be there, not shown), `empty`, `content-type`,
    #: `content-encoding`, `grpc-encoding`, `too-large` (see `body.SALVAGE_LIMIT`); empty = the body was read.
    unread: str = ""
    #: Number of images, sounds, videos and files in the prompt.
    media: int = 0
    #: Whether the engine computes the whole prompt without its cache, because its log-probabilities are asked for.
    recomputed: bool = False


def unread(api: str, why: str, size: int = 0) -> ParsedRequest:
    """A request whose body of `size` bytes could not be read. It is scheduled by its path and size."""
    return ParsedRequest(api, stream=api in STREAMING, prompt_bytes=size, unread=why)


def named(model: str | None, salt: Raw) -> bytes:
    """Model and cache salt, for a root. The length before every part of a root ensures that different parts never give
    the same root. Raises `ClientError`."""
    name = model_bytes(model)
    if value := sent(salt):
        return b"%d:%b salt %d:%b" % (len(name), name, len(value), value)
    return b"%d:%b" % (len(name), name)


def scoped(parsed: ParsedRequest, target: str) -> ParsedRequest:
    """Return the request with the root that it would have if it named `target`."""
    old, new = (text.encode("utf-8", "surrogatepass") for text in (parsed.model, target))
    root = parsed.root.replace(b" %d:%b" % (len(old), old), b" %d:%b" % (len(new), new), 1)
    return replace(parsed, root=root)


def scope(root: bytes, *parts: tuple[bytes, Raw]) -> bytes:
    """Append the fields that were sent to `root`, each with its name."""
    for name, raw in parts:
        if raw is not ABSENT and (value := sent(raw)):
            root += b" %b %d:%b" % (name, len(value), value)
    return root


def sent(raw: Raw) -> bytes:
    """The raw bytes of a field; empty if it is absent or null, which mean the same."""
    if raw is ABSENT:
        return b""
    value = bytes(raw)
    return b"" if value == b"null" else value


class _Members(Struct, gc=False):
    """What is read of `reasoning` and `output_config`, `thinking`, and `metadata`."""

    effort: Raw = ABSENT
    type: Raw = ABSENT
    user_id: Raw = ABSENT


_decode_members = Decoder(_Members).decode


def members_of(raw: Raw) -> _Members:
    """The members of a field that is an object; all are absent if it cannot be read."""
    try:
        return _decode_members(raw) if is_sent(raw) else _Members()
    except (DecodeError, UnicodeDecodeError, RecursionError):
        return _Members()


def is_sent(raw: Raw) -> bool:
    """Whether a field is neither absent nor null. Reads one byte."""
    view = memoryview(raw)
    return bool(view) and view[0] != NULL


def model_bytes(model: str | None) -> bytes:
    """The name of a model in UTF-8. Raises `ClientError` if it cannot be one."""
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
    """The first of the fields that is a short string; empty if none is."""
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
    """The number of completions requested for all prompts together. Raises `ClientError`."""
    return min(max(count(n, "n"), 1) * prompts, MAX_N)


class Text(NamedTuple):
    """A prompt in one of the forms that most APIs accept."""

    #: Bytes to hash.
    view: memoryview
    #: The size of the prompt as text, in bytes.
    size: int
    #: The exact number of tokens if the prompt is token ids, otherwise 0.
    tokens: int


#: The result of a reader; `None` = the body is too large for a second reading.
Parsed = ParsedRequest | None


def reading(
    read: Callable[[bytes], B | None],
) -> Callable[[Callable[[B], ParsedRequest]], Callable[[bytes, str], Parsed]]:
    """Decorate a function of the struct that `read` returns, to make it a parser of bodies. Raises `ClientError`."""

    def parser(parse: Callable[[B], ParsedRequest]) -> Callable[[bytes, str], Parsed]:
        def parse_body(body: bytes, content_type: str) -> Parsed:
            body_fields = read(body)
            return None if body_fields is None else parse(body_fields)

        return parse_body

    return parser
