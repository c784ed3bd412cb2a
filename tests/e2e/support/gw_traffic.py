"""Byte-safety traffic: random exchanges with the benchmark upstream whose responses are known to the last byte."""

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from gw_http1 import Http1
from gw_http2 import Http2
from gw_messages import JSON, Ask, Broken, Got

NOISE = Random(7).randbytes(5 << 20)
_VERIFIED, _UPLOADED = 0.6, 0.9


class Exchange(NamedTuple):
    """What to ask, and what must come back: status, and body (or, empty, the digest that the response names itself)."""

    ask: Ask
    status: int
    body: bytes = b""

    def verdict(self, got: Got) -> str:
        """Empty when every byte is right."""
        if got.status != self.status:
            return f"status {got.status} instead of {self.status}: {got.body[:200]!r}"
        if self.body:
            return "" if got.body == self.body else f"body {got.body[:200]!r} instead of {self.body[:200]!r}"
        told = got.field("x-bench-sha256")
        return "" if told == got.sha256 else f"{len(got.body)} bytes are not what the upstream sent"


class Tally:
    """What came of a run."""

    def __init__(self, pair: str) -> None:
        self.pair = pair
        self.streams = self.down = self.up = 0
        self.seconds = 0.0
        #: What was wrong, one entry per stream.
        self.differences: list[str] = []

    def row(self) -> str:
        return (
            f"{self.pair:42} {self.streams:8,} {self.down / 1e6:10,.1f} {self.up / 1e6:10,.1f} "
            f"{self.streams - len(self.differences):10,} {self.seconds:8.1f}"
        )

    @staticmethod
    def head() -> str:
        names = ("streams", 8), ("MB down", 10), ("MB up", 10), ("identical", 10), ("seconds", 8)
        return f"{'request/response':42} " + " ".join(f"{name:>{width}}" for name, width in names)


def exchanges(seed: int, count: int, largest: int = 5 << 20) -> Iterator[Exchange]:
    """60 % verified responses, 30 % uploads that are echoed as digests, 10 % answers before the upload was read."""
    chance = Random(seed)
    for number in range(count):
        kind = chance.random()
        if kind < _VERIFIED:
            yield _verified(chance, number)
        elif kind < _UPLOADED:
            yield _uploaded(chance, largest if number % 50 == 7 else largest >> 4)
        else:
            yield _early(chance)


def _verified(chance: Random, seed: int) -> Exchange:
    """Numbered chunks of 1 B-256 KB in bursts and pauses, by length or chunked."""
    if chance.random() < 0.15:
        return Exchange(Ask("GET", f"/data/{seed}", _fields("verify", chance)), 200)
    pad = NOISE[: int(math.exp(chance.uniform(math.log(100), math.log(120_000))))].hex()
    body = {"model": "m", "messages": [{"role": "user", "content": pad}], "stream": chance.random() < 0.8}
    path = "/v1/chat/completions" if chance.random() < 0.9 else "/v1/anything"
    return Exchange(_ask(path, _fields("verify", chance), json.dumps(body).encode(), chance), 200)


def _uploaded(chance: Random, largest: int) -> Exchange:
    body = _body(int(math.exp(chance.uniform(math.log(1000), math.log(largest)))), chance)
    told = {"bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
    return Exchange(_ask("/upload", _fields("echo", chance), body, chance), 200, json.dumps(told).encode())


def _early(chance: Random) -> Exchange:
    """An error that is sent when the request's head was read; the upload is far from over.

    The upstream goes on reading: one that hung up would lose its own answer now and then (RFC 9112, 9.6).
    """
    status = chance.choice((401, 413))
    body = _body(int(math.exp(chance.uniform(math.log(20_000), math.log(1_000_000)))), chance)
    fields = [("x-bench-mode", "early"), ("x-bench-status", str(status)), JSON]
    told = {"error": {"message": "early answer", "code": status}}
    return Exchange(_ask("/upload", fields, body, chance, expect=False), status, json.dumps(told).encode())


def _fields(mode: str, chance: Random) -> list[tuple[str, str]]:
    count = int(math.exp(chance.uniform(0, math.log(100))))
    return [
        ("x-bench-mode", mode),
        ("x-bench-seed", str(chance.randrange(1 << 30))),
        ("x-bench-chunks", str(count)),
        ("x-bench-max-bytes", str(chance.choice((100, 20_000, 262_144, 262_144)))),
        JSON,
    ]


def _body(size: int, chance: Random) -> bytes:
    """Not JSON, and no two are alike."""
    mark = b"%016x" % chance.getrandbits(64)
    return (mark + NOISE[: size - len(mark)]) if size > len(mark) else mark[:size]


def _ask(path: str, fields: list[tuple[str, str]], body: bytes, chance: Random, expect: bool = True) -> Ask:
    pieces = list(_cut(body, chance)) if chance.random() < 0.5 else [body]
    expecting = expect and chance.random() < 0.1
    slow = chance.random() < 0.04
    return Ask("POST", path, fields, pieces, chunked=chance.random() < 0.4, expect=expecting, slow=slow)


def _cut(body: bytes, chance: Random) -> Iterator[bytes]:
    start = 0
    while start < len(body):
        size = int(math.exp(chance.uniform(0, math.log(len(body) + 1)))) + len(body) // 40
        yield body[start : start + size]
        start += size


async def run(tally: Tally, port: int, planned: Iterator[Exchange], workers: int = 16, timeout_s: float = 60.0) -> None:
    """Work off `planned` with many connections, a third of them HTTP/2. Every stream is judged."""
    started = time.monotonic()

    async def work(index: int) -> None:
        client = Http2(port, narrow=index % 6 == 5) if index % 3 == 2 else Http1(port)
        async with client:
            for exchange in planned:
                tally.streams += 1
                tally.up += sum(map(len, exchange.ask.pieces))
                verdict = await _judge(tally, client, exchange, timeout_s)
                if verdict:
                    tally.differences.append(f"{type(client).__name__} {_summary(exchange.ask)}: {verdict}")
                    await client.close()

    async with asyncio.TaskGroup() as group:
        for index in range(workers):
            group.create_task(work(index))
    tally.seconds = time.monotonic() - started


async def _judge(tally: Tally, client: Http1 | Http2, exchange: Exchange, timeout_s: float) -> str:
    try:
        async with asyncio.timeout(timeout_s):
            got = await client.ask(exchange.ask)
    except Broken as error:
        return str(error)
    except TimeoutError:
        return f"no whole response within {timeout_s:g} s"
    tally.down += len(got.body)
    return exchange.verdict(got)


def _summary(ask: Ask) -> str:
    told = ", ".join(value for name, value in ask.fields if name.startswith("x-bench-"))
    size = sum(map(len, ask.pieces))
    return f"{ask.method} {ask.path} ({told}; {size} bytes, {'chunked' if ask.chunked else 'by length'})"
