"""The raw JSON bytes of a prompt: the part that stays a prefix when the prompt grows, its size, and its media."""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from itertools import islice
from typing import TypeVar

from msgspec import DecodeError, Raw, Struct, defstruct
from msgspec.json import Decoder
from msgspec.structs import astuple

from fairlead.apis.body import ABSENT
from fairlead.apis.parsed import MAX_N, QUOTE, Text, is_sent
from fairlead.core.tokens import DEFAULT_BYTES_PER_TOKEN

_SPACE = b" \t\r\n"


def list_prefix(raw: Raw) -> memoryview | None:
    """The bytes of a JSON array without its closing bracket and the white space before it; `None` = not an array.

    Appending to the array later does not change these bytes.
    """
    view = memoryview(raw)
    if not view or view[0] != 0x5B:
        return None
    end = len(view) - 1
    while view[end - 1] in _SPACE:
        end -= 1
    return view[:end]


def text_or_list(raw: Raw) -> Text | None:
    """A prompt that is a string, a list of strings, of token ids, or of such lists; `None` for anything else."""
    view = memoryview(raw)
    if view and view[0] == QUOTE:
        return Text(view[1:-1], len(view) - 2, 0)
    array = list_prefix(raw)
    return None if array is None else Text(array, len(array), token_ids(array))


def prompts_in(raw: Raw) -> int:
    """The number of prompts in what `text_or_list` reads: the length of a list of texts or lists, otherwise 1."""
    array = list_prefix(raw)
    if array is None or bytes(array[1:64]).lstrip(_SPACE)[:1].isdigit():
        return 1
    return max(items(raw), 1)


#: Matches raw messages, a raw system prompt or a text that begins with Claude Code's header: it differs in each
#: request, and vLLM leaves its line out. The group ends behind the text's first letter.
billed = re.compile(rb'(x(?=-)|[\s\[{:,"a-z_]{0,99}+(?<="x))-anthropic-billing-header[^"\\]*+(?:\\n)?').match

T = TypeVar("T", bytes, memoryview)


def unbilled(text: T) -> T | memoryview:
    """Raw messages or a raw system prompt without the line of Claude Code's header; copied only if they have it."""
    match = billed(text)
    return text if match is None else memoryview(match[1][:-1] + bytes(text[match.end() :]))


_decode_items = Decoder(list[Raw]).decode


#: A list with fewer commas is counted as objects, 60 bytes each.
_FEW_COMMAS = 4 * MAX_N


@cache
def _decode_first(most: int) -> Callable[[bytes | Raw], Struct]:
    """Reads the first `most` items of a list and skips the others: 30 million items are 1.7 GB as objects. Of a shorter
    list the rest is absent."""
    fields = [(f"item_{number}", Raw, ABSENT) for number in range(most)]
    return Decoder(defstruct("First", fields, array_like=True, gc=False)).decode


def items(raw: Raw) -> int:
    """The number of items in a list, `MAX_N` if it has more; 1 for a single value, 0 if nothing was sent."""
    if not is_sent(raw):
        return 0
    try:
        if bytes(raw).count(b",") < _FEW_COMMAS:
            return min(len(_decode_items(raw)), MAX_N)
        read = astuple(_decode_first(MAX_N)(raw))
    except (DecodeError, UnicodeDecodeError, RecursionError):
        return 1
    return MAX_N if read[-1] is not ABSENT else read.index(ABSENT)


def truncated(root: bytes, text: Text, limit: int, side: object) -> tuple[bytes, Text]:
    """The root and the part of a prompt of which the engine keeps `limit` tokens; 0 = all. `side`: "right" = it drops
    the end, anything else = it drops the beginning.

    Without the beginning each turn of a conversation begins elsewhere, so only prompts of equal length share the root.
    Whether a text is longer is a guess.
    """
    tokens = text.tokens or int(text.size / DEFAULT_BYTES_PER_TOKEN)
    if not 0 < limit < tokens:
        return root, text
    size, tokens = text.size * limit // tokens, text.tokens and limit
    if side == "right":
        return root, Text(text.view[:size], size, tokens)
    return root + b" last %d of %d" % (limit, len(text.view)), Text(text.view[-size:], size, tokens)


def anything(raw: Raw) -> Text:
    """Like `text_or_list`, but any other value is taken as its raw bytes. Empty for null and for an absent field."""
    text = text_or_list(raw)
    if text is not None:
        return text
    view = memoryview(raw) if is_sent(raw) else memoryview(b"")
    return Text(view, len(view), 0)


def token_ids(array: memoryview) -> int:
    """Number of token ids in a list of integers, or in a list of such lists; 0 for anything else."""
    start = bytes(array[:64]).lstrip(b"[ \t\r\n")
    return bytes(array).count(b",") + 1 if start[:1].isdigit() else 0


# What a conversation begins with, so that its turns are recognised without any memory of earlier ones.

#: Messages that are looked at: system prompts and what the user wrote before the first answer.
_OPENING = 16


class _Message(Struct, gc=False):
    role: str = ""
    content: Raw = ABSENT


class _Part(Struct, gc=False):
    text: Raw = ABSENT


_decode_message, _decode_parts = Decoder(_Message).decode, Decoder(list[_Part]).decode


def openings(messages: bytes | memoryview) -> Iterator[bytes]:
    """Yield the texts of the user's messages before the first answer, which each turn of a conversation sends again,
    then those before the second answer, and so on. Nothing if there are none, or if `messages` is no list of messages.
    `messages`: the last segment of `ParsedRequest.prompt`.

    System prompts are left out, because many contain the time of day. So are the other members of a part: clients move
    their cache marks from turn to turn."""
    raw, texts, last = bytes(messages), list[bytes](), b""
    if raw and raw[:1] != b"[":  # the Responses API takes a text for a single message
        yield raw
        return
    with suppress(DecodeError, UnicodeDecodeError, RecursionError):
        for item in (*astuple(_decode_first(_OPENING)(raw + b"]")), ABSENT):
            message = _decode_message(item) if item is not ABSENT else None
            if message is not None and message.role == "user":
                texts.append(_text_of(message.content))
            elif message is None or message.role not in ("system", "developer"):
                written = b"\n".join(texts)
                if written != last:  # otherwise this message belongs to the same answer
                    yield (last := written)
            if message is None:
                return


def _text_of(content: Raw) -> bytes:
    raw = bytes(content)
    if raw[:1] == b"[":
        raw = b'"'.join(bytes(part.text)[1:] for part in _decode_parts(raw) if is_sent(part.text))
    return raw.strip(b'"')


# Counts the images, sounds, videos and files among the parts of a message, and the size of the prompt without them.
#
# An inline item costs tokens by its resolution or duration, not by the length of its base64 text, and an item that is
# given by URL costs the same. So each item counts as `MEDIA_BYTES` of text.

#: 1,000 tokens at 4.2 bytes.
MEDIA_BYTES = 4200

#: The type of a part as OpenAI's, vLLM's and Anthropic's APIs name it. Text cannot match: its quotes are escaped.
_PART = re.compile(
    rb'"type"[ \t\r\n]*:[ \t\r\n]*"(?:computer_screenshot|'
    rb'(?:input_)?(?:image|audio|video|file|document)(?:_url|_pil|_embeds)?)"'
)
#: Marks of places where inline data may begin: a data URL, or a member `data` (`input_audio`, Anthropic's `source`),
#: `file_data` or an embedding of vLLM. `find` is ten times as fast as a pattern for all of them.
_INLINE = (b";base64,", b'data"', b'_embeds"')
_MEMBERS = (b'"data"', b'"file_data"', b'"image_embeds"', b'"audio_embeds"', b'"video_embeds"')
_DATA = re.compile(rb";base64,")
_VALUE = re.compile(rb'[ \t\r\n]*:[ \t\r\n]*"')
#: A data URL is not longer before its data.
_LONGEST_KIND = 256
#: The beginning of inline data. Shorter data is left in the size: it hardly matters.
_BASE64 = re.compile(rb"[A-Za-z0-9+/=_\\-]{256}")


def media_items(messages: memoryview) -> int:
    """The number of media items in a list of messages, `MAX_N` if it has more. Costs 0.4 µs per kB."""
    return sum(1 for _ in islice(_PART.finditer(messages), MAX_N))


def measured(messages: memoryview) -> tuple[int, int]:
    """The number of media items, and the size in bytes of a text that costs as many tokens as the messages. It looks at
    the first `MAX_N` places where inline data may begin. Parts without a type are known by a whole data URL. Costs
    0.8 µs per kB if there are no media."""
    size = length = len(messages)
    items, inline = media_items(messages), 0
    if not items and _DATA.search(messages) is None:
        return 0, size
    raw = bytes(messages)
    position = 0
    nearest = dict.fromkeys(_INLINE if items else _INLINE[:1], -1)
    for _ in range(MAX_N):
        for mark, place in nearest.items():
            if place < position:
                place = raw.find(mark, position)
                nearest[mark] = length if place < 0 else place
        mark = min(nearest, key=nearest.__getitem__)
        if nearest[mark] == length:
            break
        position = nearest[mark] + len(mark)
        if mark != _INLINE[0]:
            value = _VALUE.match(raw, position) if raw.endswith(_MEMBERS, 0, position) else None
            if value is None:
                continue
            position = value.end()
        elif not items and not _begins_url(raw, position):
            continue
        if _BASE64.match(raw, position):
            # Base64 has no quotes, so the next quote ends the string. `find` has the speed of memchr.
            end = raw.find(b'"', position)
            end = length if end < 0 else end
            size -= end - position
            position = end
            inline += 1
    items = max(items, inline)
    return items, size + items * MEDIA_BYTES


def _begins_url(raw: bytes, end: int) -> bool:
    """Whether the string of which this is the end so far is a data URL: else it is a text that has one."""
    start = raw.rfind(b'"', max(end - _LONGEST_KIND, 0), end) + 1
    return raw.startswith(b"data:", start)
