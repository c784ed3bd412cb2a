"""The raw JSON bytes of a prompt: what stays a prefix when it grows, and how long it is."""

from msgspec import Raw

from fairlead.parse.parsed import QUOTE, Text, is_sent

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


def text_or_list(raw: Raw) -> Text | None:
    """A prompt that is a string, a list of strings, of token ids, or of such lists; `None` for anything else."""
    view = memoryview(raw)
    if view and view[0] == QUOTE:
        return Text(view[1:-1], len(view) - 2, 0)
    array = list_prefix(raw)
    return None if array is None else Text(array, len(array), token_ids(array))


def anything(raw: Raw) -> Text:
    """Like `text_or_list`, and a value of any other type as it stands; nothing for null and for what was not sent."""
    text = text_or_list(raw)
    if text is not None:
        return text
    view = memoryview(raw) if is_sent(raw) else memoryview(b"")
    return Text(view, len(view), 0)


def token_ids(array: memoryview) -> int:
    """Number of token ids in a list of integers, or in a list of such lists; 0 for anything else."""
    start = bytes(array[:64]).lstrip(b"[ \t\r\n")
    return bytes(array).count(b",") + 1 if start[:1].isdigit() else 0
