"""gRPC messages out of any cutting, and header blocks as hpack reads them."""

import random
from collections.abc import Callable
from urllib.parse import unquote_to_bytes

import pytest
from hpack import Decoder
from hypothesis import example, given
from hypothesis import strategies as st

from fairlead.core.errors import ProtocolError
from fairlead.gateway import grpc_frames as grpc


def framed(*messages: bytes) -> bytes:
    return b"".join(grpc.PREFIX.pack(0, len(message)) + message for message in messages)


@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(0, 1 << 32), st.integers(1, 30))
def test_messages_survive_any_cutting(messages: list[bytes], seed: int, largest: int) -> None:
    chance = random.Random(seed)
    reader, wire, found, pos = grpc.MessageReader(1000), framed(*messages), [], 0
    while pos < len(wire):
        size = min(chance.randint(0, largest), len(wire) - pos)
        found += reader.feed(b"<<" + wire[pos : pos + size] + b">>", 2, 2 + size)
        pos += size
    assert found == messages
    assert not reader.partial


def test_an_unfinished_message_is_known() -> None:
    reader = grpc.MessageReader(100)
    wire = framed(b"abcdef")
    for cut in range(1, len(wire)):
        assert reader.feed(wire, cut - 1, cut) == []
        assert reader.partial
    assert reader.feed(wire, len(wire) - 1, len(wire)) == [b"abcdef"]
    assert not reader.partial


def test_a_claimed_size_reserves_nothing(bytes_kept: Callable[[Callable[[], object]], int]) -> None:
    def claimed() -> grpc.MessageReader:
        reader = grpc.MessageReader(1 << 30)
        assert reader.feed(grpc.PREFIX.pack(0, 1 << 30) + b"x", 0, 6) == []
        assert reader.partial
        return reader

    assert bytes_kept(claimed) < 10_000


@pytest.mark.parametrize("cut", [1, 5, 6, 100])
def test_too_large_and_compressed_messages_are_errors(cut: int) -> None:
    def feed(wire: bytes) -> None:
        reader = grpc.MessageReader(10)
        for pos in range(0, len(wire), cut):
            reader.feed(wire, pos, min(pos + cut, len(wire)))

    feed(framed(b"x" * 10))
    with pytest.raises(ProtocolError) as caught:
        feed(framed(b"x" * 11))
    assert caught.value.code == grpc.Status.RESOURCE_EXHAUSTED
    with pytest.raises(ProtocolError) as caught:
        feed(b"\x01\0\0\0\x01x")
    assert caught.value.code == grpc.Status.UNIMPLEMENTED


def decoded(block: bytes) -> list[tuple[str, str]]:
    decoder = Decoder()
    fields = [(str(name), str(value)) for name, value in decoder.decode(block)]
    assert len(decoder.header_table.dynamic_entries) == 0
    return fields


def test_header_blocks() -> None:
    assert decoded(grpc.RESPONSE) == [(":status", "200"), ("content-type", "application/grpc")]
    assert decoded(grpc.TRAILERS_OK) == [("grpc-status", "0")]
    assert decoded(grpc.TABLE_SIZE_ZERO + grpc.trailers(13, "a b")) == [("grpc-status", "13"), ("grpc-message", "a b")]
    assert decoded(grpc.trailers_only(5)) == [*decoded(grpc.RESPONSE), ("grpc-status", "5")]
    assert decoded(grpc.trailers(17)) == decoded(grpc.trailers(-1)) == [("grpc-status", "2")]
    assert decoded(grpc.http_error(415)) == [(":status", "415")]
    assert decoded(grpc.http_error(405)) == [(":status", "405"), ("allow", "POST")]


@pytest.mark.parametrize("size", [0, 1, 126, 127, 128, 254, 255, 16382, 16511, 60000])
def test_literals_of_any_length(size: int) -> None:
    assert decoded(grpc.literal(b"n", b"v" * size)) == [("n", "v" * size)]


@given(st.text(max_size=30))
@example("  two and one ")
@example("   ")
@example(" 100 % \n ")
def test_messages_are_percent_encoded(message: str) -> None:
    encoded = grpc.percent_encode(message)
    assert encoded == encoded.strip(), "HTTP/2 allows no spaces at the ends"
    assert all(0x20 <= byte <= 0x7E for byte in encoded)
    assert unquote_to_bytes(encoded) == message.encode("utf-8", "replace")
    assert len(grpc.percent_encode(message * 1000)) <= 3 * 4 * 1024
