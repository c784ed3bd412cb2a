"""Asking engines for token ids: as a real vLLM answers, and as nobody should."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from fairlead.apis.request import parse_request, unread
from fairlead.apis.tokens import MediaItem, PromptTokens
from fairlead.pool import render
from fairlead.pool.render import FAILURES, PAUSE, RETRY_AFTER, RenderClient
from fairlead.pool.scrape import TokenFile

DATA = Path(__file__).parents[2] / "data" / "vllm-0.32-apis"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[Handler], Awaitable[str]]


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def client(clock: Clock) -> AsyncIterator[RenderClient]:
    client = RenderClient(5.0, clock, concurrency=2)
    yield client
    assert client.rendering == 0
    await client.close()


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    runners: list[web.AppRunner] = []

    async def start(handler: Handler) -> str:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


def answering(answers: dict[str, tuple[int, Any]], seen: list[tuple[str, Any]] | None = None) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        if seen is not None:
            seen.append((request.path, await request.json()))
        status, body = answers.get(request.path, (404, {}))
        return web.Response(status=status, body=body if isinstance(body, bytes) else json.dumps(body).encode())

    return handle


async def test_an_engine_gets_the_token_that_it_requires(clock: Clock, serve: Serve, tmp_path: Path) -> None:
    token = tmp_path / "token"
    client = RenderClient(5.0, clock, token=TokenFile(str(token)))

    async def guarded(request: web.Request) -> web.Response:
        known = request.headers.get("Authorization") == "Bearer engine's"
        return web.json_response({"token_ids": [1, 2]} if known else {}, status=200 if known else 401)

    url = await serve(guarded)
    body = b'{"model": "m", "messages": [{"role": "user", "content": "a"}]}'
    parsed = parse_request("/v1/chat/completions", body)
    for content in (None, "", "client's"):
        if content is not None:
            token.write_text(content)
        clock.time += PAUSE
        assert (await client.tokens_of(parsed, body, url)).reason
    clock.time += PAUSE
    token.write_text("engine's\n")
    assert not (await client.tokens_of(parsed, body, url)).reason
    await client.close()


def captured(name: str) -> bytes:
    return (DATA / f"{name}.bin").read_bytes().partition(b"\r\n\r\n")[2]


async def ask(client: RenderClient, url: str, path: str = CHAT, **body: Any) -> PromptTokens:
    sent = {"model": "m", **({"messages": MESSAGES} if path == CHAT else {}), **body}
    raw = json.dumps(sent).encode()
    return await client.tokens_of(parse_request(path, raw), raw, url)


def ids(found: PromptTokens) -> list[int]:
    assert found.reason == "", found
    return list(memoryview(found.ids).cast("I"))


async def test_an_engine_that_renders(client: RenderClient, serve: Serve) -> None:
    """Answers captured from vLLM 0.32.0."""
    url = await serve(
        answering(
            {
                f"{CHAT}/render": (200, captured("chat_render.response")),
                f"{COMPLETIONS}/render": (200, captured("completion_render.response")),
            }
        )
    )
    body = captured("chat_render.request")
    found = await client.tokens_of(parse_request(CHAT, body), body, url)
    assert ids(found) == json.loads(captured("tokenize_chat.response"))["tokens"]
    assert found.total == found.count == 125
    assert ids(await ask(client, url, COMPLETIONS, prompt="import os")) == [768, 581]


async def test_media_salt_and_batches(client: RenderClient, serve: Serve) -> None:
    features = {"mm_hashes": {"image": ["x"]}, "mm_placeholders": {"image": [{"offset": 1, "length": 2}]}}
    chat = {"token_ids": [1, 5, 5, 2], "features": features, "cache_salt": "s"}
    batch = [{"token_ids": [1]}, {"token_ids": [2, 3]}]
    url = await serve(answering({f"{CHAT}/render": (200, chat), f"{COMPLETIONS}/render": (200, batch)}))
    found = await ask(client, url)
    assert (ids(found), found.media, found.salt) == ([1, 5, 5, 2], (MediaItem("x", 1, 2),), "s")
    found = await ask(client, url, COMPLETIONS, prompt=["a", "b"])
    assert (ids(found), found.total) == ([1], 3)


@pytest.mark.parametrize("status", [403, 404, 405])
async def test_an_engine_that_only_tokenises(client: RenderClient, serve: Serve, status: int) -> None:
    seen: list[tuple[str, Any]] = []
    answers = {f"{CHAT}/render": (status, {}), "/tokenize": (200, captured("tokenize_chat.response"))}
    url = await serve(answering(answers, seen))
    for _ in range(2):
        found = await ask(client, url, max_tokens=5, cache_salt="s", tools=[])
        assert (len(ids(found)), found.salt) == (125, "s")
    asked = {"model": "m", "messages": MESSAGES, "tools": []}
    assert seen[1:] == [("/tokenize", asked)] * 2
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert (await ask(client, url, messages=image)).reason == "media"
    for _ in range(2):
        assert (await ask(client, url, COMPLETIONS, prompt=["a", "b"])).reason == "engine"
    assert len(seen) == 4, "each API is tried once"


async def test_an_engine_that_restarts_with_other_flags_renders(
    client: RenderClient, serve: Serve, clock: Clock
) -> None:
    seen: list[tuple[str, Any]] = []
    answers: dict[str, tuple[int, Any]] = {"/tokenize": (200, {"tokens": [1]})}
    url = await serve(answering(answers, seen))
    for _ in range(3):
        assert ids(await ask(client, url)) == [1]
        clock.time += 0.4 * RETRY_AFTER
    assert [where for where, _ in seen] == [f"{CHAT}/render", *["/tokenize"] * 3]
    answers[f"{CHAT}/render"] = 200, {"token_ids": [2]}
    assert ids(await ask(client, url)) == [2]
    del answers[f"{CHAT}/render"]
    assert ids(await ask(client, url)) == [1]


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (CHAT, "documents", [{"text": "word " * 100}]),
        (CHAT, "reasoning_effort", "low"),
        (CHAT, "chat_template", "{{ messages }}"),
        (CHAT, "truncate_prompt_tokens", 5),
        (COMPLETIONS, "truncate_prompt_tokens", -1),
        (COMPLETIONS, "prompt_embeds", "AAAA"),
    ],
)
async def test_a_prompt_that_tokenize_would_make_differently_has_no_ids(
    client: RenderClient, serve: Serve, path: str, name: str, value: Any
) -> None:
    seen: list[tuple[str, Any]] = []
    answers: dict[str, tuple[int, Any]] = {"/tokenize": (200, captured("tokenize_chat.response"))}
    url = await serve(answering(answers, seen))
    prompt = {"prompt": "a"} if path == COMPLETIONS else {}
    for _ in range(4):
        found = await ask(client, url, path, **prompt, **{name: value})
        assert (found.reason, found.ids) == ("fields", b"") and f"'{name}'" in found.detail
    assert [where for where, _ in seen] == [f"{path}/render"], "it need not be asked"
    assert ids(await ask(client, url, path, **prompt, **{name: None}))
    answers[f"{path}/render"] = 200, {"token_ids": [7]}
    other = await serve(answering(answers))
    assert ids(await ask(client, other, path, **prompt, **{name: value})) == [7], "an engine that renders knows it"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_other_apis_are_rendered_or_not_asked_for_again(client: RenderClient, serve: Serve, path: str) -> None:
    seen: list[tuple[str, Any]] = []
    body = {"model": "tiny", "input": "hi", "messages": MESSAGES, "max_tokens": 5}
    url = await serve(answering({f"{path}/render": (200, b'{"token_ids": [1, 2]}')}, seen))
    assert ids(await ask(client, url, path, **body)) == [1, 2]
    other = await serve(answering({f"{CHAT}/render": (200, b'{"token_ids": [1, 2]}')}, seen))
    seen.clear()
    assert [(await ask(client, other, path, **body)).reason for _ in range(2)] == ["engine"] * 2
    assert [where for where, _ in seen] == [f"{path}/render"]
    assert ids(await ask(client, other)) == [1, 2]


@pytest.mark.parametrize(
    "answer",
    [
        (500, b"oops"),
        (200, b""),
        (200, b"{"),
        (200, b"[]"),
        (200, b'{"ids": [1]}'),
        (200, b'{"token_ids": ["x"]}'),
        (200, b'{"token_ids": [-1]}'),
        (200, b'{"token_ids": [4294967296]}'),
        (200, b'{"token_ids": [1], "features": {"mm_hashes": {"image": ["x"]}}}'),
        (200, b"\xff\xfe"),
        (200, b"[" * 100_000),
        (307, b""),
        (200, b" " * 5000),
    ],
)
async def test_no_usable_answer(
    client: RenderClient, serve: Serve, answer: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render, "MAX_ANSWER", 4000 if answer[1].startswith(b" ") else 1 << 20)
    for answers in ({f"{CHAT}/render": answer}, {"/tokenize": answer}):
        found = await ask(client, await serve(answering(answers)))
        assert found.reason == "engine" and found.detail, answers
        assert found.ids == b""


async def test_more_ids_than_a_prompt_can_have_are_not_read(client: RenderClient, serve: Serve) -> None:
    """To read millions of them holds up all other requests."""
    answer = b'{"tokens": [' + b"1," * 700_000 + b"1]}"
    url = await serve(answering({"/tokenize": (200, answer)}))
    found = await ask(client, url)
    assert (found.reason, "more than" in found.detail) == ("engine", True)
    assert len(ids(await ask(client, url, messages=[{"role": "user", "content": "a " * 100_000}]))) == 700_001


async def test_an_engine_that_fails_is_left_alone_for_a_while(client: RenderClient, serve: Serve, clock: Clock) -> None:
    seen: list[tuple[str, Any]] = []
    answers: dict[str, tuple[int, Any]] = {f"{CHAT}/render": (500, {})}
    url = await serve(answering(answers, seen))
    for _ in range(10):
        assert (await ask(client, url)).reason == "engine"
    assert len(seen) == 3
    clock.time += PAUSE
    answers[f"{CHAT}/render"] = (200, {"token_ids": [7]})
    assert ids(await ask(client, url)) == [7]
    assert ids(await ask(client, url)) == [7]


async def test_what_one_client_asks_wrongly_silences_no_engine(client: RenderClient, serve: Serve) -> None:
    unknown = {"error": {"message": "The model `m` does not exist.", "type": "NotFoundError", "param": "model"}}
    seen: list[tuple[str, Any]] = []
    answers: dict[str, tuple[int, Any]] = {}
    url = await serve(answering(answers, seen))
    for status, said in ((400, {"error": {"message": "bad temperature"}}), (404, unknown), (413, {}), (422, {})):
        answers[f"{CHAT}/render"] = status, said
        for _ in range(4):
            assert (await ask(client, url)).reason == "engine"
    assert len(seen) == 16 and {path for path, _ in seen} == {f"{CHAT}/render"}
    answers[f"{CHAT}/render"] = 200, {"token_ids": [7]}
    assert ids(await ask(client, url)) == [7], "it renders, although it did not know a model"
    answers["/tokenize"] = 200, captured("tokenize_chat.response")
    for _ in range(4):
        found = await ask(client, url, COMPLETIONS, prompt=["a", "b"])
        assert (found.reason, found.detail) == ("engine", "/tokenize takes one text only")
    assert ids(await ask(client, url)) == [7]


async def test_an_engine_with_another_tokenize_is_left_alone(client: RenderClient, serve: Serve) -> None:
    """llama.cpp knows no `…/render`. Its `/tokenize` reads `content`, and answers all else without tokens."""
    seen: list[tuple[str, Any]] = []
    unknown = {"error": {"code": 404, "message": "File Not Found", "type": "not_found_error"}}
    answers: dict[str, tuple[int, Any]] = {f"{CHAT}/render": (404, unknown), "/tokenize": (200, {"tokens": []})}
    url = await serve(answering(answers, seen))
    for _ in range(9):
        assert (await ask(client, url)).reason == "engine"
    assert [path for path, _ in seen] == [f"{CHAT}/render", *["/tokenize"] * FAILURES]


async def test_an_engine_without_tokenize_is_left_alone(client: RenderClient, serve: Serve) -> None:
    seen: list[tuple[str, Any]] = []
    url = await serve(answering({}, seen))
    for _ in range(9):
        assert (await ask(client, url)).reason == "engine"
    assert len(seen) == 1 + FAILURES


async def test_an_empty_prompt_is_not_sent_to_tokenize(client: RenderClient, serve: Serve) -> None:
    seen: list[tuple[str, Any]] = []
    url = await serve(answering({"/tokenize": (200, {"tokens": [7]})}, seen))
    for _ in range(4):
        assert (await ask(client, url, COMPLETIONS, prompt="")).reason == "engine"
    assert len(seen) == 1
    assert ids(await ask(client, url, COMPLETIONS, prompt="a")) == [7]


async def test_nobody_listens(client: RenderClient) -> None:
    found = await ask(client, "http://127.0.0.1:1")
    assert found.reason == "engine" and "127.0.0.1" in found.detail


async def test_an_engine_that_hangs(serve: Serve, clock: Clock) -> None:
    release = asyncio.Event()

    async def hang(request: web.Request) -> web.Response:
        await release.wait()
        return web.Response(status=500)

    url = await serve(hang)
    client = RenderClient(0.05, clock, concurrency=2)
    found = await asyncio.gather(*(ask(client, url) for _ in range(5)))
    assert [one.detail for one in found].count("2 other prompts are being rendered") == 3
    assert [one.detail for one in found].count("no answer within 0.05 s") == 2
    assert client.rendering == 0
    patient = RenderClient(60.0, clock)
    waiting = asyncio.create_task(ask(patient, url))
    while not patient.rendering:
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert patient.rendering == 0
    release.set()
    await client.close()
    await patient.close()


async def test_what_is_not_asked(client: RenderClient, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = json.dumps({"input": "x"}).encode()
    assert (await client.tokens_of(parse_request("/v1/embeddings", raw), raw, "http://x")).reason == "api"
    assert (await client.tokens_of(unread("chat", "too-large"), b"", "http://x")).reason == "unread"
    monkeypatch.setattr(render, "MAX_BODY", 10)
    assert (await ask(client, "http://x")).reason == "too-long"


async def test_engines_are_forgotten(client: RenderClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "MAX_ENGINES", 2)
    urls = [f"http://127.0.0.1:{port}" for port in range(1, 6)]
    for url in urls:
        await ask(client, url)
    assert client.known == (*urls[-2:],)
