"""Prompts that are read before their requests arrive."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fairlead.apis.parsed import ParsedRequest
from fairlead.apis.tokens import PromptTokens
from fairlead.apis.tokens.pieces import absent
from fairlead.config.schema import ModelTokens, Tokens
from fairlead.core.kv.recipe import Recipe
from fairlead.gateway.understand import PromptKnown
from fairlead.pool.render import RenderClient
from fairlead.server.live import prompts
from fairlead.server.live.prompts import PromptReading


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
    """Stands for who takes offers."""

    def __init__(self) -> None:
        self.offers: list[bytes] = []
        self.prepared: list[Any] = []
        self.recipe = Recipe()

    def offer(self, tokens: Any, prepared: Any = None) -> str:
        self.offers.append(tokens.ids)
        self.prepared.append(prepared)
        return f"blocks {len(self.offers)}"

    def prepare(self, tokens: Any, model: str) -> str:
        return f"{tokens.count} tokens for {model} in {threading.current_thread().name[:7]}"


@pytest.fixture
async def reading() -> AsyncIterator[tuple[PromptReading, Seen]]:
    seen = Seen()
    reading = PromptReading(Tokens(), seen, lambda model: "", lambda model: frozenset())  # type: ignore[arg-type]
    reading.tokeniser = Tokeniser()  # type: ignore[assignment]
    yield reading, seen
    reading.tokeniser.free.set()  # type: ignore[attr-defined]
    await reading.close()


def long() -> ParsedRequest:
    return ParsedRequest("chat", prompt_bytes=1000)


Setting = tuple[PromptReading, Seen]


def at_once(read: PromptReading, parsed: ParsedRequest, body: bytes) -> PromptKnown:
    known = read.read(parsed, body, ("m",))
    assert isinstance(known, PromptKnown)
    return known


async def later(read: PromptReading, parsed: ParsedRequest, body: bytes) -> PromptKnown:
    task = read.read(parsed, body, ("m",))
    assert isinstance(task, asyncio.Task)
    return await task


async def test_short_prompts_are_read_at_once(reading: Setting) -> None:
    read, seen = reading
    known = at_once(read, ParsedRequest("chat"), b"12345678")
    assert known.tokens == 2
    assert read.offer(known) == "blocks 1"  # type: ignore[comparison-overlap]
    assert seen.offers == [b"12345678"]


async def test_what_cannot_be_read_is_counted(reading: Setting) -> None:
    read, _ = reading
    assert at_once(read, ParsedRequest("chat"), b"") == PromptKnown()
    assert read.without == {"media": 1}


async def test_long_prompts_are_read_in_a_thread_while_the_loop_goes_on(reading: Setting) -> None:
    read, seen = reading
    tokeniser: Any = read.tokeniser
    tokeniser.free.clear()
    task = read.read(long(), b"12345678", ("m",))
    assert isinstance(task, asyncio.Task) and not task.done()
    asyncio.get_running_loop().call_soon(tokeniser.free.set)
    known = await task
    assert known.tokens == 2
    assert read.offer(known) == "blocks 1"  # type: ignore[comparison-overlap]
    assert seen.offers == [b"12345678"]
    assert tokeniser.threads[0].startswith("prompts")
    await asyncio.sleep(0)
    assert not read.reading


async def test_blocks_of_very_long_prompts_are_named_in_the_thread_too(reading: Setting) -> None:
    read, seen = reading
    # Also of prompts that need no tokeniser.
    ids = bytes(4 * 20_000)
    read.offer(await later(read, ParsedRequest("completions", prompt_tokens=20_000), ids))
    read.offer(await later(read, long(), ids[:4000]))
    assert seen.prepared == ["20000 tokens for m in prompts", None]


async def test_a_client_that_goes_meanwhile_ends_the_reading(reading: Setting) -> None:
    read, seen = reading
    task = read.read(long(), b"12345678", ("m",))
    assert isinstance(task, asyncio.Task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert (read.reading, seen.offers, read.without) == (set(), [], {})


async def test_patience_ends(reading: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    read, _ = reading
    monkeypatch.setattr(prompts, "PATIENCE", 0.01)
    tokeniser: Any = read.tokeniser
    tokeniser.free.clear()
    assert await later(read, long(), b"12345678") == PromptKnown()
    assert read.without == {"too-long": 1}


async def test_only_so_many_wait_for_the_thread(reading: Setting) -> None:
    read, _ = reading
    tokeniser: Any = read.tokeniser
    tokeniser.free.clear()
    found = [read.read(long(), b"12345678", ("m",)) for _ in range(100)]
    assert sum(isinstance(one, asyncio.Task) for one in found) == len(read.reading) == 32
    assert found[32:] == [PromptKnown()] * 68
    assert read.without == {"too-long": 68}


async def test_a_model_that_engines_render() -> None:
    seen = Seen()
    models = Tokens(models={"*": ModelTokens(render="engine")})
    reading = PromptReading(models, seen, lambda model: "", lambda model: frozenset())  # type: ignore[arg-type]
    await reading.start()
    assert await later(reading, long(), b"{}") == PromptKnown()
    assert reading.without == {"engine": 1}
    await reading.close()


QWEN, BASE = frozenset({"qwen", "qwen-latest"}), frozenset({"base", "also"})
#: What the endpoints have, by model: adapters of `qwen`, of `base` and of both.
BASES = {"qwen": [QWEN], "sql": [QWEN], "base": [BASE, {"base"}], "also": [BASE], "chat": [BASE], "both": [QWEN, BASE]}


def bases(model: str) -> frozenset[frozenset[str]]:
    return frozenset(map(frozenset, BASES.get(model, ())))


@pytest.mark.parametrize(
    ("targets", "by"),
    [
        (("qwen",), "qwen"),
        (("sql",), "qwen"),  # an adapter has the tokenizer of its base model
        (("sql", "qwen"), "qwen"),
        (("chat",), "also"),
        (("unknown",), "unknown"),
        (("base", "unknown"), "base"),
        (("qwen", "gemma"), ""),
        (("both",), ""),
        (("sql", "chat"), ""),
    ],
)
async def test_who_reads_the_prompts_of_a_name(targets: tuple[str, ...], by: str) -> None:
    entries = {"qwen": ModelTokens(), "gemma": ModelTokens(), "*": ModelTokens()}
    reading = PromptReading(Tokens(models=entries), Seen(), lambda model: "", bases)  # type: ignore[arg-type]
    asked = []
    tokeniser = Tokeniser()
    reading.tokeniser = tokeniser  # type: ignore[assignment]
    read = tokeniser.tokens_of
    tokeniser.tokens_of = lambda parsed, body, model: (asked.append(model), read(parsed, body, model))[1]  # type: ignore
    known = reading.read(ParsedRequest("chat", prompt_bytes=8), b"12345678", targets)
    assert asked == ([by] if by else [])
    assert known == (PromptKnown(2, (PromptTokens(ids=b"12345678", total=2), None)) if by else PromptKnown())
    assert reading.without == ({} if by else {"no-tokeniser": 1})
    await reading.close()


@pytest.mark.parametrize(
    ("targets", "by"),
    [
        (("base",), "base"),
        (("chat",), "also"),
        (("chat", "base"), "also"),
        (("base", "new"), "base"),
        (("both",), ""),
        (("base", "qwen"), ""),
    ],
)
async def test_an_engine_is_asked_for_the_target(
    targets: tuple[str, ...], by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = []

    async def tokens_of(self: Any, parsed: Any, body: bytes, url: str) -> PromptTokens:
        bodies.append(json.loads(body)["model"])
        return absent("engine", "busy")

    monkeypatch.setattr(RenderClient, "tokens_of", tokens_of)
    entries = {"*": ModelTokens(render="engine")}
    reading = PromptReading(Tokens(models=entries), Seen(), lambda model: "10.0.0.1:80", bases)  # type: ignore[arg-type]
    await reading.start()
    body = b'{"model": "alias", "messages": []}'
    known = reading.read(ParsedRequest("chat", model="alias", prompt_bytes=8), body, targets)
    assert (known if isinstance(known, PromptKnown) else await known) == PromptKnown()
    assert bodies == ([by] if by else [])
    assert reading.without == ({"engine": 1} if by else {"no-tokeniser": 1})
    await reading.close()
