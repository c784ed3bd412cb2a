"""One handler behind both transports: a grpcio client must not be able to tell them apart."""

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

import grpc
import grpc.aio
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, StreamEnded, TrailersReceived
from h2.settings import SettingCodes
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fairlead.gateway.grpc_server import GrpcServer
from fairlead.gateway.h2_limits import H2Limits
from fairlead.gateway.h2_server import H2Server
from fairlead.gateway.health import HealthService
from fairlead.gateway.stream import ServerStream

PATH = "/test.Service/Transform"
LIMIT = 400_000
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]

#: (answers, status code, status message or None while running) or the class of what was raised.
Outcome = tuple[list[bytes], int, str]


class Transform:
    """What a message does is in its first byte; see `ACTIONS`."""

    #: Name of a call → what its handler was told besides messages.
    told: dict[str, list[str]] = {}

    def __init__(self, stream: ServerStream, headers: Mapping[str, str]) -> None:
        self._stream = stream
        self._headers = headers
        self._events = self.told.setdefault(headers.get("x-call", ""), [])
        self._status = (0, "")
        if "x-refuse" in headers:
            stream.finish(7, headers["x-refuse"])

    def on_message(self, message: bytes) -> None:
        kind, body = message[:1], message[1:]
        if kind == b"e":
            self._stream.send(body)
        elif kind == b"r":
            self._stream.send(body[::-1], b"", body)
        elif kind == b"l":  # larger than any window
            self._stream.send(body * 50 + b"." * 100_000)
        elif kind == b"s":
            self._status = (len(body), body.decode("utf-8", "replace"))
        elif kind == b"f":
            self._stream.send(b"last")
            self._stream.finish(len(body) % 17, body.decode("utf-8", "replace"))
            self._stream.send(b"never seen")
        elif kind == b"h":
            self._stream.send(self._headers.get("x-text", "-").encode(), self._headers.get("x-raw-bin", "-").encode())
        elif kind == b"!":
            raise RuntimeError("on purpose")

    def on_half_close(self) -> None:
        self._events.append("half-close")
        self._stream.finish(*self._status)

    def on_lost(self, why: str) -> None:
        self._events.append("lost")


#: e echo, r reverse, l large, s status at the end, f finish at once, h headers, ! raise, . nothing.
ACTIONS = "erlsfh!."
ENDING = (b"f", b"!")
#: Statuses above 16 and UTF-8 that needs escaping come out of the bodies.
bodies = st.one_of(
    st.binary(max_size=20), st.text(max_size=12).map(str.encode), st.integers(0, 20).map(lambda size: b"z" * size)
)
script = st.lists(st.tuples(st.sampled_from(ACTIONS), bodies).map(lambda pair: pair[0].encode() + pair[1]), max_size=8)


class Pair:
    """Both servers and a channel to each, on a loop of their own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._names = (f"call-{number}" for number in itertools.count())
        self.health = HealthService()
        self.loop.run_until_complete(self._start())

    async def _start(self) -> None:
        limits = H2Limits(max_message=LIMIT)
        routes = {PATH: Transform, **self.health.routes()}
        self.servers = (H2Server(routes, limits), GrpcServer(routes, limits))
        self.targets = [f"127.0.0.1:{await server.listen('127.0.0.1')}" for server in self.servers]
        self.channels = [grpc.aio.insecure_channel(target, options=OPTIONS) for target in self.targets]

    def close(self) -> None:
        async def stop() -> None:
            for channel in self.channels:
                await channel.close()
            for server in self.servers:
                await server.close()

        self.loop.run_until_complete(stop())
        self.loop.close()

    def both(self, play: Any) -> list[Any]:
        """`play(channel, name of the call)` against each server."""

        async def run() -> list[Any]:
            async with asyncio.timeout(30):
                return [await play(channel, next(self._names)) for channel in self.channels]

        return self.loop.run_until_complete(run())


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


async def talk(channel: Any, name: str, messages: list[bytes], **metadata: Any) -> Outcome:
    """Through grpcio, which loses answers if it writes after the server has ended: so it stops at the message that
    ends the stream. `talk_raw` has no such scruples."""
    pairs = tuple((f"x-{key.replace('_', '-')}", value) for key, value in metadata.items())
    call = channel.stream_stream(PATH)(metadata=(("x-call", name), *pairs))
    for message in messages:
        await call.write(message)
        if message[:1] in ENDING:
            break
    else:
        await call.done_writing()
    answers = []
    with contextlib.suppress(grpc.aio.AioRpcError):
        while (answer := await call.read()) is not grpc.aio.EOF:
            answers.append(answer)
    return answers, (await call.code()).value[0], await call.details()


async def talk_raw(
    target: str, name: str, messages: list[bytes], *more: tuple[str, str]
) -> tuple[bytes, dict[bytes, bytes]]:
    """Everything in one write, through the h2 library: the bytes of all answers, and the trailers."""
    reader, writer = await asyncio.open_connection(*target.split(":"))
    # grpcio leaves spaces around a status message as they are, and h2 would refuse such a header.
    client = H2Connection(H2Configuration(client_side=True, validate_inbound_headers=False))
    client.initiate_connection()
    client.increment_flow_control_window(1 << 24)
    client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1 << 24})
    fields = [(":method", "POST"), (":scheme", "http"), (":authority", "test"), (":path", PATH), ("te", "trailers")]
    client.send_headers(1, [*fields, ("content-type", "application/grpc"), ("x-call", name), *more])
    for message in messages:
        client.send_data(1, b"\0" + len(message).to_bytes(4, "big") + message)
    client.end_stream(1)
    writer.write(client.data_to_send())
    body, trailers, ended = b"", {}, False
    while not ended:
        for event in client.receive_data(await reader.read(1 << 20)):
            if isinstance(event, DataReceived):
                body += event.data
            elif isinstance(event, (ResponseReceived, TrailersReceived)):
                trailers |= dict(event.headers)
            ended |= isinstance(event, StreamEnded)
        writer.write(client.data_to_send())
    writer.close()
    trailers.pop(b"grpc-accept-encoding", None)  # grpc's own, and optional
    trailers[b"grpc-message"] = unquote_to_bytes(trailers.get(b"grpc-message", b""))  # grpc sends it always
    return body, trailers


settings.register_profile("transports", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(script)
@settings(settings.get_profile("transports"), max_examples=150)
def test_scripts_have_the_same_answers_and_statuses(pair: Pair, messages: list[bytes]) -> None:
    own, reference = pair.both(lambda channel, name: talk(channel, name, messages))
    assert own == reference


@given(script)
@example([b"s "])
@settings(settings.get_profile("transports"), max_examples=60)
def test_scripts_sent_in_one_write_have_the_same_answers(pair: Pair, messages: list[bytes]) -> None:
    async def play(channel: Any, name: str) -> Any:
        return await talk_raw(pair.targets[pair.channels.index(channel)], name, messages)

    own, reference = pair.both(play)
    assert own == reference


@given(st.lists(script, min_size=2, max_size=30))
@settings(settings.get_profile("transports"), max_examples=15)
def test_scripts_at_once(pair: Pair, scripts: list[list[bytes]]) -> None:
    async def play(channel: Any, name: str) -> list[Outcome]:
        return await asyncio.gather(*(talk(channel, f"{name}-{n}", messages) for n, messages in enumerate(scripts)))

    own, reference = pair.both(play)
    assert own == reference


def test_metadata_arrives_alike(pair: Pair) -> None:
    async def play(channel: Any, name: str) -> Outcome:
        return await talk(channel, name, [b"h"], text="a b", raw_bin=bytes(range(0, 250, 7)))

    own, reference = pair.both(play)
    assert own == reference
    assert own[0][0] == b"a b"


def test_refusals_by_the_factory_are_alike(pair: Pair) -> None:
    async def play(channel: Any, name: str) -> Any:
        target = pair.targets[pair.channels.index(channel)]
        return await talk_raw(target, name, [b"e1", b"e2"], ("x-refuse", "not you"))

    own, reference = pair.both(play)
    assert own == reference
    assert own[0] == b"" and own[1][b"grpc-status"] == b"7" and own[1][b"grpc-message"] == b"not you"


@pytest.mark.parametrize("size", [LIMIT, LIMIT + 1])
def test_the_size_limit_is_the_same(pair: Pair, size: int) -> None:
    async def play(channel: Any, name: str) -> tuple[list[int], int]:
        answers, code, _ = await talk(channel, name, [b"e" + b"x" * (size - 1)])
        return [len(answer) for answer in answers], code

    own, reference = pair.both(play)
    assert own == reference == (([LIMIT - 1], 0) if size == LIMIT else ([], 8))


def test_unknown_methods_are_unimplemented(pair: Pair) -> None:
    async def play(channel: Any, name: str) -> Any:
        call = channel.unary_unary("/no/Such")(b"x")
        return await call.code()

    own, reference = pair.both(play)
    assert own is reference is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("early", [False, True])
def test_handlers_hear_the_same_of_cancels(pair: Pair, early: bool) -> None:
    """`on_lost` exactly once, and never for a stream that was finished."""

    async def play(channel: Any, name: str) -> list[str]:
        call = channel.stream_stream(PATH)(metadata=(("x-call", name),))
        await call.write(b"f" if early else b"e1")
        await call.read()
        call.cancel()
        async with asyncio.timeout(10):
            while not early and not Transform.told[name]:
                await asyncio.sleep(0.01)
        await talk(channel, f"{name}-later", [b"f"])  # whatever was on its way has arrived before
        return Transform.told[name]

    own, reference = pair.both(play)
    assert own == reference == ([] if early else ["lost"])


def test_handlers_hear_the_same_of_ends_and_errors(pair: Pair) -> None:
    async def play(channel: Any, name: str) -> list[list[str]]:
        for number, messages in enumerate(([b"e"], [b"!"], [b"f"], [b"e", b"!", b"e"])):
            await talk(channel, f"{name}-{number}", messages)
        await talk(channel, f"{name}-later", [b"f"])
        return [Transform.told[f"{name}-{number}"] for number in range(4)]

    own, reference = pair.both(play)
    assert own == reference == [["half-close"], ["lost"], [], ["lost"]]


def test_health_is_the_same(pair: Pair) -> None:
    async def play(channel: Any, name: str) -> list[Any]:
        pair.health.set_ready(False)
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        unknown = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"\x0a\x04none")
        seen = [await check(b""), await watch.read(), await unknown.read()]
        pair.health.set_ready(True)
        seen += [await check(b""), await watch.read()]
        for request in (b"\x0a\x04none", b"\x0a\xff"):
            call = check(request)
            seen.append(await call.code())
        watch.cancel()
        unknown.cancel()
        async with asyncio.timeout(10):
            while pair.health.watchers:
                await asyncio.sleep(0.01)
        return seen

    own, reference = pair.both(play)
    assert own == reference
    assert own[:5] == [b"\x08\x02", b"\x08\x02", b"\x08\x03", b"\x08\x01", b"\x08\x01"]


def test_draining_lets_running_calls_end() -> None:
    made = Pair()

    async def play(channel: Any, name: str) -> list[Any]:
        server = made.servers[made.channels.index(channel)]
        call = channel.stream_stream(PATH)(metadata=(("x-call", name),))
        await call.write(b"e1")
        seen = [await call.read()]
        server.drain()
        closing = asyncio.create_task(server.close(10))
        await call.write(b"e2")
        seen.append(await call.read())
        await call.done_writing()
        seen.append((await call.code()).value[0])
        await closing
        return seen

    own, reference = made.both(play)
    made.close()
    assert own == reference == [b"1", b"2", 0]
