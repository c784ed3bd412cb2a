"""Flow-control credit is given as the budget of all streams allows."""

import asyncio
from typing import Any

from fairlead.gateway import h2
from fairlead.gateway.grpc_frames import PREFIX, Status
from fairlead.gateway.h2_limits import ByteBudget, H2Limits

Connect = Any
MB = 1 << 20
FRAME = 16_384
LIMITS = H2Limits(stream_window=256 << 10, connection_window=4 * MB)


class Budgeted:
    """A connection whose streams share `limit` bytes, and a clock."""

    def __init__(self, connect: Connect, limit: int = 8 * MB) -> None:
        self.now = 100.0
        self.budget = ByteBudget(limit, lambda: self.now)
        self.peer = connect(LIMITS, budget=self.budget).shake()
        self.windows: dict[int, int] = {}
        self.number = -1

    def begin(self, size: int) -> int:
        """Open a stream and announce a message; returns the stream."""
        self.number += 2
        self.peer.open(self.number)
        self.windows[self.number] = LIMITS.stream_window
        self.send(self.number, PREFIX.pack(0, size))
        return self.number

    def send(self, stream: int, payload: bytes) -> None:
        self.windows[stream] -= len(payload)
        assert self.windows[stream] >= 0
        self.peer.feed(h2.frame(h2.DATA, 0, stream, payload))
        self.read()

    def push(self, stream: int, size: int) -> int:
        """Send so much or as far as credit goes; returns how much that was."""
        sent = 0
        while sent < size and self.windows[stream]:
            part = min(FRAME, size - sent, self.windows[stream])
            self.send(stream, b"x" * part)
            sent += part
        return sent

    def read(self) -> None:
        for kind, _, stream, payload in self.peer.frames():
            if kind == h2.WINDOW_UPDATE and stream:
                self.windows[stream] += int.from_bytes(payload, "big")


async def test_unfinished_messages_hold_no_more_than_the_budget(connect: Connect) -> None:
    rig = Budgeted(connect)
    sent = [rig.push(rig.begin(4 * MB), 3 * MB) for _ in range(20)]
    assert sent[0] == 3 * MB, "the first has room for all of it"
    assert sum(sent) <= rig.budget.limit
    assert rig.budget.used <= rig.budget.limit
    assert rig.peer.alive


async def test_small_requests_are_served_meanwhile(connect: Connect) -> None:
    rig = Budgeted(connect)
    for _ in range(20):
        rig.push(rig.begin(4 * MB), 3 * MB)
    for size in (100, 20_000, 60_000):
        stream = rig.begin(size)
        assert rig.push(stream, size) == size
        assert rig.peer.handlers[-1].heard == [b"x" * size]


async def test_who_waited_gets_credit_when_the_one_before_is_done(connect: Connect) -> None:
    rig = Budgeted(connect)
    first, second = rig.begin(4 * MB), rig.begin(3 * MB)
    begun = rig.push(second, 3 * MB)
    assert begun < 256 << 10
    assert rig.push(first, 4 * MB) == 4 * MB
    rig.read()
    assert rig.push(second, 3 * MB - begun) == 3 * MB - begun
    assert [len(handler.heard[0]) for handler in rig.peer.handlers] == [4 * MB, 3 * MB]
    assert (rig.budget.used, rig.budget.waiting) == (0, 0)


async def test_a_reset_or_a_lost_connection_gives_everything_back(connect: Connect) -> None:
    rig = Budgeted(connect)
    streams = [rig.begin(4 * MB) for _ in range(5)]
    rig.peer.feed(h2.rst_stream(streams[0], 8), h2.rst_stream(streams[1], 8))
    rig.peer.feed(h2.HEAD.pack(500_000 << 8 | h2.DATA, 0, streams[2]) + b"begun")
    assert rig.budget.used > 0
    rig.peer.connection.connection_lost(None)
    assert (rig.budget.used, rig.budget.waiting) == (0, 0)


async def test_who_holds_room_and_stops_is_cut_off(connect: Connect) -> None:
    rig = Budgeted(connect)
    idle, waits = rig.begin(4 * MB), rig.begin(3 * MB)
    rig.now += 30.0
    rig.budget.tick()
    await asyncio.sleep(0)
    rig.read()
    assert [kind for kind, *_ in rig.peer.handlers[0].heard] == ["lost"]
    assert rig.push(waits, 3 * MB) == 3 * MB
    assert idle and rig.budget.cut == 1


async def test_what_a_handler_keeps_is_counted_until_it_lets_go(connect: Connect) -> None:
    rig = Budgeted(connect)
    stream = rig.begin(MB)
    handler = rig.peer.handlers[-1]
    handler.on = lambda message: handler.stream.hold(len(message))
    rig.push(stream, MB)
    assert rig.budget.used == MB
    handler.stream.hold(0)
    assert rig.budget.used == 0
    handler.stream.hold(10, 5 * MB)
    assert rig.budget.used == 5 * MB
    handler.stream.finish()
    assert rig.budget.used == 0


async def test_a_handler_that_expects_more_than_there_is_loses_its_stream(connect: Connect) -> None:
    rig = Budgeted(connect)
    rig.begin(100)
    handler = rig.peer.handlers[-1]
    handler.stream.hold(10, 50 * MB)
    assert handler.heard[0][0] == "lost"
    assert rig.budget.refused == 1
    assert Status.RESOURCE_EXHAUSTED == 8
