"""Steady traffic through a gateway, with every answer counted."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e" / "support"))

from gw_http1 import Http1
from gw_messages import JSON, Ask, Broken, Got


def ask(model: str, text: str = "hello") -> Ask:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": text}]}).encode()
    return Ask("POST", "/v1/chat/completions", [JSON], [body])


async def one(port: int, model: str) -> Got:
    async with Http1(port) as client:
        return await client.ask(ask(model))


class Traffic:
    """`clients` connections that each ask again as soon as they are answered, with a pause of `gap` seconds.

    `text`: the prompt of a client's turn.
    """

    def __init__(
        self,
        port: int,
        model: str = "chat",
        clients: int = 4,
        gap: float = 0.01,
        text: Callable[[int, int], str] = "{} {}".format,
    ) -> None:
        self.statuses: Counter[object] = Counter()
        self.answers: list[tuple[int, str]] = []
        self._port, self._model, self._gap, self._count = port, model, gap, clients
        self._stopping, self._text = False, text

    async def __aenter__(self) -> "Traffic":
        self._tasks = [asyncio.create_task(self._client(i)) for i in range(self._count)]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _client(self, number: int) -> None:
        async with Http1(self._port) as client:
            turn = 0
            while not self._stopping:
                turn += 1
                try:
                    got = await client.ask(ask(self._model, self._text(number, turn)))
                    self.statuses[got.status] += 1
                    if got.status != 200:
                        self.answers.append((got.status, got.body[:200].decode(errors="replace")))
                except Broken as error:
                    self.statuses[str(error)] += 1
                await asyncio.sleep(self._gap)

    @property
    def total(self) -> int:
        return sum(self.statuses.values())


async def load(port: int, model: str, count: int, clients: int = 8) -> Counter[int]:
    """`count` requests as fast as they are answered; statuses."""
    statuses: Counter[int] = Counter()
    left = iter(range(count))

    async def client() -> None:
        async with Http1(port) as connection:
            for number in left:
                statuses[(await connection.ask(ask(model, str(number)))).status] += 1

    await asyncio.gather(*(client() for _ in range(clients)))
    return statuses
