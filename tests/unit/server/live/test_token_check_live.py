"""Engines are asked for token ids once for each model, and what they say is told."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from datetime import datetime
from typing import Any

import pytest
from aiohttp import web
from tokenizers import Tokenizer, models, pre_tokenizers

from fairlead.apis.request import parse_request
from fairlead.apis.tokens import PromptTokeniser
from fairlead.apis.tokens.pieces import PieceCache
from fairlead.apis.tokens.prompt_tokeniser import ModelFiles, build
from fairlead.core.endpoint import MODEL_LABEL, Endpoint
from fairlead.core.trust import CAUSES
from fairlead.pool import render
from fairlead.server.live import knowledge as module
from fairlead.server.live.knowledge import TokenCheck
from fairlead.server.observe.component_metrics import TokenMetrics
from fairlead.server.observe.exposition import Registry

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | tojson if tools }}"


def made(template: str = PLAIN, shift: int = 0) -> PromptTokeniser:
    alphabet = {letter: number + shift for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    files = ModelFiles(tokenizer=tokenizer.to_str().encode(), template=template)
    cache = PieceCache(1 << 20, nullcontext())
    return PromptTokeniser({"m": build(files, cache, datetime.now)}, cache)


class Engine:
    """Answers as vLLM does, with its own tokeniser."""

    def __init__(self) -> None:
        self.tokeniser = made()
        self.models: Any = {"data": [{"id": "m"}, {"id": "sql", "parent": "m"}]}
        self.tokenized = 0
        self.broken = False
        self.address = ""

    async def list(self, request: web.Request) -> web.Response:
        return web.json_response(self.models) if self.models is not None else web.Response(status=500)

    async def tokenize(self, request: web.Request) -> web.Response:
        self.tokenized += 1
        if self.broken:
            return web.Response(status=500)
        body = await request.read()
        path = "/v1/chat/completions" if b'"messages"' in body else "/v1/completions"
        found = self.tokeniser.tokens_of(parse_request(path, body), body, "m")
        return web.json_response({"tokens": memoryview(found.ids).cast("I").tolist()})


class World:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokeniser = made()
        self.asks = False
        self.token_check = TokenCheck(lambda: self.tokeniser, lambda model: self.asks, later=0.05)
        self.registry = Registry()
        TokenMetrics(self.registry, lambda: self.tokeniser, self.token_check.states, {"media": 2})

    def up(self, name: str = "e", **labels: str) -> None:
        self.token_check.up(Endpoint(name, self.engine.address, labels))

    async def until(self, happened: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not happened():
                await asyncio.sleep(0.005)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    engine = Engine()
    app = web.Application()
    app.router.add_get("/v1/models", engine.list)
    app.router.add_post("/tokenize", engine.tokenize)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.address = f"127.0.0.1:{runner.addresses[0][1]}"
    world = World(engine)
    world.token_check.start()
    yield world
    await world.token_check.close()
    await runner.cleanup()


async def test_each_engine_is_asked_once(world: World) -> None:
    world.up("a")
    await world.until(lambda: world.token_check.states() == {"m": "agrees"})
    asked = world.engine.tokenized
    world.up("a")
    world.up("b")
    await world.until(lambda: world.engine.tokenized >= 2 * asked)
    assert world.engine.tokenized == 2 * asked
    assert world.token_check.finding("a") is None
    page = world.registry.render().decode()
    assert 'fairlead_tokens_parity{model="m",state="agrees"} 1' in page
    assert 'fairlead_tokens_parity{model="m",state="differs"} 0' in page
    assert 'fairlead_tokens_model{model="m",template="ok",tokeniser="fastokens"} 1' in page
    assert 'fairlead_tokens_missing_total{reason="media"} 2' in page
    assert world.tokeniser.cache is not None and world.tokeniser.cache.asked
    assert f"fairlead_tokens_cache_asked_total {world.tokeniser.cache.asked}" in page


@pytest.mark.parametrize(
    ("theirs", "cause"), [(made("<s>" + PLAIN), "chat-template"), (made(PLAIN, 7), "tokeniser")], ids=["chat", "all"]
)
async def test_one_that_differs_is_told_of(
    world: World, theirs: PromptTokeniser, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    world.engine.tokeniser = theirs
    world.up("a")
    await world.until(lambda: world.token_check.results)
    finding = world.token_check.finding("a")
    assert finding is not None
    assert finding.cause == cause and cause in CAUSES
    assert finding.detail.startswith("m at a differs: ")
    assert world.token_check.states() == {"m": "differs"}
    assert "token ids differ from ours" in caplog.text


async def test_a_difference_lasts_as_long_as_its_endpoint(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(render, "PAUSE", 0.01)
    world.engine.tokeniser = made(PLAIN, 7)
    world.up("a")
    await world.until(lambda: world.token_check.finding("a"))
    # Neither another one that differs nor one that cannot be asked changes that.
    asked = world.engine.tokenized
    world.up("b")
    await world.until(lambda: world.engine.tokenized >= 2 * asked)
    world.engine.broken = True
    world.up("c")
    await world.until(lambda: world.engine.tokenized > 2 * asked)
    assert world.token_check.states() == {"m": "differs"}
    assert caplog.text.count("token ids differ from ours") == 1
    world.engine.broken, world.engine.tokeniser = False, made()
    asked = world.engine.tokenized
    world.up("d")
    await world.until(lambda: world.engine.tokenized >= asked + 6)
    world.token_check.down("b")
    assert (world.token_check.states(), world.token_check.finding("d")) == ({"m": "differs"}, None)
    assert world.token_check.finding("a")
    world.token_check.down("a")
    await world.until(lambda: world.token_check.states() == {"m": "agrees"})
    assert world.token_check.finding("a") is None


async def test_one_that_cannot_be_asked_is_tried_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "PAUSE", 0.01)
    world.engine.broken = True
    world.up("a")
    await world.until(lambda: world.token_check.states() == {"m": "unknown"})
    world.engine.broken = False
    await world.until(lambda: world.token_check.states() == {"m": "agrees"})


async def test_trying_ends(world: World) -> None:
    world.engine.models = None
    world.up("a")
    await asyncio.sleep(0.5)
    assert (world.token_check.results, world.token_check._waiting) == ({}, {})
    # Another endpoint, whose label says what it serves.
    world.up("b", **{MODEL_LABEL: "m"})
    await world.until(lambda: world.token_check.states() == {"m": "agrees"})


@pytest.mark.parametrize("models", [[], {"data": [{"id": 5}]}, {"data": [{"id": ""}]}, {"data": 1}, "x", {}])
async def test_nonsense_is_no_model(world: World, models: Any) -> None:
    world.engine.models = models
    world.up("a")
    await world.until(lambda: not world.token_check._waiting)
    await asyncio.sleep(0.05)
    assert world.token_check.results == {}


async def test_what_is_not_tokenised_here_is_not_compared(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.asks = True
    world.up("a")
    await asyncio.sleep(0.1)
    world.asks = False
    world.engine.models = {"data": [{"id": f"other-{at}"} for at in range(5)]}
    world.up("b")
    await asyncio.sleep(0.1)
    assert (world.token_check.results, world.engine.tokenized) == ({}, 0)
    monkeypatch.setattr(module, "MOST_MODELS", 0)
    world.engine.models = {"data": [{"id": "m"}]}
    world.up("c")
    await asyncio.sleep(0.1)
    assert world.token_check.results == {}
