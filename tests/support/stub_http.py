"""Talking HTTP to stub replicas, byte by byte."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from fairlead.lab.engine.spec import EngineSpec, LatencyModel
from fairlead.lab.stub.config import StubConfig


def _config(step_ms: float) -> StubConfig:
    spec = EngineSpec(latency=LatencyModel(step_ms), num_blocks=5000, max_model_len=40_000)
    return StubConfig(engine=spec, model="tiny")


#: A step per millisecond; and a step per hour: nothing ends by itself.
QUICK, STUCK = _config(1.0), _config(3_600_000.0)


class Http:
    """A client without opinions: requests are what the test says, answers are what came."""

    @staticmethod
    async def ask(address: str, request: bytes) -> bytes:
        """Send and read until the server closes."""
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(request)
            return await asyncio.wait_for(reader.read(), 20)
        finally:
            writer.close()

    @staticmethod
    def request(path: str, body: object, *extra: str, method: str = "POST") -> bytes:
        data = json.dumps(body).encode() if body is not None else b""
        lines = [f"{method} {path} HTTP/1.1", "host: x", "content-type: application/json", *extra]
        return "\r\n".join([*lines, f"content-length: {len(data)}", "", ""]).encode() + data

    @staticmethod
    def split(response: bytes) -> tuple[str, list[tuple[str, str]], bytes]:
        """Status line, headers, body without its chunks."""
        head, _, body = response.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = [(name, value) for name, _, value in (line.partition(": ") for line in lines[1:])]
        if dict(headers).get("transfer-encoding") == "chunked":
            body = Http.dechunk(body)
        return lines[0], headers, body

    @staticmethod
    def dechunk(body: bytes) -> bytes:
        parts = []
        at = 0
        while True:
            end = body.index(b"\r\n", at)
            count = int(body[at:end], 16)
            at = end + 2 + count + 2
            assert body[at - 2 : at] == b"\r\n"
            if not count:
                assert at == len(body)
                return b"".join(parts)
            parts.append(body[end + 2 : at - 2])
            # The real server sends an event per chunk.
            assert parts[-1].endswith(b"\n\n") and parts[-1].count(b"\n\n") == 1

    async def post(self, address: str, path: str, body: object, method: str = "POST") -> tuple[int, bytes]:
        answer = await self.ask(address, self.request(path, body, "connection: close", method=method))
        status, _, content = self.split(answer)
        return int(status.split(" ")[1]), content

    async def get(self, address: str, path: str) -> tuple[int, bytes]:
        return await self.post(address, path, None, "GET")

    async def open(self, address: str, path: str, body: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request and read the head of its answer."""
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(self.request(path, body))
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        return reader, writer

    @staticmethod
    def events(body: bytes) -> list[Any]:
        lines = [event.removeprefix("data: ") for event in body.decode().removesuffix("\n\n").split("\n\n")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    @staticmethod
    async def until(condition: Callable[[], bool], what: str) -> None:
        for _ in range(2000):
            if condition():
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"in ten seconds: {what}")
