"""Header maps are read the same way whether an entry was seen before or not, and whatever bytes they consist of."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead.core.errors import ProtocolError
from fairlead.gateway.ext_proc import Incoming, known_entries, read_headers, read_last_chunk, read_opening
from fairlead.gateway.protobuf import field, read_varint, walk

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
        tag, pos = read_varint(data, pos, end)
        size, pos = read_varint(data, pos, end)
        if tag != 0x0A or pos + size > end:
            raise ProtocolError("malformed header map")
        name = value = b""
        for number, start, stop in walk(data, pos, pos + size):
            if number == 1:
                name = data[start:stop]
            elif stop > start:
                value = data[start:stop]
        out[name.decode("latin-1").lower()] = value.decode("latin-1")
        pos += size
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


IDS = entry(b"x-fairlead-id", b"1" * 36) + entry(b"x-request-id", b"2" * 36)


@settings(max_examples=300)
@given(pairs, st.data())
def test_what_stands_before_the_ids_of_an_embedded_gateway_is_read_like_field_by_field(
    sent: list[tuple[bytes, bytes]], draw: st.DataObject
) -> None:
    before = bytearray(b"".join(entry(name, value, draw.draw(st.sampled_from((2, 3)))) for name, value in sent))
    for _ in range(draw.draw(st.integers(0, 2)) if before else 0):
        before[draw.draw(st.integers(0, len(before) - 1))] = draw.draw(st.integers(0, 255))
    data = bytes(before) + IDS
    results: list[object] = []
    for how in (read, read, walked):  # the second time what is known is used
        try:
            results.append(how(data) if how is read else walked(data, len(data)))
        except ProtocolError:
            results.append("malformed")
    assert results[0] == results[1] == results[2]


def test_ids_inside_of_a_value_are_a_part_of_it() -> None:
    assert read(entry(b"x-a", b"before" + IDS)) == {"x-a": "before" + IDS.decode("latin-1")}


def test_ids_are_never_remembered_and_what_is_is_bounded() -> None:
    for number in range(2000):
        ids = b"%036d" % number, b"%036d" % (number + 1)
        data = entry(b":path", b"/v1/%d" % number) + entry(b"x-fairlead-id", ids[0]) + entry(b"x-request-id", ids[1])
        found = {":path": f"/v1/{number}", "x-fairlead-id": ids[0].decode(), "x-request-id": ids[1].decode()}
        assert read(data) == read(data) == found
    assert known_entries.cache_info().currsize <= 256
    known_entries.cache_clear()
    for number in range(2000):
        read(entry(b":path", b"/v1") + entry(b"x-fairlead-id", b"%036d" % number) + entry(b"x-request-id", b"9" * 36))
    read(entry(b":path", b"/" * 2000) + IDS)
    assert known_entries.cache_info().currsize == 1


ID = st.binary(min_size=36, max_size=36)


def opening(entries: bytes, gateway_id: bytes, request_id: bytes, behind: bytes = b"") -> bytes:
    entries += field(1, field(1, b"x-fairlead-id") + field(3, gateway_id))
    entries += field(1, field(1, b"x-request-id") + field(3, request_id))
    return field(2, field(1, entries) + behind) + b"B\x00Z\x06\x08\x01\x10\x01\x18\x01"


@given(ID, ID, st.sampled_from((b"", b"\x18\x01", entry(b"x-request-id", b"later"))))
def test_a_first_message_is_read_from_memory_as_it_is_read_otherwise(one: bytes, other: bytes, behind: bytes) -> None:
    known = entry(b":path", b"/v1/chat/completions") + entry(b"x-request-id", b"earlier")
    data = opening(known, one, other, behind)
    found, message = read_opening(data), Incoming(data)
    if found is not None:
        rest, *ids = found
        headers = {**rest.headers, **dict(zip(("x-fairlead-id", "x-request-id"), ids, strict=True))}
        assert (headers, rest.ended) == message.headers()
        assert (rest.modes, rest.subset) == (message.modes(), message.subset())


def test_first_messages_that_are_read_from_memory() -> None:
    plain = opening(entry(b":method", b"POST"), b"a" * 36, b"b" * 36)
    found = read_opening(plain)
    assert found is not None
    assert (found[0].headers, *found[1:]) == ({":method": "POST"}, "a" * 36, "b" * 36)
    assert read_opening(opening(entry(b":method", b"POST"), b"c" * 36, b"d" * 36)) == (found[0], "c" * 36, "d" * 36)
    at = plain.index(b"\x0a\x35")
    for other in (
        plain[:at] + entry(b"x-request-id", b"c" * 36) + plain[at:],  # the map's length is wrong
        plain[:3] + bytes([plain[3] ^ 1]) + plain[4:],
        plain[: plain.index(b"b" * 36) + 35],  # cut short
        field(2, plain),
        opening(b"\x0a\x05x", b"a" * 36, b"b" * 36),  # what stands before the ids is no whole entry
        opening(b"", b"a" * 36, b"b" * 36, b"\x0a\x7f"),
    ):
        assert read_opening(other) is None


@pytest.mark.parametrize("size", [0, 1, 118, 119, 120, 127, 128, 129, 16375, 16383, 16384, 70_000, 2_097_152])
def test_a_last_chunk_is_read_as_it_is_read_otherwise(size: int) -> None:
    chunk = b"x" * size
    data = field(4, field(1, chunk) + b"\x10\x01") + b"B\x00"
    assert read_last_chunk(data) == chunk == Incoming(data).body()[0]
    for other in (
        data[:-2],
        data[:-3] + b"\x00B\x00",  # more follows
        data + b"\x00",
        data[1:],
        field(5, field(1, chunk) + b"\x10\x01") + b"B\x00",
        field(4, field(1, chunk + b"\x10\x01")) + b"B\x00",
    ):
        assert read_last_chunk(other) is None
