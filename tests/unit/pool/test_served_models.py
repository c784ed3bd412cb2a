"""Reading `/v1/models`: when it is asked, of whom, and what is made of odd answers."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from math import inf
from pathlib import Path
from random import Random

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fairlead.core.endpoint import BaseModels, Endpoint
from fairlead.core.events import AdaptersListed
from fairlead.pool import served_models
from fairlead.pool.scrape import ScrapeOptions
from fairlead.pool.served_models import MOST_LETTERS, MOST_NAMES, ModelList, ServedModels, read_model_list

DATA = Path(__file__).parents[2] / "data" / "vllm-0.32"


def page(*adapters: str) -> bytes:
    cards = [{"id": "base", "parent": None}, *({"id": name, "parent": "base", "root": "/x"} for name in adapters)]
    return json.dumps({"object": "list", "data": cards}).encode()


CRITIC = {"id": "critic", "parent": "base", "root": "/x"}


def test_a_list_of_models() -> None:
    found = read_model_list(page("poet", "critic"))
    base = BaseModels(frozenset({"base"}))
    assert found.names_as(ModelList(base, frozenset({"poet", "critic"})))
    assert read_model_list(page("x" * (MOST_LETTERS + 1), "")).names_as(ModelList(base, frozenset()))
    assert read_model_list(b'{"data": []}') == ModelList(BaseModels(), frozenset())


@pytest.mark.parametrize(
    ("said", "contexts"),
    [([512, 2048, 0], {"m0": 512, "m1": 2048}), ([None, "9", 4.5, True, -1], {}), ([1 << 60, 10**300, []], {})],
)
def test_the_contexts_of_the_base_models(said: list[object], contexts: dict[str, int]) -> None:
    cards = [{"id": f"m{at}", "max_model_len": tokens} for at, tokens in enumerate(said)]
    cards.append({"id": "poet", "parent": "m0", "max_model_len": 1})
    assert read_model_list(json.dumps({"data": cards}).encode()).base.contexts == contexts


def test_an_adapter_has_the_context_of_its_parent() -> None:
    entries = read_model_list((DATA / "models-with-adapters.json").read_bytes()).entries
    assert {name: entry.context for name, entry in entries.items()} == dict.fromkeys(("tiny", "lora-a", "lora-b"), 1024)
    cards = [
        {"id": "base", "max_model_len": 1024},
        {"id": "own", "parent": "base", "max_model_len": 2048},
        {"id": "orphan", "parent": "elsewhere"},
    ]
    entries = read_model_list(json.dumps({"data": cards}).encode()).entries
    assert [entry.context for entry in entries.values()] == [1024, 2048, inf]


@pytest.mark.parametrize(
    "broken",
    [b"", b"[]", b"{}", b'{"data": 3}', b'{"data": [3]}', b'{"data": [{"id": 3}]}', b"\xff", b'{"data": [', b"[" * 9999,
     page(*map(str, range(MOST_NAMES + 1)))],
)  # fmt: skip
def test_what_is_no_list_says_so(broken: bytes) -> None:
    with pytest.raises(ValueError, match=r"no list of models|more than"):
        read_model_list(broken)


@given(
    st.binary() | st.recursive(st.none() | st.text() | st.integers(), st.lists).map(lambda v: json.dumps(v).encode())
)
def test_any_page_is_read_or_refused(content: bytes) -> None:
    with suppress(ValueError):
        assert isinstance(read_model_list(content), ModelList)


class Server:
    """Answers `/v1/models` with what it is told to, and counts."""

    def __init__(self) -> None:
        self.body, self.status, self.asked, self.tokens = page("poet"), 200, 0, [""]

    async def models(self, request: web.Request) -> web.Response:
        self.asked += 1
        self.tokens.append(request.headers.get("authorization", ""))
        return web.Response(body=self.body, status=self.status)


class Rig:
    """Two servers, and what is told of them. The period is longer than any test."""

    def __init__(self) -> None:
        self.servers: dict[str, Server] = {"a": Server(), "b": Server()}
        self.told: asyncio.Queue[AdaptersListed] = asyncio.Queue()
        self.addresses: dict[str, str] = {}

    def reader(self, options: ScrapeOptions | None = None) -> ServedModels:
        options = options or ScrapeOptions(models_s=600.0)
        return ServedModels(asyncio.get_running_loop(), self.told.put_nowait, options, Random(1))

    def endpoint(self, name: str, **fields: str) -> Endpoint:
        return Endpoint(name, self.addresses[name], **fields)  # type: ignore[arg-type]

    async def heard(self) -> tuple[str, frozenset[str] | None]:
        event = await asyncio.wait_for(self.told.get(), 10)
        return event.endpoint_id, event.adapters


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made, runners = Rig(), []
    for name, server in made.servers.items():
        app = web.Application()
        app.router.add_get("/v1/models", server.models)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        made.addresses[name] = f"127.0.0.1:{runner.addresses[0][1]}"
        runners.append(runner)
    yield made
    for runner in runners:
        await runner.cleanup()


async def test_it_is_read_when_an_endpoint_comes_and_told_when_it_changes(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_models, "RETRY", 0.01)
    reader = rig.reader(ScrapeOptions(models_s=0.05))
    try:
        reader.up(rig.endpoint("a"))
        assert await rig.heard() == ("a", frozenset({"poet"}))
        while rig.servers["a"].asked < 4:
            await asyncio.sleep(0.01)
        assert rig.told.empty(), "the same again is no news"
        rig.servers["a"].body = page("poet", "critic")
        assert await rig.heard() == ("a", frozenset({"poet", "critic"}))
        rig.servers["a"].status = 401
        assert await rig.heard() == ("a", None), "it does not tell any more"
        reader.down("a")
        asked = rig.servers["a"].asked
        await asyncio.sleep(0.2)
        assert rig.servers["a"].asked <= asked + 1
    finally:
        await reader.close()


async def test_a_name_is_listed_as_the_server_with_the_shortest_context_says_it(rig: Rig) -> None:
    reader = rig.reader()
    try:
        for name, tokens in (("a", 4096), ("b", 512)):
            card = {"id": "base", "max_model_len": tokens, "owned_by": name}
            rig.servers[name].body = json.dumps({"data": [card]}).encode()
            reader.up(rig.endpoint(name))
            await rig.heard()
            assert json.loads(bytes(reader.union(alike=True)["base"].said)) == card
    finally:
        await reader.close()


async def test_names_of_unlike_endpoints_are_united(rig: Rig) -> None:
    reader = rig.reader(ScrapeOptions(models_s=0.05))
    assert reader.union(alike=True) == {}
    assert not reader.knows_all()
    try:
        for name in "ab":
            reader.up(rig.endpoint(name))
            assert not reader.knows_all()
            await rig.heard()
            assert reader.knows_all()
        assert reader.union(alike=True).keys() == {"base", "poet"}
        assert reader.union(alike=False) == {}, "all serve the same"
        rig.servers["b"].body = page("critic")
        assert await rig.heard() == ("b", frozenset({"critic"}))
        assert reader.union(alike=False).keys() == {"base", "poet", "critic"}
        assert json.loads(bytes(reader.union(alike=False)["critic"].said)) == CRITIC, "as its server says it"
        reader.down("b")
        assert (reader.union(alike=True).keys(), reader.union(alike=False)) == ({"base", "poet"}, {})
        reader.down("a")
        assert not reader.knows_all(), "there are no endpoints"
    finally:
        await reader.close()


async def test_a_server_that_refuses_to_list_its_models_is_told_once(rig: Rig) -> None:
    reader = rig.reader(ScrapeOptions(models_s=0.05))
    rig.servers["a"].status = 401
    try:
        reader.up(rig.endpoint("a"))
        assert await rig.heard() == ("a", None)
        while rig.servers["a"].asked < 4:
            await asyncio.sleep(0.01)
        assert rig.told.empty()
    finally:
        await reader.close()


async def test_a_refusal_counts_from_the_third_on_while_the_metrics_page_is_read(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_models, "RETRY", 0.01)
    server, scraped, loop = rig.servers["a"], False, asyncio.get_running_loop()
    options = ScrapeOptions(models_s=0.05)
    reader = ServedModels(loop, rig.told.put_nowait, options, Random(1), scraped=lambda endpoint_id: scraped)
    try:
        reader.up(rig.endpoint("a"))
        await rig.heard()
        server.status, asked = 404, server.asked
        while server.asked < asked + 8:
            await asyncio.sleep(0.01)
        assert rig.told.empty() and reader.union(alike=True).keys() == {"base", "poet"}
        server.status, asked = 200, server.asked
        while server.asked < asked + 2:
            await asyncio.sleep(0.01)
        scraped, server.status, asked = True, 404, server.asked
        assert await rig.heard() == ("a", None)
        assert server.asked - asked >= 3
    finally:
        await reader.close()


@pytest.mark.parametrize(("status", "body"), [(200, b"<html>"), (200, b"x" * (2 << 20)), (503, b""), (200, page()[:9])])
async def test_a_broken_answer_changes_nothing_and_is_asked_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, status: int, body: bytes
) -> None:
    monkeypatch.setattr(served_models, "RETRY", 0.01)
    server, reader = rig.servers["a"], rig.reader(ScrapeOptions(models_s=0.05))
    try:
        reader.up(rig.endpoint("a"))
        await rig.heard()
        good, server.status, server.body = server.body, status, body
        asked = server.asked
        while server.asked < asked + 5:
            await asyncio.sleep(0.01)
        assert rig.told.empty()
        server.status, server.body = 200, good.replace(b"poet", b"bard")
        assert await rig.heard() == ("a", frozenset({"bard"}))
    finally:
        await reader.close()


async def test_a_404_has_everybody_asked_and_told_but_not_again_and_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_models, "SOON", 0.3)
    reader = rig.reader()
    try:
        reader.up(rig.endpoint("a"))
        reader.up(rig.endpoint("b"))
        assert {(await rig.heard())[0] for _ in "ab"} == {"a", "b"}
        rig.servers["b"].body = page("new")
        for _ in range(50):
            reader.look("a")
            await asyncio.sleep(0.002)
        heard = Counter([await rig.heard(), await rig.heard()])
        assert heard == {("a", frozenset({"poet"})): 1, ("b", frozenset({"new"})): 1}
        assert max(server.asked for server in rig.servers.values()) <= 4
    finally:
        await reader.close()


async def test_a_server_that_is_not_there_is_tried_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_models, "RETRY", 0.01)
    reader = rig.reader()
    try:
        reader.up(Endpoint("a", "127.0.0.1:9"))
        assert await rig.heard() == ("a", None), "nobody need wait for its list any more"
        await asyncio.sleep(0.05)
        assert rig.told.empty()
        reader.up(rig.endpoint("a"))
        assert await rig.heard() == ("a", frozenset({"poet"}))
    finally:
        await reader.close()


@pytest.mark.parametrize(
    ("metrics", "sent"),
    [(lambda address: "", "Bearer secret"), (lambda address: f"http://{address}/m", "Bearer secret"),
     (lambda address: "http://127.0.0.1:9/metrics", "")],
)  # fmt: skip
async def test_the_token_goes_only_where_the_metrics_page_is(
    rig: Rig, tmp_path, metrics: Callable[[str], str], sent: str
) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    reader = rig.reader(replace(ScrapeOptions(), token_file=str(file)))
    try:
        reader.up(rig.endpoint("a", metrics_url=metrics(rig.addresses["a"])))
        assert await rig.heard() == ("a", frozenset({"poet"}))
        assert rig.servers["a"].tokens[-1] == sent
    finally:
        await reader.close()


@pytest.mark.parametrize("metrics", ["", "http://127.0.0.1:9/metrics"])
async def test_model_servers_get_the_token_that_they_require(rig: Rig, tmp_path, metrics: str) -> None:
    for name in ("pages", "own"):
        (tmp_path / name).write_text(f"{name}\n")
    options = replace(ScrapeOptions(), token_file=str(tmp_path / "pages"), upstream_token_file=str(tmp_path / "own"))
    reader = rig.reader(options)
    try:
        reader.up(rig.endpoint("a", metrics_url=metrics))
        assert await rig.heard() == ("a", frozenset({"poet"}))
        assert rig.servers["a"].tokens[-1] == "Bearer own"
    finally:
        await reader.close()


async def test_with_a_period_of_0_nobody_is_asked(rig: Rig) -> None:
    reader = rig.reader(ScrapeOptions(models_s=0.0))
    reader.up(rig.endpoint("a"))
    reader.look("a")
    await asyncio.sleep(0.05)
    await reader.close()
    assert rig.servers["a"].asked == 0
