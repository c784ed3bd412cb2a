"""The indexer's HTTP port, asked as strangers ask."""

import asyncio
import gc
import io
import json
import weakref
from array import array
from collections.abc import AsyncIterator
from contextlib import nullcontext
from datetime import datetime
from typing import Any

import aiohttp
import pytest
from kv_blocks import held
from tokenizers import Tokenizer, models, pre_tokenizers

from fairlead.apis.request import parse_request
from fairlead.apis.tokens import PromptTokeniser
from fairlead.apis.tokens.pieces import PieceCache
from fairlead.apis.tokens.prompt_tokeniser import ModelFiles, build
from fairlead.core.endpoint import Endpoint
from fairlead.core.exact import ExactKnowledge
from fairlead.core.kv.keys import prompt_keys
from fairlead.core.kv.match import KvMatch
from fairlead.core.kv.recipe import ANY_MODEL
from fairlead.core.kv.snapshot import Place, Shelved, save
from fairlead.core.kv.tiers import Tier
from fairlead.server.indexer import server as module
from fairlead.server.indexer.server import IndexServer, IndexSources
from fairlead.server.indexer.service import IndexService

HASHES = [111, 2**63 + 5, 333, 444]
TOKENS = list(range(500, 564))
TEXT = "abcdefghijklmnop" * 4


def tokeniser() -> PromptTokeniser:
    """One token per byte."""
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(alphabet, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    files = ModelFiles(tokenizer=made.to_str().encode(), template="{% for m in messages %}{{ m.content }}{% endfor %}")
    return PromptTokeniser({"*": build(files, PieceCache(1 << 20, nullcontext()), datetime.now)})


class World:
    """Three endpoints: the first holds all of a prompt, the second half of it in memory, the third nothing."""

    def __init__(self) -> None:
        self.exact = ExactKnowledge()
        self.endpoints = [(slot, Endpoint(f"default/pod{slot}", f"10.0.0.{slot}:8000")) for slot in range(3)]
        self.tokeniser = tokeniser()
        self.service = IndexService(self.exact, lambda: self.endpoints, lambda: self.tokeniser)
        self.unready: list[str] = []
        self.taken: list[bytes] = []
        self.errors: list[str] = []
        for slot, _ in self.endpoints:
            self.exact.add_slot(slot)
            cache = self.exact.index.rank(slot, 0, ANY_MODEL)
            cache.block_size, cache.heard = 16, True
        self.store(array("I", TOKENS).tobytes(), HASHES)
        self.store(self.tokeniser.tokens_of(*self.asked()).ids, [5, 6, 7, 8])
        self.exact.refresh()
        self.url = ""

    def asked(self) -> Any:
        body = json.dumps({"model": "m", "prompt": TEXT}).encode()
        return parse_request("/v1/completions", body), body, "m"

    def store(self, ids: bytes, hashes: list[int]) -> None:
        index = self.exact.index
        keys = prompt_keys(index.space.root(ANY_MODEL, ""), ids, 16).tolist()
        index.store(index.shelf(index.rank(0, 0, ANY_MODEL), 0, Tier.GPU), hashes, keys, 0)
        index.store(index.shelf(index.rank(1, 0, ANY_MODEL), 0, Tier.GPU), hashes[:1], keys[:1], 0)
        index.store(index.shelf(index.rank(1, 0, ANY_MODEL), 0, Tier.HOST), hashes[1:2], keys[1:2], 1)

    def take(self, content: bytes) -> int:
        Shelved(self.exact.index, content)
        self.taken.append(content)
        return 3

    async def post(self, fields: Any, status: int = 200, raw: bytes | None = None) -> Any:
        body = io.BytesIO(raw if raw is not None else json.dumps(fields).encode())
        async with aiohttp.ClientSession() as session, session.post(f"{self.url}/query", data=body) as answer:
            assert answer.status == status, await answer.text()
            return await answer.json()

    async def call(self, method: str, path: str, **arguments: Any) -> tuple[int, bytes]:
        async with aiohttp.ClientSession() as session, session.request(method, self.url + path, **arguments) as answer:
            return answer.status, await answer.read()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    sources = IndexSources(
        metrics=lambda: [b"index_size 1\n"],
        unready=lambda: world.unready,
        snapshot=lambda: save(
            world.exact.index, {s: e.id for s, e in world.endpoints}, lambda cache: held(Place(7, 1.0))
        ),
        take=world.take,
        on_error=lambda page, error: world.errors.append(page),
    )
    server = IndexServer(world.service, sources, "127.0.0.1", 0)
    await server.start()
    world.url = f"http://127.0.0.1:{server.port}"
    yield world
    await server.close()
    world.service.close()


async def test_engine_hashes_as_in_the_documents(world: World) -> None:
    found = await world.post({"prompt_hash": HASHES, "pods": ["pod0", "10.0.0.1:8000", "default/pod2"]})
    assert found == {
        "total": 4,
        "block_size": 0,
        "unknown": [],
        "pods": {
            "pod0": {"matched": 4, "hit_rate": 1.0, "tiers": {"gpu": 4}},
            "10.0.0.1:8000": {"matched": 2, "hit_rate": 0.5, "tiers": {"gpu": 1, "cpu": 1}},
            "default/pod2": {"matched": 0, "hit_rate": 0.0, "tiers": {}},
        },
    }
    # Signed, as text, and without pods: all of them.
    signed = [111, str(2**63 + 5), 333, "999"]
    found = await world.post({"prompt_hash": signed, "hits_only": True})
    assert {name: pod["matched"] for name, pod in found["pods"].items()} == {"default/pod0": 3, "default/pod1": 2}
    assert found["pods"]["default/pod0"]["hit_rate"] == 0.75
    assert (await world.post({"prompt_hash": [111, 5 - 2**63]}))["pods"]["default/pod0"]["matched"] == 2
    # A beginning that nobody holds ends the match at once.
    assert (await world.post({"prompt_hash": [9, *HASHES], "hits_only": True}))["pods"] == {}
    assert (await world.post({"prompt_hash": []}))["total"] == 0
    asked = world.service.asked
    assert (asked.questions, asked.looked_up, asked.hit) == (5, 4 + 4 + 2 + 5 + 0, 4 + 3 + 2)


async def test_token_ids_texts_and_messages(world: World) -> None:
    found = await world.post({"token_ids": TOKENS})
    assert (found["total"], found["block_size"], found["pods"]["default/pod0"]["matched"]) == (4, 16, 4)
    for fields in ({"prompt": TEXT}, {"messages": [{"role": "user", "content": TEXT}]}):
        found = await world.post({**fields, "model": "m"})
        assert [pod["matched"] for pod in found["pods"].values()] == [4, 2, 0]
    # A salt makes other blocks of the same tokens.
    assert (await world.post({"token_ids": TOKENS, "cache_salt": "x"}))["pods"]["default/pod0"]["matched"] == 0
    # Long ones are prepared in a thread.
    found = await world.post({"token_ids": TOKENS * 300})
    assert (found["total"], found["pods"]["default/pod0"]["matched"]) == (1200, 4)
    found = await world.post({"prompt": TEXT * 500})
    assert (found["total"], found["pods"]["default/pod0"]["matched"]) == (2000, 4)


async def test_each_pod_has_blocks_of_its_own_size(world: World) -> None:
    index = world.exact.index
    cache = index.rank(2, 0, ANY_MODEL)
    cache.block_size = 32
    keys = prompt_keys(index.space.root(ANY_MODEL, ""), array("I", TOKENS).tobytes(), 32).tolist()
    index.store(index.shelf(cache, 0, Tier.GPU), [7], keys[:1], 0)
    world.exact.refresh()
    found = await world.post({"token_ids": TOKENS})
    assert (found["total"], found["block_size"]) == (4, 16)
    assert found["pods"] == {
        "default/pod0": {"matched": 4, "hit_rate": 1.0, "tiers": {"gpu": 4}},
        "default/pod1": {"matched": 2, "hit_rate": 0.5, "tiers": {"gpu": 1, "cpu": 1}},
        "default/pod2": {"matched": 1, "hit_rate": 0.5, "tiers": {"gpu": 1}, "total": 2, "block_size": 32},
    }


async def test_a_pod_of_several_ranks_has_what_each_holds(world: World) -> None:
    world.exact.index.rank(1, 1, ANY_MODEL)
    found = await world.post({"token_ids": TOKENS, "hits_only": True})
    assert found["pods"]["default/pod1"] == {
        "matched": 2,
        "hit_rate": 0.5,
        "tiers": {"gpu": 1, "cpu": 1},
        "ranks": [2, 0],
    }
    assert "ranks" not in found["pods"]["default/pod0"]


async def test_ranks_are_looked_at_only_where_blocks_are(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, slots = KvMatch.by_rank, list[int]()
    monkeypatch.setattr(KvMatch, "by_rank", lambda match, slot: slots.append(slot) or usual(match, slot))
    await world.post({"token_ids": TOKENS})
    assert slots == [0, 1]


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"prompt_hash": ["1", "x"]}, 400, "entry 1"),
        ({"prompt_hash": [2**64]}, 400, "64 bits"),
        ({"token_ids": [-1]}, 400, "0 to 4294967295"),
        ({"token_ids": [2**32]}, 400, "0 to 4294967295"),
        ({"token_ids": [2**70]}, 400, "0 to 4294967295"),
        ({"prompt_hash": [1], "pods": ["a", "b"], "strict": True}, 404, "unknown pods: a, b"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 422, "no token ids: media"),
        ({"messages": [{"role": 5}]}, 422, "no token ids"),
        ({"prompt_hash": [1], "limit": 5}, 400, "unknown field `limit`"),
    ],
)
async def test_errors_are_json_that_says_what_is_wrong(world: World, fields: Any, status: int, said: str) -> None:
    found = await world.post(fields, status)
    assert found["error"]["status"] == status
    assert said in found["error"]["message"]
    assert world.service.asked.refused == {status: 1}
    assert not world.errors


async def test_it_needs_a_tokeniser_of_its_own_for_prompts(world: World) -> None:
    world.tokeniser = PromptTokeniser()
    said = (await world.post({"prompt": "x"}, 422))["error"]["message"]
    assert said.endswith(
        "no-tokeniser: none is configured for this model; an indexer needs modelPath under tokens.models"
    )


async def test_unknown_pods_are_named_unless_strict(world: World) -> None:
    found = await world.post({"prompt_hash": HASHES, "pods": ["pod9", "pod0", "pod9"]})
    assert found["unknown"] == ["pod9"]
    assert found["pods"]["pod9"] == {"matched": 0, "hit_rate": 0.0, "tiers": {}}


async def test_pages_and_methods(world: World) -> None:
    for method, path, status in (
        ("GET", "/query", 405), ("POST", "/state", 405), ("DELETE", "/snapshot", 405), ("GET", "/nothing", 404),
    ):  # fmt: skip
        found, body = await world.call(method, path)
        assert (found, json.loads(body)["error"]["status"]) == (status, status)
    assert (await world.call("GET", "/healthz"))[0] == 200
    assert (await world.call("GET", "/metrics")) == (200, b"index_size 1\n")
    assert (await world.call("GET", "/readyz"))[0] == 200
    world.unready = ["no endpoints"]
    assert await world.call("GET", "/readyz") == (503, b"not ready\n- no endpoints\n")
    assert b"POST /query" in (await world.call("GET", "/"))[1]
    cache = world.exact.index.rank(0, 0, ANY_MODEL)
    cache.numbered = cache.dropped = True
    status, body = await world.call("GET", "/state")
    state = json.loads(body)
    assert (state["space"], state["index_size"], state["block_sizes"]) == ("own-1", 12, [16])
    for field in ("numbered", "dropped"):
        assert [pod["ranks"][0][field] for pod in state["pods"].values()] == [True, False, False]
    assert state["pods"]["default/pod1"]["address"] == "10.0.0.1:8000"
    assert state["pods"]["default/pod1"]["ranks"][0]["blocks"] == 4


async def test_large_bodies_are_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    found = await world.post(None, 413, raw=b" " * (module.MAX_QUERY + 1))
    assert "larger than" in found["error"]["message"]
    monkeypatch.setattr(module, "MAX_SNAPSHOT", 1000)
    assert (await world.call("PUT", "/snapshot", data=bytes(1001)))[0] == 413

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield bytes(400)

    assert (await world.call("PUT", "/snapshot", data=pieces()))[0] == 413
    assert world.taken == []


async def test_snapshots_come_and_go(world: World) -> None:
    status, content = await world.call("GET", "/snapshot")
    assert status == 200
    other = ExactKnowledge()
    other.add_slot(5)
    places: list[Place] = []
    for _ in Shelved(other.index, content).enter("default/pod0", 5, lambda cache, place: places.append(place)):
        pass
    assert (other.index.entries, places) == (8, [Place(7, 1.0)])
    (cache,) = other.index.caches_of(5)
    assert cache.block_size == 16
    assert await world.call("PUT", "/snapshot", data=content) == (200, b'{"endpoints": 3}')
    assert world.taken == [content]
    for damaged in (b"", b"x", content[:-1], content[:40] + b"x" + content[41:]):
        status, body = await world.call("PUT", "/snapshot", data=damaged)
        assert (status, "snapshot" in json.loads(body)["error"]["message"]) == (400, True)
    assert world.errors == []


async def test_readers_of_a_snapshot_share_it_and_are_cut_off_if_they_stop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, world: World
) -> None:
    monkeypatch.setattr(module, "STALL_S", 600.0)
    made = list[int]()

    def pieces() -> Any:
        made.append(1)
        yield b"x" * (24 << 20)

    server = IndexServer(world.service, IndexSources(metrics=list, unready=list, snapshot=pieces), "127.0.0.1", 0)
    await server.start()

    async def begin() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.write(b"GET /snapshot HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        return reader, writer

    readers = [await begin() for _ in range(6)]
    assert len(made) == 1
    assert len(await readers[0][0].readexactly(24 << 20)) == 24 << 20
    for _, writer in readers:
        writer.transport.abort()
    monkeypatch.setattr(module, "STALL_S", 0.05)
    readers = [await begin() for _ in range(3)]
    before = len(made)
    async with asyncio.timeout(15):
        while len(made) == before:  # until the readers are cut off, who comes gets the snapshot that is being sent
            _, writer = await begin()
            writer.transport.abort()
    for _, writer in readers:
        writer.transport.abort()
    await server.close()
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_snapshot_goes_with_its_last_reader(world: World) -> None:
    class Piece(bytearray):
        """Can be referred to weakly."""

    made = list[weakref.ref[Piece]]()

    def pieces() -> Any:
        piece = Piece(b"x" * 1000)
        made.append(weakref.ref(piece))
        yield piece

    server = IndexServer(world.service, IndexSources(metrics=list, unready=list, snapshot=pieces), "127.0.0.1", 0)
    await server.start()
    async with aiohttp.ClientSession() as client, client.get(f"http://127.0.0.1:{server.port}/snapshot") as answer:
        assert await answer.read() == b"x" * 1000
    await server.close()
    gc.collect()
    assert [piece() for piece in made] == [None]


async def test_a_question_that_does_not_come_is_refused(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    monkeypatch.setattr(module, "ASK_S", 0.05)

    async def body() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    assert (await world.call("POST", "/query", data=body()))[0] == 408


async def test_snapshots_are_not_taken_in_unless_allowed() -> None:
    world = World()
    sources = IndexSources(metrics=list, unready=list, snapshot=list)
    server = IndexServer(world.service, sources, "127.0.0.1", 0)
    await server.start()
    world.url = f"http://127.0.0.1:{server.port}"
    status, body = await world.call("PUT", "/snapshot", data=b"x")
    assert (status, "--accept-snapshots" in body.decode()) == (403, True)
    await server.close()
    await server.close()


async def test_a_page_that_fails_costs_only_itself(world: World) -> None:
    world.endpoints = None  # type: ignore[assignment]
    found = await world.post({"prompt_hash": [1]}, 500)
    assert found["error"]["message"] == "/query failed: TypeError"
    assert world.errors == ["/query"]
    assert (await world.call("GET", "/healthz"))[0] == 200


async def test_malformed_http_is_answered_or_closed(world: World) -> None:
    port = int(world.url.rpartition(":")[2])
    for raw in (
        b"POST /query HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n{\xff\x00\x01\x02",
        b"POST /query HTTP/1.1\r\nHost: x\r\nContent-Length: nonsense\r\n\r\n",
        b"\x00\x01\x02\x03\r\n\r\n",
        b"POST /query HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(raw)
        async with asyncio.timeout(5):
            assert b" 400 " in await reader.readline()
        writer.close()
        await writer.wait_closed()
    # One that leaves in the middle of its question does no harm.
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /query HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
    writer.close()
    await writer.wait_closed()
    assert (await world.post({"prompt_hash": HASHES}))["total"] == 4
