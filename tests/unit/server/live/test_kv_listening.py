"""KV events of a running scheduler: who is listened to, and what follows from endpoints that come and go."""

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from kv_blocks import held
from ports import free_ports

from fairlead.apis.tokens import PromptTokens
from fairlead.compat.load import load
from fairlead.core.endpoint import Endpoint
from fairlead.core.errors import ConfigError
from fairlead.core.events import EndpointDown, EndpointUp
from fairlead.core.exact import Predicted
from fairlead.core.fleet import Fleet
from fairlead.core.kv.cache import EVERYONE, RankCache
from fairlead.core.kv.events import BlocksRemoved, BlocksStored
from fairlead.core.kv.hashing import EngineHasher
from fairlead.core.kv.recipe import ANY_MODEL
from fairlead.core.kv.snapshot import Place, save
from fairlead.core.kv.tiers import Tier
from fairlead.core.request import Usage
from fairlead.lab.stub.kv_publisher import KvEventsConfig, KvPublisher
from fairlead.pool.aio import in_turns
from fairlead.pool.kv_events.discovery import Curve, KvSource
from fairlead.pool.kv_events.feed import Sync
from fairlead.pool.kv_events.subscriber import KvSubscriber
from fairlead.server.live import kv
from fairlead.server.live.knowledge import exact_knowledge
from fairlead.server.live.kv import KvListening
from fairlead.server.observe.exposition import Registry
from fairlead.testing import builders


class World:
    """Some endpoints, and what listens to their events."""

    def __init__(self, text: str) -> None:
        config = load(f"endpoints: ['10.0.0.1:8000']\nkvEvents: {text}")
        self.fleet = Fleet(exact=exact_knowledge(config))
        self.registry = Registry()
        self.kv = KvListening(config, self.fleet, self.registry)
        self.index = self.kv.exact.index
        self.publishers: list[KvPublisher] = []

    def up(self, name: str, address: str, rank: int = 0, **labels: str) -> int:
        endpoint = Endpoint(name, address, labels, rank=rank)
        self.fleet.up(endpoint)
        self.kv.endpoint(EndpointUp(endpoint))
        slot = self.fleet.table.slot(name)
        assert slot is not None
        return slot

    def down(self, name: str) -> None:
        self.fleet.down(name)
        self.kv.endpoint(EndpointDown(name))

    def publisher(self, name: str = "pod", **config: Any) -> KvPublisher:
        found = KvPublisher(KvEventsConfig(**config), name, "m")
        self.publishers.append(found)
        return found

    def page(self) -> str:
        return self.registry.render().decode()

    async def snapshot(self) -> bytes:
        """As the scheduler saves it, in turns: a rank whose last batch is not finished is waited for."""
        await asyncio.sleep(0)  # an endpoint that was loaded has its place a turn after its last block
        return b"".join(await in_turns(self.kv.snapshot()))

    async def until(self, happened: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not happened():
                await asyncio.sleep(0.005)


def source_of(publisher: KvPublisher, ranks: int) -> KvSource:
    return KvSource(publisher.events_address, publisher.replay_address, ANY_MODEL, ranks)


Start = Callable[..., Any]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    worlds: list[World] = []
    async with AsyncExitStack() as stack:

        async def begin(text: str) -> World:
            world = World(text)
            await world.kv.start(stack)
            worlds.append(world)
            return world

        yield begin
    for world in worlds:
        for publisher in world.publishers:
            await publisher.close()


def store(publisher: KvPublisher, *digests: int) -> None:
    for digest in digests:
        publisher.add(BlocksStored([digest], 0, digest.to_bytes(64, "little"), 16))
        publisher.flush()


async def test_configured_ports(start: Start) -> None:
    aside = KvPublisher(KvEventsConfig(), "pod", "m")
    events, replay = (int(a.rpartition(":")[2]) for a in (aside.events_address, aside.replay_address))
    world = await start(f"{{enabled: true, port: {events}, replayPort: {replay}}}")
    world.publishers.append(aside)
    store(aside, 1, 2)
    slot = world.up("a", "127.0.0.1:8000")
    await world.until(lambda: world.index.entries == 2)
    # Labels that change are no reason to begin anew; another address is.
    world.up("a", "127.0.0.1:8000", zone="b")
    store(aside, 3)
    await world.until(lambda: world.index.entries == 3)
    (cache,) = world.index.caches_of(slot)
    assert (cache.counts.stored, cache.counts.copied) == (3, 0)
    await world.until(lambda: world.kv.exact.source(slot) == "either")
    assert 'fairlead_kv_feed_blocks{endpoint="a",rank="0"} 3' in world.page()
    slot = world.up("a", "127.0.0.2:8000")
    await asyncio.sleep(0.05)
    assert world.kv.exact.source(slot) == "learned"
    assert all(not cache.blocks for cache in world.index.caches_of(slot))
    world.down("a")
    await world.until(lambda: world.index.entries == 0)
    world.index.validate()


async def test_what_ends_the_following_of_an_endpoint_is_logged(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask(*_: object) -> None:
        raise LookupError("nobody thought of it")

    monkeypatch.setattr(kv.discovery, "ask", ask)
    world = await start("{enabled: true}")
    world.up("a", "127.0.0.1:8000")
    await world.until(lambda: "nobody thought of it" in caplog.text)


async def test_a_rank_that_the_engine_no_longer_has_is_forgotten(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    world = await start("{enabled: true}")
    first = world.publisher()
    sources = [source_of(first, 2)]

    async def ask(*_: object) -> KvSource:
        return sources[0]

    monkeypatch.setattr(kv.discovery, "ask", ask)
    monkeypatch.setattr(kv, "STILL_THERE", 0.02)
    slot = world.up("a", "127.0.0.1:8000")
    store(first, 1)
    await world.until(lambda: world.index.entries == 1)
    assert len(world.index.caches_of(slot)) == 2
    sources[0] = source_of(first, 1)
    await world.until(lambda: len(world.index.caches_of(slot)) == 1)
    await world.until(lambda: world.index.entries == 1 and world.kv.exact.source(slot) == "either")
    world.index.validate()


async def test_an_engine_with_another_publisher_is_a_new_one(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    world = await start("{enabled: true}")
    first = world.publisher(buffer_steps=2)
    store(first, 1, 2, 3, 4)
    sources = [source_of(first, 1)]

    async def ask(*_: object) -> KvSource:
        return sources[0]

    monkeypatch.setattr(kv.discovery, "ask", ask)
    monkeypatch.setattr(kv, "STILL_THERE", 0.02)
    slot = world.up("a", "127.0.0.1:8000")

    def known() -> list[tuple[int, bool, bool, int]]:
        caches = world.index.caches_of(slot)
        return [(cache.blocks, cache.heard, cache.provisional, cache.lives) for cache in caches]

    await world.until(lambda: known() == [(2, True, True, 0)])
    idle = world.publisher()
    sources[0] = source_of(idle, 1)
    await world.until(lambda: known() == [(0, False, False, 1)])
    store(idle, 7)
    await world.until(lambda: known() == [(1, True, False, 1)])


async def test_blocks_of_an_engine_that_comes_back_without_events_are_forgotten(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await start("{enabled: true}")
    publisher = world.publisher()
    store(publisher, 1)
    sources: list[KvSource | None] = [source_of(publisher, 1)]
    asked, answered, denies = 0, 0, True

    async def ask(*_: object) -> KvSource | None:
        nonlocal asked
        asked += 1
        return sources[0]

    async def without_events(*_: object) -> bool:
        nonlocal answered
        answered += 1
        return denies

    monkeypatch.setattr(kv.discovery, "ask", ask)
    monkeypatch.setattr(kv.discovery, "without_events", without_events)
    monkeypatch.setattr(kv, "ASK_AGAIN", (0.01, 0.01))
    monkeypatch.setattr(kv, "STILL_THERE", 0.01)
    slot = world.up("a", "127.0.0.1:8000")
    await world.until(lambda: world.index.entries == 1)
    (cache,) = world.index.caches_of(slot)
    await world.until(lambda: cache.linked and world.kv.subscriptions(slot)[0].feed.applied)
    content = await world.snapshot()
    # It is still connected, whatever its HTTP port says.
    sources[0], asked = None, 0
    await world.until(lambda: asked > 3)
    assert (world.index.entries, answered) == (1, 0)
    trust = world.kv.exact.check.trust(slot)
    for _ in range(3):
        trust.judge(False)
    assert trust.distrusted
    await publisher.close()
    await world.until(lambda: not world.index.caches_of(slot))
    assert world.kv.subscriptions(slot) == []
    await world.until(lambda: not trust.distrusted)
    # So are the blocks of a snapshot.
    denies = False
    assert world.kv.take(content) == 1
    await world.until(lambda: [cache.blocks for cache in world.index.caches_of(slot)] == [1])
    denies = True
    await world.until(lambda: not world.index.caches_of(slot))


async def test_a_subscription_that_fails_is_tried_again(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = await start("{enabled: true}")
    publisher, tries, free = world.publisher(), 0, False
    store(publisher, 1)
    watch = kv.KvSubscriber.watch

    sources: list[KvSource | None] = [source_of(publisher, 1)]

    async def ask(*_: object) -> KvSource | None:
        return sources[0]

    async def without_events(*_: object) -> bool:
        return True

    def limited(self: kv.KvSubscriber, slot: int, source: KvSource, places: Any = None) -> None:
        nonlocal tries
        tries += 1
        if not free:
            raise zmq.ZMQError(errno.EMFILE)
        watch(self, slot, source, places)

    monkeypatch.setattr(kv.discovery, "ask", ask)
    monkeypatch.setattr(kv.discovery, "without_events", without_events)
    monkeypatch.setattr(kv, "ASK_AGAIN", (0.01, 0.01))
    monkeypatch.setattr(kv.KvSubscriber, "watch", limited)
    world.up("a", "127.0.0.1:8000")
    await world.until(lambda: tries > 2)
    assert caplog.text.count("cannot subscribe") == 1
    assert 'fairlead_kv_feed_connected{endpoint="a",rank="0"} 0' in world.page()
    # In its place there is an engine without events, and then one with events.
    sources[0] = None
    await world.until(lambda: 'fairlead_kv_feed_connected{endpoint="a"' not in world.page())
    sources[0] = source_of(publisher, 1)
    free = True
    await world.until(lambda: world.index.entries == 1)
    await world.until(lambda: 'fairlead_kv_feed_connected{endpoint="a",rank="0"} 1' in world.page())


async def test_publishers_that_dial_in_must_be_of_the_pool(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as free:
        port = free.bind_to_random_port("tcp://127.0.0.1")
    world = await start(f"{{enabled: true, bind: 'tcp://127.0.0.1:{port}'}}")
    slot = world.up("pool/a", "10.0.0.1:8000")
    dial = {"events": f"tcp://127.0.0.1:{port}", "replay": "", "connect": True}
    known, named, stranger = (world.publisher(name, **dial) for name in ("10.0.0.1:8000", "a", "10.9.9.9:8000"))
    digest = 1
    async with asyncio.timeout(10):
        while not world.index.entries or "rejected_batches_total 0" in world.page():
            store(known, digest)
            store(stranger, digest + 100_000)
            digest += 1
            await asyncio.sleep(0.02)
    assert [cache.linked for cache in world.index.caches_of(slot)] == [True]
    # The same pod under its name is the same endpoint.
    before = world.index.entries
    async with asyncio.timeout(10):
        while world.index.entries <= before:
            store(named, digest)
            digest += 1
            await asyncio.sleep(0.02)
    world.down("pool/a")
    await world.until(lambda: world.index.entries == 0)


def write_keys(directory: Path) -> dict[str, tuple[str, str]]:
    """Make key pairs of Fairlead (`own`) and two publishers, of which `listed` may connect. Returns them by name."""
    pairs = {name: tuple(key.decode() for key in zmq.curve_keypair()) for name in ("own", "listed", "other")}
    (directory / "public").write_text(pairs["own"][0] + "\n")
    (directory / "secret").write_text(pairs["own"][1] + "\n")
    (directory / "clients").write_text(f"# publishers\n{pairs['listed'][0]}\n")
    return pairs


def curve_of(directory: Path, **more: str) -> str:
    """The section `curve` for keys of `write_keys`."""
    files = {"publicKeyFile": "public", "secretKeyFile": "secret", "clientsFile": "clients"}
    return json.dumps({name: str(directory / file) for name, file in files.items()} | more)


async def test_a_server_key_does_not_let_others_connect(start: Start, tmp_path: Path) -> None:
    pairs, port = write_keys(tmp_path), free_ports(1)[0]
    curve = curve_of(tmp_path, serverKey=pairs["other"][0])
    world = await start(f"{{enabled: true, bind: 'tcp://127.0.0.1:{port}', curve: {curve}}}")
    listed, other = (world.up(name, f"{name}:80") for name in ("listed", "other"))
    dial = {"events": f"tcp://127.0.0.1:{port}", "replay": "", "connect": True}
    bad = world.publisher("other", **dial, curve=Curve(*pairs["other"]))  # as the CURVE server of the connection
    good = world.publisher("listed", **dial, curve=Curve(*pairs["listed"], pairs["own"][0]))
    async with asyncio.timeout(10):
        for digest in count(1):
            store(bad, digest)
            store(good, digest)
            await asyncio.sleep(0.01)
            if sum(cache.blocks for cache in world.index.caches_of(listed)) == 20:
                break
    assert not list(world.index.caches_of(other))


async def test_why_a_publisher_is_not_heard_is_said(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv, "STILL_THERE", 0.02)
    pairs = write_keys(tmp_path)
    aside = KvPublisher(KvEventsConfig(curve=Curve(*pairs["own"])), "pod", "m")
    port = int(aside.events_address.rpartition(":")[2])
    curve = curve_of(tmp_path, serverKey=pairs["other"][0])
    world = await start(f"{{enabled: true, port: {port}, curve: {curve}}}")
    world.up("pool/a", "127.0.0.1:8000")
    await world.until(world.kv.unheard)
    reason = "it ended the handshake: it has no CURVE, serverKey is not its key, or a proxy answers for it"
    assert world.kv.unheard() == f"no KV events of pool/a: {reason}"
    assert "cannot receive an endpoint's KV events" in caplog.text
    world.down("pool/a")
    assert not world.kv.unheard()
    await aside.close()


async def test_a_publisher_that_may_not_connect_is_logged(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pairs, port = write_keys(tmp_path), free_ports(1)[0]
    world = await start(f"{{enabled: true, bind: 'tcp://127.0.0.1:{port}', curve: {curve_of(tmp_path)}}}")
    dial = {"events": f"tcp://127.0.0.1:{port}", "replay": "", "connect": True}
    world.publisher("a", **dial, curve=Curve(*pairs["other"], pairs["own"][0]))
    await world.until(lambda: "clientsFile" in " ".join(str(vars(record)) for record in caplog.records))
    (said,) = (record for record in caplog.records if "a publisher of KV events could not connect" in record.message)
    assert f"tcp://127.0.0.1:{port}" in str(vars(said))


async def test_ranks_of_a_pod_that_are_endpoints(start: Start) -> None:
    """All may dial in under the name of the first, each on its own port. The name counts more than the number in
    batches."""
    port = free_ports(3)[0]
    world = await start(f"{{enabled: true, bind: 'tcp://127.0.0.1:{port}'}}")
    slots = [world.up(f"pool/a-rank-{rank}", f"10.0.0.1:{8000 + rank}", rank) for rank in (0, 1, 2)]
    slots.append(world.up("pool/b-rank-1", "10.0.0.2:8001", 1))
    dial = [{"events": f"tcp://127.0.0.1:{port + rank}", "replay": "", "connect": True} for rank in (0, 1, 2)]
    made = [world.publisher("10.0.0.1:8000", **dial[rank], rank=rank) for rank in (0, 1)]
    made.append(world.publisher("10.0.0.1:8002", **dial[2]))
    made.append(world.publisher("10.0.0.2:8001", **dial[1], rank=1))

    def held() -> list[list[int]]:
        return [[cache.rank for cache in world.index.caches_of(slot) if cache.blocks] for slot in slots]

    digest = 1
    async with asyncio.timeout(10):
        while sum(map(len, held())) < len(made):
            for publisher in made:
                store(publisher, digest)
            digest += 1
            await asyncio.sleep(0.02)
    assert held() == [[0], [1], [0], [1]]


async def test_publishers_are_renewed_once_for_all_endpoints_of_a_turn(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed: list[int] = []
    monkeypatch.setattr(KvSubscriber, "allow", lambda _, publishers: renewed.append(len(publishers)))
    with zmq.Context() as context, context.socket(zmq.PUB) as free:
        port = free.bind_to_random_port("tcp://127.0.0.1")
    world = await start(f"{{enabled: true, bind: 'tcp://127.0.0.1:{port}'}}")
    before = len(renewed)
    for host in range(50):
        world.up(f"ns/pod-{host}", f"10.0.1.{host}:8000")
    await world.until(lambda: renewed[before:])
    world.down("ns/pod-0")
    await world.until(lambda: len(renewed) > before + 1)
    # By id, by its last part, and by address.
    assert [renewed[before] - renewed[before + 1], len(renewed) - before] == [3, 2]


async def test_storage_that_all_share(start: Start) -> None:
    """Each server has a publisher for it, with numbers of its own. A block is there once."""
    with zmq.Context() as context, context.socket(zmq.PUB) as free:
        port = free.bind_to_random_port("tcp://127.0.0.1")
    world = await start(f"{{enabled: true, bind: 'tcp://127.0.0.1:{port}'}}")
    world.up("a", "10.0.0.1:8000")
    dial = {"events": f"tcp://127.0.0.1:{port}", "replay": "", "connect": True}
    one, two = (world.publisher(topic="kv@SHARED_STORAGE@m", first=1, rank=rank, **dial) for rank in (0, 1))
    other = world.publisher(topic="kv@OBJECT_STORE@m", first=1, **dial)
    digest = 1

    def held() -> list[tuple[int, int]]:
        return [(cache.blocks, cache.lives) for cache in world.index.caches_of(EVERYONE)]

    for publisher in (one, two, other):
        before = world.index.entries
        async with asyncio.timeout(10):
            while world.index.entries < before + 3:
                store(publisher, digest)
                digest += 1
                await asyncio.sleep(0.02)
    await world.until(lambda: held() == [(world.index.entries, 0)])
    store(two, 1_000_000)
    store(one, 1_000_000, 1_000_001)
    await world.until(lambda: world.index.resolve(RankCache(0, 0, ANY_MODEL), 1_000_001))
    two.add(BlocksRemoved([1_000_000]))
    two.flush()
    await world.until(lambda: not world.index.resolve(RankCache(0, 0, ANY_MODEL), 1_000_000))


async def test_a_warm_start(start: Start, tmp_path: Path) -> None:
    aside = KvPublisher(KvEventsConfig(), "pod", "m")
    store(aside, 1, 2, 3)
    events, replay = (int(a.rpartition(":")[2]) for a in (aside.events_address, aside.replay_address))
    file = tmp_path / "index.kv"
    text = f"{{enabled: true, port: {events}, replayPort: {replay}, snapshot: '{file}'}}"
    first = await start(text)
    first.publishers.append(aside)
    slot = first.up("a", "127.0.0.1:8000")
    await first.until(lambda: first.index.entries == 3)
    await first.until(lambda: (first.kv.subscriptions(slot)[0].feed.applied or Place()).last == 2)
    feed = first.kv.subscriptions(slot)[0].feed
    gone = first.index.shelf(first.index.rank(slot, 1, ANY_MODEL), 0, Tier.GPU)  # there is one rank now
    first.index.store(gone, [9], [9], 0)
    file.write_bytes(b"".join(save(first.index, {slot: "a"}, lambda cache: held(Place(feed.last, feed.last_ts)))))
    second = await start(text)
    slot = second.up("a", "127.0.0.1:8000")
    store(aside, 4)
    # Until the subscription begins, the snapshot's fourth block is that of the rank that is gone.
    await second.until(lambda: [cache.blocks for cache in second.index.caches_of(slot)] == [4])
    (cache,) = second.index.caches_of(slot)
    count = second.kv.subscriptions(slot)[0].feed.count
    # Only what came after was asked for, and the snapshot is known to be of this life.
    assert (count.batches, cache.counts.copied) == (1, 0)
    await second.until(lambda: cache.current)


async def test_loaded_blocks_stay_of_their_engine_while_it_does_not_answer(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources: list[KvSource | None] = [None]

    async def ask(*_: object) -> KvSource | None:
        return sources[0]

    monkeypatch.setattr(kv.discovery, "ask", ask)
    monkeypatch.setattr(kv, "ASK_AGAIN", (0.01, 0.01))
    world = await start("{enabled: true}")
    former = world.publisher()
    store(former, 1, 2, 3)
    sources[0] = source_of(former, 1)
    world.up("a", "127.0.0.1:8000")
    await world.until(lambda: world.index.entries == 3)
    content = await world.snapshot()
    world.down("a")
    sources[0] = None
    # It is loaded and saved twice while the engine is away.
    for _ in range(2):
        world = await start("{enabled: true}")
        world.kv.take(content)
        slot = world.up("a", "127.0.0.1:8000")
        await world.until(lambda world=world: world.index.entries == 3)
        content = await world.snapshot()
    later = world.publisher()
    store(later, 4)
    sources[0] = source_of(later, 1)
    await world.until(lambda: [(cache.blocks, cache.lives) for cache in world.index.caches_of(slot)] == [(1, 1)])


async def test_a_damaged_snapshot_is_left_alone(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "index.kv"
    file.write_bytes(b"fairlead-kv-1\nnonsense")
    world = await start(f"{{enabled: true, snapshot: '{file}'}}")
    assert world.index.entries == 0
    assert "snapshot" in caplog.text


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("{enabled: true, bind: 'tcp://999.0.0.1:1'}", "$.kvEvents.bind"),
        ("{enabled: true, bind: 'tcp://127.0.0.1:*', curve: {publicKeyFile: /x, secretKeyFile: /x, clientsFile: /x}}",
         "$.kvEvents.curve.publicKeyFile"),
        ("{enabled: true, curve: {publicKeyFile: /dev/null, secretKeyFile: /dev/null, serverKey: x}}",
         "$.kvEvents.curve.publicKeyFile"),
    ],
)  # fmt: skip
async def test_what_cannot_be_used_is_told_at_the_start(start: Start, text: str, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        await start(text)
    assert caught.value.path == path


async def test_answers_are_followed_while_that_brings_something(start: Start) -> None:
    world = await start("{enabled: true, check: 0}")
    inspect, request = world.kv.inspecting(lambda request, stream: False), builders.request("x")
    assert not inspect(request, False)
    slot = world.up("a", "127.0.0.1:8000")
    world.index.rank(slot, 0, "*").heard = True
    world.kv.exact.refresh()
    # Nobody reports anything: after a while that is enough.
    assert sum(inspect(request, True) for _ in range(1000)) == 200
    awaited = world.kv.exact.check.expect(slot, PromptTokens(ids=bytes(400), total=100), "", 96, True)
    world.kv.exact.ended(Predicted(None, awaited), Usage(prompt_tokens=100, cached_tokens=96), True, 0.0)
    assert inspect(request, False)
    for _ in range(2, 20):
        awaited = world.kv.exact.check.expect(slot, PromptTokens(ids=bytes(400), total=100), "", 96, True)
        world.kv.exact.ended(Predicted(None, awaited), Usage(prompt_tokens=100, cached_tokens=96), True, 0.0)
    world.kv.exact.refresh()
    assert not inspect(request, False)


async def test_blocks_of_an_unfinished_replay_judge_nobody(start: Start) -> None:
    publisher = KvPublisher(KvEventsConfig(buffer_steps=10_000), "pod", "m")
    events, replay = (int(a.rpartition(":")[2]) for a in (publisher.events_address, publisher.replay_address))
    world = await start(f"{{enabled: true, port: {events}, replayPort: {replay}}}")
    world.publishers.append(publisher)
    store(publisher, 1)
    for _ in range(2000):
        store(publisher, 2)
    publisher.add(BlocksRemoved([1], "GPU"))
    publisher.flush()
    slot = world.up("a", "127.0.0.1:8000")
    check = world.kv.exact.check
    prompt = PromptTokens(ids=bytes(400), total=100)
    await world.until(lambda: world.index.entries)
    early = check.expect(slot, prompt, "", 96, True)
    (feed,) = world.kv.subscriptions(slot)
    assert feed.feed.sync is Sync.REPLAYING
    await world.until(lambda: not any(cache.behind for cache in world.index.caches_of(slot)))
    late = check.expect(slot, prompt, "", 96, True)
    for awaited in (early, late):
        world.kv.exact.ended(Predicted(None, awaited), Usage(prompt_tokens=100, cached_tokens=0), True, 0.0)
    assert (check.judged(slot).idle, check.judged(slot).off) == (1, 1)


@pytest.mark.parametrize(("seed", "said"), [("7", ""), ("0", "PYTHONHASHSEED=0"), ("unheard-of", "or a common one")])
async def test_a_wrong_hash_seed_is_told_once_and_before_any_answer(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seed: str, said: str
) -> None:
    monkeypatch.setattr(kv, "STILL_THERE", 0.02)
    publisher = KvPublisher(KvEventsConfig(), "pod", "m")
    port = publisher.events_address.rpartition(":")[2]
    settings = f"port: {port}, keys: engine, hashAlgorithm: sha256_cbor, hashSeed: '7', blockSize: 16"
    world = await start(f"{{enabled: true, {settings}}}")
    world.publishers.append(publisher)
    world.up("a", "127.0.0.1:8000")
    tokens = np.arange(16, dtype="<u4")
    (digest,) = EngineHasher("sha256_cbor", seed).hashes(tokens.tolist(), 16)

    def told() -> str:
        return " ".join(str(vars(record)) for record in caplog.records if "block hashes" in record.getMessage())

    def compared() -> bool:
        publisher.add(BlocksStored([digest], 0, tokens.tobytes(), 16))
        publisher.flush()
        return bool(world.index.entries) and (not said or said in told())

    await world.until(compared)
    await asyncio.sleep(0.1)
    assert caplog.text.count("block hashes") == (1 if said else 0)
