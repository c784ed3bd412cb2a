"""Model servers at addresses of their own (127.0.0.2, …) on one port, as pods are: a pool has one port for all."""

import asyncio
import json
from collections import Counter
from typing import Self

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, StreamEnded
from h2.exceptions import ProtocolError
from ports import free_port
from tcp import TcpServer

from fairlead.core.headers import PREFILLER

_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b"


class Server:
    """Listens at an address, and ends its connections when it stops. `port` 0 = a free one."""

    def __init__(self, address: str, port: int = 0) -> None:
        self.address = address
        self.port = port

    async def start(self) -> Self:
        self._server = await TcpServer(self._serve, self.address, self.port, limit=1 << 22).start()
        self.port = self._server.port
        return self

    async def stop(self) -> None:
        await self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""


class PodServer(Server):
    """Answers completions with the model it was asked for, and keeps count. `delay`: seconds per answer."""

    def __init__(self, address: str, port: int, delay: float = 0.0) -> None:
        super().__init__(address, port)
        self.delay = delay
        self.models: Counter[str] = Counter()
        #: Who was to compute their prompts; empty = nobody was named.
        self.prefillers: Counter[str] = Counter()
        #: When the last completion came in, by the loop's clock.
        self.last_at = 0.0
        self.open = 0
        #: First lines of prompts that were served here, and how often one came again.
        self.begun: set[str] = set()
        self.hits = 0
        self._busy: set[asyncio.StreamWriter] = set()
        self._draining = False

    @property
    def served(self) -> int:
        return sum(self.models.values())

    async def drain(self) -> None:
        """As an engine that is told to end: nobody new, idle connections are closed, what runs is answered."""
        await self._server.refuse()
        self._draining = True
        for writer in self._server.writers - self._busy:
            writer.close()
        while self._busy:
            await asyncio.sleep(0.01)
        await self.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not self._draining:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                self._busy.add(writer)
                head = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
                body = await body_of(reader, head)
                kind, answer = b"text/plain", b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
                if lines[0].startswith("POST"):
                    self.prefillers[head.get(PREFILLER, "")] += 1
                    kind, answer = b"application/json", await self._complete(body)
                writer.write(_ANSWER % (kind, len(answer), answer))
                self._busy.discard(writer)
        finally:
            self._busy.discard(writer)

    async def _complete(self, body: bytes) -> bytes:
        request = json.loads(body)
        asked, beginning = request["model"], request["messages"][0]["content"].partition("\n")[0]
        self.models[asked] += 1
        self.hits += beginning in self.begun
        self.begun.add(beginning)
        self.last_at = asyncio.get_running_loop().time()
        self.open += 1
        try:
            if self.delay:
                await asyncio.sleep(self.delay)
        finally:
            self.open -= 1
        choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
        value = {"id": "x", "object": "chat.completion", "model": asked, "choices": [choice], "usage": usage}
        return json.dumps(value).encode()


async def body_of(reader: asyncio.StreamReader, head: dict[str, str]) -> bytes:
    """Envoy sends a body that was changed on the way in chunks."""
    if "transfer-encoding" not in head:
        return await reader.readexactly(int(head.get("content-length", 0)))
    pieces: list[bytes] = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        pieces.append((await reader.readexactly(size + 2))[:-2])
    await reader.readexactly(2)
    return b"".join(pieces)


async def pod_servers(count: int, delay: float = 0.0) -> list[PodServer]:
    """At 127.0.0.2 and up, on one port that is free at all of them."""
    for _ in range(20):
        port = free_port()
        servers = [PodServer(f"127.0.0.{i + 2}", port, delay) for i in range(count)]
        started = await asyncio.gather(*(one.start() for one in servers), return_exceptions=True)
        if not any(isinstance(one, BaseException) for one in started):
            return servers
        for server, one in zip(servers, started, strict=True):
            if not isinstance(one, BaseException):
                await server.stop()
    raise AssertionError("no port is free at all addresses")


class H2Pod(Server):
    """A model server that takes cleartext HTTP/2 only. `served`: completions."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.served = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        connection.initiate_connection()
        try:
            while data := await reader.read(65_536):
                for event in connection.receive_data(data):
                    if isinstance(event, DataReceived):
                        connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    elif isinstance(event, StreamEnded):
                        self.served += 1
                        connection.send_headers(event.stream_id, [(":status", "200"), ("content-type", "text/plain")])
                        connection.send_data(event.stream_id, b"by HTTP/2", end_stream=True)
                writer.write(connection.data_to_send())
        except ProtocolError:
            pass  # somebody asked by HTTP/1.1
