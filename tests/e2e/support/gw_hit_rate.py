"""Clients that talk, and how much of their prompts model servers had cached."""

import asyncio
from random import Random

import aiohttp


class Conversations:
    """Conversations of which some share a long beginning; whose turn it is, is drawn."""

    def __init__(self, count: int = 40, beginnings: int = 10) -> None:
        self._chance = Random(7)
        system = [self._text(1500) for _ in range(beginnings)]
        self._open = [
            [{"role": "system", "content": system[number % beginnings]}, {"role": "user", "content": self._text(400)}]
            for number in range(count)
        ]

    def _text(self, words: int) -> str:
        return " ".join(f"{self._chance.randrange(1 << 20):x}" for _ in range(words))

    async def hit_rate(self, port: int, requests: int = 100, clients: int = 4) -> float:
        """Percent of the prompts' tokens that the model servers had cached."""
        left, prompt, cached = [requests], 0, 0
        free = list(self._open)

        async def client(session: aiohttp.ClientSession) -> None:
            nonlocal prompt, cached
            while left[0] > 0:
                left[0] -= 1
                turns = free.pop(self._chance.randrange(len(free)))
                body = {"model": "tiny", "messages": turns, "max_tokens": 8}
                async with session.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as answer:
                    assert answer.status == 200
                    said = await answer.json()
                prompt += said["usage"]["prompt_tokens"]
                cached += said["usage"]["prompt_tokens_details"]["cached_tokens"]
                turns.append({"role": "assistant", "content": said["choices"][0]["message"]["content"]})
                turns.append({"role": "user", "content": self._text(20)})
                free.append(turns)

        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(client(session) for _ in range(clients)))
        return 100.0 * cached / prompt
