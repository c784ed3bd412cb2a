"""The end of a stream to a scheduler."""

import asyncio
from typing import Any

import pytest

from fairlead.server.remote import stream
from fairlead.server.remote.stream import SchedulerStream


class Deaf:
    """A channel and its call. A read never ends by itself, not even when the call is cancelled."""

    def __init__(self) -> None:
        self.cancelled = self.stopped = False

    def stream_stream(self, path: str) -> Any:
        return lambda: self

    async def read(self) -> bytes:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.stopped = True
        return b""

    def cancel(self) -> None:
        self.cancelled = True


async def test_closing_does_not_wait_for_a_call_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "STOPS_WITHIN", 0.01)
    channel, ends = Deaf(), list[str]()
    opened = SchedulerStream(channel, "10.0.0.1:9", lambda message: None, ends.append)
    await asyncio.sleep(0)
    opened.end("closed")
    async with asyncio.timeout(60.0):
        await opened.closed()
    await asyncio.sleep(0)
    assert channel.cancelled and channel.stopped and ends == ["closed"]
