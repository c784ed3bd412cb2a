"""The HTTP/2 server over real sockets, against grpcio."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from echo_server import MADE, NO_LIMIT, PATH, Echo, Serve, until

from fairlead.gateway.h2_limits import H2Limits
from fairlead.gateway.h2_server import H2Server
from fairlead.gateway.health import HealthService
from fairlead.gateway.ports import listening_sockets


def idle(server: H2Server) -> bool:
    """No connection holds anything of a stream."""
    return all(
        not (c.streams or c.lingering or c.queued or c.blocked or c.watched or c.partial) for c in server.connections
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
    assert server.streams == 300


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
    assert successor.streams + server.streams == 70
    assert not server.connections
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
        await until(lambda: bool(MADE) and any(c.queued for c in server.connections))
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
    sockets = listening_sockets("localhost", 0, 1024)
    assert len({sock.getsockname()[1] for sock in sockets}) == 1
    for sock in sockets:
        assert sock.getsockname()[1] != 0
        sock.close()


async def test_connections_are_limited(serve: Serve) -> None:
    """Those that only connect make room for others, the oldest first."""
    server, target = await serve(H2Limits(max_connections=3))
    port = int(target.rpartition(":")[2])
    async with grpc.aio.insecure_channel(target) as channel:
        call = channel.stream_stream(PATH)()
        await call.write(b"hello")
        assert await call.read() == b"hello"
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        for reader, _ in idle[2:]:
            assert await reader.readexactly(9)
        for reader, _ in idle[:2]:
            with suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 20)
        assert len(server.connections) == 3
        await call.write(b"again")
        assert await call.read() == b"again"
        call.cancel()
    for _, writer in idle:
        writer.close()


async def test_who_holds_most_connections_makes_room(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """Even if each of them has a stream, and others have none."""
    server, target = await serve(H2Limits(max_connections=4))
    port = int(target.rpartition(":")[2])
    async with AsyncExitStack() as stack:
        alone = [("grpc.use_local_subchannel_pool", 1)]

        async def hold() -> Any:
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(target, alone))
            call = channel.stream_stream(PATH)()
            await call.write(b"hello")
            assert await call.read() == b"hello"
            stack.callback(call.cancel)
            return call

        elsewhere, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        assert await elsewhere.readexactly(9)
        first, *_ = [await hold() for _ in range(4)]
        with pytest.raises(grpc.aio.AioRpcError):
            await asyncio.wait_for(first.read(), 20)
        assert {one.address for one in server.connections} == {"127.0.0.1", "127.0.0.2"}
        assert len(server.connections) == 4
        assert "too many connections: closed some of 3 from 127.0.0.1" in caplog.text
        writer.close()


async def test_a_gateway_with_some_connections_is_kept_where_strangers_have_one_each(serve: Serve) -> None:
    server, target = await serve(H2Limits(max_connections=32))
    port, strangers = int(target.rpartition(":")[2]), []
    async with AsyncExitStack() as stack:
        calls = []
        for _ in range(2):
            alone = [("grpc.use_local_subchannel_pool", 1)]
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(target, alone))
            calls.append(channel.stream_stream(PATH)())
            await calls[-1].write(b"hello")
            assert await calls[-1].read() == b"hello"
        for number in range(40):
            local = (f"127.0.1.{number}", 0)
            strangers.append(await asyncio.open_connection("127.0.0.1", port, local_addr=local))
            assert await strangers[-1][0].readexactly(9)
        for call in calls:
            await call.write(b"again")
            assert await call.read() == b"again"
            call.cancel()
    assert len(server.connections) <= 32
    for _, writer in strangers:
        writer.close()
