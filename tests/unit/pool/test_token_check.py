"""What is said of an engine whose tokens are the same, or not."""

import json
from collections.abc import AsyncIterator
from contextlib import nullcontext
from datetime import datetime

import pytest
from aiohttp import web
from tokenizers import Tokenizer, models, pre_tokenizers

from fairlead.apis.request import parse_request
from fairlead.apis.tokens import PromptTokeniser
from fairlead.apis.tokens.pieces import PieceCache
from fairlead.apis.tokens.prompt_tokeniser import ModelFiles, build
from fairlead.pool.render import PROBES, RenderClient, compare

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}{{ tools | tojson if tools }}"


def made(template: str) -> PromptTokeniser:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(sorted(alphabet))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    files = ModelFiles(tokenizer=tokenizer.to_str().encode(), template=template)
    return PromptTokeniser({"*": build(files, PieceCache(1 << 20, nullcontext()), datetime.now)})


class Engine:
    """Tokenises as it is told to, by the same code."""

    def __init__(self) -> None:
        self.template = TEMPLATE
        self.url = ""
        self.broken = False

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.read()
        path = "/v1/chat/completions" if "messages" in json.loads(body) else "/v1/completions"
        found = made(self.template).tokens_of(parse_request(path, body), body, "m")
        if self.broken:
            return web.Response(status=500)
        return web.json_response({"tokens": list(memoryview(found.ids).cast("I"))})


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    app = web.Application()
    app.router.add_post("/tokenize", engine.tokenize)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield engine
    await runner.cleanup()


@pytest.fixture
async def client() -> AsyncIterator[RenderClient]:
    client = RenderClient(10.0, lambda: 0.0)
    yield client
    await client.close()


async def test_the_same(engine: Engine, client: RenderClient) -> None:
    found = await compare(made(TEMPLATE), client, engine.url, "m")
    assert found.state == "agrees"
    assert found.agreed == tuple(name for name in PROBES if name != "responses"), "which /tokenize does not take"
    assert found.differing == ()


async def test_another_template(engine: Engine, client: RenderClient) -> None:
    engine.template = TEMPLATE.replace(": ", ":")
    found = await compare(made(TEMPLATE), client, engine.url, "m")
    assert found.agreed == ("completion",)
    assert found.differing == ("chat", "system and turns", "tools", "developer")
    here, there = (made(one).tokens_of(*_chat(), "m") for one in (TEMPLATE, engine.template))
    assert found.state.startswith(f"differs: chat: {here.count} tokens here, {there.count} there; from token 5: ")


async def test_an_engine_that_prints_more(engine: Engine, client: RenderClient) -> None:
    engine.template = TEMPLATE + "."
    assert (await compare(made(TEMPLATE), client, engine.url, "m")).state.endswith(": none and 13")


def _chat() -> tuple[object, bytes]:
    path, fields = PROBES["chat"]
    body = json.dumps({"model": "m", **fields}).encode()
    return parse_request(path, body), body


async def test_unknown(engine: Engine, client: RenderClient) -> None:
    engine.broken = True
    found = await compare(made(TEMPLATE), client, engine.url, "m")
    assert found.state.startswith("unknown: completion: engine: /tokenize: status 500")
    found = await compare(PromptTokeniser(), client, engine.url, "m")
    assert found.state.startswith("unknown: completion: no-tokeniser: ")
    assert found.agreed == found.differing == ()
