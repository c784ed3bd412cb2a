"""How schedulers on one machine share facts through files of one directory, which all of them map into memory.

    POOL/ORIGIN.facts       a header and a ring of records, written by that replica and read by all others
    POOL/ORIGIN.snapshot    all that it knows of itself, after another replica has asked

Rules
* Nothing wakes another process. A replica writes what it did at the end of the same turn of its event loop, and reads
  what the others wrote before it handles an event. So a decision knows of all decisions before it. Through a server,
  which each replica would ask every few milliseconds, most of the CPU time of four workers was spent on waking up.
* While a request waits here, the others are read every `interval`: the end of one of their requests may be its turn.
* A replica has locked its file for as long as it lives: if the lock is free, it died. One that hangs is lost when its
  heartbeat is older than a lease, and comes back with the next one.
* A reader that was overtaken by the writer, or finds a record that is not whole, asks for a snapshot. So it needs no
  order between the memory accesses of two processes.
* Whoever finds a dead replica's files deletes them.
"""

import asyncio
import fcntl
import mmap
import os
import time
from contextlib import suppress
from pathlib import Path
from struct import Struct as Layout
from urllib.parse import quote, urlsplit
from zlib import crc32

from fairlead.core.events import Event
from fairlead.server.files import lock, unfinished, write_whole
from fairlead.server.replicas import JOIN_S, SNAPSHOT_PAUSE_S, Own, Replicas, log

FACTS, SNAPSHOTS = ".facts", ".snapshot"
#: What a file begins with, and its second number: facts of another version are not read.
_MAGIC, _VERSION = int.from_bytes(b"fairlead"), 1
#: Fields of the header, 8 bytes each: bytes written since the file was made, and the writer's `time.monotonic`.
_MAGIC_AT, _VERSION_AT, _WRITTEN, _HEARTBEAT = range(4)
_HEADER = 64
#: Bytes of the ring. A reader that is half of it behind may already be overtaken.
RING = 2 << 20
_BEHIND, _LARGEST = RING // 2, RING // 4
#: Before each record: its kind, its length, the checksum of both and of its content, and when it was written.
_RECORD = Layout("<HHIId")
BATCH, SNAPSHOT, WANTED, GONE, _PADDING = range(5)
#: Seconds between two looks at the others while nothing happens here.
LOOK_S = 0.1


class FileReplicas(Replicas):
    """Tells the others through files. Hand events to `feed`: it lets the pipeline know what others did first."""

    def __init__(self, own: Own) -> None:
        super().__init__(own)
        self._directory = Path(urlsplit(own.settings.via).path, quote(own.pool, safe=""))
        self._own: _Ring | None = None
        self._readers: dict[str, _Ring] = {}
        self._reading = False
        #: Facts will be written at the end of this turn of the event loop.
        self._due = False
        self._soon = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._look()
        self._task = asyncio.create_task(self._keep_looking())
        until = time.monotonic() + JOIN_S
        while self.missing and time.monotonic() < until:
            await asyncio.sleep(self._settings.interval)

    async def close(self) -> None:
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait((self._task,))
        for name in [*self._readers]:
            self._readers.pop(name).close()
        if self._own is not None:
            self._write_facts()
            self._write(GONE, b"")
            self._delete(self.origin, self._own)
            self._own.close()
            self._own = None

    def feed(self, event: Event) -> None:
        """Read what the others wrote, handle the event, and write what it led to."""
        try:
            self._read()
        except Exception as error:  # the event must not be lost with what others wrote
            log.error("could not read what other replicas wrote", exc=error)
        self._feed(event)
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._write_facts)

    # ---- regularly ----

    async def _keep_looking(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.interval if self._facts.waits() else LOOK_S):
                    await self._soon.wait()
            self._soon.clear()
            self._look()

    def _look_soon(self) -> None:
        self._soon.set()

    def _look(self) -> None:
        """Whatever is not done for each event."""
        try:
            self._follow()
            self._read()
            self._write_facts()
            for name in self._facts.gaps():
                self._want(name)
            wanted = self._to_ask()
            if wanted:
                self._write(WANTED, wanted)
            if self._owes_snapshot and time.monotonic() >= self._snapshot_at + SNAPSHOT_PAUSE_S:
                self._write_snapshot()
        except Exception as error:
            if not isinstance(error, OSError | ValueError):
                log.error("could not share facts with other replicas", exc=error)
            self.counts.outages += not self.problem
            self.problem = f"{self.where}: {error}"
            return
        if self.problem:
            self.problem = ""
            log.info("connected to the other replicas", directory=str(self._directory), others=len(self.peers))

    def _follow(self) -> None:
        """Find the replicas that have come, have died, or hang. Raises `OSError` or `ValueError`."""
        now = time.monotonic()
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        names = {path.stem for path in self._directory.iterdir() if path.suffix == FACTS}
        if self._own is None or self.origin not in names:
            self._own = self._begin()
        self._own.heartbeat = now
        for name in sorted(names - {self.origin} - self._readers.keys()):
            self._meet_at(name, now)
        for name, ring in [*self._readers.items()]:
            if ring.is_left():
                self._read_one(name, ring)
                self._delete(name, ring)
                self._lose_at(name)
            elif now - ring.heartbeat > self._settings.lease:
                self._lose_at(name)

    def _begin(self) -> "_Ring":
        """Make our own file, for the first time or because somebody has deleted it. Raises `OSError`."""
        if self._own is not None:
            self._own.close()
            self._own = None
        ring = _Ring.make(self._directory / f"{self.origin}{FACTS}")
        self._owes_snapshot = True
        return ring

    def _meet_at(self, name: str, now: float) -> None:
        try:
            ring = _Ring.open(self._directory / f"{name}{FACTS}")
        except (OSError, ValueError):
            return  # it is being made or deleted, or is no file of facts
        if ring.is_left():
            self._delete(name, ring)
        elif now - ring.heartbeat <= self._settings.lease and self._meet(name) is not None:
            self._readers[name] = ring
            return
        ring.close()

    def _lose_at(self, name: str) -> None:
        ring = self._readers.pop(name, None)
        if ring is not None:
            ring.close()
            self._lose(name)

    def _delete(self, name: str, ring: "_Ring") -> None:
        """Its files, unless it has made new ones."""
        path = self._directory / f"{name}{FACTS}"
        with suppress(OSError):
            if ring.is_file(path):
                snapshot = path.with_suffix(SNAPSHOTS)
                for file in (path, snapshot, unfinished(snapshot)):
                    file.unlink(missing_ok=True)

    # ---- written ----

    def _write_facts(self) -> None:
        self._due = False
        if self._own is not None:
            batch = self._facts.batch()
            if batch and self._write(BATCH, batch):
                self.counts.sent += 1
                self.counts.sent_bytes += len(batch)

    def _write(self, kind: int, payload: bytes) -> bool:
        """False = it is too large, and a snapshot will follow instead; or there is no file."""
        if self._own is None:
            return False
        written = self._own.write(kind, payload)
        if not written:
            self.counts.dropped += 1
            self._owes_snapshot = True
        return written

    def _write_snapshot(self) -> None:
        self._write_facts()  # what the snapshot includes comes before it
        snapshot = self._facts.snapshot()
        write_whole(self._directory / f"{self.origin}{SNAPSHOTS}", (snapshot,), on_disk=False)
        self._write(SNAPSHOT, b"")
        self._owes_snapshot, self._snapshot_at = False, time.monotonic()
        self.counts.snapshots_sent += 1
        self.counts.sent_bytes += len(snapshot)

    # ---- read ----

    def _read(self) -> None:
        if self._reading:  # what was read led to an event of ours
            return
        self._reading = True
        try:
            for name, ring in [*self._readers.items()]:
                if ring.has_news():
                    self._read_one(name, ring)
        finally:
            self._reading = False

    def _read_one(self, name: str, ring: "_Ring") -> None:
        peer = self.peers.get(name)
        if peer is None:
            return
        for kind, payload, written_at in ring.read():
            self.lag_s = max(time.monotonic() - written_at, 0.0)
            if kind == BATCH:
                self._received(name, peer, payload, self.lag_s, at_once=True)
            elif kind == WANTED:
                self._asked(name, payload)
            elif kind == GONE:
                self._lose_at(name)
                return
            elif peer.ask_at:
                with suppress(OSError):
                    self._caught_up(name, peer, (self._directory / f"{name}{SNAPSHOTS}").read_bytes())
        if ring.lost:
            ring.lost = False
            self._want(name)


class _Ring:
    """A mapped file of facts. `position`: bytes written, or for a reader those read; `lost`: some could not be read."""

    def __init__(self, descriptor: int, writes: bool) -> None:
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _HEADER + RING, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0))
        header = memoryview(self._memory)[:_HEADER]
        # One access to 8 bytes that are aligned, so that a reader never sees half of a number.
        self._numbers, self._times = header.cast("Q"), header.cast("d")
        self.position = self._numbers[_WRITTEN]
        self.lost = False

    @classmethod
    def make(cls, path: Path) -> "_Ring":
        """Raises `OSError`."""
        new = path.with_suffix(".making")
        descriptor = lock(new, f"another replica makes {new}")
        try:
            # Written, not only extended: a full disk is an error here, and would kill the process later.
            os.write(descriptor, bytes(_HEADER + RING))
            ring = cls(descriptor, writes=True)
        except BaseException:
            os.close(descriptor)
            raise
        ring._numbers[_MAGIC_AT], ring._numbers[_VERSION_AT] = _MAGIC, _VERSION
        ring.heartbeat = time.monotonic()
        new.rename(path)
        return ring

    @classmethod
    def open(cls, path: Path) -> "_Ring":
        """Raises `OSError`, or `ValueError` for another kind of file."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            ring = cls(descriptor, writes=False)
        except BaseException:
            os.close(descriptor)
            raise
        if (ring._numbers[_MAGIC_AT], ring._numbers[_VERSION_AT]) != (_MAGIC, _VERSION):
            ring.close()
            raise ValueError(f"{path} is no file of facts")
        return ring

    def close(self) -> None:
        self._numbers.release()
        self._times.release()
        self._memory.close()
        os.close(self._descriptor)

    @property
    def heartbeat(self) -> float:
        return self._times[_HEARTBEAT]

    @heartbeat.setter
    def heartbeat(self, now: float) -> None:
        self._times[_HEARTBEAT] = now

    def is_file(self, path: Path) -> bool:
        """Whether it is mapped here. Raises `OSError`."""
        return os.path.samestat(os.fstat(self._descriptor), path.stat())

    def is_left(self) -> bool:
        """Whether its writer has died."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def write(self, kind: int, payload: bytes) -> bool:
        """False = it is too large."""
        length = _padded(len(payload))
        if length > _LARGEST:
            return False
        index, memory = self.position % RING, self._memory
        tail = RING - index
        if tail < length:
            if tail >= _RECORD.size:
                _RECORD.pack_into(memory, _HEADER + index, _PADDING, 0, 0, 0, 0.0)
            self.position += tail
            index = 0
        begin = _HEADER + index
        _RECORD.pack_into(memory, begin, kind, 0, len(payload), crc32(payload, kind), time.monotonic())
        begin += _RECORD.size
        memory[begin : begin + len(payload)] = payload
        self.position += length
        self._numbers[_WRITTEN] = self.position
        return True

    def has_news(self) -> bool:
        return self._numbers[_WRITTEN] != self.position

    def read(self) -> list[tuple[int, bytes, float]]:
        """The records since the last call: kind, content, and when each was written (`time.monotonic`)."""
        records: list[tuple[int, bytes, float]] = []
        end, memory = self._numbers[_WRITTEN], self._memory
        self.lost = self.lost or not 0 <= end - self.position <= _BEHIND
        while not self.lost and self.position < end:
            index = self.position % RING
            begin = _HEADER + index
            if RING - index < _RECORD.size or (record := _RECORD.unpack_from(memory, begin))[0] == _PADDING:
                self.position += RING - index
                continue
            kind, _, length, check, written_at = record
            begin += _RECORD.size
            payload = memory[begin : begin + length] if length <= _LARGEST else b""
            if len(payload) != length or crc32(payload, kind) != check:
                self.lost = True
                break
            records.append((kind, payload, written_at))
            self.position += _padded(length)
        if self.lost:
            self.position = end
        return records


def _padded(length: int) -> int:
    """Bytes of a record with a content of so many bytes."""
    return (_RECORD.size + length + 7) & ~7
