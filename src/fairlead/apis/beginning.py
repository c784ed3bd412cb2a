"""The beginning of a prompt as a request of its own, for one token: what fills a cache with it and nothing else."""

from msgspec import DecodeError, Raw, ValidationError
from msgspec.json import Decoder, encode

from fairlead.core.apis import CHAT, COMPLETIONS

#: What makes the prompt beside its text. Sampling, user and all else of the body stay behind.
_KEPT = (
    "model", "tools", "tool_choice", "documents", "cache_salt", "chat_template", "chat_template_kwargs",
    "reasoning_effort", "mm_processor_kwargs", "add_special_tokens",
)  # fmt: skip
#: Templates want a user's turn at the end.
_TURN = b'{"role":"user","content":"."}'
#: A string can be cut within a character, or within its escape (`\\uXXXX\\uXXXX`).
_LONGEST_ESCAPE = 12
_QUOTE = b'"'
_fields = Decoder(dict[str, Raw]).decode
_items = Decoder(list[Raw]).decode
_text = Decoder(str).decode


def beginning(api: str, body: bytes, end: int) -> bytes:
    """The first `end` bytes of the raw prompt of a JSON body (`ParsedRequest.prompt`), verbatim, as a body that asks
    for one token. Empty where they cannot be cut off: another API, several prompts, content in parts."""
    try:
        given = _fields(body)
        if api == CHAT:
            name, prompt = "messages", _messages(bytes(given["messages"]), end)
        elif api == COMPLETIONS:
            name, prompt = "prompt", _prompt(bytes(given["prompt"]), end)
        else:
            return b""
    except (DecodeError, ValidationError, UnicodeDecodeError, RecursionError, KeyError, ValueError):
        return b""
    if not prompt:
        return b""
    kept = {key: given[key] for key in _KEPT if key in given}
    return encode({**kept, name: Raw(prompt), "max_tokens": 1, "stream": True})


def _messages(raw: bytes, end: int) -> bytes:
    """Whole messages, and what is left of the next."""
    position, last, kept = 1, Raw(b"{}"), b""
    for message in map(bytes, _items(raw)):
        start = raw.index(message, position)
        position = start + len(message)
        cut = message if position <= end else _message(message, end - start)
        if cut:
            last, kept = Raw(cut), raw[:start] + cut
        if position > end:
            break
    if not kept:
        return b""
    asks = _text(_fields(last)["role"]) == "user"
    return kept + (b"]" if asks else b"," + _TURN + b"]")


def _message(raw: bytes, end: int) -> bytes:
    """With its first `end` bytes and what comes behind its content; empty = nothing of its content, or no text."""
    content = bytes(_fields(raw)["content"])
    start = raw.rindex(content)
    cut = _string(content, end - start)
    return raw[:start] + cut + raw[start + len(content) :] if cut else b""


def _prompt(raw: bytes, end: int) -> bytes:
    """A text, or token ids. The raw prompt of a text begins behind its quote."""
    if raw.startswith(_QUOTE):
        return _string(raw, end + 1)
    ids = raw[:end].rpartition(b",")[0]
    return ids + b"]" if ids[1:].lstrip()[:1].isdigit() else b""


def _string(raw: bytes, end: int) -> bytes:
    """The first `end` bytes of a JSON string, as one; empty = no text is left."""
    for dropped in range(_LONGEST_ESCAPE):
        cut = raw[: max(end - dropped, 0)].removesuffix(_QUOTE) + _QUOTE
        try:
            return cut if _text(cut) else b""
        except (DecodeError, UnicodeDecodeError):
            continue
    return b""
