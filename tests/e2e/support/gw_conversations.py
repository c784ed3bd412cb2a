"""Clients that talk, and the stub's tokens of what they say."""

import asyncio
import json
from random import Random
from typing import Any

import aiohttp

from fairlead.apis.parsed import ParsedRequest
from fairlead.apis.tokens import PromptTokens
from fairlead.core.exact import SETTLING
from fairlead.lab.engine.tokens import TOKEN_BYTES
from fairlead.lab.stub.plans import render_chat

MODEL = "tiny"
WORDS = ("river", "stone", "cloud", "fire", "tree", "salt", "iron", "snow")


class StubTokeniser:
    """Tokens as the stub makes them; `before` stands before every prompt, where the stub has nothing."""

    state = "the stub's"
    cache = None

    def __init__(self, before: bytes = b"", width: int = TOKEN_BYTES) -> None:
        self._before = before
        self._width = width

    def states(self) -> dict[str, Any]:
        return {}

    def in_thread(self, parsed: ParsedRequest, model: str) -> bool:
        return parsed.prompt_bytes > 3000

    def tokens_of(self, parsed: ParsedRequest, body: bytes, model: str) -> PromptTokens:
        text = self._before + render_chat(json.loads(body)["messages"])
        if self._width == TOKEN_BYTES:
            return PromptTokens(ids=text, total=len(text) // TOKEN_BYTES)
        pieces = [text[at : at + self._width] for at in range(0, len(text), self._width)]
        ids = b"".join((7 * int.from_bytes(piece, "little") % 150_000).to_bytes(4, "little") for piece in pieces)
        return PromptTokens(ids=ids, total=len(pieces))


class Conversations:
    """Some clients, each with one conversation after the other; they share a few system prompts."""

    def __init__(self, port: int, seed: int) -> None:
        self._url = f"http://127.0.0.1:{port}/v1/chat/completions"
        self._chance = Random(seed)
        self.statuses: list[int] = []
        self.systems = [self._words(250) for _ in range(6)]

    def _words(self, count: int) -> str:
        return " ".join(self._chance.choice(WORDS) + str(self._chance.randrange(100)) for _ in range(count))

    async def run(self, requests: int, clients: int = 6) -> None:
        """So many requests over all clients."""
        left = [requests]
        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(self._client(session, left) for _ in range(clients)))

    async def _client(self, session: aiohttp.ClientSession, left: list[int]) -> None:
        while left[0] > 0:
            messages = [{"role": "system", "content": self._chance.choice(self.systems)}]
            for _ in range(6):
                left[0] -= 1
                if left[0] < 0:
                    return
                messages.append({"role": "user", "content": self._words(self._chance.choice((5, 30, 80)))})
                body = {"model": MODEL, "messages": messages, "max_tokens": self._chance.choice((2, 20))}
                async with session.post(self._url, json=body) as answer:
                    self.statuses.append(answer.status)
                    got = await answer.json()
                    messages.append({"role": "assistant", "content": got["choices"][0]["message"]["content"]})
                # A guess that a prompt just sent is held there must have given way to what is known.
                await asyncio.sleep(self._chance.uniform(1.2, 2.0) * SETTLING)
