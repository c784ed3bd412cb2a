"""The raw JSON bytes of a prompt: what stays a prefix when it grows, and how long it really is."""

import re

from msgspec import Raw

#: An inline image costs about this much text: 1,000 tokens at 4.2 bytes. Its base64 length says nothing.
MEDIA_BYTES = 4200
#: Smaller bodies are not searched for media: the search would cost as much as all else, and they hold thumbnails only.
MEDIA_FLOOR = 32768

_MEDIA = re.compile(rb";base64,[A-Za-z0-9+/=_\\-]{256,}+")
_SPACE = b" \t\r\n"


def list_prefix(raw: Raw) -> memoryview | None:
    """The bytes of a JSON array without its closing bracket and the white space before it; `None` = not an array.

    What is appended to the array later leaves these bytes as they are.
    """
    view = memoryview(raw)
    if not view or view[0] != 0x5B:
        return None
    end = len(view) - 1
    while view[end - 1] in _SPACE:
        end -= 1
    return view[:end]


def token_ids(array: memoryview) -> int:
    """Number of token ids in a list of integers, or in a list of such lists; 0 for anything else."""
    start = bytes(array[:64]).lstrip(b"[ \t\r\n")
    return bytes(array).count(b",") + 1 if start[:1].isdigit() else 0


def media_excess(body: bytes) -> int:
    """By how many bytes inline media (`data:…;base64,…`) are longer than the text that costs as many tokens."""
    if _MEDIA.search(body) is None:
        return 0
    return sum(found.end() - found.start() - MEDIA_BYTES for found in _MEDIA.finditer(body))
