"""Frames in: the handshake, and what breaks a connection or a stream (RFC 9113)."""

from typing import Any

import pytest

from fairlead.gateway import h2
from fairlead.gateway.grpc_frames import PREFIX
from fairlead.gateway.h2 import ErrorCode

Connect = Any
PATH = "/s/M"


def data(stream: int, payload: bytes, flags: int = 0) -> bytes:
    return h2.frame(h2.DATA, flags, stream, payload)


def message(body: bytes) -> bytes:
    return PREFIX.pack(0, len(body)) + body


def kinds(frames: list[Any]) -> list[int]:
    return [frame[0] for frame in frames]


# ---- handshake ----


async def test_our_settings_come_first_in_one_write(connect: Connect) -> None:
    peer = connect()
    assert len(peer.transport.writes) == 1
    (kind, flags, stream, payload), update = peer.frames()
    assert (kind, flags, stream) == (h2.SETTINGS, 0, 0)
    assert dict(h2.read_settings(payload)) == {1: 0, 3: 4096, 4: 1 << 20, 5: 1 << 20, 6: 64 << 10}
    assert update == (h2.WINDOW_UPDATE, 0, 0, ((16 << 20) - 65535).to_bytes(4, "big"))


async def test_everything_may_arrive_byte_by_byte(connect: Connect) -> None:
    peer = connect()
    wire = h2.PREFACE + h2.settings({}) + peer.headers() + data(1, message(b"hello"), h2.END_STREAM)
    for pos in range(len(wire)):
        peer.feed(wire[pos : pos + 1])
    assert peer.handlers[0].heard == [b"hello", "half-close"]
    peer.frames()
    for byte in h2.settings({}):  # the shortest frame is its header
        peer.feed(bytes((byte,)))
    assert peer.frames() == [(h2.SETTINGS, h2.ACK, 0, b"")]


@pytest.mark.parametrize("wire", [b"GET / HTTP/1.1\r\n", b"\x16", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r!"])
async def test_other_protocols_are_told_at_the_first_wrong_byte(connect: Connect, wire: bytes) -> None:
    peer = connect()
    peer.feed(wire)
    assert peer.goaway() == ErrorCode.PROTOCOL_ERROR
    assert peer.transport.eof


@pytest.mark.parametrize("first", [h2.ping(b"12345678"), h2.SETTINGS_ACK, h2.frame(77, 0, 0)])
async def test_the_first_frame_is_settings(connect: Connect, first: bytes) -> None:
    peer = connect()
    peer.feed(h2.PREFACE, first)
    assert peer.goaway() == ErrorCode.PROTOCOL_ERROR


# ---- errors of the connection ----

SHORT_PING = h2.frame(h2.PING, 0, 0, b"1234567")


@pytest.mark.parametrize(
    ("wire", "code"),
    [
        (SHORT_PING, ErrorCode.FRAME_SIZE_ERROR),
        (h2.frame(h2.PING, 0, 1, b"12345678"), ErrorCode.PROTOCOL_ERROR),
        (h2.frame(h2.SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
        (h2.frame(h2.SETTINGS, h2.ACK, 0, b"\0" * 6), ErrorCode.FRAME_SIZE_ERROR),
        (h2.frame(h2.SETTINGS, 0, 0, b"\0" * 5), ErrorCode.FRAME_SIZE_ERROR),
        (h2.window_update(0, 0), ErrorCode.PROTOCOL_ERROR),
        (h2.window_update(0, 2**31 - 1), ErrorCode.FLOW_CONTROL_ERROR),
        (h2.window_update(5, 1), ErrorCode.PROTOCOL_ERROR),
        (h2.frame(h2.WINDOW_UPDATE, 0, 0, b"\0"), ErrorCode.FRAME_SIZE_ERROR),
        (h2.rst_stream(5, 0), ErrorCode.PROTOCOL_ERROR),
        (h2.rst_stream(0, 0), ErrorCode.PROTOCOL_ERROR),
        (h2.frame(h2.RST_STREAM, 0, 1, b""), ErrorCode.FRAME_SIZE_ERROR),
        (data(5, b""), ErrorCode.PROTOCOL_ERROR),
        (data(0, b""), ErrorCode.PROTOCOL_ERROR),
        (data(2, b""), ErrorCode.PROTOCOL_ERROR),
        (h2.frame(h2.HEADERS, h2.END_HEADERS, 0, b""), ErrorCode.PROTOCOL_ERROR),
        (h2.frame(h2.HEADERS, h2.END_HEADERS, 2, b""), ErrorCode.PROTOCOL_ERROR),
        (h2.frame(h2.HEADERS, h2.END_HEADERS, 3, b"\xff\xff\xff\xff\xff\xff"), ErrorCode.COMPRESSION_ERROR),
        (h2.frame(h2.HEADERS, h2.END_HEADERS, 3, b"x" * 70_000), ErrorCode.ENHANCE_YOUR_CALM),
        (h2.frame(h2.CONTINUATION, 0, 1), ErrorCode.PROTOCOL_ERROR),
        (h2.frame(h2.PUSH_PROMISE, 0, 1, b"\0" * 4), ErrorCode.PROTOCOL_ERROR),
        (h2.frame(h2.PRIORITY, 0, 1, b"1234"), ErrorCode.FRAME_SIZE_ERROR),
        (h2.frame(h2.PRIORITY, 0, 0, b"12345"), ErrorCode.PROTOCOL_ERROR),
        (h2.frame(h2.GOAWAY, 0, 1, b"\0" * 8), ErrorCode.PROTOCOL_ERROR),
        (h2.frame(h2.GOAWAY, 0, 0, b"\0" * 7), ErrorCode.FRAME_SIZE_ERROR),
        (b"\x10\x00\x01\x00\x00\x00\x00\x00\x01", ErrorCode.FRAME_SIZE_ERROR),
        (h2.frame(h2.HEADERS, 0, 3, b"") + h2.ping(b"12345678"), ErrorCode.PROTOCOL_ERROR),
        (h2.frame(h2.HEADERS, 0, 3, b"") + h2.frame(200, 0, 0), ErrorCode.PROTOCOL_ERROR),
        (h2.frame(h2.HEADERS, 0, 3, b"") + h2.frame(h2.CONTINUATION, 0, 5), ErrorCode.PROTOCOL_ERROR),
        (
            h2.frame(h2.HEADERS, 0, 3, b"") + h2.frame(h2.CONTINUATION, 0, 3, b"x" * 30_000) * 3,
            ErrorCode.ENHANCE_YOUR_CALM,
        ),
    ],
)
async def test_errors_end_the_connection_and_all_streams(connect: Connect, wire: bytes, code: ErrorCode) -> None:
    peer = connect().shake()
    handler = peer.open()
    peer.feed(wire)
    assert peer.goaway() == code
    assert peer.transport.eof
    assert len(handler.heard) == 1 and handler.heard[0][0] == "lost"
    peer.feed(peer.headers(9), wire)  # what comes later is dropped
    assert len(peer.handlers) == 1
    assert not peer.connection.streams


async def test_frames_that_mean_nothing_are_ignored(connect: Connect) -> None:
    peer = connect().shake()
    handler = peer.open()
    peer.feed(
        h2.frame(h2.PRIORITY, 0, 99, b"12345"),
        h2.frame(200, 255, 12345, b"?"),
        h2.frame(h2.HEADERS, h2.END_HEADERS | h2.PADDED | h2.HAS_PRIORITY, 3, b"\x02PPPPP" + peer.block() + b"\0\0"),
        data(1, b"\x03" + message(b"hello") + b"\0\0\0", h2.PADDED),
        h2.SETTINGS_ACK,
    )
    assert handler.heard == [b"hello"]
    assert len(peer.handlers) == 2
    assert peer.frames() == []


async def test_continuation_joins_a_block(connect: Connect) -> None:
    peer = connect().shake()
    block = peer.block(x="1" * 50)
    peer.feed(
        h2.frame(h2.HEADERS, h2.END_STREAM, 1, block[:10]),
        h2.frame(h2.CONTINUATION, 0, 1, block[10:10]),
        h2.frame(h2.CONTINUATION, 0, 1, block[10:30]),
        h2.frame(h2.CONTINUATION, h2.END_HEADERS, 1, block[30:]),
        h2.ping(b"12345678"),
    )
    assert peer.handlers[0].headers["x"] == "1" * 50
    assert peer.handlers[0].heard == ["half-close"]
    assert peer.frames() == [(h2.PING, h2.ACK, 0, b"12345678")]


# ---- errors of a stream ----


@pytest.mark.parametrize(
    ("wire", "code"),
    [
        (h2.window_update(1, 0), ErrorCode.PROTOCOL_ERROR),
        (h2.window_update(1, 2**31 - 1), ErrorCode.FLOW_CONTROL_ERROR),
        (h2.frame(h2.HEADERS, h2.END_HEADERS, 1, b"\0\x01a\x01b"), ErrorCode.PROTOCOL_ERROR),
        (h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, 1, b"\x84"), ErrorCode.PROTOCOL_ERROR),
        (data(1, b"", h2.END_STREAM) + data(1, b"x"), ErrorCode.STREAM_CLOSED),
        (data(1, b"", h2.END_STREAM) + h2.frame(h2.HEADERS, 5, 1, b""), ErrorCode.STREAM_CLOSED),
    ],
)
async def test_errors_of_a_stream_reset_it_alone(connect: Connect, wire: bytes, code: ErrorCode) -> None:
    peer = connect().shake()
    handler, other = peer.open(1), peer.open(3)
    peer.feed(wire, data(1, b"late") + h2.rst_stream(1, 8), data(3, message(b"on")))
    resets = [frame for frame in peer.frames() if frame[0] != h2.WINDOW_UPDATE]
    assert resets == [(h2.RST_STREAM, 0, 1, code.to_bytes(4, "big"))]
    assert handler.heard[-1][0] == "lost"
    assert other.heard == [b"on"]
    assert 1 not in peer.connection.streams


async def test_malformed_requests_are_reset(connect: Connect) -> None:
    peer = connect().shake()
    peer.feed(peer.headers(1, connection="close"), peer.headers(3))
    assert peer.frames() == [(h2.RST_STREAM, 0, 1, b"\0\0\0\x01")]
    assert len(peer.handlers) == 1


async def test_trailers_of_the_peer_are_a_half_close(connect: Connect) -> None:
    peer = connect().shake()
    handler = peer.open()
    peer.feed(h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, 1, b"\0\x01a\x01b"))
    assert handler.heard == ["half-close"]
    peer.feed(h2.rst_stream(1, 8))
    assert handler.heard[1] == ("lost", "reset by the peer (code 8)")


async def test_frames_on_closed_streams(connect: Connect) -> None:
    peer = connect().shake()
    peer.open(1).on = lambda _: peer.handlers[0].stream.finish()
    peer.feed(data(1, message(b"x"), h2.END_STREAM))
    assert peer.frames()[-1][1] & h2.END_STREAM
    peer.feed(h2.window_update(1, 5), h2.rst_stream(1, 0), h2.window_update(1, 0))
    assert peer.frames() == []
    peer.feed(data(1, b"late"))
    assert peer.frames() == [(h2.RST_STREAM, 0, 1, ErrorCode.STREAM_CLOSED.to_bytes(4, "big"))]
    peer.feed(data(1, b"later"))
    assert peer.frames() == []
    peer.open(5).on = lambda _: peer.handlers[1].stream.finish()
    peer.feed(data(5, message(b"x"), h2.END_STREAM))
    peer.feed(peer.headers(5))
    assert peer.goaway() == ErrorCode.STREAM_CLOSED
