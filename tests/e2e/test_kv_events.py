"""KV events in decisions: a real Envoy, four model servers with events, conversations.

The scheduler runs in this process, so that what it predicted can be held against what each answer reports. Model
servers are `fairlead stub`, whose events tell what their caches really do.
"""

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from gw_conversations import MODEL, Conversations, StubTokeniser
from gw_modes import embedded
from gw_processes import Envoy, Stub, sees_the_scheduler
from ports import free_ports

from fairlead.core.kv.cache import RankCache
from fairlead.core.records import OutcomeRecord
from fairlead.server.live import Live

#: What the stub's block hashes are made with.
HASHES = ("--kv-hash", "sha256_cbor", "--kv-hash-seed", "7")
Start = Callable[..., Awaitable[tuple[Live, asyncio.Task[None]]]]


class World:
    """A scheduler with its gateway and model servers."""

    live: Live
    gateway: Envoy
    port: int

    def __init__(self, stub: Stub, start: Start) -> None:
        self.stub = stub
        self._start = start
        self._running: tuple[Live, asyncio.Task[None]] | None = None
        self._ports: dict[str, object] = {}
        self.outcomes: list[OutcomeRecord] = []

    async def schedule(
        self,
        tokeniser: StubTokeniser | None = None,
        events: bool = True,
        tokens: dict[str, object] | None = None,
        **settings: object,
    ) -> None:
        """End the scheduler if there is one, and start another one at the same address.

        `tokens`: that section of its configuration, instead of a tokeniser that is lent to it.
        """
        await self.stop()
        config: dict[str, object] = {
            "endpoints": [{"name": f"e{at}", "address": address} for at, address in enumerate(self.stub.addresses)],
            "inspect": {"usageSampling": 1},
            "seed": 1,
            **self._ports,
        }
        if events:
            config["kvEvents"] = {"enabled": True, "check": 1, **settings}
        if tokens is not None:
            config["tokens"] = tokens
        self._running = await self._start(config)
        self.live = live = self._running[0]
        self._ports = {"extProc": {"host": "127.0.0.1", "port": live.config.ext_proc.port}}
        self.outcomes.clear()
        tell = live.watch.on_outcome

        def heard(record: OutcomeRecord) -> None:
            self.outcomes.append(record)
            tell(record)

        live.watch.on_outcome = heard  # type: ignore[method-assign]
        if live.core.kv is not None and tokens is None:
            live.core.kv.prompts.tokeniser = tokeniser or StubTokeniser()  # type: ignore[assignment]

    async def stop(self) -> None:
        if self._running is not None:
            self._running[0].stop()
            await self._running[1]

    def compared(self, since: int = 0) -> list[tuple[int, int]]:
        """Cached tokens of the answers since then, as predicted and as reported."""
        return [(one.hit_tokens, one.cached_tokens) for one in self.outcomes[since:] if one.cached_tokens >= 0]

    def agreeing(self, since: int = 0) -> float:
        pairs = self.compared(since)
        return sum(predicted == reported for predicted, reported in pairs) / len(pairs)

    def hit_rate(self) -> float:
        return sum(one.cached_tokens for one in self.outcomes) / sum(one.prompt_tokens for one in self.outcomes)

    def feeds(self) -> list[RankCache]:
        assert self.live.core.kv is not None
        index = self.live.core.kv.exact.index
        return [cache for slot, _ in self.live.fleet.table.slots() for cache in index.caches_of(slot)]

    async def listening(self) -> None:
        """Every publisher is connected, and what it had to tell is known."""
        await self.until(lambda: [feed.linked and not feed.behind for feed in self.feeds()] == [True] * 4)

    async def until(self, happened: Callable[[], object], seconds: float = 10) -> None:
        async with asyncio.timeout(seconds):
            while not happened():
                await asyncio.sleep(0.02)

    async def fault(self, replica: int, **what: object) -> None:
        url = f"http://{self.stub.addresses[replica]}/fault/kv_events"
        async with aiohttp.ClientSession() as session, session.post(url, json=what) as answer:
            assert answer.status == 200, await answer.text()

    async def new_engines(self) -> None:
        for replica in range(len(self.stub.ports)):
            await self.fault(replica, restart=True)

    def metric(self, name: str) -> dict[str, float]:
        """Of the metrics page, by what stands in braces."""
        page = b"".join(self.live.watch.exposition()).decode()
        return {labels: float(value) for labels, value in re.findall(rf"^{name}{{(.*)}} (\S+)$", page, re.M)}

    def causes(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for labels, count in self.metric("fairlead_kv_disagreements_total").items():
            found[labels.split('cause="')[1].split('"')[0]] += int(count)
        return found

    def sources(self) -> Counter[str]:
        found = self.metric("fairlead_kv_source")
        return Counter(labels.split('source="')[1].split('"')[0] for labels, value in found.items() if value)


@pytest.fixture
async def world(
    stub: Callable[..., Stub],
    envoy: Callable[..., Envoy],
    live: Start,
) -> AsyncIterator[World]:
    # Each cache holds some conversations, and forgets the others.
    arguments = ("--model", MODEL, "--kv-tokens", "40000", "--max-model-len", "16384", "--kv-events")
    servers = await asyncio.to_thread(stub, 4, *arguments, "--kv-events-port", "0", *HASHES)
    world = World(servers, live)
    await world.schedule()
    (world.port,) = free_ports(1)
    world.gateway = await asyncio.to_thread(envoy, embedded(world.live.config, world.port, servers.addresses))
    await sees_the_scheduler(world.gateway.admin)
    yield world
    await world.stop()


async def _talked(world: World, talk: Conversations, outcomes: int) -> None:
    """Talk until there are so many outcomes in all. On a busy machine some requests go past the scheduler, which learns
    nothing of their answers: others are sent in their place."""
    async with asyncio.timeout(120):
        while (missing := outcomes - len(world.outcomes)) > 0:
            await talk.run(missing)
            with contextlib.suppress(TimeoutError):
                await world.until(lambda: len(world.outcomes) >= outcomes, 5)


async def _all_use(world: World, talk: Conversations, source: str) -> None:
    """One that got few requests has shown little, so it may take some more."""
    for _ in range(12):
        if world.sources() == {source: 4}:
            break
        await talk.run(50)
    assert world.sources() == {source: 4}


async def _recovered(world: World, talk: Conversations) -> float:
    """How many predictions come true from five seconds after an accident on."""
    await talk.run(40)
    since = len(world.outcomes)
    await _talked(world, talk, since + 100)
    return world.agreeing(since)


@pytest.mark.slow
async def test_predictions_come_true_and_do_so_again_after_accidents(
    world: World, tmp_path: Path, figures: list[str]
) -> None:
    talk = Conversations(world.port, 1)
    await talk.run(120)
    await world.listening()
    since = len(world.outcomes)
    await _talked(world, talk, since + 200)
    steady = world.agreeing(since)
    assert sum(reported > 0 for _, reported in world.compared(since)) > 130
    await _all_use(world, talk, "exact")
    assert steady >= 0.99
    found = {"steady": steady}

    # The connection to one publisher is lost while its engine goes on.
    assert world.live.core.kv is not None
    subscription = world.live.core.kv.subscriptions(0)[0]
    subscription.cut()
    await talk.run(60)
    assert world.sources()["most"] == 1
    subscription.mend()
    await world.listening()
    found["connection lost"] = await _recovered(world, talk)

    # Batches are lost on the way.
    for replica in range(4):
        await world.fault(replica, lose=3)
    await talk.run(60)
    await world.listening()
    found["batches lost"] = await _recovered(world, talk)
    assert (
        sum(world.metric("fairlead_kv_gaps_total").values()) + sum(world.metric("fairlead_kv_replays_total").values())
        > 4
    )

    # Engines begin anew, with empty caches.
    await world.new_engines()
    async with asyncio.timeout(60):  # one that gets no request has nothing to tell
        while sum(world.metric("fairlead_kv_restarts_total").values()) < 4:
            await talk.run(20)
    await world.listening()
    found["engines restarted"] = await _recovered(world, talk)

    # The scheduler itself begins anew, from what it kept and from what it did not.
    for name in ("scheduler restarted", "scheduler restarted with its snapshot"):
        await world.schedule(snapshot=str(tmp_path / "index.kv"))
        await world.listening()
        await sees_the_scheduler(world.gateway.admin)
        found[name] = await _recovered(world, talk)

    figures.extend(f"KV events: predicted = reported for {share:.1%}, {name}" for name, share in found.items())
    assert set(talk.statuses) == {200}
    assert min(found.values()) >= 0.95, found


#: With each recipe, and without one: enough to compare hit rates to a few points.
REQUESTS = 120
WRONG: dict[str, tuple[StubTokeniser | None, dict[str, object]]] = {
    "block-size": (None, {"blockSize": 32}),
    "hash-seed": (None, {"keys": "engine", "hashAlgorithm": "sha256_cbor", "hashSeed": "42"}),
    "chat-template": (StubTokeniser(b"<|begin of text|>   "), {}),
    "tokeniser": (StubTokeniser(width=5), {}),
}


@pytest.mark.slow
async def test_wrong_recipes_are_found_and_cost_nothing(world: World, figures: list[str]) -> None:
    await world.schedule(events=False)
    await sees_the_scheduler(world.gateway.admin)
    talk = Conversations(world.port, 2)
    await _talked(world, talk, REQUESTS)
    learned = world.hit_rate()
    figures.append(f"KV events: {learned:.1%} of prompt tokens hit on learned prefixes")
    for cause, (tokeniser, settings) in WRONG.items():
        await world.new_engines()
        await world.schedule(tokeniser, **settings)
        await world.listening()
        await sees_the_scheduler(world.gateway.admin)
        talk = Conversations(world.port, 2)
        await _talked(world, talk, 50)
        found = world.causes()
        assert found.most_common(1)[0][0] == cause, (cause, found)
        assert world.sources()["learned"] >= 1
        assert world.sources()["exact"] == 0
        await _talked(world, talk, REQUESTS)
        figures.append(f"KV events: {world.hit_rate():.1%} with a wrong {cause}, {dict(world.causes())}")
        await _all_use(world, talk, "learned")
        assert world.hit_rate() > learned - 0.05
        assert set(talk.statuses) == {200}


async def test_prompts_that_the_engines_themselves_tokenise(world: World) -> None:
    await world.schedule(tokens={"models": {"*": {"render": "engine"}}, "engineTimeout": "400ms"})
    await sees_the_scheduler(world.gateway.admin)
    talk = Conversations(world.port, 4)
    await talk.run(100)
    since = len(world.outcomes)
    await _talked(world, talk, since + 100)
    assert world.metric("fairlead_kv_prompts_without_tokens_total") == {}
    await _all_use(world, talk, "exact")
    assert world.agreeing(since) >= 0.95
    assert set(talk.statuses) == {200}


async def test_engine_keys_with_the_right_seed(world: World) -> None:
    await world.schedule(keys="engine", hashAlgorithm="sha256_cbor", hashSeed="7")
    await sees_the_scheduler(world.gateway.admin)
    talk = Conversations(world.port, 3)
    await talk.run(100)
    since = len(world.outcomes)
    await _talked(world, talk, since + 100)
    await _all_use(world, talk, "exact")
    assert world.agreeing(since) >= 0.95
