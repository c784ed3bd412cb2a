"""KV events that a scheduler or an indexer subscribes to: finds their publishers and maintains the index.

    follow      endpoints come and go → their publishers are found (by asking, or by configured ports) and subscribed to
    refresh     ten times a second the state of the feeds is copied into `fleet.exact`
    keep        the index is saved periodically, and loaded endpoint by endpoint after a restart

KV events reach the index in small steps between two events of the pipeline (`pool.kv_events.pump`). They do not go
through `Pipeline.handle`: at twenty thousand KV events a second that would cost more than the decisions themselves.
Everything else that decisions see changes only through `Pipeline.handle`.
"""

import asyncio
import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping
from math import inf
from pathlib import Path

import aiohttp
import zmq
from msgspec import Struct, field

from fairlead.config.schema import Config
from fairlead.core.endpoint import Endpoint
from fairlead.core.errors import ConfigError, cannot_listen
from fairlead.core.events import EndpointDown, EndpointUp
from fairlead.core.exact import ExactKnowledge
from fairlead.core.fleet import Fleet
from fairlead.core.kv.cache import EVERYONE, RankCache
from fairlead.core.kv.index import KvIndex
from fairlead.core.kv.recipe import ANY_MODEL
from fairlead.core.kv.snapshot import Hold, Place, Shelved, save
from fairlead.core.trust import wrong_hashes
from fairlead.pool.aio import cancelled, in_turns
from fairlead.pool.kv_events import discovery
from fairlead.pool.kv_events.discovery import KvSource
from fairlead.pool.kv_events.feed import Sync
from fairlead.pool.kv_events.keys import read_keys
from fairlead.pool.kv_events.subscriber import KvSubscriber, Publisher, Subscription
from fairlead.pool.watched_files import read_regular
from fairlead.server.indexer.client import fetch
from fairlead.server.live.knowledge import Knowledge
from fairlead.server.observe.exposition import Registry
from fairlead.server.observe.kv_metrics import KvFeedStatus, KvMetrics
from fairlead.server.observe.log import get
from fairlead.server.own_file import HANGS_S, LAST_S, OwnFile

#: What a snapshot is made from: the index, slot → endpoint id, and what stops a rank's feed meanwhile.
What = tuple[KvIndex, Mapping[int, str], Hold]

_HELD = "another scheduler or indexer writes there; give each a file of its own"


class Keeper(Struct, eq=False):
    """Keeps a snapshot of the index in a file, so that a restarted scheduler starts warm. It is written atomically,
    every `_interval` seconds and at the end. `_what` returns the state to write. Only one process writes it, from its
    first save until it closes or ends; others try again at each save."""

    _path: Path
    _interval: float
    _what: Callable[[], What]
    #: Why the last save failed; empty = it succeeded, or none was tried yet.
    problem: str = ""
    _own: OwnFile = field(default_factory=OwnFile)
    _task: asyncio.Task[None] | None = None

    async def read(self) -> bytes | None:
        """The bytes of the last snapshot; `None` = there is none, or it cannot be read."""
        try:
            return await asyncio.to_thread(read_regular, self._path, -1)
        except FileNotFoundError:
            return None
        except OSError as error:
            _unusable(f"{self._path}: {error.strerror or error}", "the index begins empty")
            return None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Write a last snapshot, and stop."""
        await cancelled(self._task)
        await self.save(LAST_S)
        self._own.release()

    async def save(self, within_s: float = HANGS_S) -> None:
        """Write the current state, within so many seconds. Other work runs after each segment (1,024 blocks)."""
        try:
            await self._own.take(self._path, _HELD, within_s)  # first, because making a snapshot takes work and memory
            with contextlib.closing(save(*self._what())) as made:
                pieces = await in_turns(made)
            await self._own.write(self._path, _HELD, pieces, within_s)
        except OSError as error:
            reason = f"{self._path}: {error.strerror or error}"
            if not self.problem:
                log.warning("cannot write the snapshot of the KV index", reason=reason)
            self.problem = f"the snapshot of the KV index cannot be written: {reason}"
        else:
            if self.problem:
                log.info("the snapshot of the KV index is written again", file=str(self._path))
            self.problem = ""

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            await self.save()


log = get("kv-events")

#: Seconds between two refreshes.
_REFRESH = 0.1
#: Seconds until an engine that did not name its publisher is asked again: at first, and at most.
ASK_AGAIN = (1.0, 15.0)
#: Seconds between two checks whether an endpoint's publisher has changed.
STILL_THERE = 10.0
#: Seconds until it is logged again that publishers cannot connect.
_SAY_AGAIN = 60.0
#: Names in topics instead of a pod's, for blocks in storage that all endpoints share (llm-d's storage back end).
_STORAGE = ("SHARED_STORAGE", "OBJECT_STORE")


class KvListening(Knowledge):
    """KV events that this process subscribes to. `start` also opens sockets."""

    exact: ExactKnowledge

    def __init__(self, config: Config, fleet: Fleet, registry: Registry) -> None:
        super().__init__(config, fleet, registry)
        #: By endpoint id: its slot and address; the task that follows its publisher; the publisher subscribed to.
        self._known: dict[str, tuple[int, str]] = {}
        self._followed: dict[str, asyncio.Task[None]] = {}
        self._sources: dict[str, KvSource] = {}
        #: Why the last try to subscribe failed, by endpoint id.
        self._refused: dict[str, str] = {}
        #: Why the handshake with an endpoint's publisher fails, by endpoint id; empty = it does not.
        self._barred: dict[str, str] = {}
        #: When it was last logged that publishers cannot connect, as loop time by reason.
        self._turned_away: dict[str, float] = {}
        #: The last logged problem with an endpoint's block hashes, by endpoint id; empty = none.
        self._unlike: dict[str, str] = {}
        self._shelved: Shelved | None = None
        #: By slot and rank: up to where loaded blocks are valid, until their publisher is subscribed to.
        self._loaded: dict[int, dict[int, Place]] = {}
        self._keeper: Keeper | None = None
        #: The publishers of the bound socket are about to be renewed.
        self._renewing = False
        #: The last logged reason why some of their ports cannot be listened to.
        self._narrow = ""
        KvMetrics(
            registry, self.exact, self._endpoints, self._feeds, lambda: self._events.rejected, self.prompts.without
        )

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        """Raises `ConfigError` if something that is configured cannot be used."""
        settings = self._settings
        self._loop = asyncio.get_running_loop()
        self._curve, clients = await asyncio.to_thread(read_keys, settings.curve, bool(settings.bind))
        await super().start(stack)
        self._session = await stack.enter_async_context(aiohttp.ClientSession())
        self._events = await stack.enter_async_context(KvSubscriber(self.exact.index))
        if settings.snapshot:
            keeper = self._keeper = Keeper(Path(settings.snapshot), settings.snapshot_interval, self._saved)
            content = await keeper.read()
            if content is not None:
                self._load(content)
            keeper.start()
            stack.push_async_callback(keeper.close)
        if settings.indexer.warm_from:
            await self._warm(settings.indexer.warm_from)
        if settings.bind:
            self.exact.index.add_slot(EVERYONE)
            try:
                bound = self._events.bind(settings.bind, self._curve, clients, self._turn_away)
                self._events.widen(settings.ranks)
            except zmq.ZMQError as error:
                refused = OSError(error.errno, str(error))
                raise cannot_listen(settings.bind, refused, "$.kvEvents.bind") from None
            log.info("accepting connections from publishers of KV events", address=bound, ranks=settings.ranks)
        stack.push_async_callback(self._end)
        self._timer = self._loop.call_later(_REFRESH, self._refresh)
        stack.callback(lambda: self._timer.cancel())

    async def _end(self) -> None:
        await cancelled(*self._followed.values())

    # ---------------------------------------------------------------- endpoints

    def endpoint(self, event: EndpointUp | EndpointDown) -> None:
        super().endpoint(event)
        name = event.endpoint.id if isinstance(event, EndpointUp) else event.endpoint_id
        address = event.endpoint.address if isinstance(event, EndpointUp) else ""
        known = self._known.get(name)
        if known is not None and known[1] == address:
            return
        if known is not None:
            self._leave(name, known[0])
        slot = self._fleet.table.slot(name)
        if isinstance(event, EndpointUp) and slot is not None:
            self._known[name] = slot, address
            if not self._settings.bind:
                self._begin(event.endpoint, slot)
        if self._settings.bind and not self._renewing:
            # Once for all endpoints of a turn: with 1,000 at once, the list after each of them took three seconds. What
            # leaves is not read from now on (`unwatch`).
            self._renewing = True
            self._loop.call_soon(self._renew_allowed)

    def _leave(self, name: str, slot: int) -> None:
        self._known.pop(name)
        task = self._followed.pop(name, None)
        if task is not None:
            task.cancel()
        self._unlike.pop(name, None)
        self._end_feeds(name, slot)

    def _end_feeds(self, name: str, slot: int) -> None:
        self._sources.pop(name, None)
        self._refused.pop(name, None)
        self._barred.pop(name, None)
        self._loaded.pop(slot, None)
        self._events.unwatch(slot)

    def _renew_allowed(self) -> None:
        self._renewing = False
        self._events.allow(self._allowed())
        ranks = 1 + max((endpoint.rank for _, endpoint in self._fleet.table.slots()), default=0)
        try:
            self._events.widen(ranks)
        except (ConfigError, zmq.ZMQError) as error:
            reason = str(error)
            if self._narrow != reason:
                log.warning("cannot listen to KV events of all ranks", ranks=ranks, reason=reason)
            self._narrow = reason

    def _allowed(self) -> dict[str, Publisher]:
        """The publishers that may send, by the names that topics may use for a pod: the endpoint's address, its id, or
        the last part of its id. All ranks of a pod may use the names of its first endpoint."""
        allowed = dict.fromkeys(_STORAGE, Publisher(EVERYONE, ANY_MODEL))
        siblings: dict[str, dict[int, int]] = {}
        for slot, endpoint in self._fleet.table.slots():
            if endpoint.rank:
                siblings.setdefault(_host(endpoint), {})[endpoint.rank] = slot
        for slot, endpoint in self._fleet.table.slots():
            ranks = {} if endpoint.rank else siblings.get(_host(endpoint), {})
            for pod in (endpoint.address, endpoint.id, endpoint.id.rpartition("/")[2]):
                allowed[pod] = Publisher(slot, ANY_MODEL, ranks)
        return allowed

    def _begin(self, endpoint: Endpoint, slot: int) -> None:
        task = self._followed[endpoint.id] = self._loop.create_task(self._follow(endpoint, slot))
        task.add_done_callback(log.failure("following an endpoint's KV events failed", endpoint=endpoint.id))

    async def _follow(self, endpoint: Endpoint, slot: int) -> None:
        """Load the endpoint's saved blocks, find its publisher and subscribe to it; then check regularly whether the
        publisher has changed."""
        if self._shelved is not None:
            places: dict[int, Place] = {}
            entering = self._shelved.enter(endpoint.id, slot, lambda cache, place: places.update({cache.rank: place}))
            await in_turns(entering)
            self._loaded[slot] = places
        wait = ASK_AGAIN[0]
        while True:
            source = await self._source(endpoint, slot)
            if source is None or not self._watch(endpoint, slot, source):
                self._look_at_handshakes(endpoint, slot)
                await asyncio.sleep(wait)
                wait = min(2 * wait, ASK_AGAIN[1])
                continue
            await asyncio.sleep(STILL_THERE)
            self._compare_hashes(endpoint, slot)
            self._look_at_handshakes(endpoint, slot)

    def _compare_hashes(self, endpoint: Endpoint, slot: int) -> None:
        """Warn of block hashes that differ from ours. Such blocks are never found, as if the cache were empty."""
        heads = [head for cache in self.exact.index.caches_of(slot) for head in cache.stores()]
        finding = wrong_hashes(self.exact.recipe, heads)
        if finding is not None and self._unlike.get(endpoint.id) != finding.detail:
            log.warning(
                "an engine's block hashes do not match the configured algorithm; none of its blocks will be found",
                endpoint=endpoint.id,
                cause=finding.cause,
                detail=finding.detail,
            )
        self._unlike[endpoint.id] = finding.detail if finding is not None else ""

    def _look_at_handshakes(self, endpoint: Endpoint, slot: int) -> None:
        refusals = [subscription.refusal for subscription in self.subscriptions(slot) if subscription.refusal]
        reason = refusals[0] if refusals else ""
        if reason and self._barred.get(endpoint.id) != reason:
            log.warning("cannot receive an endpoint's KV events", endpoint=endpoint.id, reason=reason)
        self._barred[endpoint.id] = reason

    def _turn_away(self, reason: str) -> None:
        """Log that a publisher could not connect, once a minute for each reason."""
        now = self._loop.time()
        if now > self._turned_away.get(reason, -inf) + _SAY_AGAIN:
            self._turned_away[reason] = now
            log.warning("a publisher of KV events could not connect", bind=self._settings.bind, reason=reason)

    async def _source(self, endpoint: Endpoint, slot: int) -> KvSource | None:
        settings = self._settings
        if settings.port:
            ports = settings.port, settings.replay_port, settings.ranks
            return discovery.configured(endpoint, *ports, ANY_MODEL, self._curve)
        source = await discovery.ask(self._session, endpoint.address, ANY_MODEL, self._curve)
        caches = self.exact.index.caches_of(slot)
        known = caches or endpoint.id in self._refused
        if source is not None or not known or any(cache.linked for cache in caches):
            return source
        if await discovery.without_events(self._session, endpoint.address):
            self._forget(endpoint.id, slot)
        return None

    def _forget(self, name: str, slot: int) -> None:
        """Forget the blocks of an engine in whose place there is one without KV events."""
        self._end_feeds(name, slot)
        for cache in self.exact.index.caches_of(slot):
            self.exact.index.restarted(cache)
        self.exact.index.keep_ranks(slot, ())
        log.warning("an engine no longer has KV events", endpoint=name)

    def _watch(self, endpoint: Endpoint, slot: int, source: KvSource) -> bool:
        """Subscribe to the publisher, unless that is done. Return false if it is not possible, e.g. without files."""
        if source == self._sources.get(endpoint.id):
            return True
        places, refused = self._loaded.get(slot), self._refused.get(endpoint.id)
        self._events.unwatch(slot)
        self._sources.pop(endpoint.id, None)
        if not places and refused is None:  # the feed replays its history from the beginning
            for cache in self.exact.index.caches_of(slot):
                self.exact.index.restarted(cache)
        self.exact.index.keep_ranks(slot, range(source.ranks))  # a snapshot, or the engine before, may have had more
        try:
            self._events.watch(slot, source, places)
        except (ConfigError, zmq.ZMQError) as error:
            reason = self._refused[endpoint.id] = str(error)
            if refused != reason:
                text = "cannot subscribe to KV events; trying again"
                log.warning(text, endpoint=endpoint.id, address=source.events, reason=reason)
            return False
        self._sources[endpoint.id] = source
        self._loaded.pop(slot, None)
        self._refused.pop(endpoint.id, None)
        log.info("subscribing to KV events", endpoint=endpoint.id, address=source.events, replay=source.replay)
        return True

    # ---------------------------------------------------------------- state

    def subscriptions(self, slot: int) -> list[Subscription]:
        """The subscriptions to the endpoint in this slot, one per rank."""
        return self._events.subscriptions(slot)

    def _refresh(self) -> None:
        self._fleet.refresh_exact(self._scraped_sizes())
        self._timer = self._loop.call_later(_REFRESH, self._refresh)

    def _feeds(self) -> Iterator[KvFeedStatus]:
        for slot, endpoint in self._endpoints():
            if endpoint in self._refused:
                yield KvFeedStatus(endpoint, slot)
            for feed in self._events.feeds(slot):
                cache, count = feed.cache, feed.count
                yield KvFeedStatus(
                    endpoint, slot, cache.rank, cache.linked, feed.sync is not Sync.LIVE, cache.provisional,
                    cache.blocks, count.batches, count.events, count.bad_events + count.bad_batches, count.lost,
                    count.gaps, count.restarts, count.replays, count.failed_replays, max(0, count.connections - 1),
                )  # fmt: skip

    # ---------------------------------------------------------------- snapshot

    async def _warm(self, url: str) -> None:
        try:
            self._shelved = Shelved(self.exact.index, await fetch(self._session, url))
        except ValueError as error:
            log.warning("no warm start from another indexer", reason=str(error))
        else:
            log.info("warm start from another indexer", url=url)

    def snapshot(self) -> Generator[bytes, None, None]:
        """The bytes of a snapshot of the index, one piece per segment."""
        return save(*self._saved())

    def take(self, content: bytes) -> int:
        """Load a snapshot. Raises `ValueError` if `content` is not a valid one.

        Endpoints that have sent no KV events yet get their blocks from it soon, and endpoints that appear later when
        they appear. Endpoints that have sent events keep their blocks. Returns the number of endpoints of the first
        kind.
        """
        self._shelved = Shelved(self.exact.index, content)
        taken = 0
        for name, (slot, _) in list(self._known.items()):
            endpoint = self._fleet.table.endpoints[slot]
            task = self._followed.get(name)
            if task is None or endpoint is None or any(cache.heard for cache in self.exact.index.caches_of(slot)):
                continue
            task.cancel()
            self._end_feeds(name, slot)
            self.exact.index.clear(slot)  # what an earlier snapshot said
            self._begin(endpoint, slot)
            taken += 1
        return taken

    def _load(self, content: bytes) -> None:
        try:
            self._shelved = Shelved(self.exact.index, content)
        except ValueError as error:
            _unusable(str(error), "the index begins empty, and the next save replaces the file")

    def unheard(self) -> str:
        """Why KV events of endpoints cannot be received; empty = handshakes with their publishers succeed."""
        barred = [(name, reason) for name, reason in self._barred.items() if reason]
        more = f" and {len(barred) - 1} more" if len(barred) > 1 else ""
        return f"no KV events of {barred[0][0]}{more}: {barred[0][1]}" if barred else ""

    def unsaved(self) -> str:
        """Why the snapshot cannot be written; empty = it can."""
        return self._keeper.problem if self._keeper is not None else ""

    def _saved(self) -> What:
        return self.exact.index, dict(self._endpoints()), self._hold

    @contextlib.contextmanager
    def _hold(self, cache: RankCache) -> Iterator[Callable[[], Place | None]]:
        loaded = self._loaded.get(cache.slot, {}).get(cache.rank)
        with self._events.hold(cache) as place_of:
            yield (lambda: loaded) if loaded is not None else place_of


def _host(endpoint: Endpoint) -> str:
    return endpoint.address.rpartition(":")[0]


def _unusable(reason: str, then: str) -> None:
    log.warning(f"cannot use the snapshot of the KV index; {then}", reason=reason)
