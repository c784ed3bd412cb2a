"""Damaged JSON for the fuzzers."""

import json
from typing import Any

from hypothesis import strategies as st

#: What matters to readers of JSON bodies.
TOKENS = [*(bytes([sign]) for sign in b'"\\{}[],:\xff\xc3\n\0'), b"null", b'"type":"image"', b'"usage"', b"1e999"]


@st.composite
def mutated(draw: st.DrawFn, seeds: st.SearchStrategy[bytes], tokens: list[bytes]) -> bytes:
    data = bytearray(draw(seeds))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(0, 20)))
        data[at:end] = draw(st.sampled_from([b"", *tokens]) | st.binary(max_size=4))
    return bytes(data)


def load(body: bytes) -> Any:
    """What the model servers would see; `None` for what they cannot read."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None
