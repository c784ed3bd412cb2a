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
import json
import os
import signal
from collections.abc import Iterator

from _upstream_answers import Piece, Port, choose, early
from _wheel import Wheel
from fairlead.pool.http1 import HttpError, HttpRequest, RequestParser

_MAX_BODY = 1 << 30


class Connection(asyncio.Protocol):
    """Reads requests and plays the pieces of their answers, one request at a time."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._parser = RequestParser(max_body=_MAX_BODY)
        self._transport: asyncio.Transport | None = None
        self._pieces: Iterator[Piece] | None = None
        #: Answered before its body had come.
        self._early: HttpRequest | None = None
        self._blocked = self._waiting = self._closes = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None
        if self._pieces is not None:
            self._pieces = None
            self._port.running -= 1

    def data_received(self, data: bytes) -> None:
        self._parser.feed(data)
        self._turn()

    def _turn(self) -> None:
        """Answer what has come, once the answer before is out."""
        try:
            while self._pieces is None and self._transport is not None:
                request = self._parser.next()
                if request is None:
                    if self._parser.current is not None and self._early is None:
                        self._on_head(self._parser.current)
                    return
                if request is self._early:
                    self._early = None
                else:
                    self._answer(request, choose(self._port, request))
        except HttpError:
            if self._transport is not None:
                self._transport.write(self._port.whole(400, {"error": "malformed"}, more="connection: close\r\n"))
                self._transport.close()

    def _on_head(self, request: HttpRequest) -> None:
        """The head is here, the body is not: the moment for an early answer."""
        if self._parser.wants_continue and self._transport is not None:
            self._parser.wants_continue = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if request.headers.get("x-bench-mode", "").lower() == "early":
            self._early = request
            self._answer(request, early(self._port, request))

    def _answer(self, request: HttpRequest, pieces: Iterator[Piece]) -> None:
        self._pieces = pieces
        self._closes = not request.keep_alive
        self._port.running += 1
        self._play()

    def _resume(self) -> None:
        self._waiting = False
        self._play()
        self._turn()

    def _play(self) -> None:
        while self._pieces is not None and not self._blocked and not self._waiting:
            data, pause = next(self._pieces, (b"", -1.0))
            assert self._transport is not None
            if pause < 0:
                self._pieces = None
                self._port.running -= 1
                self._port.served += 1
                if self._closes:
                    self._transport.close()
                return
            self._transport.write(data)
            if pause:
                self._waiting = True
                self._port.wheel.after(pause, self._resume)

    def pause_writing(self) -> None:
        self._blocked = True

    def resume_writing(self) -> None:
        self._blocked = False
        self._play()
        self._turn()


async def serve(host: str, ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    wheel = Wheel(loop)
    servers = []
    for number in ports:
        port = Port(wheel)
        server = await loop.create_server(lambda port=port: Connection(port), host, number, backlog=4096)  # type: ignore[misc]
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
