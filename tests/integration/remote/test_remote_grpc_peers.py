"""Our two ends of the contract against grpc's: our client with a grpc.aio server, grpc.aio's client with our server."""

import asyncio
from typing import Any

import pytest

from fairlead.config.schema import SchedulerSettings
from fairlead.core.events import Event, Outcome, RemoteDown, RemotePick, RemotePicked, RemoteUp
from fairlead.core.instructions import AskRemote
from fairlead.server.remote.client import RemoteClient
from fairlead.server.remote.messages import (
    PATH,
    Answer,
    Ask,
    Asked,
    Batch,
    EndpointState,
    Hello,
    Picks,
    Welcome,
    decode_answer,
    decode_ask,
    encode_answer,
    encode_ask,
)
from fairlead.server.sdk.check import Dialogue
from fairlead.server.sdk.server import SchedulerServer, policy_maker
from fairlead.testing import builders

grpc = pytest.importorskip("grpc", reason="the extra grpc is not installed")


async def until(ready: Any) -> None:
    async with asyncio.timeout(20):
        while not ready():
            await asyncio.sleep(0.005)


async def test_our_client_and_their_server() -> None:
    """Large questions and answers, and the end of the stream with a status."""
    import grpc.aio

    async def schedule(requests: Any, context: Any) -> Any:
        async for data in requests:
            ask = decode_ask(data)
            if ask.hello is not None:
                yield encode_answer(Answer(welcome=Welcome(scheduler="grpc.aio", wants_forecasts=True)))
            if ask.batch is not None:
                assert all(one.forecast is not None and len(one.forecast.used) == 500 for one in ask.batch.requests)
                if len(ask.batch.requests) == 1:
                    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "ünough")
                picks = tuple(RemotePick(o.request.id, Outcome.PICKED, "e7", 1.0) for o in ask.batch.requests)
                yield encode_answer(Answer(picks=Picks(batch=ask.batch.number, picks=picks)))

    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, call: Any) -> Any:
            return grpc.stream_stream_rpc_method_handler(schedule) if call.method == PATH else None

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    events: list[Event] = []
    told: list[str] = []
    fleet = builders.fleet(*(f"e{i}" for i in range(500)))
    settings = SchedulerSettings(address=f"127.0.0.1:{port}")
    client = RemoteClient("s", settings, fleet, events.append, lambda what, why: told.append(why))
    client.start()
    try:
        await until(lambda: any(isinstance(event, RemoteUp) for event in events))
        for size in (200, 3, 200):
            for _ in range(size):
                client.ask(AskRemote("s", builders.request("hello"), None, None, 1.0))
            await asyncio.sleep(0.01)
        await until(lambda: sum(len(e.picks) for e in events if isinstance(e, RemotePicked)) == 403)
        client.ask(AskRemote("s", builders.request("hello"), None, None, 1.0))
        await until(lambda: any(isinstance(event, RemoteDown) for event in events))
        await until(lambda: any("gRPC status 8" in why for why in told))
    finally:
        await client.close()
        await server.stop(None)


async def test_their_client_and_our_server() -> None:
    import grpc.aio

    server = SchedulerServer(policy_maker("least-requests"))
    address = await server.start("127.0.0.1:0")
    endpoints = [EndpointState(slot=i, id=f"e{i}", address=f"10.0.0.{i}:1") for i in range(3)]
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.stream_stream(PATH)()
            await call.write(encode_ask(Ask(hello=Hello(), state=Dialogue().state(endpoints))))
            assert decode_answer(await call.read()).welcome is not None
            for number in range(1, 4):
                requests = [Asked(request=builders.request(str(i))) for i in range(300)]
                await call.write(encode_ask(Ask(batch=Batch(number=number, requests=requests))))
                picks = decode_answer(await call.read()).picks
                assert picks is not None and [p.request_id for p in picks.picks] == [o.request.id for o in requests]
                taken = [sum(pick.endpoint == f"e{i}" for pick in picks.picks) for i in range(3)]
                assert taken == [100, 100, 100], "its own picks count"
            await call.done_writing()
            assert await call.code() == grpc.StatusCode.OK
    finally:
        await server.close()
