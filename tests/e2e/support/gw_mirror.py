"""A model server that tells what reached it."""

import asyncio
import contextlib
import hashlib
import json
from types import TracebackType
from typing import Any, Self

from fairlead.bench.http1 import MalformedMessage, MessageReader

Told = dict[str, Any]

_PAGE = b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\nvllm:kv_cache_usage_perc 0.0\n"


class Mirror:
    """An HTTP/1.1 server in this process.

    | path          | answer                                                                                      |
    |---------------|---------------------------------------------------------------------------------------------|
    | `/metrics`    | an idle vLLM                                                                                |
    | `/bytes/N`    | N bytes in one chunk                                                                        |
    | `/stream`     | SSE: 30 events, 0.05 s apart; `/stream/fast`: 0.001 s                                       |
    | anything else | JSON: `at` (own address), `method`, `path`, `headers` (list of pairs), `bytes`, `sha256`; two cookies |
    """  # noqa: E501

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self.address = ""
        #: What it told, metrics aside.
        self.told: list[Told] = []
        #: What arrived and was no HTTP, such as the rest of a body that was longer than announced.
        self.malformed: list[str] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, self._host, 0)
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._connections:
            writer.transport.abort()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._server.wait_closed(), 5)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            rest = b""
            while True:
                message, body, rest = await _request(reader, rest)
                await self._answer(message, body, writer)
        except (OSError, EOFError):
            pass
        except MalformedMessage as error:
            self.malformed.append(str(error))
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _answer(self, message: MessageReader, body: bytes, writer: asyncio.StreamWriter) -> None:
        lines = message.head.decode("latin-1").split("\r\n")
        method, path, _ = lines[0].split(" ", 2)
        if path == "/metrics":
            writer.write(_head(200, "text/plain", len(_PAGE)) + _PAGE)
        elif path.startswith("/bytes/"):
            data = bytes(int(path.rsplit("/", 1)[1]))
            writer.write(_head(200, "application/octet-stream", None))
            writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
        elif path.startswith("/stream"):
            await _stream(writer, 0.001 if path.endswith("/fast") else 0.05)
        else:
            self._tell(method, path, lines[1:], body, writer)
        await writer.drain()

    def _tell(self, method: str, path: str, lines: list[str], body: bytes, writer: asyncio.StreamWriter) -> None:
        headers = [line.split(": ", 1) for line in lines if line]
        digest = hashlib.sha256(body).hexdigest()
        told = {"at": self.address, "method": method, "path": path, "headers": headers, "bytes": len(body)}
        self.told.append({**told, "sha256": digest})
        text = json.dumps(self.told[-1]).encode()
        head = _head(200, "application/json", len(text), "set-cookie: a=1\r\nset-cookie: b=2\r\n")
        writer.write(head + (b"" if method == "head" else text))


async def _request(reader: asyncio.StreamReader, rest: bytes) -> tuple[MessageReader, bytes, bytes]:
    """The next request, its body, and what came behind it."""
    pieces: list[bytearray] = []
    message = MessageReader(response=False, payload=pieces.append)
    data = rest or await reader.read(262_144)
    while True:
        if not data:
            raise EOFError
        if message.feed(bytearray(data), len(data)):
            return message, b"".join(pieces), message.rest
        data = await reader.read(262_144)


async def _stream(writer: asyncio.StreamWriter, pause: float) -> None:
    writer.write(_head(200, "text/event-stream", None))
    for number in range(30):
        event = b"data: %d\n\n" % number
        writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        await writer.drain()
        await asyncio.sleep(pause)
    writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


def _head(status: int, kind: str, length: int | None, more: str = "") -> bytes:
    framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return f"HTTP/1.1 {status} Mirror\r\ncontent-type: {kind}\r\n{framing}\r\n{more}\r\n".encode()
