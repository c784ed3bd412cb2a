"""Real sockets: stub publishers and a subscriber in one loop."""

import asyncio
import errno
import gc
import random
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import zmq
from msgspec.structs import replace
from ports import free_ports

from fairlead.core.errors import ConfigError
from fairlead.core.kv.events import AllCleared, BlocksRemoved, BlocksStored
from fairlead.core.kv.index import KvIndex
from fairlead.core.kv.snapshot import Place
from fairlead.lab.stub.kv_publisher import Encoding, KvEventsConfig, KvPublisher
from fairlead.pool.kv_events import replay as replays
from fairlead.pool.kv_events import subscriber as module
from fairlead.pool.kv_events.discovery import Curve, KvSource, Limits, rank_address
from fairlead.pool.kv_events.feed import Feed, Sync
from fairlead.pool.kv_events.subscriber import KvSubscriber, Publisher

LIMITS = Limits(replay_silence=0.8, replay_backoff=0.01, reconnect_min=0.01, reconnect_max=0.05, replay_cooldown=5)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what must come."""
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.005)


def store(publisher: KvPublisher, *digests: int, parent: int = 0) -> None:
    """One batch: blocks whose content follows from their hashes."""
    content = b"".join(random.Random(digest).randbytes(64) for digest in digests)
    publisher.add(BlocksStored(list(digests), parent, content, 16, "", "GPU", kind="full_attention"))
    publisher.flush()


@pytest.fixture
async def events() -> AsyncIterator[KvSubscriber]:
    index = KvIndex()
    for slot in range(3):
        index.add_slot(slot)
    async with KvSubscriber(index, LIMITS) as subscriber:
        yield subscriber


@pytest.fixture
async def publish() -> AsyncIterator[Callable[..., KvPublisher]]:
    made: list[KvPublisher] = []

    def make(name: str = "10.0.0.1:8000", **options: Any) -> KvPublisher:
        made.append(KvPublisher(KvEventsConfig(**options), name, "m"))
        return made[-1]

    yield make
    for publisher in made:
        await publisher.close()


def source(publisher: KvPublisher, **more: Any) -> KvSource:
    return KvSource(publisher.events_address, publisher.replay_address, "m", **more)


def blocks(events: KvSubscriber, slot: int = 0, rank: int = 0) -> int:
    return events.index.rank(slot, rank, "m").blocks


@pytest.mark.parametrize("replay_topic", [True, False])
@pytest.mark.parametrize(
    "encoding", [Encoding(), Encoding("array", hashes="bytes"), Encoding(batch="map", wrapped=True)]
)
async def test_history_then_live(events: Any, publish: Any, replay_topic: bool, encoding: Encoding) -> None:
    publisher = publish(replay_topic=replay_topic, encoding=encoding)
    store(publisher, 1, 2, 3)
    store(publisher, 4, parent=3)
    events.watch(0, source(publisher))
    await until(lambda: blocks(events) == 4)
    store(publisher, 5, 6, parent=4)
    await until(lambda: blocks(events) == 6)
    publisher.add(BlocksRemoved([6, 5], "GPU"))
    await until(lambda: blocks(events) == 4)
    publisher.add(AllCleared())
    await until(lambda: blocks(events) == 0)
    (count,) = events.counts(0)
    assert count.lost == count.bad_batches == count.bad_events == count.restarts == 0
    events.index.validate()


async def test_lost_batches_are_fetched(events: Any, publish: Any) -> None:
    publisher = publish()
    events.watch(0, source(publisher))
    await until(lambda: events.counts(0)[0].replays >= 1)
    store(publisher, 1)
    await until(lambda: blocks(events) == 1)
    publisher.lose(3)
    for digest in (2, 3, 4):
        store(publisher, digest, parent=digest - 1)
    store(publisher, 5, parent=4)
    await until(lambda: blocks(events) == 5)
    (count,) = events.counts(0)
    assert count.lost == 0 and count.restarts == 0
    assert not events.index.rank(0, 0, "m").provisional


async def test_a_replay_of_too_many_bytes_is_fetched_in_parts(events: Any, publish: Any) -> None:
    publisher = publish()
    for digest in range(1, 101):
        store(publisher, digest, parent=digest - 1)
    async with KvSubscriber(events.index, replace(LIMITS, replay_bytes=2_000)) as narrow:
        narrow.watch(0, source(publisher))
        await until(lambda: blocks(narrow) == 100)
        (count,) = narrow.counts(0)
        assert count.failed_replays >= 2 and count.replayed == 100
        assert count.lost == count.restarts == 0


async def test_empty_replies_of_a_replay_are_bounded_too() -> None:
    index, context = KvIndex(), zmq.Context[zmq.Socket[bytes]]()
    index.add_slot(0)
    publisher = context.socket(zmq.ROUTER)
    address = f"tcp://127.0.0.1:{publisher.bind_to_random_port('tcp://127.0.0.1')}"
    feed = Feed(index, index.rank(0, 0, "m"), True)
    limits = replace(LIMITS, replay_bytes=2_000)
    replayer = replays.Replayer(context, address, None, limits, feed, asyncio.Semaphore(), lambda: None)
    replayer.step()
    async with asyncio.timeout(5):
        while not publisher.poll(0):
            await asyncio.sleep(0.005)
    peer = publisher.recv_multipart()[0]
    for _ in range(200):
        publisher.send_multipart([peer, b"", b""])
    await asyncio.sleep(0.3)
    assert sum(replayer.step() for _ in range(200)) < 20
    await replayer.close()
    context.destroy(linger=0)


async def test_without_replay_gaps_are_counted(events: Any, publish: Any) -> None:
    publisher = publish(replay="")
    events.watch(0, source(publisher))
    await joined(events, publisher, 0)
    publisher.lose(2)
    for digest in (2, 3, 4):
        store(publisher, digest)
    await until(lambda: events.counts(0)[0].lost == 2)
    await until(lambda: blocks(events) >= 2)
    assert events.index.rank(0, 0, "m").provisional


async def joined(events: KvSubscriber, publisher: KvPublisher, slot: int) -> None:
    """Publish one block until it has been heard: a subscription takes a moment."""
    async with asyncio.timeout(15):
        while not blocks(events, slot):
            store(publisher, 1)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("replay", ["", "tcp://127.0.0.1:*"])
async def test_an_engine_that_starts_again(events: Any, publish: Any, replay: str) -> None:
    publisher = publish(replay=replay)
    events.watch(0, source(publisher))
    await joined(events, publisher, 0)
    for digest in range(2, 30):
        store(publisher, digest)
    await until(lambda: blocks(events) == 29)
    publisher.restart()
    store(publisher, 100, 101)
    await until(lambda: blocks(events) == 2)
    assert events.counts(0)[0].restarts == 1


async def test_an_engine_that_was_away(events: Any, publish: Any) -> None:
    first = publish()
    store(first, 1, 2, 3)
    events.watch(0, source(first))
    await until(lambda: blocks(events) == 3)
    addresses = {"events": first.events_address, "replay": first.replay_address}
    await first.close()
    second = publish(**addresses)
    store(second, 50)
    await until(lambda: blocks(events) == 1)
    assert events.counts(0)[0].restarts == 1
    # The replay may have come before the subscription: what was sent in between is missed until something follows.
    last = 50
    async with asyncio.timeout(15):
        while blocks(events) < 2:
            last += 1
            store(second, last)
            await asyncio.sleep(0.05)
    await until(lambda: blocks(events) == last - 49)


async def test_a_connection_that_breaks_while_its_queue_is_full(
    events: Any, publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If libzmq connected again by itself, the next read would end the process."""
    monkeypatch.setattr(replays, "HEARTBEAT", 100)
    publisher = publish()
    events.watch(0, source(publisher))
    await joined(events, publisher, 0)
    with events.hold(events.index.rank(0, 0, "m")):  # so nothing is read, not even the answers to heartbeats
        for digest in range(2, 2 + 20 * LIMITS.queue):
            store(publisher, digest)
        await until(lambda: events.counts(0)[0].connections >= 2)
    await until(lambda: blocks(events) == 1 + 20 * LIMITS.queue)
    await until(lambda: events.feeds(0)[0].hungry)
    await asyncio.sleep(0.2)  # the queue is read
    (count,) = events.counts(0)
    assert count.lost == count.restarts == 0


async def test_history_that_is_cut_off(events: Any, publish: Any) -> None:
    publisher = publish(buffer_steps=5)
    for digest in range(1, 21):
        store(publisher, digest)
    events.watch(0, source(publisher))
    await until(lambda: blocks(events) == 5)
    assert events.index.rank(0, 0, "m").provisional
    store(publisher, 30)
    await until(lambda: blocks(events) == 6)


async def test_a_replay_port_that_never_answers(events: Any, publish: Any) -> None:
    publisher, silent = publish(), publish()
    events.watch(0, KvSource(publisher.events_address, silent.events_address, "m"))
    await until(lambda: events.counts(0)[0].failed_replays >= LIMITS.replay_attempts)
    await joined(events, publisher, 0)
    store(publisher, 2)
    await until(lambda: blocks(events) == 2)


async def test_a_replay_without_a_socket_has_failed(events: Any, publish: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def dealer(*_: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(replays, "dealer", dealer)
    publisher = publish()
    events.watch(0, source(publisher))
    await until(lambda: events.counts(0)[0].failed_replays >= LIMITS.replay_attempts)
    await joined(events, publisher, 0)


async def test_a_replay_that_works_only_later(events: Any, publish: Any) -> None:
    first = publish()
    replay = first.replay_address
    await first.close()
    publisher = publish(replay="")
    store(publisher, 1)
    limits = Limits(replay_silence=0.05, replay_backoff=0.01, replay_cooldown=0.5)
    async with KvSubscriber(events.index, limits) as impatient:
        impatient.watch(0, KvSource(publisher.events_address, replay, "m"))
        await until(lambda: impatient.counts(0)[0].failed_replays >= 3)
        late = publish(replay=replay)
        store(late, 1, 2, 3)
        await until(lambda: blocks(impatient) == 3)


@pytest.mark.parametrize(("limit", "most"), [(-1, 3), (16, 3), (15, 2)])
async def test_subscriptions_leave_open_files_to_the_rest_of_the_process(
    events: Any, publish: Any, monkeypatch: pytest.MonkeyPatch, limit: int, most: int
) -> None:
    publisher = publish()
    monkeypatch.setattr(module, "getrlimit", lambda kind: (limit, limit))
    for slot in range(most):
        events.watch(slot, source(publisher))
        events.watch(slot, source(publisher))
    if most < 3:
        with pytest.raises(zmq.ZMQError, match="Too many open files"):
            events.watch(most, source(publisher))
    assert [len(events.subscriptions(slot)) for slot in range(3)] == [1] * most + [0] * (3 - most)


async def test_an_engine_that_comes_up_during_a_cool_down_is_asked_for_its_history(events: Any, publish: Any) -> None:
    ports = free_ports(2)
    addresses = [f"tcp://127.0.0.1:{port}" for port in ports]
    limits = Limits(replay_silence=0.02, replay_backoff=0.01, reconnect_min=0.01, reconnect_max=0.05)
    async with KvSubscriber(events.index, limits) as early:
        early.watch(0, KvSource(*addresses, "m"))
        await until(lambda: early.feeds(0)[0].unsure)
        store(publish(events=addresses[0], replay=addresses[1]), 1, 2, 3)
        await until(lambda: blocks(early) == 3)


async def test_ranks_have_ports_of_their_own(events: Any, publish: Any) -> None:
    first = publish()
    port = int(first.events_address.rpartition(":")[2])
    try:
        second = publish(events=f"tcp://127.0.0.1:{port + 1}", rank=1, replay="")
    except zmq.ZMQError:
        pytest.skip("the port after a free one is taken")
    events.watch(0, KvSource(first.events_address, "", "m", ranks=2))
    await joined(events, first, 0)
    async with asyncio.timeout(15):
        while not blocks(events, 0, 1):
            store(second, 7)
            await asyncio.sleep(0.01)
    assert blocks(events, 0, 0) == 1 and len(events.counts(0)) == 2


async def test_bad_batches_from_the_wire(events: Any, publish: Any) -> None:
    publisher = publish()
    events.watch(0, source(publisher))
    await joined(events, publisher, 0)
    for payload in (b"", b"\xc1", b"\x93\x01", bytes(2 << 20)):
        publisher.send(payload)
    store(publisher, 2, parent=1)
    await until(lambda: blocks(events) == 2)
    assert events.counts(0)[0].bad_batches >= 4


@pytest.mark.parametrize("bound", [True, False])
async def test_frames_that_are_too_large_are_not_read_into_memory(events: Any, publish: Any, bound: bool) -> None:
    size = events.limits.max_frame
    if bound:
        address = events.bind("tcp://127.0.0.1:*")
        events.allow({"10.0.0.1:8000": Publisher(0, "m")})
        publisher = publish(events=address, connect=True, replay="")
        async with asyncio.timeout(15):
            while not blocks(events):
                store(publisher, 1)
                await asyncio.sleep(0.01)
    else:
        publisher = publish(replay="")
        events.watch(0, source(publisher))
        await joined(events, publisher, 0)
    count = events.counts(0)[0]
    bad, before = count.bad_batches, count.batches
    publisher.send(bytes(size + 1))
    async with asyncio.timeout(15):
        while count.batches == before:  # it is connected again
            store(publisher, 2)
            await asyncio.sleep(0.01)
    assert count.bad_batches == bad


async def test_a_great_many_batches_at_once(events: Any, publish: Any) -> None:
    publisher = publish()
    for digest in range(1, 3001):
        store(publisher, digest)
    events.watch(0, source(publisher))
    await until(lambda: blocks(events) == 3000)
    for digest in range(3001, 4001):
        store(publisher, digest)
    await until(lambda: blocks(events) == 4000)
    assert events.counts(0)[0].lost == 0


async def test_leaving(events: Any, publish: Any) -> None:
    publisher = publish()
    store(publisher, 1)
    events.watch(0, source(publisher))
    await until(lambda: blocks(events) == 1)
    events.unwatch(0)
    events.index.drop_slot(0)
    events.index.add_slot(0)
    events.watch(1, source(publisher))
    await until(lambda: blocks(events, 1) == 1)
    store(publisher, 2)
    await until(lambda: blocks(events, 1) == 2)
    assert blocks(events) == 0 and events.counts(0) == []
    events.watch(0, source(publisher))
    await until(lambda: blocks(events) == 2)


@pytest.mark.parametrize("answered", [True, False], ids=["live", "in a replay"])
async def test_nothing_of_an_endpoint_that_left_waits_for_a_collection(
    events: Any, publish: Any, answered: bool
) -> None:
    publisher = publish()
    store(publisher, 1)
    silent = zmq.Context.instance().socket(zmq.ROUTER)
    nobody = f"tcp://127.0.0.1:{silent.bind_to_random_port('tcp://127.0.0.1')}"
    events.watch(0, source(publisher) if answered else KvSource(publisher.events_address, nobody, "m"))
    await until(lambda: blocks(events) == 1 if answered else events.feeds(0)[0].sync is Sync.REPLAYING)
    left = weakref.ref(events.feeds(0)[0])
    gc.collect()
    gc.disable()
    try:
        events.unwatch(0)
        await until(lambda: left() is None)
    finally:
        gc.enable()
        silent.close(linger=0)


async def test_going_on_after_a_warm_start(events: Any, publish: Any) -> None:
    publisher = publish()
    store(publisher, 1)
    events.watch(0, source(publisher))
    await until(lambda: blocks(events) == 1)
    await until(lambda: (events.place_of(events.index.rank(0, 0, "m")) or Place()).last == 0)
    place = events.place_of(events.index.rank(0, 0, "m"))
    assert place.last_ts > 0
    store(publisher, 2)
    events.watch(1, source(publisher), {0: place})
    await until(lambda: blocks(events, 1) == 1)  # only what came after
    events.watch(2, source(publisher), {0: Place(0, place.last_ts - 5)})
    await until(lambda: blocks(events, 2) == 2)  # another life: all
    assert events.counts(2)[0].restarts == 1 and events.place_of(events.index.rank(0, 1, "m")) == Place()


async def test_no_batch_begins_while_a_rank_is_saved(events: Any, publish: Any) -> None:
    publisher = publish()
    events.watch(0, source(publisher))
    await joined(events, publisher, 0)
    cache = events.index.rank(0, 0, "m")
    await until(lambda: events.place_of(cache) is not None and not events.feeds(0)[0].busy)
    with events.hold(cache) as place_of:
        before, blocks_before = place_of(), cache.blocks
        assert not events.feeds(0)[0].hungry
        store(publisher, 2)
        await until(lambda: cache.linked)
        assert (cache.blocks, place_of()) == (blocks_before, before)
    await until(lambda: cache.blocks > blocks_before)
    await until(lambda: place_of() is not None and place_of().last > before.last)


async def test_publishers_that_dial(events: Any, publish: Any) -> None:
    address = events.bind("tcp://127.0.0.1:*")
    events.allow({"10.0.0.1:8000": Publisher(0, "m"), "10.0.0.2:8000": Publisher(1)})
    good = publish(events=address, connect=True, replay="")
    other = publish("10.0.0.2:8000", events=address, connect=True, replay="", rank=3)
    stranger = publish("10.6.6.6:8000", events=address, connect=True, replay="")
    async with asyncio.timeout(15):
        while not (blocks(events, 0) and blocks(events, 1, 3) and events.rejected):
            for publisher in (good, other, stranger):
                store(publisher, 1)
            await asyncio.sleep(0.01)
    assert events.index.entries == 2
    # Its endpoint leaves, and another one has its slot before those that may send are renewed.
    events.unwatch(1)
    events.index.drop_slot(1)
    events.index.add_slot(1)
    rejected = events.rejected
    async with asyncio.timeout(15):
        while events.rejected < rejected + 5:
            store(other, 2)
            await asyncio.sleep(0.01)
    assert blocks(events, 1, 3) == 0
    events.allow({"10.0.0.1:8000": Publisher(0, "m")})
    rejected = events.rejected
    async with asyncio.timeout(15):
        while events.rejected < rejected + 5:
            store(other, 2)
            await asyncio.sleep(0.01)
    assert blocks(events, 1, 3) == 0
    with pytest.raises(RuntimeError):
        events.bind("tcp://127.0.0.1:*")


async def test_ranks_dial_one_port_each(events: Any, publish: Any) -> None:
    address = events.bind(f"tcp://127.0.0.1:{free_ports(3)[0]}")
    events.allow({"10.0.0.1:8000": Publisher(0, "m")})
    events.widen(2)
    events.widen(1)
    first = publish(events=address, connect=True, replay="")
    second = publish(events=rank_address(address, 1), connect=True, replay="", rank=1)
    async with asyncio.timeout(15):
        while not (blocks(events, 0) and blocks(events, 0, 1)):
            store(first, 1)
            store(second, 2)
            await asyncio.sleep(0.01)
    assert [cache.linked for cache in events.index.caches_of(0)] == [True, True]
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        other.bind(rank_address(address, 2))
        with pytest.raises(zmq.ZMQError):
            events.widen(3)


async def test_publishers_that_dial_and_go_away(events: Any, publish: Any) -> None:
    dialling = {"events": events.bind("tcp://127.0.0.1:*"), "connect": True, "replay": ""}
    events.allow({"10.0.0.1:8000": Publisher(0, "m"), "10.0.0.2:8000": Publisher(1, "m")})
    first, other = publish("10.0.0.1:8000", **dialling), publish("10.0.0.2:8000", **dialling)
    async with asyncio.timeout(15):
        while not (blocks(events, 0) and blocks(events, 1)):
            store(first, 1, 2, 3)
            store(other, 4)
            await asyncio.sleep(0.01)
    engine, idle = events.index.rank(0, 0, "m"), events.index.rank(1, 0, "m")
    assert engine.linked and idle.linked
    # A stranger leaves, then the engine does. An idle one stays connected.
    rejected = events.rejected
    with zmq.Context() as context, context.socket(zmq.PUB) as stranger:
        stranger.connect(dialling["events"])
        async with asyncio.timeout(15):
            while events.rejected == rejected:
                stranger.send_multipart([b"kv@10.0.0.2:8000@m", bytes(8), b"\xc1"])
                await asyncio.sleep(0.01)
    await first.close()
    await until(lambda: not engine.linked)
    assert idle.linked
    store(other, 5)
    await until(lambda: idle.blocks == 2)
    # The next engine's first batches are lost, so its numbers do not continue: nothing is left of the one before.
    second = publish("10.0.0.1:8000", **dialling)
    lost = events.feeds(0)[0].last + 2
    second.lose(lost)
    for _ in range(lost):
        store(second, 8)
    async with asyncio.timeout(15):
        while not engine.linked:
            store(second, 9)
            await asyncio.sleep(0.01)
    assert engine.blocks == 1
    assert (events.counts(0)[0].restarts, events.counts(1)[0].restarts) == (1, 0)


async def test_messages_at_the_bound_socket_that_are_no_batches_are_counted(events: Any) -> None:
    address = events.bind("tcp://127.0.0.1:*")
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.connect(address)
        async with asyncio.timeout(15):
            while not events.rejected:
                socket.send_multipart([b"kv@10.0.0.1:8000@m", bytes(8), b"\xc1"])
                await asyncio.sleep(0.01)


def keys() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


async def test_curve_when_we_connect(events: Any, publish: Any) -> None:
    server, client, wrong = keys(), keys(), keys()
    publisher = publish(curve=Curve(*server))
    store(publisher, 1)
    events.watch(0, source(publisher, curve=Curve(*client, server[0])))
    events.watch(1, source(publisher, curve=Curve(*client, wrong[0])))
    events.watch(2, source(publisher))
    await until(lambda: blocks(events) == 1)
    await until(lambda: events.counts(1)[0].failed_replays > 0 and events.counts(2)[0].failed_replays > 0)
    assert blocks(events, 1) == blocks(events, 2) == 0
    await until(lambda: all(events.subscriptions(slot)[0].refusal for slot in (1, 2)))
    refusals = [events.subscriptions(slot)[0].refusal for slot in (0, 1, 2)]
    assert refusals == [
        "",
        "it ended the handshake: it has no CURVE, serverKey is not its key, or a proxy answers for it",
        "only one side uses CURVE",
    ]


async def test_curve_when_they_dial(events: Any, publish: Any) -> None:
    server, client, stranger = keys(), keys(), keys()
    reasons: set[str] = set()
    address = events.bind("tcp://127.0.0.1:*", Curve(*server), [client[0]], reasons.add)
    events.allow({"10.0.0.1:8000": Publisher(0, "m"), "10.0.0.2:8000": Publisher(1, "m")})
    good = publish(events=address, connect=True, replay="", curve=Curve(*client, server[0]))
    bad = publish("10.0.0.2:8000", events=address, connect=True, replay="", curve=Curve(*stranger, server[0]))
    dialling_plainly = {"events": address, "connect": True, "replay": ""}
    plain = publish("10.0.0.2:8000", **dialling_plainly)
    async with asyncio.timeout(15):
        while not blocks(events, 0):
            for publisher in (bad, plain, good):
                store(publisher, 1)
            await asyncio.sleep(0.01)
    for digest in range(2, 22):
        for publisher in (bad, plain, good):
            store(publisher, digest)
        await until(lambda digest=digest: blocks(events, 0) == digest)
    assert blocks(events, 1) == 0
    # Each side finds that only one of them uses CURVE. A publisher that does so first hangs up for good, and nothing
    # tells it from somebody who only looks whether the port is open: the next one may be slower.
    async with asyncio.timeout(15):
        while len(reasons) < 2:
            publish("10.0.0.2:8000", **dialling_plainly)
            await asyncio.sleep(0.2)
    assert [reason for reason in reasons if "clientsFile" in reason]
    assert [reason for reason in reasons if "only one side" in reason]


async def test_settings_that_cannot_be(events: Any) -> None:
    with pytest.raises(ConfigError):
        rank_address("ipc:///tmp/x", 1)
    assert rank_address("tcp://[::1]:5557", 2) == "tcp://[::1]:5559"
    with pytest.raises(zmq.ZMQError):
        events.watch(0, KvSource("nonsense"))
    assert events.counts(0) == []
    with pytest.raises(KeyError):
        events.watch(9, KvSource("tcp://127.0.0.1:1"))


async def test_a_publisher_that_changes_its_topic_is_one_publisher(events: Any, publish: Any) -> None:
    address = events.bind("tcp://127.0.0.1:*")
    events.allow({"10.0.0.1:8000": Publisher(0)})
    made = [publish(events=address, connect=True, replay="", topic=f"kv@10.0.0.1:8000@model-{name}") for name in "ab"]
    for publisher, model in zip(made, ("model-a", "model-b"), strict=True):
        async with asyncio.timeout(15):
            while True:
                store(publisher, 1)
                await asyncio.sleep(0.01)
                if any(cache.model == model and cache.blocks for cache in events.index.caches()):
                    break
        assert len(events.counts(0)) == 1
