import asyncio
import socket
from collections.abc import Iterator
from time import monotonic
from typing import Any

import pytest

from fairlead.lab.load.reactor import READABLE, WRITABLE, Alarm, Reactor


@pytest.fixture
async def reactor() -> Any:
    reactor = Reactor(asyncio.get_running_loop())
    yield reactor
    reactor.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


async def test_an_alarm_never_rings_early_and_rings_once() -> None:
    rung: list[float] = []
    alarm = Alarm(asyncio.get_running_loop(), lambda: rung.append(monotonic()))
    when = monotonic() + 0.02
    alarm.set(when)
    later = asyncio.Event()
    witness = Alarm(asyncio.get_running_loop(), later.set)
    witness.set(when + 0.01)
    async with asyncio.timeout(20):
        await later.wait()
    witness.close()
    alarm.close()
    alarm.close()
    assert len(rung) == 1
    assert rung[0] >= when


async def test_an_alarm_in_the_past_rings_and_a_later_setting_replaces_an_earlier_one() -> None:
    rung = asyncio.Event()
    alarm = Alarm(asyncio.get_running_loop(), rung.set)
    alarm.set(monotonic() + 1000)
    alarm.set(-5.0)
    async with asyncio.timeout(20):
        await rung.wait()
    alarm.close()


async def test_a_failing_handler_is_reported_and_stops_no_other(
    reactor: Reactor, pair: tuple[socket.socket, socket.socket]
) -> None:
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reports.append(context))
    left, right = pair
    heard = asyncio.Event()

    def fail(_events: int, _now: float) -> None:
        left.recv(10)
        raise RuntimeError("broken handler")

    def hear(_events: int, _now: float) -> None:
        right.recv(10)
        heard.set()

    reactor.watch(left.fileno(), READABLE, fail)
    reactor.watch(right.fileno(), READABLE, hear)
    left.send(b"x")
    right.send(b"x")
    async with asyncio.timeout(20):
        await heard.wait()
        while not reports:
            await asyncio.sleep(0)
    assert [str(report["exception"]) for report in reports] == ["broken handler"]


async def test_a_forgotten_descriptor_is_not_heard(reactor: Reactor, pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    heard: list[int] = []
    reactor.watch(left.fileno(), READABLE, lambda events, _now: heard.append(events))
    reactor.forget(left.fileno())
    reactor.forget(left.fileno())
    right.send(b"x")
    later = asyncio.Event()
    writable, other = socket.socketpair()
    with writable, other:
        reactor.watch(writable.fileno(), WRITABLE, lambda _events, _now: later.set())
        async with asyncio.timeout(20):
            await later.wait()
        reactor.forget(writable.fileno())
    assert heard == []
