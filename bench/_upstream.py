"""A very light HTTP/1.1 upstream for measuring gateways: several ports, one process, little CPU per request and per chunk.

    python bench/_upstream.py --ports 8        prints {"pid": …, "ports": […]} and serves until SIGTERM or SIGINT

`GET /health`, `/v1/models` and `/metrics` (vLLM names) answer as a model server would. Any other request is answered as its
`x-bench-mode` says. Settings are request headers, or one string in a JSON body: `"x-bench": "mode=sse;chunks=5"`.

| mode     | answer                                                                       | settings (default)                    |
|----------|------------------------------------------------------------------------------|---------------------------------------|
| `json`   | a chat completion of about 1 KB with usage, at once                          | `delay-ms` (0), `cached` tokens (0)   |
| `sse`    | head at once, then chunks, then usage and `[DONE]`; the default if streaming | `chunks` (16), `interval-ms` (0), `chunk-bytes` (230), `delay-ms` (0) before the first, `cached` (0) |
| `verify` | numbered chunks of 1 B-256 KB (log-uniform) in bursts and pauses, framed by length or chunked; `x-bench-sha256` names the body's digest | `seed` (0), `chunks` (30), `max-bytes` (262144) |
| `early`  | `status` (413) as soon as the head was read; the upload is drained           | `status`, `close` (0)                 |
| `echo`   | `{"bytes", "sha256"}` of the upload                                          |                                       |

Every answer carries `x-bench-port`.
"""  # noqa: E501

import argparse
import asyncio
import hashlib
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

from _upstream_answers import Piece, Port, Settings, choose, early
from _wheel import Wheel
from fairlead.bench.http1 import MalformedMessage, MessageReader

#: What is looked through for `"stream": true` and settings: this much of the upload's beginning and of its end.
_KEPT = 65536
_MAX_REST = 1 << 20


class Connection(asyncio.BufferedProtocol):
    """Reads requests and plays the pieces of their answers, one request at a time."""

    def __init__(self, port: Port, buffer: bytearray) -> None:
        self._port = port
        # Shared by all connections: received bytes are used up before the next one reads.
        self._buffer = buffer
        self._reader = MessageReader(response=False, payload=self._on_body)
        self._transport: asyncio.Transport | None = None
        self._pieces: Iterator[Piece] | None = None
        self._blocked = False
        self._waiting = False
        self._fresh()

    def _fresh(self) -> None:
        self._reader.reset(self._on_body)
        self._begin = bytearray()
        self._end = b""
        self._digest: Any = None
        self._started = self._received = self._answered = False
        self._early_rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None
        if self._pieces is not None:
            self._pieces = None
            self._port.running -= 1

    def get_buffer(self, _hint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, size: int) -> None:
        if self._received:
            self._early_rest += bytes(self._buffer[:size])
            if len(self._early_rest) > _MAX_REST and self._transport is not None:
                self._transport.abort()
            return
        self._take(self._buffer, size)

    def _take(self, data: bytearray, size: int) -> None:
        try:
            self._received = self._reader.feed(data, size)
        except MalformedMessage:
            if self._transport is not None:
                self._transport.write(self._port.whole(400, {"error": "malformed"}, more="connection: close\r\n"))
                self._transport.close()
            return
        if self._reader.head and not self._started and not self._received:
            self._on_head()
        if self._received and not self._started:
            self._answer(choose(self._port, self._reader, bytes(self._begin) + self._end, self._digest))
        elif self._received:
            self._turn()

    def _on_body(self, piece: bytearray) -> None:
        if self._digest is None:
            self._digest = hashlib.sha256() if self._reader.field(b"x-bench-mode") == b"echo" else False
        if self._digest:
            self._digest.update(piece)
        if len(self._begin) < _KEPT:
            self._begin += piece[:_KEPT]
            piece = piece[_KEPT:]
        if piece:
            self._end = (self._end + bytes(piece[-_KEPT:]))[-_KEPT:]

    def _on_head(self) -> None:
        """The head is here, the body is not: the moment for an early answer."""
        if self._reader.field(b"expect") == b"100-continue" and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self._reader.field(b"x-bench-mode") == b"early":
            self._answer(early(self._port, self._reader, Settings(self._reader, b"")))

    def _answer(self, pieces: Iterator[Piece]) -> None:
        self._started = True
        self._pieces = pieces
        self._port.running += 1
        self._play()

    def _resume(self) -> None:
        self._waiting = False
        self._play()

    def _play(self) -> None:
        while self._pieces is not None and not self._blocked and not self._waiting:
            data, pause = next(self._pieces, (b"", -1.0))
            if pause < 0:
                self._pieces = None
                self._port.running -= 1
                self._port.served += 1
                self._answered = True
                self._turn()
                return
            assert self._transport is not None
            self._transport.write(data)
            if pause:
                self._waiting = True
                self._port.wheel.after(pause, self._resume)

    def _turn(self) -> None:
        """Ready for the next request once this one is read and answered."""
        if self._transport is None:
            return
        if self._answered and not self._reader.keep_alive:
            self._transport.close()
        elif self._answered and self._received:
            rest = self._reader.rest + self._early_rest
            self._fresh()
            if rest:
                self._take(bytearray(rest), len(rest))

    def pause_writing(self) -> None:
        self._blocked = True

    def resume_writing(self) -> None:
        self._blocked = False
        self._play()


async def serve(host: str, ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    wheel = Wheel(loop)
    buffer = bytearray(1 << 18)
    servers = []
    for number in ports:
        port = Port(wheel)
        server = await loop.create_server(lambda port=port: Connection(port, buffer), host, number, backlog=4096)  # type: ignore[misc]
        port.number = server.sockets[0].getsockname()[1]
        servers.append((port, server))
    print(json.dumps({"pid": os.getpid(), "ports": [port.number for port, _ in servers]}), flush=True)
    stopped = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopped.set)
    await stopped.wait()
    for _, server in servers:
        server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="A very light HTTP upstream for gateway benchmarks.")
    parser.add_argument("--ports", type=int, default=1, help="how many free ports to serve on")
    parser.add_argument("--listen", default="", help="port numbers instead, separated by commas")
    parser.add_argument("--host", default="127.0.0.1")
    arguments = parser.parse_args()
    chosen = [int(number) for number in arguments.listen.split(",") if number]
    asyncio.run(serve(arguments.host, chosen or [0] * arguments.ports))


if __name__ == "__main__":
    main()
