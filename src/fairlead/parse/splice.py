"""Put another model name into a request's body. Every other byte stays what it is: key order, white space, escapes and
integers of any size survive, because nothing is decoded and written anew.

* JSON: the string (or null) that is the value of the top-level `model`, the last one of several as `parse_request`
  reads it. A body without it gets it as its first member.
* JSON that is not UTF-8 (UTF-16 or UTF-32, which `parse_request` reads) becomes UTF-8 on the way.
* `multipart/form-data`: the text of the field `model`.
"""

import json

from fairlead.parse.api import SGLANG
from fairlead.parse.multipart import field_span, is_form
from fairlead.parse.span import model_member

_QUOTE = 0x22
_SPACE = b" \t\r\n"


def splice_model(body: bytes, name: str, content_type: str = "", api: str = "") -> bytes | None:
    """The body with `name` for its model. `None` when there is no place for it: no JSON object, no such form field.

    `api`: see `parse.api`. SGLang's own has the adapter in `lora_path`, which counts where no model is named.
    """
    if is_form(content_type):
        span = field_span(body, content_type, "model")
        if span is None or any(c in name for c in "\r\n"):
            return None
        return body[: span[0]] + name.encode() + body[span[1] :]
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
    rest = body[member.inside :]
    comma = b"" if rest.lstrip(_SPACE).startswith(b"}") else b","
    return body[: member.inside] + b'"model":' + string + comma + rest


def json_string(text: str) -> bytes:
    """A JSON string, quotes included, in UTF-8."""
    return json.dumps(text, ensure_ascii=False).encode("utf-8", "surrogatepass")
