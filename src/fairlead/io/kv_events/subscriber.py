"""All KV events of a pool: who is listened to, and everything that this needs.

Connecting out is the default: endpoints come from discovery, so nobody else can tell the index anything. Binding is for
publishers that dial (`hub.py`).
"""

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

import zmq
from msgspec import Struct

from fairlead.fleet.kv.cache import RankCache
from fairlead.fleet.kv.index import KvIndex
from fairlead.fleet.kv.snapshot import Place
from fairlead.io.kv_events.feed import Count, Feed
from fairlead.io.kv_events.hub import Hub
from fairlead.io.kv_events.pump import Pump
from fairlead.io.kv_events.settings import Curve, KvSource, Limits
from fairlead.io.kv_events.sockets import Context
from fairlead.io.kv_events.subscription import Subscription

#: Edge-triggered descriptors can lose a wake-up when a socket is used from another call; this finds what was left.
_SWEEP_S = 0.5


#: Three per rank (events, their monitor, a replay); libzmq's default of 1,023 is soon reached.
_MOST_SOCKETS = 30_000


class Publisher(Struct, frozen=True):
    """Who may speak on the bound socket: the slot that its blocks belong to, and its base model (empty: topic's)."""

    slot: int
    model: str = ""


class KvSubscriber:
    """`async with KvSubscriber(index) as events: events.watch(slot, source)`."""

    def __init__(self, index: KvIndex, limits: Limits | None = None) -> None:
        self.index = index
        self.limits = limits or Limits()
        self._loop = asyncio.get_running_loop()
        self._context: Context = zmq.Context(1)
        self._context.set(zmq.MAX_SOCKETS, _MOST_SOCKETS)
        self._slots = asyncio.Semaphore(self.limits.replays_at_once)
        self.pump = Pump(self._loop, self.limits.hold, self._tend)
        self._watched: dict[int, list[Subscription]] = {}
        self._hub: Hub | None = None
        self._allowed: dict[str, Publisher] = {}
        #: Slot to rank to feed.
        self._hub_feeds: dict[int, dict[int, Feed]] = {}
        self._authenticator: Any = None
        self._closing: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.TimerHandle = self._loop.call_later(_SWEEP_S, self._sweep)

    async def __aenter__(self) -> "KvSubscriber":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---------------------------------------------------------------- connecting out

    def watch(self, slot: int, source: KvSource, places: Mapping[int, Place] | None = None) -> None:
        """Listen to an endpoint whose slot the index has. A second call replaces the first.

        `places`: per rank, up to where the index was loaded from a snapshot; the engine is asked for what came after.
        Raises `ConfigError` or `zmq.ZMQError` for an address that is none; then nothing is listened to.
        """
        self.unwatch(slot)
        subscriptions = self._watched[slot] = []
        try:
            for rank in range(source.ranks):
                addresses = source.of_rank(rank)
                cache = self.index.rank(slot, rank, source.model)
                feed = Feed(self.index, cache, bool(addresses[1]))
                if places is not None and rank in places:
                    feed.resume(places[rank].last, places[rank].last_ts)
                subscriptions.append(
                    Subscription(self._context, addresses, source.curve, self.limits, feed, self.pump, self._slots)
                )
        except Exception:
            self.unwatch(slot)
            raise

    def unwatch(self, slot: int) -> None:
        """Stop listening. The index keeps what it knows until the slot is dropped there."""
        for subscription in self._watched.pop(slot, ()):
            subscription.stop()
            task = self._loop.create_task(subscription.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for feed in self._hub_feeds.pop(slot, {}).values():
            self._forget(feed)

    def engine_started(self, slot: int, at: float) -> None:
        """Metrics of the endpoint say when its process started (Unix seconds)."""
        for subscription in self._watched.get(slot, ()):
            subscription.engine_started(at)
        for feed in self._hub_feeds.get(slot, {}).values():
            feed.engine_started(at)

    # ---------------------------------------------------------------- binding

    def bind(self, address: str, curve: Curve | None = None, clients: Collection[str] | None = None) -> str:
        """Let publishers dial in. `clients`: public CURVE keys that may; needs `curve`, the server's own keys.

        Returns the address, with its port. Only allowed publishers (`allow`) are listened to. Raises `zmq.ZMQError`.
        """
        if self._hub is not None:
            raise RuntimeError(f"already bound to {self._hub.address}")
        if clients is not None:
            if curve is None:
                raise ValueError("client keys need a CURVE key pair of the server")
            self._authenticate(clients)
        self._hub = Hub(self._context, address, curve, self.limits, self.pump, self._admit)
        return self._hub.address

    def allow(self, publishers: Mapping[str, Publisher]) -> None:
        """Who may speak on the bound socket, by the pod in its topic (`ip:port`). Replaces the list."""
        for pod, publisher in self._allowed.items():
            if publishers.get(pod) != publisher:
                self.unwatch(publisher.slot)
        self._allowed = dict(publishers)

    def _admit(self, pod: str, model: str, rank: int) -> Feed | None:
        publisher = self._allowed.get(pod)
        if publisher is None:
            return None
        cache = self.index.rank(publisher.slot, rank, publisher.model or model)
        feed = Feed(self.index, cache, can_replay=False)
        feeds = self._hub_feeds.setdefault(publisher.slot, {})
        if rank in feeds:
            # The same pod under another topic: it serves another model now.
            self._forget(feeds[rank])
        feeds[rank] = feed
        cache.linked = True
        return feed

    def _forget(self, feed: Feed) -> None:
        assert self._hub is not None
        self._hub.forget(feed)

    def _authenticate(self, clients: Collection[str]) -> None:
        from zmq.auth.asyncio import AsyncioAuthenticator

        allowed = frozenset(key.encode() for key in clients)

        class Keys:
            def callback(self, domain: str, key: bytes) -> bool:
                return key in allowed

        self._authenticator = AsyncioAuthenticator(self._context)
        self._authenticator.configure_curve_callback("*", Keys())
        self._authenticator.start()

    # ---------------------------------------------------------------- state

    def subscriptions(self, slot: int) -> list[Subscription]:
        """Where we connect to, per rank."""
        return list(self._watched.get(slot, ()))

    def feeds(self, slot: int) -> list[Feed]:
        """Per rank, in the order of ranks (of a bound socket: in which they were first heard)."""
        feeds = [subscription.feed for subscription in self._watched.get(slot, ())]
        return [*feeds, *self._hub_feeds.get(slot, {}).values()]

    def counts(self, slot: int) -> list[Count]:
        """As `feeds`."""
        return [feed.count for feed in self.feeds(slot)]

    def place_of(self, cache: RankCache) -> Place:
        """Up to where the index is true for a rank, to be saved with it."""
        for subscription in self._watched.get(cache.slot, ()):
            feed = subscription.feed
            if feed.cache is cache:
                return Place(*feed.applied)
        return Place()

    @property
    def rejected(self) -> int:
        """Batches from publishers that are not allowed."""
        return self._hub.rejected if self._hub is not None else 0

    async def close(self) -> None:
        """Stop listening to all. Safe to call again."""
        self._sweeper.cancel()
        for slot in [*self._watched, *self._hub_feeds]:
            self.unwatch(slot)
        if self._closing:
            await asyncio.gather(*self._closing)
        self.pump.close()
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        if self._hub is not None:
            self._hub.close()
            self._hub = None
        self._context.destroy(linger=0)

    def _tend(self, now: float) -> bool:
        return self.index.tend(now)

    def _sweep(self) -> None:
        for subscriptions in self._watched.values():
            for subscription in subscriptions:
                subscription.sweep()
        if self._hub is not None:
            self.pump.wake(self._hub)
        self.pump.poke()
        self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep)
