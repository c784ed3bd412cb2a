"""One sample line of the Prometheus text format: `name{labels} value [timestamp] [# exemplar]`.

Numbers are read as the format's parsers do, but only finite ones count: a NaN or infinite queue length is no reading.
"""

import re
from math import isfinite

# Possessive quantifiers: no input makes these backtrack, a hostile page costs linear time.
_REST = re.compile(
    rb'[ \t]*+(\{(?:[^"}\n]*+"(?:[^"\\\n]|\\.)*+")*+[^"}\n]*+\})?[ \t]*+([^\s#]++)'
    rb"(?:[ \t]++[0-9.eE+-]++)?[ \t\r]*+(?:#.*+)?"
)
_LABEL = re.compile(rb'[ \t]*+([a-zA-Z_][a-zA-Z0-9_]*+)[ \t]*+=[ \t]*+"((?:[^"\\]|\\.)*+)"[ \t]*+(,|$)')
_ESCAPE = re.compile(rb'\\([\\"n])')


def parse_sample(line: bytes, at: int) -> tuple[bytes, float] | None:
    """(text between the braces, value) of a line whose name ends at `at`; `None` = malformed or not a finite number."""
    match = _REST.fullmatch(line, at)
    if match is None:
        return None
    value = parse_value(match[2])
    if value is None:
        return None
    braces: bytes | None = match[1]
    return (braces[1:-1] if braces else b""), value


def parse_value(text: bytes) -> float | None:
    """A finite decimal number, else `None`. Python's digit separators (`1_0`) are not part of the format."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) and b"_" not in text else None


def parse_labels(inner: bytes) -> dict[str, str] | None:
    """Labels of the text between the braces; `None` = malformed. A repeated label keeps its last value."""
    labels: dict[str, str] = {}
    at = 0
    while at < len(inner):
        match = _LABEL.match(inner, at)
        if match is None:
            return labels if not inner[at:].strip() and labels else None
        value = match[2]
        if b"\\" in value:
            value = _ESCAPE.sub(lambda m: b"\n" if m[1] == b"n" else m[1], value)
        labels[match[1].decode()] = value.decode("utf-8", "replace")
        at = match.end()
    return labels
