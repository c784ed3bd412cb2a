"""The header `traceparent` (W3C Trace Context, level 1).

A header that does not follow the recommendation counts as absent, so it starts a new trace. Of higher versions, the
first four fields are read, as section 3.2.3 demands.
"""

import re

from msgspec import Struct

HEADER = "traceparent"
STATE_HEADER = "tracestate"
_SAMPLED = 1
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)


class TraceParent(Struct, frozen=True, gc=False):
    """The caller's trace and span. Both ids are above 0."""

    trace_id: int
    span_id: int
    sampled: bool


def parse(text: str) -> TraceParent | None:
    """Read a header; `None` if it is not valid."""
    match = _FORM.fullmatch(text.strip(" \t"))
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more):
        return None
    parent = TraceParent(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & _SAMPLED))
    return parent if parent.trace_id and parent.span_id else None


def render(trace_id: int, span_id: int, sampled: bool) -> str:
    """Write a header of version 00."""
    return f"00-{trace_id:032x}-{span_id:016x}-{int(sampled):02x}"
