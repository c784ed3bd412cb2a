"""A model server that tells what reached it."""

import asyncio
import hashlib
import json
from types import TracebackType
from typing import Any, Self

import httptools
from tcp import TcpServer

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
        self.address = ""
        #: What it told, but to the scheduler.
        self.told: list[Told] = []
        #: What arrived and was no HTTP, such as the rest of a body that was longer than announced.
        self.malformed: list[str] = []

    async def __aenter__(self) -> Self:
        self._server = await TcpServer(self._serve, self._host).start()
        self.address = self._server.address
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.vanish()

    async def vanish(self) -> None:
        """Hang up, and refuse whoever comes."""
        await self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            requests = _Requests()
            while data := await reader.read(262_144):
                requests.feed(data)
                for request in requests.taken():
                    await self._answer(request, writer)
        except httptools.HttpParserError as error:
            self.malformed.append(str(error))

    async def _answer(self, request: "_Request", writer: asyncio.StreamWriter) -> None:
        path = request.path
        if path == "/metrics":
            writer.write(_head(200, "text/plain", len(_PAGE)) + _PAGE)
        elif path == "/v1/models" and dict(request.headers).get("user-agent", "").startswith("fairlead/"):
            writer.write(_head(404, "text/plain", 0))  # the scheduler looks for adapters
        elif path.startswith("/bytes/"):
            data = bytes(int(path.rsplit("/", 1)[1]))
            writer.write(_head(200, "application/octet-stream", None))
            writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
        elif path.startswith("/stream"):
            await _stream(writer, 0.001 if path.endswith("/fast") else 0.05)
        else:
            self._tell(request, writer)
        await writer.drain()

    def _tell(self, request: "_Request", writer: asyncio.StreamWriter) -> None:
        body = b"".join(request.body)
        digest = hashlib.sha256(body).hexdigest()
        told = {"at": self.address, "method": request.method, "path": request.path, "headers": request.headers}
        self.told.append({**told, "bytes": len(body), "sha256": digest})
        text = json.dumps(self.told[-1]).encode()
        head = _head(200, "application/json", len(text), "set-cookie: a=1\r\nset-cookie: b=2\r\n")
        writer.write(head + (b"" if request.method == "head" else text))


class _Request:
    """All in lower case but the body."""

    def __init__(self) -> None:
        self.method = self.path = ""
        self.headers: list[list[str]] = []
        self.body: list[bytes] = []


class _Requests:
    """Requests as they came, one after the other."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._whole: list[_Request] = []
        self._now = _Request()

    def feed(self, data: bytes) -> None:
        """Raises `httptools.HttpParserError`."""
        self._parser.feed_data(data)

    def taken(self) -> list[_Request]:
        whole, self._whole = self._whole, []
        return whole

    # ---- httptools calls ----

    def on_url(self, piece: bytes) -> None:
        self._now.path += piece.decode("latin-1").lower()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._now.headers.append([name.decode("latin-1").lower(), value.decode("latin-1").lower().strip()])

    def on_body(self, piece: bytes) -> None:
        self._now.body.append(piece)

    def on_message_complete(self) -> None:
        self._now.method = self._parser.get_method().decode().lower()
        self._whole.append(self._now)
        self._now = _Request()


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
