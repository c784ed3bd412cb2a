"""The HTTP/2 server against the h2 library, which checks every frame that we send, and against rude peers."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from echo_server import MADE, PATH, Serve, until
from h2.config import H2Configuration
from h2.connection import H2Connection as Client
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    PingAckReceived,
    RemoteSettingsChanged,
    SettingsAcknowledged,
    StreamEnded,
    TrailersReceived,
)  # fmt: skip
from h2.settings import SettingCodes

from fairlead.gateway.h2_limits import H2Limits


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
    await peer.until(SettingsAcknowledged, lambda event: SettingCodes.INITIAL_WINDOW_SIZE in event.changed_settings)
    body = grpc_message(os.urandom(5000))
    peer.state.send_headers(1, request_headers())
    peer.state.send_data(1, body, end_stream=True)
    received = 0
    while received < len(body):
        await peer.until(DataReceived, lambda _, before=received: len(peer.body()) > before)
        received = len(peer.body())
        if received % 100 == 0:
            peer.state.increment_flow_control_window(100, 1)
    await peer.until(StreamEnded)
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
    peer.state.ping(b"all read")
    peer.flush()
    await peer.until(PingAckReceived)
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
    await until(lambda: not server.connections)


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
    assert not server.connections
    writer.transport.abort()
