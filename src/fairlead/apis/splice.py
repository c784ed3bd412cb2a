"""Find the model's name in a request's body, and replace it in place."""

import json
import re
from typing import NamedTuple

from fairlead.apis.multipart import is_form, with_field
from fairlead.core.apis import SGLANG

# Finds the model's name in a body. Not on the hot path.
#
# Theory. Only two kinds of tokens matter: strings, because brackets inside them do not count, and brackets, because
# they show the depth. At depth 1 a string followed by a colon is a key. The time is linear for any bytes; a quote that
# opens no complete string ends the scan.

_TOKEN = re.compile(rb'["{}\[\]]')
_COLON = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*")


class Member(NamedTuple):
    """Where an object has a key and its value."""

    #: Offset behind the bracket that opens the object.
    inside: int
    #: Whether the key occurs.
    present: bool
    #: Offsets of the key's last value; `None` if that value is neither a string nor null.
    value: tuple[int, int] | None


def model_member(body: bytes, key: str = "model") -> Member | None:
    """Find a top-level key of an object. `None` if the body is not an object, judged by its brackets."""
    # Has the length of `body`, and every remaining quote begins or ends a string.
    plain = body.replace(b"\\\\", b"..").replace(b'\\"', b"..") if b"\\" in body else body
    depth = position = inside = 0
    present = False
    span: tuple[int, int] | None = None
    while match := _TOKEN.search(plain, position):
        start = match.start()
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
    """Offsets of a string or null; `None` for any other value."""
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


# Replaces the model's name in a request's body. No other byte changes: key order, white space, escapes and integers of
# any size survive, because the body is not decoded and encoded again.
#
# * JSON: the value of the top-level `model`, a string or null, is replaced. If the key occurs several times, the last
#   occurrence counts, as for `parse_request`. A body without the key gets it as its first member.
# * JSON in UTF-16 or UTF-32, which `parse_request` reads too, is converted to UTF-8.
# * `multipart/form-data`: the text of the field `model` is replaced. Without the field, it becomes the first part.

_QUOTE = 0x22
_SPACE = b" \t\r\n"


def splice_model(body: bytes, name: str, content_type: str = "", api: str = "") -> bytes | None:
    """The body with `name` as its model; `None` if it has no place for one: neither a JSON object nor a form.

    `api`: see `core.apis`. SGLang's own API has the adapter in `lora_path`, which counts if no model is named.
    """
    if is_form(content_type):
        return None if any(c in name for c in "\r\n") else with_field(body, content_type, "model", name.encode())
    encoding = json.detect_encoding(body)
    if encoding not in ("utf-8", "utf-8-sig"):
        try:
            body = body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
        except UnicodeError:
            return None
    return _splice_json(body, name, api)


def _splice_json(body: bytes, name: str, api: str) -> bytes | None:
    member = model_member(body)
    if api == SGLANG and member is not None and (member.value is None or body[member.value[0]] != _QUOTE):
        member = model_member(body, "lora_path")
    if member is None or (member.present and member.value is None):
        return None
    string = json_string(name)
    if member.value is not None:
        return body[: member.value[0]] + string + body[member.value[1] :]
    members = body[member.inside :]
    comma = b"" if members.lstrip(_SPACE).startswith(b"}") else b","
    return body[: member.inside] + b'"model":' + string + comma + members


def json_string(text: str) -> bytes:
    """Encode `text` as a JSON string in UTF-8, quotes included."""
    return json.dumps(text, ensure_ascii=False).encode("utf-8", "surrogatepass")
