"""Quantities as people write them: `64MiB`, `1G`, `1m30s`."""

import re
from typing import Annotated

from msgspec import Meta

from fairlead.plugins.durations import seconds

#: In a JSON Schema: the key under which a number says how it may be written as text, see `json_schema`.
AS_TEXT = "orText"
DURATION = {AS_TEXT: r"^\s*(\d+(\.\d+)?(ms|us|s|m|h))+\s*$|^0$"}
SIZE = {AS_TEXT: r"^\s*\d+(\.\d+)?\s*([kKMGT]i?)?B?\s*$"}

#: Seconds in Python; in a file a number of seconds or a string such as `1m30s`.
Seconds = Annotated[float, Meta(ge=0, extra={"unit": "duration"}, extra_json_schema=DURATION)]
#: The same, but 0 makes no sense.
PositiveSeconds = Annotated[float, Meta(gt=0, extra={"unit": "duration"}, extra_json_schema=DURATION)]
#: Bytes in Python; in a file a whole number of bytes or a string such as `64MiB`.
Bytes = Annotated[int, Meta(ge=1, extra={"unit": "size"}, extra_json_schema=SIZE)]

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kKMGT])(i?))?B?")
_POWERS = {"k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def size(text: str) -> int:
    """Bytes. `k`, `M`, `G`, `T` count in thousands, with `i` in 1024s; a `B` may follow.

    Raises `ValueError` for a string that is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("expected a size such as 64MiB, 1G or 4096")
    number, prefix, binary = match.groups()
    factor = (1024 if binary else 1000) ** _POWERS[prefix] if prefix else 1
    value = float(number) * factor
    if value > 2**60:
        raise ValueError("expected a size that fits into a machine")
    return int(number) * factor if number.isdigit() else round(value)


def duration(text: str) -> float:
    """Seconds. Raises `ValueError` for a string that is no duration."""
    try:
        value = seconds(text)
    except ValueError:
        raise ValueError("expected a duration such as 250ms, 5s, 1m30s, or a number of seconds") from None
    if value > 1e9:
        raise ValueError("expected a duration of less than 30 years")
    return value
