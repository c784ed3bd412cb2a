"""Makes a request for one token from the beginning of a prompt. Its only effect is to fill an engine's cache."""

from msgspec import DecodeError, Raw, ValidationError
from msgspec.json import Decoder, encode

from fairlead.apis.body import ABSENT
from fairlead.apis.parsed import is_sent
from fairlead.core.apis import CHAT, COMPLETIONS

#: Fields that shape the prompt in addition to its text. Sampling, user and all other fields are dropped.
_KEPT = (
    "model", "tools", "tool_choice", "documents", "cache_salt", "chat_template", "chat_template_kwargs",
    "reasoning_effort", "mm_processor_kwargs", "media_io_kwargs", "add_special_tokens",
)  # fmt: skip
#: Appended because chat templates expect the last message to be a user's.
_TURN = b'{"role":"user","content":"."}'
#: A cut can fall inside a character or inside its escape; the longest escape is `\\uXXXX\\uXXXX`.
_LONGEST_ESCAPE = 12
_QUOTE = b'"'
_fields = Decoder(dict[str, Raw]).decode
_items = Decoder(list[Raw]).decode
_text = Decoder(str).decode


def beginning(api: str, body: bytes, end: int) -> bytes:
    """Return a body that asks for one token after the first `end` bytes of a JSON body's raw prompt
    (`ParsedRequest.prompt`), verbatim. Empty if they cannot be cut off: another API, several prompts, content in
    parts."""
    try:
        given = _fields(body)
        if is_sent(given.get("truncate_prompt_tokens", ABSENT)):  # the engine may read only the prompt's end
            return b""
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
    """The messages that end before `end`, and the cut beginning of the next one; empty if nothing is left."""
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
    """The message with its content cut at byte `end`; empty if no content is left, or the content is no text."""
    content = bytes(_fields(raw)["content"])
    start = raw.rindex(content)
    cut = _string(content, end - start)
    return raw[:start] + cut + raw[start + len(content) :] if cut else b""


def _prompt(raw: bytes, end: int) -> bytes:
    """The beginning of a text or of token ids. The raw prompt of a text begins after the opening quote."""
    if raw.startswith(_QUOTE):
        return _string(raw, end + 1)
    ids = raw[:end].rpartition(b",")[0]
    return ids + b"]" if ids[1:].lstrip()[:1].isdigit() else b""


def _string(raw: bytes, end: int) -> bytes:
    """The first `end` bytes of a JSON string, closed by a quote; empty if no text is left."""
    for dropped in range(_LONGEST_ESCAPE):
        cut = raw[: max(end - dropped, 0)].removesuffix(_QUOTE) + _QUOTE
        try:
            return cut if _text(cut) else b""
        except (DecodeError, UnicodeDecodeError):
            continue
    return b""
