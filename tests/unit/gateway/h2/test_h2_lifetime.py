"""Silence, draining, and merged wake-ups."""

import asyncio
import socket
from typing import Any

from fairlead.gateway import h2
from fairlead.gateway.grpc_frames import PREFIX
from fairlead.gateway.h2 import ErrorCode
from fairlead.gateway.h2_limits import H2Limits
from fairlead.gateway.h2_server import H2Server

Connect = Any
PATH = "/s/M"


def data(stream: int, payload: bytes, flags: int = 0) -> bytes:
    return h2.frame(h2.DATA, flags, stream, payload)


def message(body: bytes) -> bytes:
    return PREFIX.pack(0, len(body)) + body


def kinds(frames: list[Any]) -> list[int]:
    return [frame[0] for frame in frames]


# ---- merged wake-ups ----


class MarkSocket:
    family = socket.AF_INET

    def __init__(self) -> None:
        self.marks: list[int] = []

    def setsockopt(self, level: int, option: int, value: int) -> None:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_RCVLOWAT)
        self.marks.append(value)


def merging(connect: Connect) -> tuple[Any, list[int]]:
    sock = MarkSocket()
    peer = connect(merge=True, sock=sock)
    assert sock.marks == []
    return peer, sock.marks


async def test_the_mark_is_high_only_when_nothing_short_is_awaited(connect: Connect) -> None:
    peer, marks = merging(connect)
    peer.feed(h2.PREFACE, h2.settings({}))
    assert marks == []  # the acknowledgement of our SETTINGS has nine bytes
    peer.feed(h2.SETTINGS_ACK)
    assert marks == [14]
    handler = peer.open(1)
    assert marks == [14, 1]  # a cancel must be heard at once
    handler.stream.watch_cancel(False)
    await asyncio.sleep(0)
    assert marks == [14, 1, 14]
    peer.feed(data(1, message(b"hello")[:3]))
    assert marks[-1] == 1  # the rest of the message may be short
    peer.feed(data(1, message(b"hello")[3:]))
    assert marks[-1] == 14
    peer.feed(h2.ping(b"12345678")[:11])
    assert marks[-1] == 1  # the rest of the frame may be short
    peer.feed(h2.ping(b"12345678")[11:])
    assert marks[-1] == 14
    handler.stream.send(b"x" * 70_000)
    await asyncio.sleep(0)
    assert marks[-1] == 1  # WINDOW_UPDATE has 13 bytes
    peer.feed(h2.window_update(1, 10_000) + h2.window_update(0, 10_000))
    assert marks[-1] == 14
    handler.stream.watch_cancel(True)
    await asyncio.sleep(0)
    assert marks[-1] == 1
    handler.stream.finish()
    await asyncio.sleep(0)
    assert marks[-1] == 14
    peer.connection.pause_writing()
    peer.connection.flush()
    assert marks[-1] == 1
    peer.connection.resume_writing()
    peer.connection.flush()
    assert marks[-1] == 14
    peer.connection.drain()
    await asyncio.sleep(0)
    assert marks[-1] == 1


async def test_an_exchange_in_one_read_does_not_touch_the_mark(connect: Connect) -> None:
    peer, marks = merging(connect)
    peer.shake()
    for number in range(10):
        stream = 1 + 2 * number
        peer.feed(h2.rst_stream(max(1, stream - 2), 0) if number else b"", peer.headers(stream, path="/no/Such"))
    assert marks == [14]


async def test_silent_connections_are_woken_for_stragglers(connect: Connect) -> None:
    peer, marks = merging(connect)
    peer.shake()
    peer.connection.tick(peer.connection.loop.time())
    assert marks == [14]
    peer.connection.tick(peer.connection.loop.time() + 1)
    assert marks == [14, 1]


async def test_without_merging_sockets_are_left_alone(connect: Connect) -> None:
    sock = MarkSocket()
    peer = connect(sock=sock).shake()
    peer.open().stream.finish()
    await asyncio.sleep(0)
    assert sock.marks == []


# ---- time ----


async def test_silent_peers_are_asked_and_then_dropped(connect: Connect) -> None:
    peer = connect(H2Limits(keepalive=10)).shake()
    start = peer.connection.loop.time()
    for second in (0, 5, 11, 12, 13):
        peer.connection.tick(start + second)
    assert peer.frames() == [(h2.PING, 0, 0, b"keepaliv")]
    peer.feed(h2.ping(b"keepaliv", ack=True))
    for second in (14, 25, 26, 33):
        peer.connection.tick(start + second)
    assert peer.frames() == [(h2.PING, 0, 0, b"keepaliv")]
    assert not peer.transport.aborted
    peer.connection.tick(start + 36)
    assert peer.transport.aborted


async def test_a_handshake_has_a_deadline(connect: Connect) -> None:
    peer = connect(H2Limits(handshake_timeout=3, keepalive=0))
    start = peer.connection.loop.time()
    peer.feed(h2.PREFACE)
    peer.connection.tick(start + 2)
    assert not peer.transport.eof
    peer.connection.tick(start + 4)
    assert peer.goaway() == ErrorCode.SETTINGS_TIMEOUT


# ---- draining ----


async def test_draining_ends_with_the_last_exchange(connect: Connect) -> None:
    peer = connect().shake()
    handler = peer.open(1)
    peer.connection.drain()
    await asyncio.sleep(0)
    goaway, ping = peer.frames()
    assert goaway == (h2.GOAWAY, 0, 0, (2**31 - 1).to_bytes(4, "big") + b"\0" * 4)
    peer.feed(peer.headers(3))  # was on its way
    assert len(peer.handlers) == 2
    peer.feed(h2.ping(ping[3], ack=True))
    assert peer.frames() == [(h2.GOAWAY, 0, 0, b"\0\0\0\x03" + b"\0" * 4)]
    peer.feed(peer.headers(5), data(5, message(b"x")), h2.rst_stream(5, 8), peer.headers(7))
    assert len(peer.handlers) == 2
    assert peer.frames() == []
    peer.handlers[1].stream.finish()
    handler.stream.send(b"x")
    handler.stream.finish()
    await asyncio.sleep(0)
    assert kinds(peer.frames()) == [h2.HEADERS, h2.HEADERS, h2.DATA, h2.HEADERS]
    assert not peer.transport.eof
    peer.feed(h2.rst_stream(1, 0), h2.rst_stream(3, 0))
    assert peer.transport.eof


async def test_draining_does_not_wait_for_a_ping_that_never_comes(connect: Connect) -> None:
    peer = connect().shake()
    peer.connection.drain()
    peer.connection.drain()
    await asyncio.sleep(0)
    assert kinds(peer.frames()) == [h2.GOAWAY, h2.PING]
    peer.connection.tick(peer.connection.loop.time() + 2)
    await asyncio.sleep(0)
    assert kinds(peer.frames()) == [h2.GOAWAY]
    assert peer.transport.eof


async def test_a_peer_that_says_goodbye_finishes_first(connect: Connect) -> None:
    peer = connect().shake()
    handler = peer.open()
    peer.feed(h2.goaway(0, 0))
    assert not peer.transport.eof
    handler.stream.finish()
    peer.feed(h2.rst_stream(1, 0))
    assert peer.transport.eof


async def test_a_connection_that_is_accepted_while_the_server_closes_is_ended_too() -> None:
    server = H2Server({})

    class Connection:
        opened = 0

        def drain(self) -> None:
            """Like a peer with streams that do not end."""

        def abort(self, why: str) -> None:
            server.lost(self)  # type: ignore[arg-type]

    class First(Connection):
        def abort(self, why: str) -> None:
            server.made(Connection())  # type: ignore[arg-type]
            super().abort(why)

    server.made(First())  # type: ignore[arg-type]
    await asyncio.wait_for(server.close(), 10)
    assert not server.connections
