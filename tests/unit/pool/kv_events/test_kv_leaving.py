"""A slot that is another endpoint's soon after its first one left."""

import asyncio

from fairlead.core.kv.events import BlocksStored
from fairlead.core.kv.index import KvIndex
from fairlead.lab.stub.kv_publisher import KvEventsConfig, KvPublisher
from fairlead.pool.kv_events.discovery import KvSource
from fairlead.pool.kv_events.subscriber import KvSubscriber


def store(publisher: KvPublisher, digest: int) -> None:
    publisher.add(BlocksStored([digest], 0, bytes([digest] * 64), 16))
    publisher.flush()


async def test_nothing_is_taken_after_unwatch() -> None:
    index = KvIndex()
    index.add_slot(0)
    publisher = KvPublisher(KvEventsConfig(), "pod", "m")
    async with KvSubscriber(index) as events:
        events.watch(0, KvSource(publisher.events_address, publisher.replay_address, "*"))
        store(publisher, 1)
        async with asyncio.timeout(10):
            while index.entries != 1:
                await asyncio.sleep(0.002)
        (cache,) = index.caches_of(0)
        assert (cache.heard, cache.linked, cache.block_size) == (True, True, 16)
        # Many more batches are on their way when the endpoint leaves and another one gets its slot.
        for digest in range(2, 100):
            store(publisher, digest)
        events.unwatch(0)
        index.drop_slot(0)
        index.add_slot(0)
        for digest in range(100, 150):
            store(publisher, digest)
        for _ in range(50):
            await asyncio.sleep(0.002)
        assert not cache.linked
        assert list(index.caches_of(0)) == []
        while index.tend(0.0):
            pass
        assert index.entries == 0
        index.validate()
    await publisher.close()
