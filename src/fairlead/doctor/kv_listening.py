"""Subscribes to the KV events of all endpoints while the site is open, into an index of the doctor's own.

Publishers serve any number of subscribers, and replays only read, so this does not disturb other subscribers.
"""

import asyncio
from collections.abc import Callable

import zmq
from msgspec import Struct

from fairlead.core.endpoint import Endpoint
from fairlead.core.errors import ConfigError
from fairlead.core.exact import ExactKnowledge
from fairlead.core.kv.cache import Head, RankCache
from fairlead.core.kv.index import KvIndex
from fairlead.core.kv.recipe import ANY_MODEL, Recipe
from fairlead.doctor.http import Answer, Unreached
from fairlead.doctor.site import MOST_FOLLOWED, Site, tried
from fairlead.pool.kv_events import discovery
from fairlead.pool.kv_events.discovery import Curve, KvSource
from fairlead.pool.kv_events.feed import Sync
from fairlead.pool.kv_events.keys import read_keys
from fairlead.pool.kv_events.subscriber import KvSubscriber, Subscription

#: Seconds for connecting, and for replaying the events that engines have kept.
_CONNECTING, _REPLAYING = 3.0, 3.0
_POLL = 0.02


class Source(Struct, frozen=True):
    """Where an endpoint publishes KV events. If `source` is `None`, `reason` says why."""

    source: KvSource | None = None
    reason: str = ""
    #: Whether the model server itself could not be reached.
    away: bool = False
    topic: str = ""


class KvListening:
    """The subscriptions. An endpoint's slot is its index in `site.endpoints`; only the first `MOST_FOLLOWED` are
    subscribed to."""

    def __init__(self, site: Site) -> None:
        settings = site.config.kv_events
        self.site = site
        self.recipe = Recipe(settings.keys, settings.hash_algorithm, settings.hash_seed, settings.block_size)
        self.exact = ExactKnowledge(self.recipe, KvIndex(settings.max_blocks, self.recipe.space()))
        self.endpoints = site.endpoints[:MOST_FOLLOWED]
        self.sources: dict[int, Source] = {}

    async def start(self) -> "KvListening":
        """Find publishers, connect, and wait a few seconds at most until the events that engines have kept are
        replayed.

        Raises `ConfigError` for CURVE keys that cannot be used."""
        site = self.site
        curve, _ = await asyncio.to_thread(read_keys, site.config.kv_events.curve, False)
        self._events = events = KvSubscriber(self.exact.index)
        site.keep(events.close)
        sources = await asyncio.gather(*(self._source(endpoint, curve) for endpoint in self.endpoints))
        for slot, source in enumerate(sources):
            self.exact.add_slot(slot)
            self.sources[slot] = source
            if source.source is not None:
                try:
                    events.watch(slot, source.source)
                except (ConfigError, zmq.ZMQError) as error:
                    self.sources[slot] = Source(None, str(error), topic=source.topic)
        await self.until(lambda: all(self.linked(slot) for slot in self.watched), _CONNECTING)
        await self.until(lambda: not any(self.behind(slot) for slot in self.watched), _REPLAYING)
        self.exact.refresh()
        return self

    async def _source(self, endpoint: Endpoint, curve: Curve | None) -> Source:
        settings = self.site.config.kv_events
        if settings.port:
            ports = settings.port, settings.replay_port, settings.ranks
            return Source(discovery.configured(endpoint, *ports, ANY_MODEL, curve))
        answer = await tried(self.site.ask(endpoint, "/kv_event_sources"))
        if isinstance(answer, Unreached):
            return Source(reason=str(answer), away=True)
        if answer.status != 200:
            return Source(reason=f"GET /kv_event_sources: {answer.status}")
        source = await discovery.ask(self.site.client.session, endpoint.address, ANY_MODEL, curve)
        reason = "" if source else "/kv_event_sources names no ZMQ publisher"
        return Source(source, reason, topic=_topic(answer))

    @property
    def watched(self) -> list[int]:
        return [slot for slot, source in self.sources.items() if source.source is not None]

    def caches(self, slot: int) -> list[RankCache]:
        return list(self.exact.index.caches_of(slot))

    def subscriptions(self, slot: int) -> list[Subscription]:
        return self._events.subscriptions(slot)

    def linked(self, slot: int) -> bool:
        """Whether every rank is connected."""
        caches = self.caches(slot)
        return bool(caches) and all(cache.linked for cache in caches)

    def behind(self, slot: int) -> bool:
        feeds = (subscription.feed for subscription in self.subscriptions(slot))
        return any(feed.cache.linked and feed.sync is not Sync.LIVE for feed in feeds)

    def heads(self, slot: int) -> list[Head]:
        """The recently stored blocks of an endpoint."""
        return [head for cache in self.caches(slot) for head in cache.stores()]

    def event_count(self, slot: int) -> int:
        return sum(subscription.feed.count.events for subscription in self.subscriptions(slot))

    def has_more_events(self, slot: int, count: int) -> bool:
        """Whether there were more events of an endpoint than that."""
        return self.event_count(slot) > count

    async def until(self, happened: Callable[[], bool], seconds: float) -> bool:
        """Wait until `happened()`. Returns whether it happened in time."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while not happened():
            if loop.time() >= end:
                return False
            await asyncio.sleep(_POLL)
        return True


async def listening(site: Site) -> KvListening:
    """The `KvListening` that all checks share; the first call starts it. Raises `ConfigError`."""
    return await site.once("kv listening", lambda: KvListening(site).start())


def _topic(answer: Answer) -> str:
    try:
        return next((str(source.get("topic") or "") for source in answer.json().values()), "")
    except (ValueError, AttributeError):
        return ""
