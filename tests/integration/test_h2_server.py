"""The HTTP/2 server over real sockets, against grpcio and against the h2 library."""

import asyncio
import contextlib
import os
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection as Client
from h2.events import ConnectionTerminated, DataReceived, RemoteSettingsChanged, StreamEnded, TrailersReceived
from h2.settings import SettingCodes

from fairlead.io.receive.h2_limits import H2Limits
from fairlead.io.receive.h2_server import H2Server, bind
from fairlead.io.receive.health import HealthService
from fairlead.io.receive.stream import ServerStream
from fairlead.io.tls import ServerTls
from fairlead.model.errors import ConfigError

PATH = "/test.Service/Echo"
NO_LIMIT = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Echo:
    """Sends every message back, ends when the peer ends."""

    def __init__(self, stream: ServerStream, headers: Mapping[str, str]) -> None:
        self.stream = stream
        self.lost: list[str] = []
        MADE.append(self)

    def on_message(self, message: bytes) -> None:
        self.stream.send(message)

    def on_half_close(self) -> None:
        self.stream.finish()

    def on_lost(self, why: str) -> None:
        self.lost.append(why)


MADE: list[Echo] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    MADE.clear()


Serve = Callable[..., Awaitable[tuple[H2Server, str]]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts an echo server on a free port; gives it and its target."""
    servers: list[H2Server] = []

    async def start(limits: H2Limits | None = None, **options: Any) -> tuple[H2Server, str]:
        server = H2Server({PATH: Echo}, limits, **options)
        servers.append(server)
        return server, f"127.0.0.1:{await server.listen('127.0.0.1')}"

    yield start
    for server in servers:
        await server.close()
        assert server.stats().connections == 0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def idle(server: H2Server) -> bool:
    """No connection holds anything of a stream."""
    return all(
        not (c.streams or c.lingering or c.queued or c.blocked or c.watched or c.partial) for c in server._connections
    )


async def echo(channel: grpc.aio.Channel, *messages: bytes) -> list[bytes]:
    async def requests() -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    return [answer async for answer in channel.stream_stream(PATH)(requests())]


# ---- grpcio ----


@pytest.mark.parametrize("merge", [False, True])
async def test_unary_and_bidirectional_calls(serve: Serve, merge: bool) -> None:
    server, target = await serve(merge_wakeups=merge)
    async with grpc.aio.insecure_channel(target) as channel:
        assert await channel.unary_unary(PATH)(b"hello") == b"hello"
        assert await channel.unary_unary(PATH)(b"") == b""
        call = channel.stream_stream(PATH)()
        for number in range(20):
            await call.write(b"%d" % number)
            assert await call.read() == b"%d" % number
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() == grpc.StatusCode.OK
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/no/Such")(b"x")
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        await until(lambda: idle(server))


async def test_three_hundred_streams_at_once(serve: Serve) -> None:
    server, target = await serve()
    async with grpc.aio.insecure_channel(target) as channel:
        sent = [[b"%d-%d" % (stream, part) * (stream % 50) for part in range(4)] for stream in range(300)]
        assert await asyncio.gather(*(echo(channel, *messages) for messages in sent)) == sent
        await until(lambda: idle(server))
    assert server.stats().streams == 300


@pytest.mark.parametrize("merge", [False, True])
async def test_large_messages_both_ways(serve: Serve, merge: bool) -> None:
    server, target = await serve(merge_wakeups=merge)
    big = os.urandom(3_000_000)
    async with grpc.aio.insecure_channel(target, options=NO_LIMIT) as channel:
        answers = await asyncio.gather(*(echo(channel, big, b"small", big[:100_000]) for _ in range(8)))
        assert all(answer == [big, b"small", big[:100_000]] for answer in answers)
        await until(lambda: idle(server))


async def test_messages_above_the_limit_are_refused(serve: Serve) -> None:
    server, target = await serve(H2Limits(max_message=1000))
    async with grpc.aio.insecure_channel(target) as channel:
        assert await echo(channel, b"x" * 1000) == [b"x" * 1000]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await echo(channel, b"x" * 1001)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert MADE[-1].lost
        await until(lambda: idle(server))


async def test_compressed_messages_are_refused(serve: Serve) -> None:
    server, target = await serve()
    async with grpc.aio.insecure_channel(target, compression=grpc.Compression.Gzip) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(PATH)(b"x" * 10_000)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        await until(lambda: idle(server))


@pytest.mark.parametrize("merge", [False, True])
async def test_cancels_and_deadlines_reach_the_handler(serve: Serve, merge: bool) -> None:
    server, target = await serve(merge_wakeups=merge)
    async with grpc.aio.insecure_channel(target) as channel:
        calls = [channel.stream_stream(PATH)() for _ in range(50)]
        for call in calls:
            await call.write(b"x")
            assert await call.read() == b"x"
        for call in calls:
            call.cancel()
        await until(lambda: all(made.lost for made in MADE))
        late = channel.stream_stream(PATH)(timeout=0.2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await late.read()
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: bool(MADE[-1].lost))
        assert len(MADE) == 51 and all(len(made.lost) == 1 for made in MADE)
        await until(lambda: idle(server))


async def test_draining_during_traffic_loses_nothing(serve: Serve) -> None:
    server, target = await serve()
    successor = H2Server({PATH: Echo})
    async with grpc.aio.insecure_channel(target) as channel:
        running = [channel.stream_stream(PATH)() for _ in range(20)]
        for call in running:
            await call.write(b"first")
            assert await call.read() == b"first"
        server.drain()
        await successor.listen("127.0.0.1", int(target.rpartition(":")[2]))
        # New calls go to the successor as soon as the client knows; those on their way are still served here.
        assert await asyncio.gather(*(echo(channel, b"new") for _ in range(50))) == [[b"new"]] * 50
        closing = asyncio.create_task(server.close(20))
        for call in running:
            await call.write(b"second")
            assert await call.read() == b"second"
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            assert await call.code() == grpc.StatusCode.OK
        await closing
    assert successor.stats().streams + server.stats().streams == 70
    assert server.stats().connections == 0
    await successor.close()


async def test_grace_ends(serve: Serve) -> None:
    server, target = await serve()
    async with grpc.aio.insecure_channel(target) as channel:
        call = channel.stream_stream(PATH)()
        await call.write(b"x")
        await call.read()
        await server.close(0.05)
        assert MADE[0].lost == ["the connection was lost"]
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()


async def test_health_over_the_wire() -> None:
    health = HealthService()
    server = H2Server(health.routes())
    target = f"127.0.0.1:{await server.listen('127.0.0.1')}"
    async with grpc.aio.insecure_channel(target) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"\x0a\x09readiness")
        assert await check(b"") == b"\x08\x02"
        assert await check(b"\x0a\x08liveness") == b"\x08\x01"
        assert await watch.read() == b"\x08\x02"
        health.set_ready(True)
        assert await watch.read() == b"\x08\x01"
        assert await check(b"") == b"\x08\x01"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(b"\x0a\x01x")
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        assert health.watchers == 1
        watch.cancel()
        await until(lambda: health.watchers == 0)
    await server.close()


# ---- slow readers ----


async def test_a_slow_reader_gets_everything(serve: Serve) -> None:
    server, target = await serve()
    async with grpc.aio.insecure_channel(target, options=NO_LIMIT) as channel:
        call = channel.stream_stream(PATH)()
        sent = [os.urandom(200_000) for _ in range(30)]
        writing = asyncio.create_task(_write_all(call, sent))
        await until(lambda: bool(MADE) and any(c.queued for c in server._connections))
        for message in sent:
            assert await call.read() == message
            await asyncio.sleep(0.001)
        await writing
        assert await call.code() == grpc.StatusCode.OK
        await until(lambda: idle(server))


async def _write_all(call: Any, messages: list[bytes]) -> None:
    for message in messages:
        await call.write(message)
    await call.done_writing()


async def test_a_reader_that_never_reads_is_dropped(serve: Serve) -> None:
    server, target = await serve(H2Limits(max_pending=1 << 20))
    client = Client(H2Configuration(client_side=True))
    client.initiate_connection()
    client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 2**31 - 1})
    client.increment_flow_control_window(2**31 - 65536)
    client.send_headers(1, request_headers())
    _, writer = await asyncio.open_connection("127.0.0.1", int(target.rpartition(":")[2]), limit=1)
    writer.write(client.data_to_send())
    await writer.drain()
    with contextlib.suppress(ConnectionError):
        for _ in range(1000):
            writer.write(b"\x00\x40\x00\x00\x00\x00\x00\x00\x01" + b"\0\0\0\x3f\xfb" + b"x" * 0x3FFB)
            await writer.drain()
            if MADE and MADE[0].lost:
                break
    await until(lambda: bool(MADE[0].lost))
    assert server.stats().connections == 0
    writer.transport.abort()


# ---- the h2 library as the peer: it checks every frame that we send ----


def request_headers(path: str = PATH) -> list[tuple[str, str]]:
    fields = [(":method", "POST"), (":scheme", "http"), (":authority", "test"), (":path", path)]
    return [*fields, ("content-type", "application/grpc"), ("te", "trailers")]


class Peer:
    """A client that answers nothing by itself but SETTINGS and PING."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.state = Client(H2Configuration(client_side=True))
        self.events: list[Any] = []
        self.state.initiate_connection()

    def flush(self) -> None:
        self._writer.write(self.state.data_to_send())

    def raw(self, data: bytes) -> None:
        self.flush()
        self._writer.write(data)

    async def until(self, kind: type, condition: Callable[[Any], bool] = lambda event: True) -> Any:
        """The first event of that kind, past ones included."""
        self.flush()
        async with asyncio.timeout(10):
            while True:
                for event in self.events:
                    if isinstance(event, kind) and condition(event):
                        return event
                data = await self._reader.read(65536)
                assert data, "the server closed the connection"
                self.events += self.state.receive_data(data)
                self.flush()

    def body(self, stream: int = 1) -> bytes:
        return b"".join(e.data for e in self.events if isinstance(e, DataReceived) and e.stream_id == stream)


@pytest.fixture
async def peer(serve: Serve) -> AsyncIterator[Peer]:
    _, target = await serve()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(target.rpartition(":")[2]))
    made = Peer(reader, writer)
    await made.until(RemoteSettingsChanged)
    yield made
    writer.close()


def grpc_message(body: bytes) -> bytes:
    return b"\0" + len(body).to_bytes(4, "big") + body


async def test_padding_and_continuation(peer: Peer) -> None:
    block = peer.state.encoder.encode(request_headers())
    peer.raw(
        (4 + 5 + 10).to_bytes(3, "big") + b"\x01\x28\0\0\0\x01" + b"\x03" + b"\0\0\0\0\x10" + block[:10] + b"\0\0\0"
        + (5).to_bytes(3, "big") + b"\x09\x00\0\0\0\x01" + block[10:15]
        + (len(block) - 15).to_bytes(3, "big") + b"\x09\x04\0\0\0\x01" + block[15:]
        + (13).to_bytes(3, "big") + b"\x00\x09\0\0\0\x01" + b"\x04" + grpc_message(b"odd") + b"\0" * 4
    )  # fmt: skip
    # The library does not know the stream; our answer's first HEADERS would be refused. Read frames ourselves.
    async with asyncio.timeout(10):
        seen = b""
        while b"grpc-status\x010" not in seen:
            seen += await peer._reader.read(65536)
    assert grpc_message(b"odd") in seen


async def test_tiny_windows(serve: Serve) -> None:
    _, target = await serve()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(target.rpartition(":")[2]))
    peer = Peer(reader, writer)
    peer.state.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 100})
    await peer.until(RemoteSettingsChanged)
    body = grpc_message(os.urandom(5000))
    peer.state.send_headers(1, request_headers())
    peer.state.send_data(1, body, end_stream=True)
    while not any(isinstance(event, StreamEnded) for event in peer.events):
        before = len(peer.body())
        await peer.until(DataReceived, lambda event, before=before: len(peer.body()) > before)
        peer.events.append(object())
        got = sum(event.flow_controlled_length for event in peer.events if isinstance(event, DataReceived))
        peer.state.acknowledge_received_data(len(peer.body()) - before, 1)
        if got == len(body):
            await peer.until(StreamEnded)
        elif peer.state.streams[1].inbound_flow_control_window == 0:
            peer.state.increment_flow_control_window(100, 1)
    assert peer.body() == body
    writer.close()


async def test_settings_that_change_in_the_middle(peer: Peer) -> None:
    """The window shrinks below what is used: negative. The library raises if we send more than it allows."""
    body = grpc_message(os.urandom(300_000))
    peer.state.send_headers(1, request_headers())
    for pos in range(0, len(body), 16384):
        peer.state.send_data(1, body[pos : pos + 16384])
        peer.flush()
    await peer.until(DataReceived, lambda _: len(peer.body()) == 65535)
    peer.state.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1000, SettingCodes.MAX_FRAME_SIZE: 20_000})
    peer.state.end_stream(1)
    peer.flush()
    await asyncio.sleep(0.05)
    assert len(peer.body()) == 65535
    peer.state.increment_flow_control_window(1_000_000)
    peer.state.increment_flow_control_window(100_000, 1)
    await peer.until(DataReceived, lambda _: len(peer.body()) == 65535 + 100_000 - 64535)
    peer.state.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 500_000, SettingCodes.HEADER_TABLE_SIZE: 0})
    trailers = await peer.until(TrailersReceived)
    assert (b"grpc-status", b"0") in trailers.headers
    assert peer.body() == body


async def test_protocol_errors_are_told_before_closing(peer: Peer) -> None:
    peer.raw(b"\0\0\0\x00\0\0\0\0\0" * 3)
    event = await peer.until(ConnectionTerminated)
    assert event.error_code == 1
    assert await peer._reader.read() == b""


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("reset", [False, True])
async def test_connections_that_vanish_take_their_streams_along(serve: Serve, merge: bool, reset: bool) -> None:
    server, target = await serve(merge_wakeups=merge)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(target.rpartition(":")[2]))
    peer = Peer(reader, writer)
    peer.state.send_headers(1, request_headers())
    peer.state.send_data(1, grpc_message(b"x"))
    await peer.until(DataReceived)
    if reset:
        linger = writer.get_extra_info("socket")
        linger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()
    await until(lambda: bool(MADE[0].lost))
    await until(lambda: server.stats().connections == 0)


# ---- sockets ----


async def test_unix_sockets(tmp_path: Path) -> None:
    path = str(tmp_path / "epp.sock")
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(path)
    stale.close()
    server = H2Server({PATH: Echo})
    await server.listen_unix(path)
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert server.addresses == [path]
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        assert await echo(channel, b"hello") == [b"hello"]
    await server.close()
    assert not os.path.exists(path)


async def test_several_listeners_share_a_server() -> None:
    server = H2Server({PATH: Echo})
    everywhere = await server.listen()
    local = await server.listen("localhost")
    assert all(address.endswith((f":{everywhere}", f":{local}")) for address in server.addresses)
    for target in (f"127.0.0.1:{everywhere}", f"127.0.0.1:{local}"):
        async with grpc.aio.insecure_channel(target) as channel:
            assert await echo(channel, b"hello") == [b"hello"]
    if socket.has_dualstack_ipv6() and server.addresses[0].startswith("[::]"):
        async with grpc.aio.insecure_channel(f"ipv6:[::1]:{everywhere}") as channel:
            assert await echo(channel, b"hello") == [b"hello"]
    with pytest.raises(OSError):
        await server.listen("127.0.0.1", local)
    await server.close()


def test_all_sockets_of_a_name_have_one_port() -> None:
    sockets = bind("localhost", 0)
    assert len({sock.getsockname()[1] for sock in sockets}) == 1
    for sock in sockets:
        assert sock.getsockname()[1] != 0
        sock.close()


async def test_connections_are_limited(serve: Serve) -> None:
    server, target = await serve(H2Limits(max_connections=3))
    port = int(target.rpartition(":")[2])
    streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
    heads = []
    for reader, _ in streams:
        try:
            heads.append(await reader.read(9))
        except ConnectionError:
            heads.append(b"")
    assert [bool(head) for head in heads] == [True] * 3 + [False] * 2
    assert server.stats().connections == 3
    for _, writer in streams:
        writer.close()


# ---- TLS ----


def certificate(directory: Path, name: str, days: int = 2) -> bytes:
    """A self-signed pair in `tls.crt` and `tls.key`; gives the certificate."""
    new = directory / f".{name}"
    new.mkdir()
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", new / "tls.key", "-out", new / "tls.crt", "-days", str(days), "-subj", f"/CN={name}",
         "-addext", f"subjectAltName=DNS:{name}"],
        check=True, capture_output=True,
    )  # fmt: skip
    for file in ("tls.key", "tls.crt"):
        os.replace(new / file, directory / file)
    return (directory / "tls.crt").read_bytes()


async def secure_echo(target: str, root: bytes, name: str) -> list[bytes]:
    credentials = grpc.ssl_channel_credentials(root)
    options = [("grpc.ssl_target_name_override", name)]
    async with grpc.aio.secure_channel(target, credentials, options=options) as channel:
        return await asyncio.wait_for(echo(channel, b"hello", os.urandom(0) + b"x" * 200_000), 10)


async def test_tls_with_reload(serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = certificate(tmp_path, "one.test")
    tls = ServerTls.from_directory(tmp_path)
    server, target = await serve(tls=tls)
    expected = [b"hello", b"x" * 200_000]
    assert await secure_echo(target, first, "one.test") == expected
    second = certificate(tmp_path, "two.test")
    assert tls.reload()
    assert not tls.reload()
    assert await secure_echo(target, second, "two.test") == expected
    (tmp_path / "tls.crt").write_bytes(second[:100])
    assert not tls.reload()
    assert not tls.reload()
    assert [record.levelname for record in caplog.records if "unusable" in record.message] == ["WARNING"]
    assert await secure_echo(target, second, "two.test") == expected
    (tmp_path / "tls.crt").write_bytes(first)  # does not belong to the key
    assert not tls.reload()
    (tmp_path / "tls.key").unlink()
    assert not tls.reload()
    assert await secure_echo(target, second, "two.test") == expected
    assert tls.reloads == 1
    await until(lambda: idle(server))


async def test_tls_reload_needs_no_owner(serve: Serve, tmp_path: Path) -> None:
    certificate(tmp_path, "one.test")
    tls = ServerTls(tmp_path / "tls.crt", tmp_path / "tls.key", check_interval=0.1)
    _, target = await serve(tls=tls)
    second = certificate(tmp_path, "two.test")
    await until(lambda: tls.reloads == 1)
    assert await secure_echo(target, second, "two.test")


async def test_tls_peers_must_speak_h2(serve: Serve, tmp_path: Path) -> None:
    certificate(tmp_path, "one.test")
    server, target = await serve(tls=ServerTls.from_directory(tmp_path))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection("127.0.0.1", int(target.rpartition(":")[2]), ssl=context)
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()
    await until(lambda: server.stats().connections == 0)


async def test_clients_may_have_to_show_a_certificate(serve: Serve, tmp_path: Path) -> None:
    own, theirs = tmp_path / "own", tmp_path / "theirs"
    own.mkdir()
    theirs.mkdir()
    root = certificate(own, "one.test")
    client = certificate(theirs, "client.test")
    _, target = await serve(tls=ServerTls.from_directory(own, client_ca=theirs / "tls.crt"))
    options = [("grpc.ssl_target_name_override", "one.test")]
    credentials = grpc.ssl_channel_credentials(root, (theirs / "tls.key").read_bytes(), client)
    async with grpc.aio.secure_channel(target, credentials, options=options) as channel:
        assert await echo(channel, b"hello") == [b"hello"]
    with pytest.raises(grpc.aio.AioRpcError):
        await secure_echo(target, root, "one.test")


def test_tls_files_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tls\.crt"):
        ServerTls.from_directory(tmp_path)
    certificate(tmp_path, "one.test")
    key = tmp_path / "tls.key"
    subprocess.run(
        ["openssl", "ec", "-in", key, "-aes128", "-passout", "pass:x", "-out", key], check=True, capture_output=True
    )
    with pytest.raises(ConfigError):
        ServerTls.from_directory(tmp_path)
