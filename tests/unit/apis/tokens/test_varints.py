import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.apis.tokens.pieces import ids_of


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


@given(st.lists(st.lists(st.integers(0, 2**32 - 1))))
def test_all_numbers(segments: list[list[int]]) -> None:
    sent = [b"".join(map(varint, segment)) for segment in segments]
    assert np.frombuffer(ids_of(sent), "<u4").tolist() == [number for segment in segments for number in segment]


@pytest.mark.parametrize("sent", [b"\x80", b"\x01\xff", varint(2**32), varint(2**70), b"\xff" * 9 + b"\x01"])
def test_what_is_no_id(sent: bytes) -> None:
    with pytest.raises(ValueError, match="a number"):
        ids_of([sent])


def test_nothing() -> None:
    assert ids_of([]) == ids_of([b"", memoryview(b"")]) == b""
