"""Receive all KV events of a pool, over connections to publishers or a bound socket that they connect to."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from errno import EMFILE
from math import inf
from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit
from typing import Any

import zmq
from msgspec import Struct

from fairlead.core.kv.cache import EVERYONE, RankCache
from fairlead.core.kv.index import KvIndex
from fairlead.core.kv.snapshot import Place
from fairlead.pool.kv_events.discovery import Curve, KvSource, Limits, rank_address
from fairlead.pool.kv_events.feed import Count, Feed, Sync
from fairlead.pool.kv_events.keys import authenticator
from fairlead.pool.kv_events.pump import Pump
from fairlead.pool.kv_events.replay import (
    AUTH,
    NO_DETAIL,
    PROTOCOL,
    Context,
    Monitor,
    Replayer,
    bound_to,
    receive,
    receive_from,
    subscriber,
)
from fairlead.pool.kv_events.wire import BatchDecoder, bounded, live, topic_of

#: Why a publisher that we connect to is not heard, by the monitor's event.
_REFUSED_BY: dict[int, str] = {
    AUTH: "it does not accept our public key",
    PROTOCOL: "only one side uses CURVE",
    NO_DETAIL: "it ended the handshake: it has no CURVE, serverKey is not its key, or a proxy answers for it",
}
#: Why a publisher that connects is not heard. Others that end the handshake may be no publishers.
_REFUSED: dict[int, str] = {
    AUTH: "its public key is not in kvEvents.curve.clientsFile: add those of the endpoints whose events are missing",
    PROTOCOL: "only one side uses CURVE, or its curve_serverkey is not our public key: correct either at the endpoints "
    "whose events are missing",
}


class Subscription:
    """The connection to one rank's publisher, a worker of the pump. Raises `zmq.ZMQError` for a bad address."""

    def __init__(
        self,
        context: Context,
        addresses: tuple[str, str],
        curve: Curve | None,
        limits: Limits,
        feed: Feed,
        pump: Pump,
        slots: asyncio.Semaphore,
    ) -> None:
        self.feed = feed
        self._stopped = False
        self._limits = limits
        self._pump = pump
        self._loop = asyncio.get_running_loop()
        self._socket = subscriber(context, limits, curve)
        events, replay = addresses
        self._address = events
        self._secured = curve is not None
        self._refusal, self._refused_until = "", -inf
        #: The loop time from which on `sweep` connects again, and the seconds between the next attempt and another.
        self._mend_at, self._pause = inf, limits.reconnect_min
        try:
            self._monitor = Monitor(self._socket, self._connected, lambda descriptor: self._lost(), self._refused)
            self.mend()
        except zmq.ZMQError:
            self._socket.close(linger=0)
            raise
        self._replayer = Replayer(context, replay, curve, limits, feed, slots, self._wake) if replay else None
        self._descriptors = (int(self._socket.get(zmq.FD)), self._monitor.descriptor)
        self._loop.add_reader(self._descriptors[0], self._wake)
        self._loop.add_reader(self._descriptors[1], self._monitor.read)
        self._loop.call_soon(self._monitor.read)
        self._wake()

    def step(self, now: float) -> bool:
        feed = self.feed
        if self._stopped:
            return False
        if feed.step(now):
            return True
        if feed.held:
            return False
        if feed.sync is Sync.LIVE:
            frames = receive(self._socket)
            if frames is None:
                return False
            self._take(frames)
            if feed.sync is Sync.LIVE:
                return True
        return self._replayer is not None and self._replayer.step()

    def sweep(self) -> None:
        """Check for events whose wake-up was lost, and connect again if the connection was lost or failed."""
        self._monitor.read()
        if self._loop.time() > self._mend_at and not self.feed.cache.linked:
            with contextlib.suppress(zmq.ZMQError):  # libzmq has already given up the address
                self._socket.disconnect(self._address)
            self.mend()
        self._wake()

    def cut(self) -> None:
        """Drop the connection as if the network broke; `mend` connects again. For tests and drills."""
        self._socket.disconnect(self._address)
        self._lost()  # the monitor does not report a requested disconnection
        self._mend_at = inf

    def mend(self) -> None:
        self._mend_at = self._loop.time() + self._pause
        self._pause = min(2 * self._pause, self._limits.reconnect_max)
        self._socket.connect(self._address)

    def stop(self) -> None:
        """Take no more events from now on, because the slot may soon be another endpoint's."""
        self._stopped = True
        self.feed.gone()
        self.feed.cache.linked = False

    async def close(self) -> None:
        """Close all sockets and remove all readers from the loop."""
        self.stop()
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)
        if self._replayer is not None:
            await self._replayer.close()
        self._monitor.close()
        self._socket.close(linger=0)
        del self._monitor, self._replayer  # break reference cycles: garbage collection may be rare

    def _take(self, frames: list[bytes]) -> None:
        try:
            received = live(bounded(frames, self._limits.max_batch))
        except ValueError:
            self.feed.unreadable()
            return
        self.feed.live(received)

    def _wake(self) -> None:
        self._pump.wake(self)

    def _refused(self, event: int) -> None:
        if self._secured or event != NO_DETAIL:  # a proxy in front of an engine that does not run ends connections too
            self._refusal = _REFUSED_BY[event]
            # Until the attempts after this one are over; each waits for a sweep.
            self._refused_until = self._loop.time() + 4 * max(self._limits.reconnect_max, _SWEEP_S)

    @property
    def refusal(self) -> str:
        """Why the last handshake failed; empty = it succeeded, or there was none lately."""
        return self._refusal if self._loop.time() < self._refused_until else ""

    def _connected(self) -> None:
        self._refused_until, self._pause = -inf, self._limits.reconnect_min
        self.feed.cache.linked = True
        if self._replayer is not None:
            self._replayer.connected()
        self.feed.connected()
        self._wake()

    def _lost(self) -> None:
        self.feed.cache.linked = False
        self.feed.connection_lost()


# Receives all KV events of a pool.
#
# By default the subscriber connects to the publishers of discovered endpoints, so that no one else can change the
# index. Binding is for publishers that connect themselves (`Hub`).

#: ZMQ's descriptors are edge-triggered and can lose a wake-up. The sweep finds events that were left.
_SWEEP_S = 0.5


#: Each rank needs three sockets (events, monitor, replay), so libzmq's default of 1,023 is soon reached.
_MOST_SOCKETS = 30_000
#: Open files of a subscription, with its connection, and the share of the limit that all of them may have. The rest is
#: for the process's own port and for connections to endpoints.
_FILES, _SHARE = 4, 0.75


class Publisher(Struct, frozen=True):
    """A publisher allowed on the bound socket: the slot of its blocks, and its base model (empty = the topic's)."""

    slot: int
    model: str = ""
    #: Ranks that are endpoints of their own, and their slots.
    ranks: Mapping[int, int] = {}


class KvSubscriber:
    """Receives a pool's KV events: `async with KvSubscriber(index) as events: events.watch(slot, source)`."""

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
        #: Slots whose endpoints left since `_allowed` was made. Others may have them by now.
        self._left: set[int] = set()
        #: Feeds of the bound socket, by slot and rank.
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
        """Receive the events of an endpoint whose slot the index has. A second call replaces the first.

        `places`: per rank, the last batch that the index was loaded with from a snapshot. Later batches are requested.
        Raises `ConfigError` or `zmq.ZMQError` for a bad address, and `zmq.ZMQError` if too few open files are allowed;
        then no events are received.
        """
        self.unwatch(slot)
        limit, watched = getrlimit(RLIMIT_NOFILE)[0], sum(map(len, self._watched.values()))
        if limit != RLIM_INFINITY and _FILES * (watched + source.ranks) > _SHARE * limit:
            raise zmq.ZMQError(EMFILE)
        subscriptions = self._watched[slot] = []
        try:
            for rank in range(source.ranks):
                addresses = source.of_rank(rank)
                cache = self.index.rank(slot, rank, source.model)
                feed = Feed(self.index, cache, bool(addresses[1]))
                if places is not None and rank in places:
                    feed.resume(places[rank])
                subscriptions.append(
                    Subscription(self._context, addresses, source.curve, self.limits, feed, self.pump, self._slots)
                )
        except Exception:
            self.unwatch(slot)
            raise

    def unwatch(self, slot: int) -> None:
        """Stop receiving, on the bound socket until the next `allow`. The index keeps its knowledge until the slot is
        dropped there."""
        self._left.add(slot)
        for subscription in self._watched.pop(slot, ()):
            subscription.stop()
            task = self._loop.create_task(subscription.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for feed in self._hub_feeds.pop(slot, {}).values():
            self._forget(feed)

    # ---------------------------------------------------------------- binding

    def bind(
        self,
        address: str,
        curve: Curve | None = None,
        clients: Collection[str] = (),
        refused: Callable[[str], None] = lambda reason: None,
    ) -> str:
        """Let publishers connect. With `curve`, the server's own keys, only those whose public keys are in `clients`.
        `refused` is called with the reason when a handshake fails.

        Returns the address, with its port, to which rank 0 connects; see `widen`. Only allowed publishers (`allow`) are
        read. Raises `zmq.ZMQError`.
        """
        if self._hub is not None:
            raise RuntimeError(f"already bound to {self._hub.address}")
        if curve is not None:
            self._authenticator = authenticator(self._context, clients)
        self._hub = Hub(self._context, address, curve, self.limits, self.pump, self._admit, refused)
        return self._hub.address

    def widen(self, ranks: int) -> None:
        """Listen for so many ranks at least: rank n connects to the port n higher. Raises `zmq.ZMQError` if a port is
        not free, and `ConfigError` if the address has none."""
        if self._hub is not None:
            self._hub.widen(min(ranks, _MOST_RANKS))

    def allow(self, publishers: Mapping[str, Publisher]) -> None:
        """Replace the publishers that are allowed on the bound socket, by the pod in their topic (`ip:port`)."""
        for pod, publisher in self._allowed.items():
            if publishers.get(pod) != publisher:
                self.unwatch(publisher.slot)
        self._allowed = dict(publishers)
        self._left.clear()

    def _admit(self, pod: str, model: str, rank: int) -> Feed | None:
        publisher = self._allowed.get(pod)
        if publisher is None:
            return None
        slot = publisher.ranks.get(rank, publisher.slot)
        if slot in self._left:
            return None
        if slot == EVERYONE:  # all ranks share one feed: one rank may remove the blocks that another stored
            rank = 0
        cache = self.index.rank(slot, rank, publisher.model or model)
        feed = Feed(self.index, cache, can_replay=False)
        feeds = self._hub_feeds.setdefault(slot, {})
        if rank in feeds:
            # The same pod under another topic: it now serves another model.
            self._forget(feeds[rank])
        feeds[rank] = feed
        return feed

    def _forget(self, feed: Feed) -> None:
        assert self._hub is not None
        self._hub.forget(feed)

    # ---------------------------------------------------------------- state

    def subscriptions(self, slot: int) -> list[Subscription]:
        """The connections to an endpoint's publishers, by rank."""
        return list(self._watched.get(slot, ()))

    def feeds(self, slot: int) -> list[Feed]:
        """The feeds of an endpoint, by rank; those of the bound socket in the order of their first batch."""
        feeds = [subscription.feed for subscription in self._watched.get(slot, ())]
        return [*feeds, *self._hub_feeds.get(slot, {}).values()]

    def counts(self, slot: int) -> list[Count]:
        return [feed.count for feed in self.feeds(slot)]

    @contextlib.contextmanager
    def hold(self, cache: RankCache) -> Iterator[Callable[[], Place | None]]:
        """Begin no batch of a rank meanwhile, so that its blocks can be saved. The callable is `place_of` this rank."""
        cache.holds += 1
        try:
            yield lambda: self.place_of(cache)
        finally:
            cache.holds -= 1
            for subscription in self._watched.get(cache.slot, ()):
                self.pump.wake(subscription)

    def place_of(self, cache: RankCache) -> Place | None:
        """The last batch that the index has of a rank, to be saved with it; `None` = it is still being applied."""
        for subscription in self._watched.get(cache.slot, ()):
            if subscription.feed.cache is cache:
                return subscription.feed.applied
        return Place()

    @property
    def rejected(self) -> int:
        """The number of messages from publishers that are not allowed, or that are no batches, at the bound socket."""
        return self._hub.rejected if self._hub is not None else 0

    async def close(self) -> None:
        """Stop receiving. May be called again."""
        self._sweeper.cancel()
        for slot in [*self._watched, *self._hub_feeds]:
            self.unwatch(slot)
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


# A bound socket that publishers connect to (centralized mode). Only their topics identify them.
#
# Any client that reaches the port could corrupt the index, so a publisher's pod must be on the allow-list; with CURVE
# keys, it must also have an allowed client key. Without CURVE, protect the port with a network policy. There are no
# replays, because a bound socket does not know the addresses of its publishers.

#: The most ranks accepted of a pod.
_MOST_RANKS = 256


class Hub:
    """The bound socket, a worker of the pump. `admit(pod, model, rank)` returns the feed of an allowed publisher,
    `None` for others."""

    def __init__(
        self,
        context: Context,
        address: str,
        curve: Curve | None,
        limits: Limits,
        pump: Pump,
        admit: Callable[[str, str, int], Feed | None],
        refused: Callable[[str], None],
    ) -> None:
        self._limits = limits
        self._pump = pump
        self._admit = admit
        self._refused = refused
        self._loop = asyncio.get_running_loop()
        self._decoders: dict[bytes, BatchDecoder] = {}
        self._feeds: dict[tuple[bytes, int], Feed] = {}
        #: The connection of each feed's last batch, by its descriptor.
        self._connections: dict[Feed, int] = {}
        self._current: Feed | None = None
        #: Batches from publishers that are not allowed, and messages that are no batches.
        self.rejected = 0
        self._socket = subscriber(context, limits, curve)
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            self._socket.close(linger=0)
            raise
        self.address = bound_to(self._socket)
        self._ranks = 1
        self._monitor = Monitor(self._socket, lambda: None, self._lost, self._failed)
        self._descriptors = (int(self._socket.get(zmq.FD)), self._monitor.descriptor)
        for descriptor in self._descriptors:
            self._loop.add_reader(descriptor, self._wake)
        self._wake()

    def widen(self, ranks: int) -> None:
        while self._ranks < ranks:
            self._socket.bind(rank_address(self.address, self._ranks))
            self._ranks += 1

    def step(self, now: float) -> bool:
        if self._socket.closed:
            return False
        if self._current is not None and self._current.step(now):
            return True
        self._current = None
        message = receive_from(self._socket)
        if message is None:
            self._monitor.read()  # after the batches that came before
            return False
        self._take(*message)
        return True

    def _lost(self, descriptor: int) -> None:
        for feed, connection in self._connections.items():
            if connection == descriptor:
                feed.cache.linked = False
                feed.connection_lost()

    def _failed(self, event: int) -> None:
        if event in _REFUSED:
            self._refused(_REFUSED[event])

    def forget(self, feed: Feed) -> None:
        """Drop the feed of an endpoint that is gone."""
        feed.gone()
        for name in [name for name, known in self._feeds.items() if known is feed]:
            del self._feeds[name]
            self._connections.pop(feed, None)
            self._decoders.pop(name[0], None)

    def close(self) -> None:
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)
        self._monitor.close()
        self._socket.close(linger=0)
        del self._monitor  # breaks a reference cycle

    def _take(self, frames: list[bytes], descriptor: int) -> None:
        try:
            received = live(bounded(frames, self._limits.max_batch))
            decoder = self._decoders.get(received.topic) or BatchDecoder()
            batch = decoder.decode(received.payload)
        except ValueError:
            self.rejected += 1
            return
        feed = self._feed(received.topic, batch.rank)
        if feed is None:
            self.rejected += 1
            return
        # Only allowed topics are remembered: the number of others is unbounded.
        self._decoders[received.topic] = decoder
        self._current = feed
        if self._connections.get(feed, descriptor) != descriptor:
            feed.connection_lost()  # not reported yet
        self._connections[feed] = descriptor
        feed.cache.linked = True
        if feed.cache.slot == EVERYONE:  # several publishers share the feed, each with its own sequence numbers
            received.sequence = feed.last + 1
        feed.live(received, batch)

    def _feed(self, name: bytes, rank: int) -> Feed | None:
        feed = self._feeds.get((name, rank))
        if feed is None and 0 <= rank < _MOST_RANKS:
            topic = topic_of(name)
            feed = self._admit(topic.pod, topic.model, rank)
            if feed is not None:
                self._feeds[name, rank] = feed
        return feed

    def _wake(self) -> None:
        self._pump.wake(self)
