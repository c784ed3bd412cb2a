"""List and watch: keep a local copy of some objects, which recovers from any failure of the API server.

Rules
* A list gives the state and its version. A watch from that version gives the changes, and bookmarks advance the version
  while nothing changes. A watch that ends for any reason is started again at the last version.
* 410 (as an answer or within the stream) means that the version is too old. Then objects are listed again and compared:
  known objects that are missing were deleted meanwhile and are reported as removed; unchanged objects are not reported.
* A version that was refused is never tried again. Two well-known clients loop in this case.
* While the API server does not answer, the copy stays as it is. Pauses grow and have jitter, so that a thousand clients
  do not return at the same moment.
* An object that cannot be read affects no other: its last known state stays, and the problem is reported.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from random import Random
from typing import Generic, TypeVar

from msgspec import Raw, Struct

from fairlead.pool.aio import call_consumer
from fairlead.pool.kube.client import KubeClient, KubeError, Resource, Unreachable
from fairlead.pool.kube.objects import Page as PageOf
from fairlead.pool.kube.objects import Unreadable, key_of, read_event, read_failure, read_meta, read_page

T = TypeVar("T")

PAGE = 250
#: Seconds of silence after which a watch is started again. Bookmarks arrive about once a minute.
IDLE_S = 130.0
#: The server is asked to end a watch after a random number of seconds between these.
_WATCH_S = (240, 480)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
#: The pause if a kind is not installed or a verb not allowed: frequent requests would not help.
REFUSED_PAUSE_S = 5.0
#: A shorter watch counts as a failure. Otherwise a server that ends every watch would get requests without a pause.
_SHORT_S = 1.0
_GONE = 410


class Gone(Exception):
    """The version is too old, or must not be used further."""


class Stats(Struct):
    """Counts and state of a reflector, for metrics."""

    lists: int = 0
    watches: int = 0
    failures: int = 0
    events: int = 0
    unreadable: int = 0
    #: The last request succeeded.
    connected: bool = False
    #: Why changes are not seen, also while only lists succeed; empty = they are, or nothing was tried yet.
    trouble: str = ""


class Backoff:
    """Pauses that double. Each is shortened at random by up to half, and added to what the server asks for."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._next = FIRST_PAUSE_S

    def reset(self) -> None:
        self._next = FIRST_PAUSE_S

    def pause(self, after: float = 0.0) -> float:
        """The next pause in seconds. `after`: what the server asked for."""
        pause = self._next * self._rng.uniform(0.5, 1.0)
        self._next = min(self._next * 2, LONGEST_PAUSE_S)
        return after + pause


class Reflector(Generic[T]):
    """Keeps `items` by `namespace/name`. Calls `changed(changes)` with the new, changed and (`None`) removed objects of
    a list or an event by key, and `synced()` after each list. `await run()` never returns."""

    def __init__(
        self,
        client: KubeClient,
        resource: Resource,
        read: Callable[[Raw], T],
        changed: Callable[[Mapping[str, T | None]], object],
        *,
        query: Mapping[str, str] | None = None,
        synced: Callable[[], object] = lambda: None,
        on_trouble: Callable[[str], object] = lambda trouble: None,
        report: Callable[[str], object] = lambda problem: None,
        items: Mapping[str, T] | None = None,
        idle_s: float = IDLE_S,
    ) -> None:
        """`on_trouble(why)` is called when contact is lost, `on_trouble("")` when it is back, and `report(problem)` for
        unreadable objects. `items`: the known objects, with which the first list is compared."""
        self.resource = resource
        self.items: dict[str, T] = dict(items or {})
        self.stats = Stats()
        #: Set once objects were listed.
        self.ready = asyncio.Event()
        #: The last request was not allowed (403).
        self.forbidden = False
        self._client = client
        self._read = read
        self._changed = changed
        self._synced = synced
        self._on_trouble = on_trouble
        self._report = report
        self._query = dict(query or {})
        self._idle_s = idle_s
        self._backoff = Backoff(client.rng)
        self._version = ""
        #: The last watch was refused. Then a list that succeeds is no end of the trouble.
        self._watch_refused = False

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            pause = 0.0
            try:
                if not self._version:
                    self._version = await self._list()
                started = loop.time()
                await self._watch()
                if loop.time() - started < _SHORT_S:
                    pause = self._backoff.pause()
                else:
                    self._backoff.reset()
            except (Gone, KubeError) as error:
                self._version = ""
                pause = self._backoff.pause()
                if isinstance(error, KubeError) and error.code != _GONE:
                    self.forbidden = error.code == 403
                    self._lost(str(error))
                    if error.code in (403, 404):
                        pause = max(pause, REFUSED_PAUSE_S * self._client.rng.uniform(0.5, 1.0))
            except Unreachable as error:
                if "Too large resource version" in str(error):  # etcd was restored from an older state
                    self._version = ""
                self._lost(str(error))
                pause = self._backoff.pause(error.after)
            await asyncio.sleep(pause)

    # ---- the state ----

    async def _list(self) -> str:
        """Replace the copy with a fresh list. Return its version."""
        listed: dict[str, T] = {}
        nameless = False
        page = await self._page("")
        while True:
            for i, raw in enumerate(page.items or ()):
                nameless = not self._take(raw, listed) or nameless
                if i % 50 == 49:
                    await asyncio.sleep(0)  # let decisions run in between
            if not page.metadata.continue_:
                break
            page = await self._page(page.metadata.continue_)
        self.stats.lists += 1
        self._in_touch()
        gone = [key for key in self.items if key not in listed and not nameless]
        self._apply({**listed, **dict.fromkeys(gone)})
        self.ready.set()
        self._guard(self._synced)
        return page.metadata.resource_version

    async def _page(self, token: str) -> PageOf:
        query = {**self._query, "limit": str(PAGE)}
        if token:
            query["continue"] = token
        try:
            page = read_page(await self._client.get(self.resource, query))
        except Unreadable as error:
            raise Unreachable(f"the list of {self.resource.plural} cannot be read: {error}") from None
        if not page.metadata.resource_version:
            raise Unreachable(f"the list of {self.resource.plural} has no version")
        return page

    def _take(self, raw: Raw, listed: dict[str, T]) -> bool:
        """Read a listed object. Return false if not even its name can be read."""
        try:
            key = key_of(read_meta(raw))
        except Unreadable as error:
            self._unreadable("?", error)
            return False
        value = self._value(key, raw)
        if value is not None:
            listed[key] = value
        return True

    @property
    def complete(self) -> bool:
        """Whether what is not among `items` does not exist: the objects were listed, could all be read, and changes are
        seen."""
        stats = self.stats
        return self.ready.is_set() and stats.connected and not stats.trouble and not stats.unreadable

    def _value(self, key: str, raw: Raw) -> T | None:
        try:
            return self._read(raw)
        except Unreadable as error:
            self._unreadable(key, error)
            return self.items.get(key)

    # ---- changes ----

    async def _watch(self) -> None:
        """Watch until the watch ends."""
        seconds = self._client.rng.randint(*_WATCH_S)
        query = {**self._query, "resourceVersion": self._version, "timeoutSeconds": str(seconds)}
        self.stats.watches += 1
        try:
            async with aclosing(self._client.watch(self.resource, query, self._idle_s)) as batches:
                async for lines in batches:
                    self._watch_refused = False
                    self._in_touch()
                    for line in lines:
                        if line.strip():
                            self._event(line)
                            self._backoff.reset()
        except KubeError as error:
            self._watch_refused |= error.code != _GONE
            raise

    def _event(self, line: bytes) -> None:
        try:
            event = read_event(line)
            if event.type == "ERROR":
                failure = read_failure(event.object)
                if failure.code == _GONE:
                    raise Gone
                self._version = ""
                raise Unreachable(f"the watch of {self.resource.plural} broke: {failure.code} {failure.message}")
            meta = read_meta(event.object)
        except Unreadable as error:
            self._unreadable("?", error)
            raise Gone from None  # something changed, and only a list shows what
        self.stats.events += 1
        if event.type in ("ADDED", "MODIFIED"):
            key = key_of(meta)
            value = self._value(key, event.object)
            if value is not None:
                self._apply({key: value})
        elif event.type == "DELETED":
            self._apply({key_of(meta): None})
        if meta.resource_version:
            self._version = meta.resource_version

    def _apply(self, present: Mapping[str, T | None]) -> None:
        """Take over the present objects (`None` = it is gone), and report those that differ."""
        changes = {key: value for key, value in present.items() if self.items.get(key) != value}
        for key, value in changes.items():
            if value is None:
                del self.items[key]
            else:
                self.items[key] = value
        if changes:
            self._guard(lambda: self._changed(changes))

    # ---- callbacks ----

    def _guard(self, call: Callable[[], object]) -> None:
        call_consumer(call, f"a consumer of {self.resource.plural}")

    def _in_touch(self) -> None:
        lost = not self.stats.connected or bool(self.stats.trouble)
        self.stats.connected, self.forbidden = True, False
        if lost and not self._watch_refused:
            self.stats.trouble = ""
            self._guard(lambda: self._on_trouble(""))

    def _lost(self, why: str) -> None:
        self.stats.failures += 1
        self.stats.connected = False
        if self.stats.trouble != why:
            self.stats.trouble = why
            self._guard(lambda: self._on_trouble(why))

    def _unreadable(self, key: str, error: Unreadable) -> None:
        self.stats.unreadable += 1
        self._guard(lambda: self._report(f"{self.resource.plural} {key} cannot be read: {error}"))
