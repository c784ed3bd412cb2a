"""The state file, with what the scheduler learned: read when it starts, written periodically and when it stops.

    file = b"fairlead state\\n" block*        a block is one part (`fairlead.core.state`) with a checksum

Rules
* The file must not make a restart fail, nor a request wait. If it cannot be read or written, the log says so and the
  scheduler continues without it.
* Parts are encoded and restored one at a time, with other work in between. A thread writes them.
* A new file replaces the old one when it is complete and on the disk. A process that is killed leaves the old one.
* Only one process writes: it holds a lock until it ends. Other processes read, and write once that process has ended.
* `StateFile` keeps an endpoint's parts until the endpoint joins the pool. Parts older than `state.maxAge` are dropped.
* A replica that becomes the leader takes over the file of the last one (`inherit`, see `server.live.handover`).
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from math import inf
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from fairlead.config.schema import StateSettings
from fairlead.core.endpoint import Endpoint
from fairlead.core.events import Event, Restored
from fairlead.core.learned import Common, EndpointLearned, Part, PrefixesLearned
from fairlead.core.prefix import ChainHasher
from fairlead.core.scheduler import Pipeline
from fairlead.core.state import BLOCK_BYTES, VERSION, Head, decode, encode, taken
from fairlead.pool.aio import cancelled
from fairlead.pool.watched_files import read_regular
from fairlead.server.journal.blocks import OVERHEAD, Damage, block, blocks
from fairlead.server.observe.log import get
from fairlead.server.own_file import HANGS_S, LAST_S, OwnFile

log = get("state")

MAGIC = b"fairlead state\n"
#: The suffix of the file names of workers other than the first, before their number.
WORKER = ".worker-"
#: Making a file may use this share of the event loop's time between two files.
_BUSY = 0.02
#: 1/`_SPARED` of the largest file is reserved for data other than prefixes.
_SPARED = 4
_HELD = "another scheduler writes there; give each a file of its own"


class Stored(Struct):
    """The content of a file. `problems`: what cannot be used, in words."""

    head: Head | None = None
    common: Common | None = None
    #: Parts by endpoint id, in the file's order.
    endpoints: dict[str, list[Part]] = {}
    problems: list[str] = []


def read_state(path: Path, cut: ChainHasher, max_bytes: int) -> Stored:
    """Read the file. Never raises because of its content or because it cannot be read. Prefixes of prompts that were
    cut into other blocks than those of `cut` are left out. A missing file is no problem."""
    stored = Stored()
    try:
        data = read_regular(path, max_bytes + 1)
    except FileNotFoundError:
        return stored
    except OSError as error:
        stored.problems.append(f"it cannot be read: {error.strerror or error}")
        return stored
    if len(data) > max_bytes:
        stored.problems.append("it is larger than maxBytes")
    else:
        _understand(data, stored, cut)
    return stored


def _understand(data: bytes, stored: Stored, cut: ChainHasher) -> None:
    if not data.startswith(MAGIC):
        stored.problems.append("it is no state file")
        return
    damaged = unreadable = 0
    for entry in blocks(data[len(MAGIC) :]):
        if isinstance(entry, Damage):
            damaged += entry.size
            continue
        try:
            part = decode(entry[1])
        except ValueError:
            unreadable += 1
            continue
        if isinstance(part, Head):
            stored.head = part
            if part.version != VERSION:
                stored.head = None
                stored.problems.append(f"it has version {part.version}; this program knows {VERSION}")
                return
        elif stored.head is None:
            unreadable += 1
        elif isinstance(part, Common):
            stored.common = part
        elif not isinstance(part, PrefixesLearned) or (stored.head.finest, stored.head.growth) == (
            cut.finest,
            cut.growth,
        ):
            stored.endpoints.setdefault(part.endpoint_id, []).append(part)
    if stored.head is None:
        stored.problems.append("it has no beginning")
    elif (stored.head.finest, stored.head.growth) != (cut.finest, cut.growth):
        stored.problems.append("its prefixes are left out: prompts were cut into blocks of another size")
    if damaged:
        stored.problems.append(f"{damaged} damaged bytes are left out")
    if unreadable:
        stored.problems.append(f"{unreadable} of its parts cannot be read")


def _taken_at(stored: Stored) -> float:
    return stored.head.taken_at if stored.head is not None else -inf


class StateCounts(Struct):
    """Counts since the start."""

    written: int = 0
    errors: int = 0
    #: Bytes of the newest file.
    bytes: int = 0
    #: Prompt blocks that were restored, and the endpoints that they were restored for.
    prefixes: int = 0
    endpoints: int = 0


class StateFile(Struct, eq=False):
    """Call `start`, then `joined` for each endpoint that appears, and `close` at the end. All methods run on the event
    loop's thread."""

    #: The file that is written.
    path: Path
    settings: StateSettings
    _pipeline: Pipeline
    _cut: ChainHasher
    _feed: Callable[[Event], object]
    #: The pipeline's clock, in seconds.
    _now: Callable[[], float]
    #: What was read, and from which file.
    _stored: Stored = field(default_factory=Stored)
    _source: str = ""
    #: What was read is of a scheduler that served until now.
    _inherited: bool = False
    _joined: deque[str] = field(default_factory=deque)
    _restoring: asyncio.Task[None] | None = None
    _writing: asyncio.Task[None] | None = None
    _one_write: asyncio.Lock = field(default_factory=asyncio.Lock)
    _own: OwnFile = field(default_factory=OwnFile)
    counts: StateCounts = field(default_factory=StateCounts)
    #: Why the file cannot be written; empty = it can.
    problem: str = ""
    #: A line that says what was restored; empty = nothing.
    note: str = ""

    async def start(self) -> None:
        """Read the file, and restore the part that all endpoints share. A worker takes the file of the first worker,
        which knows what all workers have sent, unless its own file is newer. Its own may be an old one, from an earlier
        run with more workers."""
        path, first = self.path, self.path.with_name(self.path.name.partition(WORKER)[0])
        stored = await self._read(path)
        if first != path:
            stored_first = await self._read(first)
            if _taken_at(stored_first) >= _taken_at(stored):
                path, stored = first, stored_first
        self._begin(stored, str(path))
        self._writing = asyncio.create_task(self._write_on())

    async def inherit(self, data: bytes, source: str) -> None:
        """Take over the file of a scheduler that served until now, in place of what is known here. `source`: where it
        came from, for people."""
        stored = Stored()
        await asyncio.to_thread(_understand, data, stored, self._cut)
        await self.settled()
        self._inherited = True
        self._begin(stored, source)
        for _, endpoint in self._pipeline.fleet.table.slots():
            self.joined(endpoint)
        await self.settled()

    def _begin(self, stored: Stored, source: str) -> None:
        self._stored, self._source = stored, source
        for problem in stored.problems:
            log.warning("loaded only part of the saved state", file=source, problem=problem)
        if self._age() > self.settings.max_age:
            age = f"it is {self._age():.0f} s old, and state.maxAge is {self.settings.max_age:.0f} s"
            log.warning("did not load the saved cache contents", file=source, problem=age)
        if stored.common is not None:
            self._feed(Restored(stored.common, self._age(), self._inherited))

    async def _read(self, path: Path) -> Stored:
        return await asyncio.to_thread(read_state, path, self._cut, self.settings.max_bytes)

    def joined(self, endpoint: Endpoint) -> None:
        """The endpoint is in the pool now: restore its saved state."""
        if endpoint.id in self._stored.endpoints:
            self._joined.append(endpoint.id)
            if self._restoring is None or self._restoring.done():
                self._restoring = asyncio.create_task(self._restore())

    async def settled(self) -> None:
        """Wait until the saved state of all joined endpoints is restored."""
        if self._restoring is not None:
            await self._restoring

    async def close(self) -> None:
        """Write the file a last time, and stop."""
        await cancelled(self._restoring, self._writing)
        await self.write(LAST_S)
        self._own.release()

    # ---- restoring ----

    def _age(self) -> float:
        head = self._stored.head
        return max(time.time() - head.taken_at, 0.0) if head is not None else 0.0

    def _known(self, endpoint_id: str) -> tuple[list[Part], float]:
        """The parts of an endpoint that has not joined, and their age; no parts if they are too old."""
        parts = self._stored.endpoints[endpoint_id]
        first = parts[0]
        age_s = self._age() + (first.age_s if isinstance(first, EndpointLearned) else 0.0)
        return (parts if age_s <= self.settings.max_age else []), age_s

    async def _restore(self) -> None:
        counts, table, age_s = self.counts, self._pipeline.fleet.prefix, self._age()
        while self._joined:
            endpoint_id = self._joined.popleft()
            if endpoint_id not in self._stored.endpoints:
                continue
            parts, age_s = self._known(endpoint_id)
            before = table.entries
            for part in parts:
                self._feed(Restored(part, age_s, self._inherited))
                await asyncio.sleep(0)
            del self._stored.endpoints[endpoint_id]
            counts.prefixes += max(table.entries - before, 0)
            counts.endpoints += table.entries > before
        common = self._stored.common
        speeds = len(common.forecasts.speeds.classes) if common is not None else 0
        self.note = (
            f"restored {counts.prefixes} prefixes for {counts.endpoints} endpoints, "
            f"learned speeds of {speeds} engine class{'' if speeds == 1 else 'es'}, {age_s:.0f} s old"
        )
        log.info(self.note, file=self._source)

    # ---- writing ----

    async def _write_on(self) -> None:
        pause_s = self.settings.interval
        while True:
            await asyncio.sleep(pause_s)
            pause_s = max(self.settings.interval, await self.write() / _BUSY)

    def _parts(self) -> Iterator[Head | Part]:
        yield Head(VERSION, time.time(), self._cut.finest, self._cut.growth)
        most_blocks = (self.settings.max_bytes - self.settings.max_bytes // _SPARED) // BLOCK_BYTES
        yield from taken(self._pipeline.fleet, self._pipeline.tokens, self._now(), most_blocks)
        for endpoint_id in list(self._stored.endpoints):
            if endpoint_id not in self._stored.endpoints:
                continue  # it joined meanwhile, and its state was restored
            parts, age_s = self._known(endpoint_id)
            if not parts:
                del self._stored.endpoints[endpoint_id]
            for part in parts:
                yield replace(part, age_s=age_s) if isinstance(part, EndpointLearned) else part

    async def write(self, within_s: float = HANGS_S) -> float:
        """Write the file, within so many seconds. Returns how many this kept the event loop busy. Never raises."""
        try:
            async with self._one_write:
                return await self._write_parts(self._parts(), within_s)
        except OSError as error:
            problem = error.strerror or str(error)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            log.error("cannot save what was learned", exc=error)
        self.counts.errors += 1
        self.problem = f"{self.path} cannot be written, and a restart forgets: {problem}"
        return 0.0

    async def _write_parts(self, parts: Iterator[Head | Part], within_s: float) -> float:
        encoded, size, worked_s = list[bytes](), len(MAGIC), 0.0
        while True:
            started = time.perf_counter()
            part = next(parts, None)
            if part is None:
                break
            content = encode(part)
            if size + OVERHEAD + len(content) <= self.settings.max_bytes:
                size += OVERHEAD + len(content)
                encoded.append(content)
            worked_s += time.perf_counter() - started
            await asyncio.sleep(0)
        pieces = chain((MAGIC,), (block(content, pack=False) for content in encoded))
        self.counts.bytes = await self._own.write(self.path, _HELD, pieces, within_s)
        self.counts.written += 1
        self.problem = ""
        return worked_s
