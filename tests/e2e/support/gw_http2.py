"""An HTTP/2 client with prior knowledge (h2c), one request at a time: flow control, trailers, early answers."""

import asyncio
import contextlib
from types import TracebackType
from typing import Self

import hpack
from gw_messages import Ask, Broken, Fields, Got

from fairlead.gateway import h2

#: What we let the gateway send ahead: all it has, or little.
_WIDE, _NARROW = h2.MAX_WINDOW, h2.DEFAULT_WINDOW
#: Not sent over HTTP/2 (RFC 9113, 8.2.2).
_HOP_BY_HOP = ("connection", "transfer-encoding")


class Http2:
    """One connection, opened when needed. Streams follow each other."""

    def __init__(self, port: int, host: str = "127.0.0.1", narrow: bool = False) -> None:
        self._where = host, port
        self._own_window = _NARROW if narrow else _WIDE
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._reset()

    def _reset(self) -> None:
        self._next = 1
        self._encoder, self._decoder = hpack.Encoder(), hpack.Decoder()
        self._window, self._initial, self._frame = h2.DEFAULT_WINDOW, h2.DEFAULT_WINDOW, h2.MIN_FRAME_SIZE
        self._stream_window = 0
        self._goaway = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._streams is not None:
            writer, self._streams = self._streams[1], None
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def ask(self, ask: Ask) -> Got:
        await self._connect()
        try:
            return await self._exchange(ask)
        except (OSError, asyncio.IncompleteReadError) as error:
            await self.close()
            raise Broken(f"{type(error).__name__} in the middle of an exchange") from error
        except Broken:
            await self.close()
            raise
        finally:
            if self._goaway:
                await self.close()

    async def _connect(self) -> None:
        if self._streams is not None:
            return
        self._reset()
        try:
            self._streams = await asyncio.open_connection(*self._where, limit=1 << 20)
        except OSError as error:
            raise Broken("cannot connect") from error
        self._write(h2.PREFACE + h2.settings({h2.ENABLE_PUSH: 0, h2.INITIAL_WINDOW_SIZE: self._own_window}))
        if self._own_window > h2.DEFAULT_WINDOW:
            self._write(h2.window_update(0, self._own_window - h2.DEFAULT_WINDOW))

    def _write(self, data: bytes) -> None:
        assert self._streams is not None
        self._streams[1].write(data)

    async def _exchange(self, ask: Ask) -> Got:
        stream, self._next = self._next, self._next + 2
        self._stream_window = self._initial
        response = _Response()
        upload = b"".join(ask.pieces)
        last = not upload and not ask.trailers
        self._headers(stream, _head(ask, self._where), last)
        sent = 0
        while not last and not response.over:
            room = min(self._window, self._stream_window, self._frame, len(upload) - sent)
            if room > 0 or sent == len(upload):
                ends = sent + room == len(upload) and not ask.trailers
                if room > 0 or ends:
                    self._write(h2.frame(h2.DATA, h2.END_STREAM if ends else 0, stream, upload[sent : sent + room]))
                sent += room
                self._window -= room
                self._stream_window -= room
                if sent == len(upload):
                    if ask.trailers:
                        self._headers(stream, ask.trailers, True)
                    last = True
            else:
                await self._read(stream, response)
        while not response.over:
            await self._read(stream, response)
        if not last:  # the answer came first; the rest of the upload is not wanted
            self._write(h2.rst_stream(stream, h2.ErrorCode.NO_ERROR))
        return Got(int(response.field(":status")), response.fields, b"".join(response.body))

    def _headers(self, stream: int, fields: Fields, last: bool) -> None:
        block = self._encoder.encode(list(fields))
        self._write(h2.frame(h2.HEADERS, h2.END_HEADERS | (h2.END_STREAM if last else 0), stream, block))

    async def _read(self, stream: int, response: "_Response") -> None:
        """Take one frame."""
        assert self._streams is not None
        reader = self._streams[0]
        size, flags, number = h2.HEAD.unpack(await reader.readexactly(h2.HEAD_SIZE))
        kind, size = size & 0xFF, size >> 8
        payload = await reader.readexactly(size)
        mine = number == stream
        if kind == h2.DATA and mine:
            response.body.append(payload)
            if size:
                self._write(h2.window_update(0, size))
                if self._own_window == _NARROW and not flags & h2.END_STREAM:
                    self._write(h2.window_update(number, size))
        elif kind == h2.HEADERS:
            assert flags & h2.END_HEADERS, "Envoy's header blocks fit one frame here"
            fields = self._decoder.decode(payload)
            if mine:
                response.fields += [(str(name), str(value)) for name, value in fields]
        elif kind == h2.RST_STREAM and mine and not response.over:
            raise Broken(f"stream reset with code {int.from_bytes(payload, 'big')}")
        else:
            self._control(kind, flags, number, stream, payload)
        if mine and kind in (h2.DATA, h2.HEADERS) and flags & h2.END_STREAM:
            response.over = True

    def _control(self, kind: int, flags: int, number: int, stream: int, payload: bytes) -> None:
        if kind == h2.SETTINGS and not flags & h2.ACK:
            for key, value in h2.read_settings(payload):
                if key == h2.INITIAL_WINDOW_SIZE:
                    self._stream_window += value - self._initial
                    self._initial = value
                elif key == h2.MAX_FRAME_SIZE:
                    self._frame = value
            self._write(h2.SETTINGS_ACK)
        elif kind == h2.WINDOW_UPDATE:
            if not number:
                self._window += int.from_bytes(payload, "big")
            elif number == stream:
                self._stream_window += int.from_bytes(payload, "big")
        elif kind == h2.PING and not flags & h2.ACK:
            self._write(h2.ping(payload, ack=True))
        elif kind == h2.GOAWAY:
            self._goaway = True


class _Response:
    def __init__(self) -> None:
        self.fields: list[tuple[str, str]] = []
        self.body: list[bytes] = []
        self.over = False

    def field(self, name: str) -> str:
        return next((value for key, value in self.fields if key == name), "0")


def _head(ask: Ask, where: tuple[str, int]) -> Fields:
    authority = f"{where[0]}:{where[1]}"
    start = [(":method", ask.method), (":path", ask.path), (":scheme", "http"), (":authority", authority)]
    fields = [(name.lower(), value) for name, value in ask.fields if name.lower() not in _HOP_BY_HOP]
    if ask.pieces and not ask.chunked and not ask.trailers:
        fields.append(("content-length", str(sum(map(len, ask.pieces)))))
    return start + fields
