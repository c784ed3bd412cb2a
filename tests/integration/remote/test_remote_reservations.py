"""What a scheduler is told of the pool while room is kept for the very requests that it is asked about."""

import asyncio
from typing import Any

from fairlead.config.schema import SchedulerSettings
from fairlead.core.events import Event, Outcome, RemotePick, RemotePicked, RemoteUp
from fairlead.core.instructions import AskRemote
from fairlead.gateway.h2_limits import H2Limits
from fairlead.gateway.h2_server import H2Server
from fairlead.server.remote.client import RemoteClient
from fairlead.server.remote.messages import PATH, Answer, Ask, Picks, Welcome, decode_ask, encode_answer
from fairlead.testing import builders


class Scheduler:
    """Takes down what it is told, and picks e1."""

    def __init__(self) -> None:
        self.told: list[Ask] = []

    def __call__(self, stream: Any, metadata: Any) -> "Scheduler":
        self._stream = stream
        return self

    def on_message(self, message: bytes) -> None:
        ask = decode_ask(message)
        self.told.append(ask)
        if ask.hello is not None:
            welcome = Welcome(scheduler="test", wants_forecasts=True)
            self._stream.send(encode_answer(Answer(welcome=welcome)))
        if ask.batch is not None:
            picks = tuple(RemotePick(one.request.id, Outcome.PICKED, "e1") for one in ask.batch.requests)
            self._stream.send(encode_answer(Answer(picks=Picks(batch=ask.batch.number, picks=picks))))

    def on_half_close(self) -> None: ...

    def on_lost(self, why: str) -> None: ...


async def test_it_is_not_told_of_reservations() -> None:
    fleet, scheduler = builders.fleet("e0", "e1"), Scheduler()
    server = H2Server({PATH: scheduler}, H2Limits())
    port = await server.listen("127.0.0.1")
    events: list[Event] = []
    client = RemoteClient("s", SchedulerSettings(address=f"127.0.0.1:{port}"), fleet, events.append)
    client.start()

    async def until(kind: type) -> None:
        async with asyncio.timeout(20):
            while not any(isinstance(event, kind) for event in events):
                await asyncio.sleep(0.005)

    try:
        await until(RemoteUp)
        running, asked = builders.request("word " * 3000), builders.request("word " * 4000)
        fleet.charge(running, 1, 0.0, 0, 100.0)
        fleet.charge(asked, 0, 0.0, 0, 100.0, reserved=True)
        client.ask(AskRemote("s", asked, None, None, 100.0))
        await until(RemotePicked)
    finally:
        await client.close()
        await server.close()
    ask = scheduler.told[-1]
    assert ask.state is not None and ask.batch is not None
    assert ask.state.slots.tolist() == [1], "nothing has changed at e0"
    forecast = ask.batch.requests[0].forecast
    assert forecast is not None and forecast.ttft_ms[0] < forecast.ttft_ms[1]
    assert fleet.table.inflight.tolist() == [1.0, 1.0], "here both count"
    fleet.validate()
