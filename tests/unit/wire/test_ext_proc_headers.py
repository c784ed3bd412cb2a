"""Header maps are read the same way whether an entry was seen before or not, and whatever bytes they consist of."""

from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead.model.errors import ProtocolError
from fairlead.wire import ext_proc_headers as headers
from fairlead.wire.ext_proc_headers import read_headers
from fairlead.wire.protobuf import field

NAMES = (b":path", b":method", b"content-type", b":Path", b"x-request-id", b"", b"n" * 130)
pairs = st.lists(st.tuples(st.sampled_from(NAMES), st.binary(max_size=140)), max_size=6)


def entry(name: bytes, value: bytes, tag: int = 3) -> bytes:
    return field(1, field(1, name) + field(tag, value))


def read(data: bytes, end: int | None = None) -> dict[str, str]:
    out: dict[str, str] = {}
    read_headers(data, 0, len(data) if end is None else end, out)
    return out


def walked(data: bytes, end: int) -> dict[str, str]:
    """Field by field, without any short cut."""
    out: dict[str, str] = {}
    pos = 0
    while pos < end:
        pos = headers._read_header(data, pos, end, out)
    return out


@given(pairs)
def test_names_in_lower_case_and_the_last_value_of_each(sent: list[tuple[bytes, bytes]]) -> None:
    expected = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in sent}
    data = b"".join(entry(name, value) for name, value in sent)
    assert read(data) == read(data) == expected


@settings(max_examples=300)
@given(pairs, st.data())
def test_any_bytes_are_read_like_field_by_field(sent: list[tuple[bytes, bytes]], draw: st.DataObject) -> None:
    whole = b"".join(entry(name, value, draw.draw(st.sampled_from((2, 3)))) for name, value in sent)
    read(whole)  # what can be remembered is remembered now
    data = bytearray(whole)
    for _ in range(draw.draw(st.integers(0, 3)) if data else 0):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    end = draw.draw(st.integers(0, len(data)))
    results: list[object] = []
    for how in (read, walked):
        try:
            results.append(how(bytes(data), end))
        except ProtocolError:
            results.append("malformed")
    assert results[0] == results[1]


def test_what_is_remembered_is_bounded() -> None:
    for number in range(2000):
        assert read(entry(b":path", b"/v1/%d" % number)) == {":path": f"/v1/{number}"}
    assert len(headers._ENTRIES) <= 256
    before = len(headers._ENTRIES)
    for number in range(2000):
        read(entry(b"x-request-id", b"%d" % number))
    assert len(headers._ENTRIES) == before
