"""Where in a body the model's name stands, for replacing it in place. Not on the hot path.

Theory. Only two kinds of tokens matter: strings, because brackets inside them do not count, and brackets, because they
tell the depth. At depth 1 a string that a colon follows is a key. Possessive quantifiers keep the scan linear for any
bytes; a quote that opens no complete string ends it.
"""

import json
import re

_QUOTED = rb'"(?:[^"\\]++|\\.)*+"'
_STRING = re.compile(_QUOTED, re.DOTALL)
_TOKEN = re.compile(_QUOTED + rb'|["{}\[\]]', re.DOTALL)
_COLON = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*")


def model_span(body: bytes) -> tuple[int, int] | None:
    """Offsets (start, end) of the JSON string, quotes included, that is the value of the top-level key `model`.

    The last one of several counts, as for `parse_request`. `None` if there is none, if it is not a string, or if the
    body is not UTF-8 JSON text (such as UTF-16, which `parse_request` reads).
    """
    depth = 0
    span: tuple[int, int] | None = None
    position = 0
    while found := _TOKEN.search(body, position):
        position = found.end()
        first = body[found.start()]
        if first == 0x22:
            if position - found.start() == 1:
                return None
            if depth == 1 and (colon := _COLON.match(body, position)):
                position = colon.end()
                if _is_model(found.group()):
                    value = _STRING.match(body, position)
                    span = value.span() if value else None
        elif first in b"{[":
            depth += 1
        else:
            depth -= 1
    return span if depth == 0 else None


def _is_model(key: bytes) -> bool:
    if key == b'"model"':
        return True
    # An escape makes a key at most six times as long.
    if b"\\" not in key or len(key) > 32:
        return False
    try:
        return bool(json.loads(key) == "model")
    except ValueError:
        return False
