"""What all streams together may hold, as a model: whoever has room can finish, and it is never more than the limit."""

import asyncio
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead.gateway.grpc_frames import Status
from fairlead.gateway.grpc_server import AioStream
from fairlead.gateway.h2_limits import ByteBudget, Claim
from fairlead.gateway.h2_server import H2Server

KB, MB = 1 << 10, 1 << 20


class Stream:
    def __init__(self, budget: ByteBudget) -> None:
        self.claim = Claim(self)
        self.budget = budget
        self.grants = 0
        self.failed = ""

    def ask(self, size: int, window: int = MB) -> bool:
        return self.budget.ask(self.claim, size, window)

    def done(self) -> None:
        self.budget.count(self.claim, 0)

    def granted(self) -> None:
        self.grants += 1

    def fail(self, code: int, why: str) -> None:
        self.failed = why
        self.done()


class Rig:
    def __init__(self, limit: int = 64 * MB) -> None:
        self.now = 100.0
        self.budget = ByteBudget(limit, lambda: self.now)

    def stream(self) -> Stream:
        return Stream(self.budget)


def test_what_does_not_fit_waits_and_gets_its_room_in_line() -> None:
    rig = Rig()
    first, second, third = rig.stream(), rig.stream(), rig.stream()
    assert first.ask(40 * MB) and second.ask(30 * MB) and third.ask(5 * MB)
    assert [rig.budget.starved(one.claim) for one in (first, second, third)] == [False, True, True]
    assert rig.budget.used == 42 * MB, "who waits holds its window"
    first.done()
    assert (second.grants, third.grants) == (1, 1)
    assert rig.budget.used == 35 * MB
    second.done()
    third.done()
    assert (rig.budget.used, rig.budget.waiting, rig.budget.pressed()) == (0, 0, False)


def test_a_large_one_in_line_is_not_overtaken() -> None:
    rig = Rig()
    first, large, small = rig.stream(), rig.stream(), rig.stream()
    first.ask(20 * MB)
    large.ask(40 * MB)
    small.ask(2 * MB)
    assert rig.budget.starved(small.claim)


def test_small_ones_are_served_though_large_ones_wait() -> None:
    rig = Rig()
    hostile = [rig.stream() for _ in range(200)]
    answers = [one.ask(40 * MB) for one in hostile]
    assert answers.count(True) < 20 and rig.budget.refused == answers.count(False)
    polite = [rig.stream() for _ in range(100)]
    assert all(one.ask(60 * KB) for one in polite)
    assert not any(rig.budget.starved(one.claim) for one in polite)
    assert rig.budget.used <= rig.budget.limit


def test_who_never_finishes_is_cut_off_when_others_wait() -> None:
    rig = Rig()
    idle, next_one = rig.stream(), rig.stream()
    idle.ask(40 * MB)
    rig.now += 1000.0
    rig.budget.tick()
    assert not idle.failed, "nobody waits"
    next_one.ask(30 * MB)
    rig.budget.tick()
    assert idle.failed and rig.budget.cut == 1
    assert next_one.grants == 1
    rig.now += 15.0
    rig.stream().ask(30 * MB)
    rig.budget.tick()
    assert not next_one.failed, "10 seconds and one for each 4 MiB"
    rig.now += 5.0
    rig.budget.tick()
    assert next_one.failed


def test_who_waits_for_an_endpoint_is_counted_and_not_cut() -> None:
    rig = Rig()
    queued, late = rig.stream(), rig.stream()
    rig.budget.count(queued.claim, 47 * MB)
    late.ask(20 * MB)
    rig.now += 1000.0
    late.claim.since = rig.now
    rig.budget.tick()
    assert not queued.failed and rig.budget.starved(late.claim)
    queued.done()
    assert late.grants == 1


def test_more_than_there_is_at_all_is_refused() -> None:
    rig = Rig()
    assert not rig.stream().ask(60 * MB)
    assert rig.budget.used == 0 and rig.budget.pressed()


steps = st.lists(
    st.tuples(
        st.sampled_from(["ask", "count", "done", "tick"]), st.integers(0, 9), st.integers(0, 70 * MB), st.booleans()
    ),
    max_size=60,
)


@given(steps)
@settings(max_examples=300, deadline=None)
def test_nobody_waits_for_somebody_who_waits(taken: list[tuple[str, int, int, bool]]) -> None:
    rig = Rig()
    streams = [rig.stream() for _ in range(10)]
    for step, number, size, small in taken:
        one = streams[number]
        size = size % (64 * KB) if small else size
        rig.now += size % 7
        if step == "ask" and not one.ask(size):
            one.done()
        elif step == "count" and one.claim.coming and not rig.budget.starved(one.claim):
            rig.budget.count(one.claim, one.claim.size)  # all of it has come
        elif step == "done":
            one.done()
        elif step == "tick":
            rig.budget.tick()
        assert rig.budget.used == sum(stream.claim.size for stream in streams) <= rig.budget.limit
    # Everybody with room finishes, and so everybody finishes.
    for _ in streams:
        for one in streams:
            if not rig.budget.starved(one.claim):
                one.done()
    assert (rig.budget.used, rig.budget.waiting) == (0, 0)


async def test_over_grpc_aio_a_stream_that_waits_is_not_read_from() -> None:
    budget = ByteBudget(64 * MB, lambda: 0.0)
    first, waits, refused = AioStream(budget), AioStream(budget), AioStream(budget)
    first.hold(1, 40 * MB)
    waits.hold(1, 30 * MB)
    reading = asyncio.create_task(waits.may_read())
    await asyncio.sleep(0)
    assert not reading.done()
    refused.hold(1, 60 * MB)
    assert (refused.finished, refused.code) == (True, Status.RESOURCE_EXHAUSTED)
    first.released()
    await asyncio.wait_for(reading, 5.0)
    for stream in (first, waits, refused):
        stream.released()
    assert (budget.used, budget.waiting) == (0, 0)


async def test_connections_that_break_the_protocol_make_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    server = H2Server({})
    with caplog.at_level(logging.INFO, "fairlead.gateway.h2_server"):
        for number in range(500):
            server.broke(f"10.0.0.{number % 250}", "this is not HTTP/2")
    (line,) = caplog.messages
    assert line == "closed 1 connections that broke the protocol, the last from 10.0.0.0: this is not HTTP/2"
