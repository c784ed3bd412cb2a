"""Both windows in both directions, slow readers, and what `room` promises."""

import asyncio
from typing import Any

import pytest

from fairlead.gateway import h2
from fairlead.gateway.grpc_frames import PREFIX
from fairlead.gateway.h2 import ErrorCode
from fairlead.gateway.h2_limits import H2Limits

Connect = Any


def data(stream: int, payload: bytes, flags: int = 0) -> bytes:
    return h2.frame(h2.DATA, flags, stream, payload)


def message(body: bytes) -> bytes:
    return PREFIX.pack(0, len(body)) + body


def sizes(frames: list[Any], stream: int) -> list[int]:
    """Payloads of the stream's DATA frames; 0 stands for its trailers."""
    found = []
    for kind, flags, owner, payload in frames:
        if owner == stream and kind == h2.DATA:
            assert payload
            found.append(len(payload))
        elif owner == stream and flags & h2.END_STREAM:
            found.append(0)
    return found


def payload(frames: list[Any], stream: int) -> bytes:
    return b"".join(frame[3] for frame in frames if frame[0] == h2.DATA and frame[2] == stream)


BIG = bytes(range(256)) * 400  # 102 400 bytes


# ---- sending ----


async def test_answers_wait_for_the_streams_window(connect: Connect) -> None:
    peer = connect().shake()
    handler = peer.open()
    handler.stream.send(BIG)
    handler.stream.send(b"tail")
    handler.stream.finish()
    await asyncio.sleep(0)
    frames = peer.frames()
    assert sizes(frames, 1) == [16384, 16384, 16384, 16383]
    peer.feed(h2.window_update(0, 1_000_000))
    assert peer.frames() == []
    peer.feed(h2.window_update(1, 20_000))
    frames += peer.frames()
    assert sizes(frames[-2:], 1) == [16384, 3616]
    peer.feed(h2.window_update(1, 1_000_000))
    frames += peer.frames()
    assert sizes(frames, 1)[-1] == 0
    assert payload(frames, 1) == message(BIG) + message(b"tail")
    assert peer.connection.queued == 0
    assert not peer.connection.streams


@pytest.mark.parametrize("window", [0, 20, 21, 1000])
@pytest.mark.parametrize("before", [[], [b"first"]])
async def test_last_messages_are_the_same_frames_as_messages_and_an_end(
    connect: Connect, window: int, before: list[bytes]
) -> None:
    """At once where the window allows it (both take 19 bytes), else when it grows."""
    written = []
    for together in (False, True):
        peer = connect().shake({h2.INITIAL_WINDOW_SIZE: window + 10 * len(before)})
        handler = peer.open()
        for body in before:
            handler.stream.send(body)
        if together:
            handler.stream.send_last(b"pick", b"go on")
        else:
            handler.stream.send(b"pick", b"go on")
            handler.stream.finish()
        await asyncio.sleep(0)
        frames = peer.frames()
        assert bool(peer.connection.streams) == (window < 19)
        peer.feed(h2.window_update(1, 1000))
        frames += peer.frames()
        handler.stream.send_last(b"ignored")
        await asyncio.sleep(0)
        assert peer.frames() == []
        peer.connection.validate()
        assert payload(frames, 1) == b"".join(map(message, (*before, b"pick", b"go on")))
        written.append(frames)
    assert written[0] == written[1]


async def test_answers_wait_for_the_connections_window_and_take_turns(connect: Connect) -> None:
    peer = connect().shake({h2.INITIAL_WINDOW_SIZE: 10_000_000})
    one, two = peer.open(1), peer.open(3)
    for handler in (one, two):
        handler.stream.send(BIG * 3)
        handler.stream.finish()
    await asyncio.sleep(0)
    frames = peer.frames()
    assert sum(sizes(frames, 1)) == 65535 and not sizes(frames, 3)
    assert list(peer.connection.blocked) == [1, 3]
    peer.feed(h2.window_update(0, 200_000))
    frames = peer.frames()
    order = [frame[2] for frame in frames if frame[0] == h2.DATA]
    assert order == [1] * 4 + [3] * 4 + [1] * 4 + [3]  # turns of 64 KiB
    assert sum(sizes(frames, 1) + sizes(frames, 3)) == 200_000
    peer.feed(h2.window_update(0, 1_000_000))
    assert not peer.connection.blocked
    assert not peer.connection.streams


async def test_tiny_windows_lose_nothing(connect: Connect) -> None:
    peer = connect().shake({h2.INITIAL_WINDOW_SIZE: 0})
    handler = peer.open()
    handler.stream.send(b"hello", b"", b"world")
    handler.stream.finish()
    await asyncio.sleep(0)
    assert peer.frames() == []  # not even the headers: nothing can be sent yet
    frames = []
    for _ in range(30):
        peer.feed(h2.window_update(1, 1))
        frames += peer.frames()
    assert payload(frames, 1) == message(b"hello") + message(b"") + message(b"world")
    assert sizes(frames, 1) == [1] * 25 + [0]


async def test_small_messages_wait_for_the_connections_window_too(connect: Connect) -> None:
    peer = connect().shake({h2.INITIAL_WINDOW_SIZE: 1 << 20})
    big, small, tiny = peer.open(1), peer.open(3), peer.open(5)
    big.stream.send(b"x" * 65_500)
    small.stream.send(b"y" * 30)
    tiny.stream.send(b"z" * 20)
    await asyncio.sleep(0)
    frames = peer.frames()
    assert sizes(frames, 3) == [30] and not sizes(frames, 5)
    assert peer.connection.window == 0
    peer.feed(h2.window_update(0, 100))
    frames = peer.frames()
    assert payload(frames, 3) + payload(frames, 5) == message(b"y" * 30)[30:] + message(b"z" * 20)
    assert peer.connection.window == 100 - 5 - 25


async def test_a_stream_with_the_smallest_window_waits_for_the_connection(connect: Connect) -> None:
    peer = connect().shake()
    peer.open(1).stream.send(b"x" * 65_530)
    other = peer.open(3)
    peer.feed(h2.settings({h2.INITIAL_WINDOW_SIZE: 3}))
    other.stream.send(b"abc")
    await asyncio.sleep(0)
    peer.frames()
    peer.feed(h2.window_update(0, 100))
    assert sizes(peer.frames(), 3) == [3]


async def test_windows_may_become_negative(connect: Connect) -> None:
    peer = connect().shake()
    handler = peer.open()
    handler.stream.send(b"x" * 50_000)
    await asyncio.sleep(0)
    peer.frames()
    peer.feed(h2.settings({h2.INITIAL_WINDOW_SIZE: 1000}))
    assert handler.stream.window == 65535 - 50005 - 64535
    assert handler.stream.writable_bytes() == 0
    handler.stream.send(b"more")
    await asyncio.sleep(0)
    peer.feed(h2.window_update(1, 49_005))
    assert [frame[0] for frame in peer.frames()] == [h2.SETTINGS]
    peer.feed(h2.settings({h2.INITIAL_WINDOW_SIZE: 1009}))
    kind, update = peer.frames()
    assert kind[0] == h2.SETTINGS  # the acknowledgement first
    assert update == (h2.DATA, 0, 1, message(b"more"))


async def test_a_window_that_settings_overflow_breaks_the_connection(connect: Connect) -> None:
    peer = connect().shake()
    peer.open()
    peer.feed(h2.window_update(1, 2**31 - 1 - 65535))
    peer.feed(h2.settings({h2.INITIAL_WINDOW_SIZE: 65536}))
    assert peer.goaway() == ErrorCode.FLOW_CONTROL_ERROR


async def test_frames_are_as_large_as_the_peer_takes(connect: Connect) -> None:
    peer = connect().shake({h2.MAX_FRAME_SIZE: 60_000})
    handler = peer.open()
    handler.stream.send(b"x" * 50_000)
    handler.stream.send(b"y" * 20_000)
    await asyncio.sleep(0)
    assert sizes(peer.frames(), 1) == [50_005, 15_530]


async def test_streams_that_are_lost_free_what_waits(connect: Connect) -> None:
    peer = connect().shake({h2.INITIAL_WINDOW_SIZE: 1 << 20})
    handlers = [peer.open(stream) for stream in (1, 3, 5)]
    for handler in handlers:
        handler.stream.send(BIG)
    handlers[2].stream.finish()
    assert peer.connection.queued == 3 * len(message(BIG)) - 65535
    peer.feed(h2.rst_stream(1, 8), h2.rst_stream(3, 8), h2.rst_stream(5, 8))
    assert peer.connection.queued == 0
    assert not peer.connection.blocked
    assert [len(handler.heard) for handler in handlers] == [1, 1, 0]  # the third was finished


async def test_room_is_what_leaves_in_one_write(connect: Connect) -> None:
    peer = connect().shake({h2.INITIAL_WINDOW_SIZE: 30_000})
    handler, other = peer.open(1), peer.open(3)
    room = handler.stream.writable_bytes()
    assert room == 30_000 - 5
    handler.stream.send(b"x" * room)
    handler.stream.finish()
    await asyncio.sleep(0)
    assert sizes(peer.frames(), 1) == [16384, 13616, 0]
    assert peer.open(5).stream.writable_bytes() == 30_000 - 5
    other.stream.send(b"x" * 30_000)
    assert other.stream.writable_bytes() == 0
    third = peer.open(7).stream
    assert third.writable_bytes() == 65535 - 60_000 - 5
    peer.transport.held = 1
    assert third.writable_bytes() == 0
    peer.transport.held = 0
    peer.connection.pause_writing()
    assert third.writable_bytes() == 0
    peer.connection.resume_writing()
    assert third.writable_bytes() > 0
    third.finish()
    assert third.writable_bytes() == 0


async def test_a_paused_transport_holds_messages_back(connect: Connect) -> None:
    peer = connect().shake({h2.INITIAL_WINDOW_SIZE: 1 << 20})
    handler, other = peer.open(1), peer.open(3)
    peer.connection.pause_writing()
    handler.stream.send(b"x")
    handler.stream.finish()
    other.stream.send(b"y")
    peer.feed(h2.window_update(0, 100), h2.window_update(3, 100), h2.ping(b"12345678"))
    assert [frame[0] for frame in peer.frames()] == [h2.PING]
    peer.connection.resume_writing()
    await asyncio.sleep(0)
    assert [frame[:3] for frame in peer.frames()] == [
        (h2.HEADERS, 4, 1), (h2.DATA, 0, 1), (h2.HEADERS, 5, 1), (h2.HEADERS, 4, 3), (h2.DATA, 0, 3)
    ]  # fmt: skip


async def test_long_output_is_handed_over_in_batches(connect: Connect) -> None:
    """The transport can stop a batch: what waits stays in the streams, and is counted."""
    peer = connect().shake({h2.INITIAL_WINDOW_SIZE: 1 << 30})
    handlers = [peer.open(1 + 2 * number) for number in range(40)]
    for handler in handlers:
        handler.stream.send(BIG)
    await asyncio.sleep(0)
    peer.frames()
    write = peer.transport.write

    def pausing(part: bytes) -> None:
        write(part)
        peer.connection.pause_writing()

    peer.transport.write = pausing
    peer.feed(h2.window_update(0, 1 << 30))
    assert sum(len(frame[3]) for frame in peer.frames()) < 2 << 20
    assert peer.connection.queued > 2 << 20


async def test_readers_that_are_too_slow_are_dropped(connect: Connect) -> None:
    peer = connect(H2Limits(max_pending=300_000)).shake()
    handler = peer.open()
    handler.stream.send(BIG, BIG, BIG)
    assert not peer.transport.aborted
    handler.stream.send(BIG)
    assert peer.transport.aborted
    queued = peer.connection.queued
    handler.stream.send(BIG)
    assert peer.connection.queued == queued


async def test_control_frames_that_nobody_reads_are_bounded(connect: Connect) -> None:
    peer = connect(H2Limits(max_pending=300_000, control_burst=10**9)).shake()
    peer.connection.pause_writing()
    peer.transport.held = 299_000
    peer.feed(h2.ping(b"12345678"))
    assert not peer.transport.aborted
    peer.transport.held = 301_000
    peer.feed(h2.ping(b"12345678"))
    assert peer.transport.aborted


# ---- receiving ----


async def test_receive_windows_are_given_back_in_big_steps(connect: Connect) -> None:
    peer = connect(H2Limits(stream_window=100_000, connection_window=200_000)).shake()
    peer.open(1)
    updates = []
    for _ in range(40):
        peer.feed(data(1, message(b"x" * 9_995)))
        updates += [(stream, int.from_bytes(body, "big")) for _, _, stream, body in peer.frames()]
    assert updates == [(1, 50_000), (0, 100_000), (1, 50_000)] * 4
    assert sum(size for stream, size in updates if stream == 0) == 400_000


async def test_data_for_finished_streams_gives_the_connections_window_back(connect: Connect) -> None:
    peer = connect(H2Limits(stream_window=60_000, connection_window=80_000)).shake()
    peer.open(1).stream.finish()
    peer.open(3)
    peer.feed(h2.window_update(3, 0))  # reset by us
    peer.frames()
    peer.feed(data(1, b"x" * 20_000), data(3, b"x" * 20_000), data(1, b"\x05" + b"x" * 19_999, h2.PADDED))
    assert peer.frames() == [(h2.WINDOW_UPDATE, 0, 0, (40_000).to_bytes(4, "big"))]


async def test_padding_counts(connect: Connect) -> None:
    peer = connect(H2Limits(stream_window=1000, connection_window=100_000)).shake()
    handler = peer.open(1)
    peer.feed(data(1, b"\xff" + message(b"x" * 300) + b"\0" * 255, h2.PADDED))
    assert peer.frames() == [(h2.WINDOW_UPDATE, 0, 1, (561).to_bytes(4, "big"))]
    assert handler.heard == [b"x" * 300]


@pytest.mark.parametrize("lingering", [False, True])
async def test_peers_that_exceed_the_streams_window_lose_it(connect: Connect, lingering: bool) -> None:
    peer = connect(H2Limits(stream_window=1000)).shake()
    handler = peer.open(1)
    if lingering:
        handler.stream.finish()
    peer.feed(data(1, message(b"x" * 1000)))
    assert peer.frames()[-1] == (h2.RST_STREAM, 0, 1, ErrorCode.FLOW_CONTROL_ERROR.to_bytes(4, "big"))
    assert [heard[0] for heard in handler.heard] == ([] if lingering else ["lost"])


async def test_peers_that_exceed_the_connections_window_lose_it(connect: Connect) -> None:
    peer = connect(H2Limits(stream_window=1 << 20, connection_window=100_000)).shake()
    peer.open(1)
    peer.feed(data(1, message(b"x" * 100_000)))
    assert peer.goaway() == ErrorCode.FLOW_CONTROL_ERROR


async def test_messages_are_joined_once_however_they_are_cut(connect: Connect) -> None:
    peer = connect().shake()
    handler = peer.open()
    wire = message(BIG * 5) + message(b"") + message(b"end")
    for pos in range(0, len(wire), 16384):
        peer.feed(data(1, wire[pos : pos + 16384]))
    assert handler.heard == [BIG * 5, b"", b"end"]
    assert peer.connection.partial == 0
