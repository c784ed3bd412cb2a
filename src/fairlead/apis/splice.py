"""Find the model's name in a request's body, and replace it in place."""

import json
import re
from codecs import BOM_UTF8
from typing import NamedTuple

import numpy as np
from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder

from fairlead.apis.body import ABSENT, SALVAGE_LIMIT
from fairlead.apis.multipart import is_form, with_field
from fairlead.core.apis import SGLANG

# Finds the model's name in a body. Not on the hot path, but on the event loop, so no Python code runs per token.
#
# Theory. msgspec returns a member as a slice of the body, and the slice's address says where it is. What only Python's
# `json` reads (NaN, raw surrogates) is scanned with its C functions, member by member, up to `SALVAGE_LIMIT` bytes:
# larger bodies of that kind are scheduled unread, too. As Latin-1 every character is one byte.

_KEY = re.compile(r'[ \t\r\n]*+(?=")')
_COLON = re.compile(r"[ \t\r\n]*+:[ \t\r\n]*+")
_NEXT = re.compile(r"[ \t\r\n]*+([,}])")
_OBJECT = re.compile(rb"[ \t\r\n]*+\{")
_EMPTY = re.compile(r"[ \t\r\n]*+\}")
_END = re.compile(r"[ \t\r\n]*+\Z")


class _Named(Struct, gc=False):
    """The members that name a model."""

    model: Raw = ABSENT
    lora_path: Raw = ABSENT


class Member(NamedTuple):
    """Where an object has a key and its value."""

    #: Offset behind the bracket that opens the object.
    inside: int
    #: Whether the key occurs.
    present: bool
    #: Offsets of the key's last value; `None` if that value is neither a string nor null.
    value: tuple[int, int] | None


_decode = Decoder(_Named).decode
_raw_decode = json.JSONDecoder(strict=False).raw_decode


def model_member(body: bytes, key: str = "model") -> Member | None:
    """Find the top-level key `model` or `lora_path` of an object. `None` if the body is not an object, or cannot be
    read."""
    start = len(BOM_UTF8) if body.startswith(BOM_UTF8) else 0
    opened = _OBJECT.match(body, start)
    if opened is None:
        return None
    try:
        named = _decode(memoryview(body)[start:])
    except (DecodeError, RecursionError):
        span, readable = _scanned(body, opened.end(), key)
        if not readable:
            return None
    else:
        span = _span(body, named.model if key == "model" else named.lora_path)
    is_name = span is not None and (body[span[0]] == _QUOTE or body[span[0] : span[1]] == b"null")
    return Member(opened.end(), span is not None, span if is_name else None)


def _span(body: bytes, raw: Raw) -> tuple[int, int] | None:
    """The offsets of a slice of the body."""
    if raw is ABSENT:
        return None
    value = np.frombuffer(raw, np.uint8)
    start = int(value.ctypes.data - np.frombuffer(body, np.uint8).ctypes.data)
    return start, start + len(value)


def _scanned(body: bytes, position: int, key: str) -> tuple[tuple[int, int] | None, bool]:
    """The offsets of the key's last value in a body that Python's `json` reads, and whether it does. `position`: behind
    the bracket that opens the object."""
    span: tuple[int, int] | None = None
    if len(body) > SALVAGE_LIMIT:
        return None, False
    text = body.decode("latin-1")
    try:
        more = _EMPTY.match(text, position) is None
        end = position if more else text.index("}", position) + 1
        while more:
            name, begin = _raw_decode(text, _after(_KEY, text, end))
            begin = _after(_COLON, text, begin)
            _, end = _raw_decode(text, begin)
            if name == key:
                span = begin, end
            end = _after(_NEXT, text, end)
            more = text[end - 1] == ","
    except (ValueError, RecursionError):
        return None, False
    return span, _END.match(text, end) is not None


def _after(pattern: re.Pattern[str], text: str, position: int) -> int:
    """The offset behind a match at `position`. Raises `ValueError`."""
    match = pattern.match(text, position)
    if match is None:
        raise ValueError
    return match.end()


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
