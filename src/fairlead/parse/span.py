"""Where in a body the model's name stands, for replacing it in place. Not on the hot path.

Theory. Only two kinds of tokens matter: strings, because brackets inside them do not count, and brackets, because they
tell the depth. At depth 1 a string that a colon follows is a key. Linear for any bytes; a quote that opens no complete
string ends the scan.
"""

import json
import re
from typing import NamedTuple

_TOKEN = re.compile(rb'["{}\[\]]')
_COLON = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*")


class Member(NamedTuple):
    """What an object says of a key, and where."""

    #: Offset behind the bracket that opens the object.
    inside: int
    #: The key occurs.
    present: bool
    #: Offsets of its last value; `None` if that is neither a string nor null.
    value: tuple[int, int] | None


def model_span(body: bytes) -> tuple[int, int] | None:
    """Offsets (start, end) of the JSON string, quotes included, that is the value of the top-level key `model`.

    The last one of several counts, as for `parse_request`. `None` if there is none, if it is not a string, or if the
    body is not UTF-8 JSON text (such as UTF-16, which `parse_request` reads).
    """
    member = model_member(body)
    if member is None or member.value is None or body[member.value[0]] != 0x22:
        return None
    return member.value


def model_member(body: bytes, key: str = "model") -> Member | None:
    """Look for a top-level key of an object. `None` if the body is no object, as far as brackets tell."""
    # Of the same length, and every quote that is left begins or ends a string.
    plain = body.replace(b"\\\\", b"..").replace(b'\\"', b"..") if b"\\" in body else body
    depth = position = inside = 0
    present = False
    span: tuple[int, int] | None = None
    while found := _TOKEN.search(plain, position):
        start = found.start()
        position = start + 1
        first = plain[start]
        if first == 0x22:
            position = plain.find(b'"', position) + 1
            if not position:
                return None
            if depth == 1 and (colon := _COLON.match(plain, position)):
                if _is_key(body[start:position], key):
                    present, span = True, _value(plain, colon.end())
                position = colon.end()
        elif first in b"{[":
            if not inside:
                if first != 0x7B:
                    return None
                inside = position
            depth += 1
        else:
            depth -= 1
    return Member(inside, present, span) if depth == 0 and inside else None


def _value(body: bytes, start: int) -> tuple[int, int] | None:
    """Offsets of a string or null."""
    if body.startswith(b"null", start):
        return start, start + 4
    end = body.find(b'"', start + 1) + 1 if body.startswith(b'"', start) else 0
    return (start, end) if end else None


def _is_key(string: bytes, key: str) -> bool:
    if b"\\" not in string:
        return string == b'"%b"' % key.encode()
    # An escape makes a key at most six times as long.
    if len(string) > 6 * len(key) + 2:
        return False
    try:
        return bool(json.loads(string) == key)
    except ValueError:
        return False
