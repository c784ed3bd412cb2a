"""Where a JSON string ends. A prompt is one long string, so this is where the time of every scan goes.

Theory. A quote closes the string unless an odd number of backslashes stands before it. Looking for quotes is a hundred
times as fast as a regular expression over every byte, as long as few of them are escaped; past `_ESCAPED` of those the
expression takes over, so that the time stays linear with a small factor for any bytes.
"""

import re

#: The rest of a string, as far as it goes without its closing quote.
_INSIDE = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_ESCAPED = 200
_QUOTE, _BACKSLASH = b'"', 0x5C


def string_end(data: bytes, position: int, stop: int) -> int:
    """Offset behind the quote that closes a string; -1 if none does before `stop`. `position`: inside of the string,
    not behind a backslash that escapes."""
    begin = position
    for _ in range(_ESCAPED):
        at = data.find(_QUOTE, position, stop)
        if at < 0:
            return -1
        before = at
        while before > begin and data[before - 1] == _BACKSLASH:
            before -= 1
        if (at - before) % 2 == 0:
            return at + 1
        begin = position = at + 1
    found = _INSIDE.match(data, position, stop)
    end = found.end() if found else stop
    return end + 1 if data.startswith(_QUOTE, end, stop) else -1


def ends_escaping(data: bytes, position: int, stop: int) -> bool:
    """Whether the piece of a string that goes on behind `stop` ends with a backslash that escapes what comes."""
    before = stop
    while before > position and data[before - 1] == _BACKSLASH:
        before -= 1
    return (stop - before) % 2 == 1
