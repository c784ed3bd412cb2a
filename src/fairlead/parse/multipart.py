"""The fields of a `multipart/form-data` body (RFC 7578, with the syntax of RFC 2046 §5.1), found in one pass.

Rules
* One search for the delimiter over the whole body and nothing is copied but headers: a sound file of 25 MB costs a few
  milliseconds.
* Of several fields of one name the last one counts, as in the servers that read these bodies (Starlette). Parts with a
  file name are files, not fields. Only CRLF ends a line.
* A form that breaks off is refused, and one of more than `MAX_PARTS` parts.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from fairlead.model.errors import ClientError

#: As many as Starlette takes (1,000 files and 1,000 fields).
MAX_PARTS = 2000
#: A part with longer headers is none of ours.
_MAX_HEADERS = 8192
_BOUNDARY = re.compile(r';\s*boundary\s*=\s*(?:"([^"]{1,200})"|([^\s;"]{1,200}))', re.IGNORECASE)
_DISPOSITION = re.compile(rb"^content-disposition[ \t]*:[ \t]*form-data[ \t]*;([^\r\n]*)", re.IGNORECASE | re.MULTILINE)
_PARAMETER = re.compile(rb'[ \t]*([\w*-]++)[ \t]*=[ \t]*(?:"((?:[^"\\]++|\\.)*+)"|([^\s;"]++))[ \t]*;?')
#: What may follow a delimiter on its line (RFC 2046: white space), or the end of the form.
_REST = re.compile(rb"--|[ \t]{0,64}\r\n")


class Form(NamedTuple):
    """What a form holds."""

    #: Text of the fields, by name.
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
    """The boundary of a form's content type; empty = it has none."""
    found = _BOUNDARY.search(content_type)
    return (found[1] or found[2]).encode("latin-1", "replace") if found else b""


def field_span(body: bytes, content_type: str, name: str) -> tuple[int, int] | None:
    """Offsets (start, end) of a field's text. `None` when there is no such field, or the form cannot be read."""
    boundary = boundary_of(content_type)
    span: tuple[int, int] | None = None
    try:
        for start, end in _parts(body, b"--" + boundary) if boundary else ():
            blank = body.find(b"\r\n\r\n", start - 2, min(start + _MAX_HEADERS, end + 2))
            if blank >= 0 and _named(body[start:blank]) == (name, False):
                span = blank + 4, max(end, blank + 4)
    except ClientError:
        return None
    return span


def read_form(body: bytes, content_type: str) -> Form | None:
    """`None` if the content type is no form's. Raises `ClientError` for a form that cannot be read. Linear time."""
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
    """(start of the headers, end of the content) of each part."""
    # The first delimiter need not stand at the beginning: text before it is a preamble, which is ignored.
    rest = _REST.match(body, len(line)) if body.startswith(line) else None
    if rest is None:
        rest = _next(body, b"\r\n" + line, 0)[1]
    for _ in range(MAX_PARTS + 1):
        if rest is None:
            raise ClientError("The multipart body breaks off, or its boundary is not that of its content type.")
        if rest.group() == b"--":
            return
        start = rest.end()
        end, rest = _next(body, b"\r\n" + line, start - 2)
        if rest is not None:
            yield start, end
    raise ClientError(f"The form has too many parts; {MAX_PARTS} are allowed.")


def _next(body: bytes, delimiter: bytes, position: int) -> tuple[int, re.Match[bytes] | None]:
    """Offset of the next delimiter, and what follows it on its line; `None` = there is none."""
    while (at := body.find(delimiter, position)) >= 0:
        rest = _REST.match(body, at + len(delimiter))
        if rest is not None:
            return at, rest
        position = at + len(delimiter)
    return at, None


def _named(headers: bytes) -> tuple[str, bool]:
    """Name of a part and whether it is a file; no name if it has none that can be read."""
    found = _DISPOSITION.search(headers)
    if found is None:
        return "", False
    parameters: dict[bytes, bytes] = {}
    position = 0
    while one := _PARAMETER.match(found[1], position):
        parameters.setdefault(one[1].lower(), one[2] if one[2] is not None else one[3])
        position = one.end()
    is_file = not {b"filename", b"filename*"}.isdisjoint(parameters)
    return parameters.get(b"name", b"").decode("utf-8", "replace"), is_file
