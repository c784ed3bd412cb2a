"""Header blocks: the rules of RFC 9113, 8 for requests, and the memory by bytes."""

import pytest
from hpack import Encoder

from fairlead.core.errors import ProtocolError
from fairlead.gateway.h2 import ErrorCode
from fairlead.gateway.h2_headers import HeaderBlocks, check

REQUEST = [
    (":method", "POST"), (":scheme", "http"), (":path", "/s/M"), (":authority", "a"), ("te", "trailers"),
    ("content-type", "application/grpc"), ("x-a", "1"),
]  # fmt: skip


def without(name: str) -> list[tuple[str, str]]:
    return [field for field in REQUEST if field[0] != name]


def test_a_request_is_read() -> None:
    opening = check([*REQUEST, ("x-a", "2")])
    assert not opening.malformed
    assert opening.http_status == 0
    assert opening.path == "/s/M"
    assert opening.headers == {"content-type": "application/grpc", "te": "trailers", "x-a": "2", ":authority": "a"}
    assert not opening.trailers


@pytest.mark.parametrize(
    "fields",
    [
        without(":method"),
        without(":path"),
        without(":scheme"),
        [(":path", ""), *without(":path")],
        [*REQUEST, (":path", "/late")],
        [(":path", "/twice"), *REQUEST],
        [(":status", "200"), *REQUEST],
        [*REQUEST, ("Upper", "x")],
        [*REQUEST, ("", "x")],
        [*REQUEST, ("spa ce", "x")],
        [*REQUEST, ("x", "a\nb")],
        [*REQUEST, ("x", "a\0b")],
        [*REQUEST, ("x", " padded")],
        [*REQUEST, ("connection", "close")],
        [*REQUEST, ("transfer-encoding", "chunked")],
        [*without("te"), ("te", "gzip")],
    ],
)
def test_malformed_requests_are_told(fields: list[tuple[str, str]]) -> None:
    assert check(fields).malformed


def test_trailers_have_no_pseudo_headers() -> None:
    assert check([("x", "1")]).trailers
    assert check([]).trailers
    assert not check([(":path", "/")]).trailers
    assert not check([("x", "a\nb")]).trailers


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/grpc", 0), ("application/grpc+proto", 0), ("application/grpc;charset=utf-8", 0),
        ("application/grpc-web", 415), ("application/json", 415), ("", 415),
    ],
)  # fmt: skip
def test_only_grpc_content_types_are_served(kind: str, status: int) -> None:
    assert check([*without("content-type"), ("content-type", kind)]).http_status == status
    assert check([(":method", "GET"), *without(":method")]).http_status == 405


def test_blocks_are_remembered_once_the_table_is_gone() -> None:
    blocks, encoder = HeaderBlocks(65536), Encoder()
    first = encoder.encode(REQUEST)
    assert blocks.read(first).path == "/s/M"
    assert len(blocks) == 0  # the table was in use: the same bytes may mean something else next time
    blocks.forbid_table()
    encoder.header_table_size = 0
    update = encoder.encode(REQUEST)
    again = encoder.encode(REQUEST)
    assert blocks.read(update) == blocks.read(again)
    assert blocks.read(again) is blocks.read(again)
    assert len(blocks) == 2


def test_a_block_with_the_table_is_not_taken_from_memory() -> None:
    """Before our SETTINGS are acknowledged a peer may shrink its table and grow it again."""
    blocks = HeaderBlocks(65536)
    literal = b"\x40\x01a\x011"  # a: 1, into the table
    assert blocks.read(b"\x20" + literal).headers == {"a": "1"}
    assert len(blocks) == 1
    assert blocks.read(b"\x3f\xe1\x1f" + literal).headers == {"a": "1"}  # the table has 4096 bytes again
    assert blocks.read(b"\xbe").headers == {"a": "1"}
    assert len(blocks) == 0


def test_memory_is_bounded_and_keeps_what_is_used() -> None:
    blocks, encoder = HeaderBlocks(65536), Encoder()
    encoder.header_table_size = 0
    blocks.read(encoder.encode(REQUEST))
    hot = encoder.encode(REQUEST)
    kept = blocks.read(hot)
    for number in range(1000):
        blocks.read(encoder.encode([*REQUEST, ("traceparent", str(number))]))
        if number % 20 == 0:
            assert blocks.read(hot) is kept
        assert len(blocks) <= 130
    size = len(blocks)
    blocks.read(encoder.encode([*REQUEST, ("long", "~" * 2000)], huffman=False))
    assert len(blocks) == size


@pytest.mark.parametrize(
    ("block", "code"),
    [
        (b"\xff\xff\xff\xff\xff\xff\xff", ErrorCode.COMPRESSION_ERROR),
        (b"\x80", ErrorCode.COMPRESSION_ERROR),
        (b"\x40\x7f", ErrorCode.COMPRESSION_ERROR),
        (b"\x00\x85aaa", ErrorCode.COMPRESSION_ERROR),
        (Encoder().encode([("x", "y" * 2000)]), ErrorCode.ENHANCE_YOUR_CALM),
    ],
)
def test_blocks_that_cannot_be_decoded_break_the_connection(block: bytes, code: ErrorCode) -> None:
    with pytest.raises(ProtocolError) as caught:
        HeaderBlocks(1000).read(block)
    assert caught.value.code == code


def test_a_peer_that_keeps_its_table_is_refused() -> None:
    blocks, encoder = HeaderBlocks(65536), Encoder()
    blocks.read(encoder.encode(REQUEST))
    blocks.forbid_table()
    with pytest.raises(ProtocolError) as caught:
        blocks.read(encoder.encode(REQUEST))
    assert caught.value.code == ErrorCode.COMPRESSION_ERROR


def test_values_need_not_be_utf8() -> None:
    opening = HeaderBlocks(65536).read(b"\x00\x01x\x02\xff\xe9")
    assert opening.headers == {"x": "\xff\xe9"}
