"""The parent keeps its schedulers running whatever the machine refuses for a moment."""

import asyncio
import logging
import os
import signal
from typing import Any

import pytest

from fairlead.server import supervise
from fairlead.server.supervise import Keeper, Outage


class Gateway:
    def write_again(self) -> None: ...


async def test_a_scheduler_that_cannot_be_started_now_is_started_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refusals: list[Exception] = [BlockingIOError(11, "too many processes"), RuntimeError("can't start new thread")]

    def spawn(command: list[str]) -> int:
        if refusals:
            raise refusals.pop(0)
        return os.posix_spawn(command[0], command, os.environ)

    monkeypatch.setattr(supervise, "spawn_tied", spawn)
    first = await asyncio.to_thread(os.posix_spawn, "/bin/true", ["/bin/true"], os.environ)
    gateway: Any = Gateway()
    keeper = Keeper("worker 1", first, ["/bin/sleep", "60"], gateway, Outage([]), only=False)
    loop, started = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
    started.set_result(None)
    loop.add_signal_handler(signal.SIGCHLD, lambda: keeper.child.reap())
    with caplog.at_level(logging.ERROR, "fairlead"):
        kept = asyncio.create_task(keeper.keep(asyncio.Event(), started))
        try:
            async with asyncio.timeout(30):
                while keeper.child.pid == first or not keeper.child.runs:
                    await asyncio.sleep(0.02)
            assert not refusals and not kept.done()
            assert sum("cannot be started" in record.getMessage() for record in caplog.records) == 2
        finally:
            kept.cancel()
            if keeper.child.pid != first:
                keeper.child.signal(signal.SIGKILL)
                await keeper.child.wait()
            loop.remove_signal_handler(signal.SIGCHLD)


@pytest.mark.parametrize(("only", "last"), [(False, [6.4, 12.8, 20.0, 20.0, 20.0]), (True, [5.0] * 5)])
async def test_a_scheduler_that_fails_at_every_start_is_tried_less_and_less_often(
    only: bool, last: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        if seconds != supervise.ASKED_AGAIN_S:
            pauses.append(seconds)
        if len(pauses) == 10:
            stopping.set()

    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    monkeypatch.setattr(supervise, "spawn_tied", lambda command: os.posix_spawn(command[0], command, os.environ))
    monkeypatch.setattr(supervise.asyncio, "sleep", sleep)
    first = await asyncio.to_thread(os.posix_spawn, "/bin/false", ["/bin/false"], os.environ)
    gateway: Any = Gateway()
    keeper = Keeper("worker 1", first, ["/bin/false"], gateway, Outage([]), only=only)
    started = loop.create_future()
    started.set_result(None)
    loop.add_signal_handler(signal.SIGCHLD, lambda: keeper.child.reap())
    try:
        with caplog.at_level(logging.ERROR, "fairlead"):
            async with asyncio.timeout(30):
                await keeper.keep(stopping, started)
    finally:
        loop.remove_signal_handler(signal.SIGCHLD)
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, *last]
