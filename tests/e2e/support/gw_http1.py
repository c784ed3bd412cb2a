"""An HTTP/1.1 client that reads while it writes: uploads of every form, and answers that come before their end."""

import asyncio
import contextlib
import socket
from types import TracebackType
from typing import Self

from gw_messages import Ask, Broken, Got

from fairlead.pool.http1 import MalformedMessage, ResponseReader

_READ = 262_144
_SIP, SIP_SECONDS = 20_000, 0.001


class Http1:
    """One keep-alive connection, opened when needed. Strict: framing errors, surplus bytes and cuts raise `Broken`."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._where = host, port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        #: Connections opened so far.
        self.opened = 0

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

    def abort(self) -> None:
        """Cut the connection at once, as a client that dies."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def ask(self, ask: Ask) -> Got:
        fresh = self._streams is None
        reader, writer = await self._connected()
        if ask.slow:  # what the kernel takes must not hide that we do not read; this connection stays a slow one
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SIP)
        body: list[bytes] = []
        message = ResponseReader(body.append)
        sending = asyncio.ensure_future(self._send(ask, reader, writer))
        try:
            continued = await self._continued(ask, sending)
            await self._receive(ask, reader, message)
        except MalformedMessage as error:
            raise Broken(f"malformed response: {error}") from error
        except (OSError, EOFError) as error:
            raise Broken(f"{type(error).__name__} on a {'fresh' if fresh else 'used'} connection") from error
        finally:
            whole = sending.done() and not sending.cancelled() and sending.exception() is None
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError, EOFError, Broken):
                await sending
            if not whole or not message.keep_alive or not message.status or ask.slow:
                await self.close()
        if message.excess:
            raise Broken("bytes after the response")
        fields = [(name.decode("latin-1").lower(), value.decode("latin-1").lower()) for name, value in message.headers]
        return Got(message.status, fields, b"".join(body), continued)

    async def begin(self, ask: Ask) -> asyncio.StreamReader:
        """Send a request and leave the response to the caller, who must `close` or `abort`."""
        reader, writer = await self._connected()
        await self._send(ask, reader, writer)
        return reader

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None:
            try:
                self._streams = await asyncio.open_connection(*self._where, limit=_SIP)
            except OSError as error:
                raise Broken("cannot connect") from error
            self.opened += 1
        return self._streams

    async def _send(self, ask: Ask, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """True when the server said `100 Continue` before the body was sent."""
        writer.write(_head(ask, self._where))
        continued = False
        if ask.expect:
            interim = await reader.readuntil(b"\r\n\r\n")
            continued = interim.startswith(b"HTTP/1.1 100 ")
            if not continued:
                raise Broken(f"instead of 100 Continue: {interim[:60]!r}")
        for piece in ask.pieces:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if ask.chunked else piece)
            await writer.drain()
        if ask.chunked:
            lines = "".join(f"{name}: {value}\r\n" for name, value in ask.trailers)
            writer.write(b"0\r\n" + lines.encode() + b"\r\n")
        await writer.drain()
        return continued

    async def _continued(self, ask: Ask, sending: "asyncio.Future[bool]") -> bool:
        return await sending if ask.expect else False  # only one may read at a time

    async def _receive(self, ask: Ask, reader: asyncio.StreamReader, message: ResponseReader) -> None:
        while True:
            data = await reader.read(_SIP if ask.slow else _READ)
            if ask.slow:
                await asyncio.sleep(SIP_SECONDS)
            if not data:
                missing = message.end_of_input()
                if missing:
                    raise Broken(missing)
                return
            whole = message.feed(data)
            if whole or (ask.method == "HEAD" and message.status):
                return


def _head(ask: Ask, where: tuple[str, int]) -> bytes:
    authority = f"[{where[0]}]:{where[1]}" if ":" in where[0] else f"{where[0]}:{where[1]}"
    lines = [f"{ask.method} {ask.path} HTTP/1.1", f"host: {authority}"]
    lines += [f"{name}: {value}" for name, value in ask.fields]
    if ask.chunked:
        lines.append("transfer-encoding: chunked")
    elif ask.pieces or ask.method in ("POST", "PUT"):
        lines.append(f"content-length: {sum(map(len, ask.pieces))}")
    if ask.expect:
        lines.append("expect: 100-continue")
    return "\r\n".join((*lines, "", "")).encode("latin-1")
