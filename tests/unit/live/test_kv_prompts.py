"""Prompts that are read before their requests arrive."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fairlead.config.tokens import ModelTokens, Tokens
from fairlead.fleet.recipe import Recipe
from fairlead.io.receive.answers import Answers
from fairlead.io.receive.shared import Shared
from fairlead.live import prompts
from fairlead.live.prompts import PromptReading
from fairlead.model.events import RequestArrived
from fairlead.model.request import Request
from fairlead.parse.parsed import ParsedRequest
from fairlead.tokens import PromptTokens
from fairlead.tokens.prompt_tokens import absent


class Tokeniser:
    """Takes as long as it is told to, in a thread for prompts of more than 100 bytes."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.threads: list[str] = []

    def in_thread(self, parsed: ParsedRequest, model: str) -> bool:
        return parsed.prompt_bytes > 100

    def tokens_of(self, parsed: ParsedRequest, body: bytes, model: str) -> PromptTokens:
        self.threads.append(threading.current_thread().name)
        self.free.wait(10)
        return absent("media", "a picture") if not body else PromptTokens(ids=body, total=len(body) // 4)


class Seen:
    """Stands for the driver, and for who takes offers."""

    def __init__(self) -> None:
        self.waiting: dict[int, Any] = {}
        self.arrived: list[Request] = []
        self.offers: dict[int, bytes] = {}
        self.prepared: dict[int, Any] = {}
        self.recipe = Recipe()

    def feed(self, event: object) -> None:
        assert isinstance(event, RequestArrived)
        self.arrived.append(event.request)

    def offer(self, request_id: int, tokens: Any, prepared: Any = None) -> None:
        self.offers[request_id] = tokens.ids
        self.prepared[request_id] = prepared

    def prepare(self, tokens: Any, model: str) -> str:
        return f"{tokens.count} tokens for {model} in {threading.current_thread().name[:7]}"


@pytest.fixture
async def reading() -> AsyncIterator[tuple[PromptReading, Seen, Shared]]:
    seen = Seen()
    reading = PromptReading(Tokens(), seen, lambda model: "")
    reading.tokeniser = Tokeniser()  # type: ignore[assignment]

    class Understood:
        reading: Any = None

    understood = Understood()
    understood.reading = reading.reading
    shared = Shared(seen, understood, Answers("x"), seen, lambda: 0.0)  # type: ignore[arg-type]
    yield reading, seen, shared
    reading.tokeniser.free.set()  # type: ignore[attr-defined]
    await reading.close()


def long() -> ParsedRequest:
    return ParsedRequest("chat", prompt_bytes=1000)


Setting = tuple[PromptReading, Seen, Shared]


async def test_short_prompts_are_read_at_once(reading: Setting) -> None:
    read, seen, shared = reading
    assert read.read(1, ParsedRequest("chat"), b"12345678", "m") == 2
    assert seen.offers == {1: b"12345678"}
    shared.arrive(Request(id=1, arrived=0.0, prompt_tokens=2))
    assert [request.id for request in seen.arrived] == [1]


async def test_what_cannot_be_read_is_counted(reading: Setting) -> None:
    read, seen, _ = reading
    assert read.read(1, ParsedRequest("chat"), b"", "m") == 0
    assert (seen.offers, read.without) == ({}, {"media": 1})


async def test_long_prompts_are_read_in_a_thread_while_the_loop_goes_on(reading: Setting) -> None:
    read, seen, shared = reading
    tokeniser: Any = read.tokeniser
    tokeniser.free.clear()
    assert read.read(1, long(), b"12345678", "m") == 0
    seen.waiting[1] = "a stream"
    shared.arrive(Request(id=1, arrived=0.0, prompt_tokens=900))
    await asyncio.sleep(0.01)
    assert seen.arrived == []
    tokeniser.free.set()
    while not seen.arrived:
        await asyncio.sleep(0.001)
    assert [(request.id, request.prompt_tokens) for request in seen.arrived] == [(1, 2)]
    assert seen.offers == {1: b"12345678"}
    assert tokeniser.threads[0].startswith("prompts")
    assert not read.reading


async def test_blocks_of_very_long_prompts_are_named_in_the_thread_too(reading: Setting) -> None:
    read, seen, _ = reading
    # Also of prompts that need no tokeniser.
    ids = bytes(4 * 20_000)
    assert read.read(1, ParsedRequest("completions", prompt_tokens=20_000), ids, "m") == 0
    assert read.read(2, long(), ids[:4000], "m") == 0
    while read.reading:
        await asyncio.sleep(0.001)
    assert seen.prepared == {1: "20000 tokens for m in prompts", 2: None}


async def test_a_client_that_goes_meanwhile_is_not_scheduled(reading: Setting) -> None:
    read, seen, shared = reading
    read.read(1, long(), b"12345678", "m")
    shared.arrive(Request(id=1, arrived=0.0))
    while read.reading:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0)
    assert seen.arrived == []


async def test_patience_ends(reading: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    read, seen, shared = reading
    monkeypatch.setattr(prompts, "PATIENCE", 0.01)
    tokeniser: Any = read.tokeniser
    tokeniser.free.clear()
    read.read(1, long(), b"12345678", "m")
    seen.waiting[1] = "a stream"
    shared.arrive(Request(id=1, arrived=0.0, prompt_tokens=900))
    while not seen.arrived:
        await asyncio.sleep(0.001)
    assert seen.arrived[0].prompt_tokens == 900
    assert (seen.offers, read.without) == ({}, {"too-long": 1})


async def test_only_so_many_wait_for_the_thread(reading: Setting) -> None:
    read, _, _ = reading
    tokeniser: Any = read.tokeniser
    tokeniser.free.clear()
    for number in range(100):
        assert read.read(number, long(), b"12345678", "m") == 0
    assert len(read.reading) == 32
    assert read.without == {"too-long": 68}


async def test_a_model_that_engines_render() -> None:
    seen = Seen()
    reading = PromptReading(Tokens(models={"*": ModelTokens(render="engine")}), seen, lambda model: "")
    await reading.start()
    assert reading.read(1, long(), b"{}", "m") == 0
    while reading.reading:
        await asyncio.sleep(0.001)
    assert reading.without == {"engine": 1}
    await reading.close()
