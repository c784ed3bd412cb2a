"""Answers: what is written when, with which status, and how exchanges end."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from fairlead.gateway import h2
from fairlead.gateway.grpc_frames import PREFIX
from fairlead.gateway.h2 import ErrorCode
from fairlead.gateway.h2_limits import Budget, H2Limits
from fairlead.gateway.stream import ServerStream

Connect = Any
PATH = "/s/M"


def data(stream: int, payload: bytes, flags: int = 0) -> bytes:
    return h2.frame(h2.DATA, flags, stream, payload)


def message(body: bytes) -> bytes:
    return PREFIX.pack(0, len(body)) + body


def kinds(frames: list[Any]) -> list[int]:
    return [frame[0] for frame in frames]


# ---- answers ----


async def test_headers_data_and_trailers_leave_in_one_write(connect: Connect) -> None:
    peer = connect().shake()
    handler = peer.open()
    assert peer.transport.writes[-1] == h2.SETTINGS_ACK

    def answer(_: bytes) -> None:
        handler.stream.send(b"one", b"two")
        handler.stream.finish()

    handler.on = answer
    before = len(peer.transport.writes)
    peer.feed(data(1, message(b"?")))
    assert len(peer.transport.writes) == before + 1
    frames = peer.frames()
    assert kinds(frames) == [h2.HEADERS, h2.DATA, h2.HEADERS]
    assert frames[1][3] == message(b"one") + message(b"two")
    assert [frame[1] for frame in frames] == [h2.END_HEADERS, 0, h2.END_HEADERS | h2.END_STREAM]
    assert peer.decoder.decode(frames[0][3]) == [(":status", "200"), ("content-type", "application/grpc")]
    assert peer.decoder.decode(frames[2][3]) == [("grpc-status", "0")]


async def test_writes_outside_of_input_leave_in_one_write_of_the_next_turn(connect: Connect) -> None:
    peer = connect().shake()
    one, two = peer.open(1), peer.open(3)
    before = len(peer.transport.writes)
    one.stream.send(b"a")
    two.stream.send(b"b")
    one.stream.finish(5, "gone")
    assert len(peer.transport.writes) == before
    await asyncio.sleep(0)
    assert len(peer.transport.writes) == before + 1
    assert kinds(peer.frames()) == [h2.HEADERS, h2.DATA, h2.HEADERS, h2.DATA, h2.HEADERS]


async def test_statuses_of_the_transport(connect: Connect) -> None:
    peer = connect(H2Limits(max_message=10, max_stream_bytes=100)).shake()
    peer.feed(peer.headers(1, path="/no/Such"))
    status = {":status": "200", "content-type": "application/grpc"}
    assert peer.trailers() == status | {"grpc-status": "12", "grpc-message": "unknown method /no/Such"}
    fields = [(":method", "GET"), (":scheme", "http"), (":path", PATH)]
    peer.feed(h2.frame(h2.HEADERS, 5, 3, peer.encoder.encode(fields)))
    assert peer.trailers() == {":status": "405", "allow": "POST"}
    fields = [(":method", "POST"), (":scheme", "http"), (":path", PATH), ("content-type", "text/html")]
    peer.feed(h2.frame(h2.HEADERS, 5, 5, peer.encoder.encode(fields)))
    assert peer.trailers() == {":status": "415"}
    assert not peer.handlers
    for number, (wire, code) in enumerate(
        [(b"\x01\0\0\0\x01x", "12"), (message(b"x" * 11), "8"), (message(b"123456789") * 8, "8"), (b"\0\0", "13")]
    ):
        handler = peer.open(7 + 2 * number)
        peer.feed(data(7 + 2 * number, wire, h2.END_STREAM))
        assert peer.trailers()["grpc-status"] == code
        assert handler.heard[-1][0] == "lost"
    assert not peer.connection.streams
    assert list(peer.connection.lingering) == [1]  # the only one without END_STREAM


async def test_handlers_that_raise_cost_their_stream(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    peer = connect().shake()
    handler = peer.open()
    handler.on = lambda _: 1 / 0  # type: ignore[assignment, return-value]
    peer.feed(data(1, message(b"x")))
    assert peer.trailers()["grpc-status"] == "13"
    assert handler.heard == [b"x", ("lost", "internal error")]

    def broken(stream: ServerStream, headers: Mapping[str, str]) -> Any:
        raise RuntimeError("no")

    peer.make = broken
    peer.feed(peer.headers(3))
    assert peer.trailers()["grpc-status"] == "13"
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError, RuntimeError]


async def test_a_factory_may_answer_at_once(connect: Connect) -> None:
    peer = connect().shake()

    make = peer.make

    def refuse(stream: ServerStream, headers: Mapping[str, str]) -> Any:
        stream.finish(14, "später")
        return make(stream, headers)

    peer.make = refuse
    peer.feed(peer.headers(1), data(1, message(b"x")), h2.rst_stream(1, 0))
    assert peer.trailers()["grpc-message"] == "sp%C3%A4ter"
    assert peer.handlers[0].heard == []


async def test_nothing_is_heard_or_sent_after_finish(connect: Connect) -> None:
    peer = connect().shake()
    handler = peer.open()
    handler.on = lambda _: handler.stream.finish(7, "no")
    peer.feed(data(1, message(b"a") + message(b"b")), data(1, message(b"c")), h2.rst_stream(1, 0))
    handler.stream.send(b"late")
    handler.stream.finish()
    await asyncio.sleep(0)
    assert handler.heard == [b"a"]
    assert peer.trailers()["grpc-status"] == "7"
    assert handler.stream.writable_bytes() == 0


async def test_a_smaller_table_is_confirmed_once(connect: Connect) -> None:
    peer = connect().shake({h2.HEADER_TABLE_SIZE: 100})
    one, two = peer.open(1), peer.open(3)
    one.stream.send(b"x")
    one.stream.finish()
    two.stream.finish()
    await asyncio.sleep(0)
    blocks = [frame[3] for frame in peer.frames() if frame[0] == h2.HEADERS]
    assert [block[0] for block in blocks] == [0x20, 0x00, 0x88]


async def test_a_smaller_table_in_the_middle_of_an_answer(connect: Connect) -> None:
    peer = connect().shake()
    handler = peer.open()
    handler.stream.send(b"x")
    await asyncio.sleep(0)
    peer.feed(h2.settings({h2.HEADER_TABLE_SIZE: 0}))
    handler.stream.finish()
    await asyncio.sleep(0)
    assert peer.frames()[-1][3][0] == 0x20


# ---- the end of exchanges ----


async def test_finished_exchanges_linger_until_the_peer_ends_them(connect: Connect) -> None:
    peer = connect().shake()
    for stream in (1, 3, 5):
        handler = peer.open(stream)
        handler.stream.send(b"x")
        handler.stream.finish()
    peer.feed(data(1, b"late" * 10), data(3, b"later", h2.END_STREAM), h2.rst_stream(5, 0))
    assert list(peer.connection.lingering) == [1]
    assert h2.RST_STREAM not in kinds(peer.frames())
    peer.feed(h2.frame(h2.HEADERS, 5, 1, b"\0\x01a\x01b"))
    assert not peer.connection.lingering
    assert [handler.heard for handler in peer.handlers] == [[], [], []]


async def test_lingering_is_bounded(connect: Connect) -> None:
    peer = connect(H2Limits(max_streams=3, stream_window=100)).shake()
    for number in range(5):
        peer.open(1 + 2 * number).stream.finish()
    assert list(peer.connection.lingering) == [5, 7, 9]
    await asyncio.sleep(0)
    resets = [frame for frame in peer.frames() if frame[0] == h2.RST_STREAM]
    assert resets == [(h2.RST_STREAM, 0, 1, b"\0" * 4), (h2.RST_STREAM, 0, 3, b"\0" * 4)]
    peer.feed(data(5, b"x" * 100), data(7, b"x" * 101))
    assert list(peer.connection.lingering) == [5, 9]


async def test_resets_of_finished_streams_do_not_count(connect: Connect) -> None:
    peer = connect(H2Limits(resets_per_second=0, reset_burst=3)).shake()
    for number in range(50):
        peer.open(1 + 2 * number).stream.finish()
        peer.feed(h2.rst_stream(1 + 2 * number, 0))
    assert h2.GOAWAY not in kinds(peer.frames())
    for number in range(50, 70):
        handler = peer.open(1 + 2 * number)
        handler.stream.send(b"x" * 100_000)
        handler.stream.finish()  # waits for the window
        peer.feed(h2.rst_stream(1 + 2 * number, 8))
    assert h2.GOAWAY not in kinds(peer.frames())
    for number in range(70, 74):
        peer.open(1 + 2 * number)
        peer.feed(h2.rst_stream(1 + 2 * number, 8))
    assert peer.goaway() == ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize(
    "wire",
    [
        h2.ping(b"12345678"),
        h2.settings({}),
        h2.SETTINGS_ACK,
        h2.frame(h2.PRIORITY, 0, 1, b"12345"),
        h2.frame(99, 0, 0),
        data(1, b""),
        data(3, b""),
    ],
)
async def test_floods_end_the_connection(connect: Connect, wire: bytes) -> None:
    peer = connect(H2Limits(control_per_second=0, control_burst=20)).shake()
    peer.open(1)
    peer.open(3).stream.finish()
    peer.open(5).stream.finish()
    peer.feed(h2.rst_stream(5, 0), wire * 10)
    assert h2.GOAWAY not in kinds(peer.frames())
    peer.feed(wire * 300)
    assert peer.goaway() == ErrorCode.ENHANCE_YOUR_CALM


async def test_floods_of_requests_that_are_reset_end_the_connection(connect: Connect) -> None:
    peer = connect(H2Limits(control_per_second=0, control_burst=20)).shake()
    for number in range(30):
        peer.feed(peer.headers(1 + 2 * number, upgrade="x"))
    assert peer.goaway() == ErrorCode.ENHANCE_YOUR_CALM


async def test_continuation_floods_end_the_connection(connect: Connect) -> None:
    peer = connect(H2Limits(control_per_second=0, control_burst=20)).shake()
    peer.feed(h2.frame(h2.HEADERS, 0, 1), h2.frame(h2.CONTINUATION, 0, 1) * 30)
    assert peer.goaway() == ErrorCode.ENHANCE_YOUR_CALM


def test_a_budget_fills_with_time() -> None:
    now = 0.0
    budget = Budget(10, 5, lambda: now)
    assert [budget.spend() for _ in range(7)] == [True] * 5 + [False] * 2
    now = 1.0
    assert [budget.spend() for _ in range(6)] == [True] * 5 + [False]


async def test_too_many_streams_are_refused(connect: Connect) -> None:
    peer = connect(H2Limits(max_streams=2)).shake()
    peer.open(1)
    peer.open(3)
    peer.feed(peer.headers(5), data(5, message(b"x"), h2.END_STREAM), h2.rst_stream(1, 8), peer.headers(7))
    assert peer.frames() == [(h2.RST_STREAM, 0, 5, ErrorCode.REFUSED_STREAM.to_bytes(4, "big"))]
    assert len(peer.handlers) == 3


async def test_a_lost_connection_is_told_once(connect: Connect) -> None:
    peer = connect().shake()
    handler, finished = peer.open(1), peer.open(3)
    finished.stream.finish()
    peer.connection.connection_lost(None)
    handler.stream.send(b"x")
    handler.stream.finish()
    await asyncio.sleep(0)
    assert handler.heard == [("lost", "the connection was lost")]
    assert finished.heard == []
    assert not peer.alive
