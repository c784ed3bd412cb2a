"""Bodies of the audio and image APIs (`multipart/form-data` or JSON), and what is read from them."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from msgspec import Raw

from fairlead.apis.body import ABSENT, Body, Reader, Scalar, count, flag
from fairlead.apis.parsed import Parsed, ParsedRequest, choices, is_sent, model_bytes, short_text, unread
from fairlead.apis.prompt import MEDIA_BYTES, anything, media_items
from fairlead.core.apis import AUDIO, IMAGES
from fairlead.core.errors import ClientError

# Finds the fields of a `multipart/form-data` body (RFC 7578, with the syntax of RFC 2046 §5.1) in one pass.
#
# Rules
# * The whole body is searched for the delimiter once, and only headers are copied: a sound file of 25 MB costs a few
#   milliseconds.
# * If several fields have the same name, the last one counts, as in the servers that read these bodies (Starlette).
#   Parts with a file name are files, not fields. Only CRLF ends a line.
# * A truncated form is refused, and so is a form of more than `MAX_PARTS` parts.

#: The most that Starlette accepts (1,000 files and 1,000 fields).
MAX_PARTS = 2000
#: Bytes of headers. A part with longer headers is skipped, because no field that is read has them.
_MAX_HEADERS = 8192
_BOUNDARY = re.compile(r';\s*boundary\s*=\s*(?:"([^"]{1,200})"|([^\s;"]{1,200}))', re.IGNORECASE)
_DISPOSITION = re.compile(rb"^content-disposition[ \t]*:[ \t]*form-data[ \t]*;([^\r\n]*)", re.IGNORECASE | re.MULTILINE)
_PARAMETER = re.compile(rb'[ \t]*([\w*-]++)[ \t]*=[ \t]*(?:"((?:[^"\\]++|\\.)*+)"|([^\s;"]++))[ \t]*;?')
#: What may follow a delimiter on its line: the end of the form (`--`), or white space and a line end (RFC 2046).
_AFTER_DELIMITER = re.compile(rb"--|[ \t]{0,64}\r\n")


class Form(NamedTuple):
    #: The text of each field, by name.
    fields: dict[str, memoryview]
    #: Sizes of the files, in bytes.
    files: list[int]

    def text(self, name: str) -> str | None:
        """A field as text; `None` if it was not sent. Raises `ClientError`."""
        value = self.fields.get(name)
        if value is None:
            return None
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            raise ClientError(f"'{name}' is not valid UTF-8 text.", param=name) from None


def is_form(content_type: str) -> bool:
    return content_type.lower().lstrip().startswith("multipart/form-data")


def boundary_of(content_type: str) -> bytes:
    """The boundary in a form's content type; empty = none."""
    match = _BOUNDARY.search(content_type)
    return (match[1] or match[2]).encode("latin-1", "replace") if match else b""


def with_field(body: bytes, content_type: str, name: str, text: bytes) -> bytes | None:
    """The form with another text in a field, which becomes the first part if it is missing. `None` if the form cannot
    be read, has no parts, or has a file of this name."""
    boundary = boundary_of(content_type)
    line = b"--" + boundary
    span: tuple[int, int] | None = None
    begin, is_file = -1, False
    try:
        for start, end in _parts(body, line) if boundary else ():
            begin = start if begin < 0 else begin
            blank = body.find(b"\r\n\r\n", start - 2, min(start + _MAX_HEADERS, end + 2))
            part = _named(body[start:blank]) if blank >= 0 else ("", False)
            if part[0] == name:
                span, is_file = (blank + 4, max(end, blank + 4)), part[1]
    except ClientError:
        return None
    if begin < 0 or is_file:
        return None
    if span is not None:
        return body[: span[0]] + text + body[span[1] :]
    head = b'Content-Disposition: form-data; name="%b"\r\n\r\n' % name.encode()
    return body[:begin] + head + text + b"\r\n" + line + b"\r\n" + body[begin:]


def read_form(body: bytes, content_type: str) -> Form | None:
    """Read a form in linear time; `None` if the content type is not a form's. Raises `ClientError` if malformed."""
    if not is_form(content_type):
        return None
    boundary = boundary_of(content_type)
    if not boundary:
        raise ClientError("The content type multipart/form-data has no boundary.")
    form = Form({}, [])
    view = memoryview(body)
    for start, end in _parts(body, b"--" + boundary):
        blank = body.find(b"\r\n\r\n", start - 2, min(start + _MAX_HEADERS, end + 2))
        if blank < 0:
            continue
        name, is_file = _named(body[start:blank])
        content = view[blank + 4 : max(end, blank + 4)]
        if is_file:
            form.files.append(len(content))
        elif name:
            form.fields[name] = content
    return form


def _parts(body: bytes, line: bytes) -> Iterator[tuple[int, int]]:
    """Yield (start of the headers, end of the content) of each part."""
    # Text before the first delimiter is a preamble, which is ignored.
    line_end = _AFTER_DELIMITER.match(body, len(line)) if body.startswith(line) else None
    if line_end is None:
        line_end = _next(body, b"\r\n" + line, 0)[1]
    for _ in range(MAX_PARTS + 1):
        if line_end is None:
            raise ClientError("The multipart body breaks off, or its boundary is not that of its content type.")
        if line_end.group() == b"--":
            return
        start = line_end.end()
        end, line_end = _next(body, b"\r\n" + line, start - 2)
        if line_end is not None:
            yield start, end
    raise ClientError(f"The form has too many parts; {MAX_PARTS} are allowed.")


def _next(body: bytes, delimiter: bytes, position: int) -> tuple[int, re.Match[bytes] | None]:
    """The offset of the next delimiter and the match of the rest of its line; `None` if there is no delimiter."""
    while (start := body.find(delimiter, position)) >= 0:
        line_end = _AFTER_DELIMITER.match(body, start + len(delimiter))
        if line_end is not None:
            return start, line_end
        position = start + len(delimiter)
    return start, None


def _named(headers: bytes) -> tuple[str, bool]:
    """The name of a part, and whether it is a file; an empty name if none can be read."""
    disposition = _DISPOSITION.search(headers)
    if disposition is None:
        return "", False
    parameters: dict[bytes, bytes] = {}
    position = 0
    while parameter := _PARAMETER.match(disposition[1], position):
        parameters.setdefault(parameter[1].lower(), parameter[2] if parameter[2] is not None else parameter[3])
        position = parameter.end()
    is_file = not {b"filename", b"filename*"}.isdisjoint(parameters)
    return parameters.get(b"name", b"").decode("utf-8", "replace"), is_file


# Sounds and images: `/v1/audio/…` and `/v1/images/…`. Bodies are forms (`multipart/form-data`) or JSON.
#
# The cost of these requests does not depend on prompt tokens, and the engine keeps no prefix of them. So each file
# counts as one media item, and nothing is hashed.


class MediaBody(Body, gc=False):
    #: The description of an image.
    prompt: Raw = ABSENT
    #: The text to speak (`/v1/audio/speech`).
    input: Raw = ABSENT
    max_completion_tokens: Scalar = None
    n: Scalar = None
    user: Raw = ABSENT


_read = Reader(MediaBody).read


def parse_audio(body: bytes, content_type: str = "") -> Parsed:
    """Parse a body of `/v1/audio/…`. Raises `ClientError`."""
    form = read_form(body, content_type)
    if form is None:
        return _from_json(AUDIO, body, content_type)
    if not form.files:
        raise ClientError("Missing required parameter: 'file'.", param="file")
    return _from_form(AUDIO, form)


def parse_images(body: bytes, content_type: str = "") -> Parsed:
    """Parse a body of `/v1/images/…`. Raises `ClientError`."""
    form = read_form(body, content_type)
    return _from_json(IMAGES, body, content_type) if form is None else _from_form(IMAGES, form)


def _from_form(api: str, form: Form) -> ParsedRequest:
    model = form.text("model") or ""
    model_bytes(model)
    prompt = form.fields.get("prompt", b"")
    return ParsedRequest(
        api,
        model,
        flag(form.text("stream") or None, "stream"),
        count(form.text("max_completion_tokens") or None, "max_completion_tokens"),
        n=choices(form.text("n") or None),
        prompt_bytes=len(prompt) + len(form.files) * MEDIA_BYTES,
        user=_short(form),
        media=len(form.files),
    )


def _from_json(api: str, body: bytes, content_type: str) -> Parsed:
    if content_type and "json" not in content_type.lower():
        # Neither a form nor JSON (a bare sound file, a form of another type): left to the model server.
        return unread(api, "content-type", MEDIA_BYTES)
    read = _read(body)
    if read is None:
        return None
    model_bytes(read.model)
    text = anything(read.prompt if is_sent(read.prompt) else read.input)
    return ParsedRequest(
        api,
        read.model or "",
        flag(read.stream, "stream"),
        count(read.max_completion_tokens, "max_completion_tokens"),
        n=choices(read.n),
        prompt_bytes=text.size,
        user=short_text(read.user),
        media=media_items(text.view),
    )


def _short(form: Form) -> str:
    user = form.text("user") or ""
    return user if len(user) <= 1024 else ""
