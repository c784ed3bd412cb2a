"""A scheduler whose blocks an indexer knows: what it makes of answers and states."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from fairlead.apis.parsed import ParsedRequest
from fairlead.apis.tokens import PromptTokens
from fairlead.apis.tokens.pieces import absent
from fairlead.compat.load import load
from fairlead.core.endpoint import MODEL_LABEL, Endpoint
from fairlead.core.events import EndpointDown, EndpointUp
from fairlead.core.fleet import Fleet
from fairlead.core.kv.answered import RankState
from fairlead.core.request import Request, Usage
from fairlead.core.trust import Finding
from fairlead.server.indexer.wire import Answer, PodAnswer, PodState, StateAnswer
from fairlead.server.live.knowledge import Knowledge, exact_knowledge
from fairlead.server.live.kv import KvListening
from fairlead.server.live.kv_lookup import KvLookup
from fairlead.server.live.wiring import knowledge
from fairlead.server.observe.exposition import Registry

TEXT = "endpoints: ['10.0.0.1:8000']\nkvEvents: {enabled: true, indexer: {url: 'http://127.0.0.1:1'}}"
CURRENT = RankState(heard=True, linked=True, block_size=16)


class Client:
    """Stands for `IndexClient`."""

    url = "http://us:er@indexer"
    up = True

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answer: Answer | None = Answer(total=4, pods={"a": PodAnswer(matched=3, hit_rate=0.75, tiers={"cpu": 3})})
        self.ends = {"answered": 0}

    async def ask(self, **fields: Any) -> Answer | None:
        self.asked.append(fields)
        return self.answer


class Tokeniser:
    cache = None

    def states(self) -> dict[str, Any]:
        return {}

    def in_thread(self, parsed: ParsedRequest, model: str) -> bool:
        return parsed.prompt_bytes > 5000

    def tokens_of(self, parsed: ParsedRequest, body: bytes, model: str) -> PromptTokens:
        return PromptTokens(ids=body, total=len(body) // 4) if body else absent("media", "a picture")


class World:
    def __init__(self) -> None:
        self.blocks: dict[int, Any] = {}
        config = load(TEXT)
        self.fleet = Fleet(exact=exact_knowledge(config))
        self.registry = Registry()
        self.kv = KvLookup(config, self.fleet, self.registry)
        self.client = Client()

    def up(self, name: str, address: str, model: str = "") -> int:
        endpoint = Endpoint(name, address, {MODEL_LABEL: model} if model else {})
        self.fleet.up(endpoint)
        self.kv.endpoint(EndpointUp(endpoint))
        slot = self.fleet.table.slot(name)
        assert slot is not None
        return slot

    def told(self, **pods: str) -> None:
        states = {name: PodState(address=address, ranks=[CURRENT]) for name, address in pods.items()}
        self.kv._on_state(StateAnswer(space="own-1", index_size=1, pods=states, block_sizes=[16], adapters=["sql"]))
        self.kv.exact.refresh(self.kv._sizes)

    async def read(self, number: int, body: bytes) -> int:
        parsed = ParsedRequest("chat", prompt_bytes=len(body))
        read = self.kv.prompts.read(parsed, body, ("m",))
        known = await read if isinstance(read, asyncio.Task) else read
        if known.blocks is not None:
            self.blocks[number] = self.kv.prompts.offer(known)
        return known.tokens

    def share(self, number: int, tokens: int = 64) -> Any:
        blocks = self.blocks.get(number)
        return self.fleet.match(
            Request(id=number, arrived=0.0, model="m", prompt_tokens=tokens, prompt_bytes=300, blocks=blocks)
        )


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    async with AsyncExitStack() as stack:
        await world.kv.start(stack)
        world.kv.prompts.tokeniser = Tokeniser()  # type: ignore[assignment]
        await world.kv.client.close()
        world.kv.client = world.client  # type: ignore[assignment]
        yield world


async def test_an_answer_becomes_a_share_of_the_endpoint_that_it_is_about(world: World) -> None:
    slot = world.up("mine", "10.0.0.7:80")
    world.up("other", "10.0.0.8:80")
    world.told(a="10.0.0.7:80", b="10.0.0.8:80")  # names differ, addresses do not
    assert world.kv.exact.source(slot) == "either"
    assert await world.read(1, bytes(256)) == 64
    (asked,) = world.client.asked
    assert (len(asked["keys"]), asked["block_size"]) == (8 * 4, 16)
    share = world.share(1)
    # Three of four blocks, in the host's memory: a little less than three quarters.
    assert share is not None and 0.6 < share[slot] < 0.75 and share.sum() == share[slot]
    assert "sql" in world.kv.exact.adapters


async def test_of_several_ranks_the_mean_counts(world: World) -> None:
    slot = world.up("a", "10.0.0.7:80")
    ranks = [RankState(rank=rank, heard=True, linked=True, block_size=16) for rank in range(2)]
    states = {"a": PodState(address="10.0.0.7:80", ranks=ranks)}
    world.kv._on_state(StateAnswer(space="own-1", index_size=1, pods=states, block_sizes=[16]))
    world.kv.exact.refresh()
    pod = PodAnswer(matched=3, hit_rate=0.75, tiers={"gpu": 3}, ranks=[99, -1])
    world.client.answer = Answer(total=4, pods={"a": pod})
    await world.read(1, bytes(256))
    share = world.share(1)
    assert share is not None and share[slot] == pytest.approx(0.5, abs=1e-3)


async def test_a_name_that_the_indexer_has_for_another_address_does_not_count(world: World) -> None:
    other, slot = world.up("a", "10.0.0.8:80"), world.up("b", "10.0.0.7:80")
    world.told(a="10.0.0.7:80", b="10.0.0.8:80")
    await world.read(1, bytes(256))
    share = world.share(1)
    assert share is not None and share[slot] > 0.6 and share[other] == 0.0


async def test_a_name_counts_where_the_indexer_knows_no_address(world: World) -> None:
    slot = world.up("a", "10.0.0.7:80")
    world.told(a="")
    await world.read(1, bytes(256))
    share = world.share(1)
    assert share is not None and share[slot] > 0.6


async def test_the_own_name_counts_if_the_indexer_has_two_at_its_address(world: World) -> None:
    slot = world.up("a", "10.0.0.7:80")
    world.told(a="10.0.0.7:80", former="10.0.0.7:80")
    await world.read(1, bytes(256))
    share = world.share(1)
    assert share is not None and share[slot] > 0.6


async def test_without_an_answer_only_the_tokens_are_known(world: World) -> None:
    world.up("a", "10.0.0.7:80")
    world.told(a="10.0.0.7:80")
    world.client.answer = None
    assert await world.read(1, bytes(256)) == 64
    assert world.share(1) is None
    # Nor is anything asked for a prompt without tokens, or one that has no whole block.
    asked = len(world.client.asked)
    assert await world.read(2, b"") == 0
    assert await world.read(3, bytes(40)) == 10
    assert len(world.client.asked) == asked
    assert world.kv.prompts.without == {"media": 1}


async def test_prompts_that_take_long_are_asked_for_too(world: World) -> None:
    world.up("a", "10.0.0.7:80")
    world.told(a="10.0.0.7:80")
    assert await world.read(1, bytes(4 * 20_000)) == 20_000
    assert len(world.client.asked[0]["keys"]) == 8 * 1250
    world.kv.exact.validate()


async def test_more_prompts_than_may_wait_are_counted_only(world: World) -> None:
    world.up("a", "10.0.0.7:80")
    world.told(a="10.0.0.7:80")
    gate = asyncio.Event()
    ask = world.client.ask

    async def slow(**fields: Any) -> Answer | None:
        await gate.wait()
        return await ask(**fields)

    world.client.ask = slow  # type: ignore[method-assign]
    jobs = [asyncio.ensure_future(world.read(number, bytes(256))) for number in range(40)]
    await asyncio.sleep(0.05)
    gate.set()
    assert await asyncio.gather(*jobs) == [64] * 40
    assert 30 <= len(world.client.asked) <= 32


async def test_an_index_of_other_keys_is_not_asked(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.up("a", "10.0.0.7:80")
    world.told(a="10.0.0.7:80")
    world.kv._on_state(StateAnswer(space="engine-1", index_size=1))
    assert world.kv.page()["indexer"]["url"] == "http://us:***@indexer"
    assert world.kv.page()["indexer"]["complaint"] == "its keys are of 'engine-1', ours of 'own-1'"
    assert await world.read(1, bytes(256)) == 64
    assert world.client.asked == []
    world.told(a="10.0.0.7:80")
    await world.read(2, bytes(256))
    assert len(world.client.asked) == 1
    world.told(x="10.9.9.9:80")
    assert "knows none of our endpoints" in world.kv.page()["indexer"]["complaint"]


async def test_a_difference_of_token_ids_explains_only_its_endpoint(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = [world.up(name, f"10.0.0.{port}:80", model) for name, port, model in (("a", 7, "m"), ("b", 8, "n"))]
    world.told(a="10.0.0.7:80", b="10.0.0.8:80")
    findings = {"a": Finding("chat-template", "m at a differs")}
    monkeypatch.setattr(world.kv.token_check, "finding", findings.get)
    world.client.answer = Answer(total=4, pods={})
    numbers = iter(range(1, 9))

    async def blame(slot: int) -> dict[str, int]:
        number = next(numbers)
        await world.read(number, bytes([number]) * 256)
        blocks = world.blocks[number]
        request = Request(id=number, arrived=0.0, model="m", prompt_tokens=64, prompt_bytes=300, blocks=blocks)
        world.fleet.match(request)
        predicted = world.kv.exact.sent(request, slot, -1, 0.0)
        world.kv.exact.ended(predicted, Usage(prompt_tokens=64, completion_tokens=1, cached_tokens=48), True, 0.0)
        return world.kv.exact.check.judged(slot).causes

    assert await blame(slots[0]) == {"chat-template": 1}
    assert await blame(slots[1]) == {"unknown": 1}
    findings.clear()
    assert await blame(slots[0]) == {"chat-template": 1, "unknown": 1}


async def test_endpoints_that_come_and_go(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[str] = []
    monkeypatch.setattr(world.kv.token_check, "down", gone.append)
    world.told(a="10.0.0.7:80", b="10.0.0.8:80")
    slot = world.up("a", "10.0.0.7:80")
    world.kv.exact.refresh()
    assert world.kv.exact.source(slot) == "either"
    world.fleet.down("a")
    world.kv.endpoint(EndpointDown("a"))
    assert gone == ["a"]
    again = world.up("b", "10.0.0.8:80")
    assert again == slot
    await world.read(1, bytes(256))
    assert world.share(1) is None  # the answer was about a
    # When the indexer is gone, what it said last is not up to date.
    world.kv.exact.refresh()
    assert world.kv.exact.source(again) == "either"
    world.kv._on_state(None)
    world.kv.exact.refresh()
    assert world.kv.exact.source(again) == "most"


async def test_an_endpoint_that_the_indexer_no_longer_knows_has_learned_prefixes(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fairlead")
    slot, other = world.up("a", "10.0.0.7:80"), world.up("b", "10.0.0.8:80")
    world.told(a="10.0.0.7:80", b="10.0.0.8:80")
    assert {world.kv.exact.source(known) for known in (slot, other)} == {"either"}
    for _ in range(2):
        world.told(b="10.0.0.8:80")
        assert [world.kv.exact.source(known) for known in (slot, other)] == ["learned", "either"]
    assert [record.getMessage() for record in caplog.records].count(
        "the indexer does not know an endpoint; it keeps learned prefixes"
    ) == 1
    # Nothing is compared there, because nothing was predicted.
    await world.read(1, bytes(256))
    request = Request(id=1, arrived=0.0, model="m", prompt_tokens=64, prompt_bytes=300, blocks=world.blocks[1])
    world.fleet.match(request)
    predicted = world.kv.exact.sent(request, slot, -1, 0.0)
    world.kv.exact.ended(predicted, Usage(prompt_tokens=64, completion_tokens=1, cached_tokens=48), True, 0.0)
    assert world.kv.exact.check.judged(slot).off == 0
    world.told(a="10.0.0.7:80", b="10.0.0.8:80")
    assert world.kv.exact.source(slot) == "either"


def test_what_is_made_of_a_configuration() -> None:
    one = "endpoints: ['10.0.0.1:8000']\n"
    kinds: list[tuple[str, Callable[..., object] | None]] = [
        ("", None),
        ("tokens: {models: {m: {modelPath: /nowhere}}}", Knowledge),
        ("kvEvents: {enabled: true}", KvListening),
        ("kvEvents: {enabled: true, indexer: {url: 'http://i:9090'}}", KvLookup),
        ("scorers: [{type: prefix-aware, cacheIndexerURL: 'http://i:9090'}]", KvLookup),
    ]
    for text, kind in kinds:
        config = load(one + text)
        made = knowledge(config, Fleet(exact=exact_knowledge(config)), Registry())
        assert type(made) is (kind or type(None)), text
