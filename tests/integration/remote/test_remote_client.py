"""The client's side of a scheduler's stream against good, bad and absent peers on real sockets."""

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fairlead.config.schema import SchedulerSettings, SchedulerTls
from fairlead.core.errors import ConfigError
from fairlead.core.events import Event, Outcome, RemoteDown, RemotePick, RemotePicked, RemoteUp
from fairlead.core.fleet import Fleet
from fairlead.core.instructions import AskRemote
from fairlead.core.records import OutcomeRecord
from fairlead.gateway import h2
from fairlead.gateway.h2_limits import H2Limits
from fairlead.gateway.h2_server import H2Server
from fairlead.gateway.protobuf import field
from fairlead.gateway.tls import ServerTls
from fairlead.server.remote import client as remote_client
from fairlead.server.remote.client import FIRST_BYTES, RemoteClient
from fairlead.server.remote.messages import PATH, Answer, Picks, Welcome, decode_ask, encode_answer
from fairlead.server.remote.stream import check_tls
from fairlead.server.sdk.server import SchedulerServer, policy_maker
from fairlead.testing import builders

WELCOME = encode_answer(Answer(welcome=Welcome(scheduler="test")))


class Ears:
    """Hears what a client feeds and tells."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.told: list[tuple[str, str]] = []

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    async def until(self, ready: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not ready():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def client(address: str, fleet: Fleet | None = None, **options: Any) -> AsyncIterator[tuple[RemoteClient, Ears]]:
    ears = Ears()
    told = {name: options.pop(name) for name in ("pool", "max_endpoints") if name in options}
    made = RemoteClient(
        "s",
        SchedulerSettings(address=address, **options),
        fleet or builders.fleet(),
        ears.events.append,
        lambda what, why: ears.told.append((what, why)),
        **told,
    )
    made.start()
    try:
        yield made, ears
    finally:
        await made.close()


class Peer:
    """A gRPC server whose answers the test gives: `reply(stream, message)` for each message."""

    def __init__(self, reply: Callable[[Any, bytes], None]) -> None:
        self.reply = reply
        self.streams: list[Any] = []

    def __call__(self, stream: Any, metadata: Any) -> "Peer._Handler":
        self.streams.append(stream)
        return Peer._Handler(self, stream)

    class _Handler:
        def __init__(self, peer: "Peer", stream: Any) -> None:
            self._peer, self._stream = peer, stream

        def on_message(self, message: bytes) -> None:
            self._peer.reply(self._stream, message)

        def on_half_close(self) -> None: ...

        def on_lost(self, why: str) -> None: ...


@asynccontextmanager
async def served(reply: Callable[[Any, bytes], None], **limits: Any) -> AsyncIterator[tuple[str, Peer]]:
    peer = Peer(reply)
    server = H2Server({PATH: peer}, H2Limits(**limits))
    port = await server.listen("127.0.0.1")
    try:
        yield f"127.0.0.1:{port}", peer
    finally:
        await server.close()


def question(request: Any) -> AskRemote:
    return AskRemote("s", request, None, None, 100.0)


def answering(stream: Any, message: bytes) -> None:
    """Picks e1 for everything."""
    ask = decode_ask(message)
    if ask.hello is not None:
        stream.send(WELCOME)
    if ask.batch is not None:
        picks = tuple(RemotePick(one.request.id, Outcome.PICKED, "e1") for one in ask.batch.requests)
        stream.send(encode_answer(Answer(picks=Picks(batch=ask.batch.number, picks=picks))))


async def test_it_asks_and_hears_and_sends_together_what_came_together() -> None:
    batches: list[int] = []

    def reply(stream: Any, message: bytes) -> None:
        ask = decode_ask(message)
        if ask.batch is not None:
            batches.append(len(ask.batch.requests))
        answering(stream, message)

    async with served(reply) as (address, _), client(address) as (one, ears):
        await ears.until(lambda: ears.of(RemoteUp))
        requests = [builders.request(str(i)) for i in range(7)]
        for request in requests:
            one.ask(question(request))
        await ears.until(lambda: ears.of(RemotePicked))
        (event,) = ears.of(RemotePicked)
        assert [pick.request_id for pick in event.picks] == [request.id for request in requests]
        assert batches == [7]


@pytest.mark.parametrize(("wants", "unread", "heard", "unheard"), [(1, 9**9, 2, 0), (1, -1, 0, 2), (0, 9**9, 0, 0)])
async def test_outcomes_are_for_those_who_want_them_and_read(
    monkeypatch: pytest.MonkeyPatch, wants: int, unread: int, heard: int, unheard: int
) -> None:
    monkeypatch.setattr(remote_client, "MAX_UNREAD", unread)
    ends: list[OutcomeRecord] = []

    def reply(stream: Any, message: bytes) -> None:
        ask = decode_ask(message)
        ends.extend(ask.ended)
        if ask.hello is not None:
            stream.send(encode_answer(Answer(welcome=Welcome(scheduler="test", wants_outcomes=bool(wants)))))
        else:
            answering(stream, message)

    async with served(reply) as (address, _), client(address) as (one, ears):
        one.hear([OutcomeRecord(request=builders.request("early"), at=1.0, endpoint="e1")])
        await ears.until(lambda: ears.of(RemoteUp))
        one.hear([OutcomeRecord(request=builders.request(str(i)), at=1.0, endpoint="e1") for i in range(2)])
        one.ask(question(builders.request("x")))
        await ears.until(lambda: ears.of(RemotePicked))
        assert (len(ends), one.unheard) == (heard, unheard)


async def test_it_comes_back_on_its_own() -> None:
    async with served(answering) as (address, peer), client(address) as (one, ears):
        for number in range(1, 4):
            await ears.until(lambda number=number: len(ears.of(RemoteUp)) == number)
            peer.streams[-1].finish(14, "going away")
            await ears.until(lambda number=number: len(ears.of(RemoteDown)) == number)
        assert one.connections >= 3
    assert any("status 14 going away" in why for _, why in ears.told)


async def test_nobody_there_is_told_once_and_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    async with client(f"unix:{path}") as (_, ears):
        await ears.until(lambda: ears.told)
        await asyncio.sleep(0.3)
        assert len(ears.told) == 1 and "cannot connect" in ears.told[0][1]
        server = SchedulerServer(policy_maker("round-robin"))
        await server.start(f"unix:{path}")
        await ears.until(lambda: ears.of(RemoteUp))
        await server.close()


BAD = {
    "another version": lambda stream, message: stream.send(encode_answer(Answer(welcome=Welcome(version=9)))),
    "garbage": lambda stream, message: stream.send(b"\xff\xff\xff"),
    "picks first": lambda stream, message: stream.send(encode_answer(Answer(picks=Picks(batch=1)))),
    "two welcomes": lambda stream, message: stream.send(WELCOME, WELCOME),
    "a batch that never was": lambda stream, message: stream.send(WELCOME, encode_answer(Answer(picks=Picks(batch=5)))),
    "more bytes than anybody asked for": lambda stream, message: stream.send(WELCOME, field(99, bytes(FIRST_BYTES))),
    "the end": lambda stream, message: stream.finish(12, "unknown"),
}


@pytest.mark.parametrize("kind", BAD)
async def test_a_peer_that_breaks_the_contract_is_left_and_told(kind: str) -> None:
    async with served(BAD[kind]) as (address, _), client(address) as (one, ears):
        await ears.until(lambda: [why for what, why in ears.told if "not connected" in what])
        assert len(ears.of(RemoteUp)) == len(ears.of(RemoteDown))
        assert one.welcome is None or len(ears.of(RemoteUp)) > len(ears.of(RemoteDown))


@asynccontextmanager
async def raw(says: bytes) -> AsyncIterator[str]:
    """A server that says the same bytes to everybody."""
    transports: list[Any] = []

    class Says(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            transports.append(transport)
            transport.write(says)

    server = await asyncio.get_running_loop().create_server(Says, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for transport in transports:
            transport.abort()
        await asyncio.sleep(0.01)


GARBAGE = {
    "http/1": b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n",
    "noise": bytes(range(256)) * 40,
    "a huge frame": h2.HEAD.pack(0xFFFFFF << 8 | h2.DATA, 0, 1) + b"x" * 100,
    "data first": h2.settings({}) + h2.frame(h2.DATA, 0, 1, b"\0\0\0\0\1x"),
    "continuation of nothing": h2.settings({}) + h2.frame(h2.CONTINUATION, 4, 1, b""),
    "push": h2.settings({}) + h2.frame(h2.PUSH_PROMISE, 4, 1, b"\0\0\0\2"),
    "bad ping": h2.frame(h2.PING, 0, 0, b"1"),
    "bad window": h2.frame(h2.WINDOW_UPDATE, 0, 0, b"\0\0\0\0"),
    "window overflow": h2.window_update(0, 2**31 - 1),
    "bad settings": h2.frame(h2.SETTINGS, 0, 0, b"12345"),
    "bad header block": h2.settings({}) + h2.frame(h2.HEADERS, 4, 1, b"\xff\xff\xff\xff\xff\xff"),
    "http 404": h2.settings({}) + h2.frame(h2.HEADERS, 5, 1, b"\x8d"),
    "goaway": h2.goaway(0, 2, "no"),
    "reset": h2.settings({}) + h2.rst_stream(1, 2),
}


@pytest.mark.parametrize("kind", GARBAGE)
async def test_bytes_that_are_no_scheduler_end_the_connection_and_nothing_else(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some of these gRPC takes for a server that is slow to answer.
    monkeypatch.setattr(remote_client, "WELCOME_WITHIN", 0.5)
    async with raw(GARBAGE[kind]) as address, client(address) as (_, ears):
        await ears.until(lambda: ears.told)
        assert ears.events == [] and ears.told[0][1]


async def test_large_messages_pass_small_windows_in_both_directions() -> None:
    """2,000 endpoints are told to a peer that gives 20 kB at a time, and a long answer comes back in pieces."""
    fleet = builders.fleet(*(f"e{i}" for i in range(2000)))
    reason = "r" * 150
    heard: list[int] = []

    def reply(stream: Any, message: bytes) -> None:
        ask = decode_ask(message)
        if ask.hello is not None:
            assert ask.state is not None
            heard.append(len(ask.state.endpoints))
            stream.send(WELCOME)
        if ask.batch is not None:
            picks = tuple(RemotePick(one.request.id, Outcome.REFUSED, reason=reason) for one in ask.batch.requests)
            stream.send(encode_answer(Answer(picks=Picks(batch=ask.batch.number, picks=picks))))

    async with (
        served(reply, stream_window=20_000, connection_window=70_000, max_frame=16_384) as (address, _),
        client(address, fleet) as (one, ears),
    ):
        await ears.until(lambda: ears.of(RemoteUp))
        assert heard == [2000]
        for _ in range(3):
            for _ in range(3000):
                one.ask(question(builders.request("x")))
            await asyncio.sleep(0)
        await ears.until(lambda: sum(len(event.picks) for event in ears.of(RemotePicked)) == 9000)


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """`tls.crt` and `tls.key` for localhost."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(tmp_path / "tls.key"), "-out", str(tmp_path / "tls.crt"), "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(command, check=True, capture_output=True)
    return tmp_path


async def test_tls_is_verified(certificate: Path) -> None:
    server = SchedulerServer(policy_maker("round-robin"), ServerTls.from_directory(certificate))
    address = await server.start("127.0.0.1:0")
    trusted = SchedulerTls(ca_file=str(certificate / "tls.crt"), server_name="localhost")
    try:
        async with client(address, tls=trusted) as (_, ears):
            await ears.until(lambda: ears.of(RemoteUp))
        async with client(address, tls=SchedulerTls(server_name="localhost")) as (_, ears):
            await ears.until(lambda: ears.told)
            assert "certificate" in ears.told[0][1].lower() and ears.events == []
        async with client(address, tls=SchedulerTls(verify=False)) as (_, ears):
            await ears.until(lambda: ears.of(RemoteUp))
    finally:
        await server.close()


def test_tls_files_that_are_not_there_are_told() -> None:
    with pytest.raises(ConfigError, match=r"TLS files.*/nowhere\.pem"):
        check_tls(SchedulerTls(ca_file="/nowhere.pem"))


async def test_batches_count_as_settled_when_all_before_them_are_answered_or_too_late() -> None:
    settled: list[int] = []
    held: list[tuple[Any, Any]] = []
    fleet = builders.fleet("e0", "e1")

    def reply(stream: Any, message: bytes) -> None:
        ask = decode_ask(message)
        if ask.hello is not None:
            stream.send(WELCOME)
        if ask.state is not None:
            settled.append(ask.state.settled)
        if ask.batch is not None:
            held.append((stream, ask.batch))

    def release(index: int) -> None:
        stream, batch = held[index]
        picks = tuple(RemotePick(one.request.id, Outcome.PICKED, "e1") for one in batch.requests)
        stream.send(encode_answer(Answer(picks=Picks(batch=batch.number, picks=picks))))

    async with served(reply) as (address, _), client(address, fleet, budget=10.0) as (one, ears):
        await ears.until(lambda: ears.of(RemoteUp))

        async def ask() -> None:
            request = builders.request("x")
            fleet.charge(request, 0, 1.0, 0, 0.0)  # something to tell each time
            before = len(held)
            one.ask(question(request))
            await ears.until(lambda: len(held) == before + 1)

        await ask()
        await ask()
        release(1)
        await ears.until(lambda: len(ears.of(RemotePicked)) == 1)
        await ask()
        release(0)
        await ears.until(lambda: len(ears.of(RemotePicked)) == 2)
        await ask()
        assert settled == [0, 0, 0, 0, 2], "the first held the second up"
