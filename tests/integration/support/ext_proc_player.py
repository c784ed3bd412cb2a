"""The client's end of a gRPC stream, by the h2 library: everything is sent as fast as the windows allow."""

import asyncio
import contextlib
from typing import NamedTuple

from ext_proc_streams import TINY, WIDE, Stream
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, RemoteSettingsChanged, ResponseReceived, StreamEnded, StreamReset, TrailersReceived
from h2.settings import SettingCodes


class Heard(NamedTuple):
    """What came back: the bytes of all answers with their gRPC framing, headers and trailers."""

    body: bytes
    headers: dict[bytes, bytes]
    reset: int | None

    @property
    def status(self) -> bytes:
        return self.headers.get(b"grpc-status", b"")


class Player:
    """The client's end of one stream, on a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stream: Stream) -> None:
        self._reader, self._writer, self._stream = reader, writer, stream
        self._client = H2Connection(H2Configuration(client_side=True))
        self._body, self._headers = b"", dict[bytes, bytes]()
        self._data, self._sent = b"", 0
        self._reset: int | None = None
        self._tiny = stream.window == TINY
        self._opened = self._ended = self._over = False

    async def begin(self, path: str) -> None:
        client = self._client
        client.initiate_connection()
        client.increment_flow_control_window(WIDE)
        client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: self._stream.window})
        while not self._opened:  # the server's windows are known then
            await self._turn()
        fields = [(":method", "POST"), (":scheme", "http"), (":authority", "test"), (":path", path), ("te", "trailers")]
        client.send_headers(1, [*fields, ("content-type", "application/grpc"), *self._stream.metadata])

    async def play(self, path: str) -> Heard:
        await self.begin(path)
        self.send(*self._stream.messages)
        while not self._over:
            if self._write() and not self._ended:
                self._end()
            await self._turn()
        self._headers.pop(b"grpc-accept-encoding", None)  # grpc's own, and optional
        self._headers.setdefault(b"grpc-message", b"")  # grpc sends it always
        return Heard(self._body, self._headers, self._reset)

    def send(self, *messages: bytes) -> None:
        self._data += b"".join(b"\0" + len(message).to_bytes(4, "big") + message for message in messages)

    async def flush(self) -> None:
        while not self._write():
            await self._turn()
        self._writer.write(self._client.data_to_send())
        await self._writer.drain()

    def _write(self) -> bool:
        """What the windows allow. Whether that was all."""
        while rest := len(self._data) - self._sent:
            fits = min(rest, self._client.local_flow_control_window(1), self._client.max_outbound_frame_size)
            if fits <= 0:
                return False
            self._client.send_data(1, self._data[self._sent : self._sent + fits])
            self._sent += fits
        return True

    def _end(self) -> None:
        after = self._stream.reset_after
        if after is None:
            self._client.end_stream(1)
            self._ended = True
        elif len(self._body) >= after:
            self._client.reset_stream(1, ErrorCodes.CANCEL)
            self._over = self._ended = True

    async def _turn(self) -> None:
        """Write what is due, read what there is."""
        self._writer.write(self._client.data_to_send())
        if self._over:
            return
        data = await self._reader.read(1 << 20)
        assert data, "the connection ended in the middle of a stream"
        for event in self._client.receive_data(data):
            if isinstance(event, DataReceived):
                self._body += event.data
            elif isinstance(event, (ResponseReceived, TrailersReceived)):
                self._headers |= dict(event.headers)
            elif isinstance(event, StreamReset):
                self._reset, self._over = int(event.error_code), True
            elif isinstance(event, StreamEnded):
                self._over = True
            self._opened |= isinstance(event, RemoteSettingsChanged)
        if self._tiny and len(self._body) >= TINY // 2 and not self._over:
            # No answer before the pick is as long: it found no room, and may come now.
            self._client.increment_flow_control_window(WIDE, 1)
            self._tiny = False


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
