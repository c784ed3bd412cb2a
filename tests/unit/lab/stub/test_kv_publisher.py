"""A real stub replica, its events over ZMQ, an index: it must know what the replica then says was cached."""

import asyncio
import json
import random
from array import array

import zmq

from fairlead.core.kv.index import KvIndex
from fairlead.core.kv.keys import prompt_keys
from fairlead.core.kv.match import BlockChain
from fairlead.lab.engine.spec import EngineSpec, LatencyModel
from fairlead.lab.stub.config import StubConfig
from fairlead.lab.stub.kv_publisher import KvEventsConfig, KvPublisher
from fairlead.lab.stub.pool import StubPool
from fairlead.pool.kv_events.discovery import KvSource
from fairlead.pool.kv_events.subscriber import KvSubscriber
from fairlead.pool.kv_events.wire import END, BatchDecoder, live, replay_request, replayed

BLOCK = 16


def small_cache(loras: tuple[str, ...] = ()) -> StubConfig:
    spec = EngineSpec(
        latency=LatencyModel(0.2), num_blocks=60, max_model_len=800, block_size=BLOCK, max_loras=len(loras)
    )
    return StubConfig(engine=spec, model="tiny", time_ratio=10.0, loras=loras)


async def caught_up(events: KvSubscriber, publisher: KvPublisher) -> None:
    """Wait until every batch that was sent has been applied."""
    async with asyncio.timeout(15):
        await asyncio.sleep(0.002)
        while True:
            place = events.place_of(events.index.rank(0, 0, "tiny"))
            if place is not None and place.last == publisher.next_sequence - 1 and events.index.idle:
                return
            await asyncio.sleep(0.002)


def predicted(index: KvIndex, ids: list[int], lora: str, salt: str) -> int:
    tokens = array("I", ids).tobytes()
    extras = [(salt,), *[()] * (len(ids) // BLOCK)] if salt else None
    keys = prompt_keys(index.space.root("tiny", lora), tokens, BLOCK, extras)
    found = index.look_up(BlockChain(keys, BLOCK), 1)
    return int(found.hit_tokens(len(ids))[0]) if found is not None else 0


async def test_the_index_predicts_what_the_replica_reports(http) -> None:
    rng = random.Random(11)
    index = KvIndex()
    index.add_slot(0)
    hits = []
    async with StubPool(small_cache(("ad",))) as pool, KvSubscriber(index) as events:
        publisher = KvPublisher(KvEventsConfig(), "stub", "tiny")
        publisher.attach(pool.replica(0).engine.blocks, BLOCK)
        events.watch(0, KvSource(publisher.events_address, publisher.replay_address, "tiny"))
        beginnings = [[rng.randrange(1000, 100_000) for _ in range(200)] for _ in range(4)]
        for step in range(60):
            beginning = rng.choice(beginnings)
            prompt = beginning[: rng.choice((60, 96, 128, 200))] + [
                rng.randrange(1000) for _ in range(rng.choice((0, 0, 40)))
            ]
            lora = "ad" if step % 5 == 4 else ""
            salt = "alpha" if step % 7 == 6 else ""
            body = {"model": lora or "tiny", "prompt": prompt, "max_tokens": rng.choice((1, 20))}
            expected = predicted(index, prompt, lora, salt)
            status, answer = await http.post(
                pool.addresses[0], "/v1/completions", body | ({"cache_salt": salt} if salt else {})
            )
            assert status == 200
            hits.append(json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"])
            assert hits[-1] == expected, f"request {step}"
            if step == 40:
                assert (await http.post(pool.addresses[0], "/reset_prefix_cache", None))[0] == 200
                publisher.flush()
            await caught_up(events, publisher)
            index.validate()
        told = index.rank(0, 0, "tiny").counts
        assert told.removed > 50 and told.copied > 0
        assert not told.removed_unknown and not told.orphaned and not told.malformed
        assert sum(hit > 0 for hit in hits) > 15
        await publisher.close()


async def test_offloading_on_demand() -> None:
    index = KvIndex()
    index.add_slot(0)
    publisher = KvPublisher(KvEventsConfig(), "stub", "tiny")
    async with KvSubscriber(index) as events:
        events.watch(0, KvSource(publisher.events_address, publisher.replay_address, "tiny"))
        ids = list(range(100, 148))
        publisher.stored([7, 8, 9], 0, lambda: array("I", ids).tobytes(), "")
        assert publisher.offload(2) == [8, 9]
        publisher.removed(9)
        publisher.flush()
        await caught_up(events, publisher)
        found = index.look_up(
            BlockChain(prompt_keys(index.space.root("tiny", ""), array("I", ids).tobytes(), BLOCK), BLOCK), 1
        )
        assert found is not None and found.tiers[:, 0].tolist() == [2, 1]
        publisher.drop([9])
        publisher.flush()
        await caught_up(events, publisher)
        assert predicted(index, [*ids, 1], "", "") == 2 * BLOCK
    await publisher.close()


async def test_replays_as_captured_from_the_real_server() -> None:
    publisher = KvPublisher(KvEventsConfig(buffer_steps=3), "p", "m")
    for digest in range(5):
        publisher.removed(digest)
        publisher.flush()
    context = zmq.Context[zmq.Socket[bytes]]()
    socket = context.socket(zmq.DEALER)
    socket.connect(publisher.replay_address)

    async def ask(request: list[bytes]) -> list[list[bytes]]:
        replies: list[list[bytes]] = []
        socket.send_multipart(request)
        async with asyncio.timeout(10):
            while not replies or replayed(replies[-1]) is not END:
                try:
                    replies.append(socket.recv_multipart(zmq.NOBLOCK))
                except zmq.Again:
                    await asyncio.sleep(0.002)
        return replies

    for wrong in ([b"\0" * 8], [b"", b"topic", b"\0" * 8], [b"", b""]):
        socket.send_multipart(wrong)
    replies = await ask(replay_request(0))
    assert [replayed(reply).sequence for reply in replies[:-1]] == [2, 3, 4]
    assert replies[-1] == [b"", b"", b"\xff" * 8, b""] and replies[0][:2] == [b"", b"kv@p@m"]
    assert len(await ask([b"", b"\x04"])) == 2
    assert len(await ask(replay_request(1_000_000))) == 1
    socket.close(linger=0)
    context.term()
    await publisher.close()


async def test_batches_as_vllm_sends_them() -> None:
    publisher = KvPublisher(KvEventsConfig(topic="-", first=1), "p", "m", unix=lambda: 5.0)
    context = zmq.Context[zmq.Socket[bytes]]()
    socket = context.socket(zmq.SUB)
    socket.set(zmq.SUBSCRIBE, b"")
    socket.connect(publisher.events_address)
    received = None
    async with asyncio.timeout(10):
        while received is None:
            publisher.cleared()
            publisher.salted("s")
            publisher.stored([1, 2], 0, lambda: bytes(128), "ad")
            await asyncio.sleep(0.01)  # the batch is sent once this callback is over
            try:
                received = live(socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                continue
    assert received.topic == b"" and 1 <= received.sequence < publisher.next_sequence
    batch = BatchDecoder().decode(received.payload)
    kinds = [type(event).__name__ for event in batch]
    assert kinds == ["AllCleared", "BlocksStored"] and batch.ts == 5.0
    (_, stored) = BatchDecoder().decode(received.payload)
    assert stored.extras == [("s",), ()] and stored.lora == "ad" and stored.kind == "full_attention"
    socket.close(linger=0)
    context.term()
    await publisher.close()
