"""Shares facts between schedulers on one machine, through files of one directory that all of them map into memory.

    POOL/ORIGIN.facts       a header and a ring of records, written by that replica and read by all others
    POOL/ORIGIN.snapshot    everything that the replica knows of itself, written after another replica has asked

Rules
* No replica wakes another process. A replica writes its facts at the end of the turn of its event loop, and reads those
  of other replicas before it handles an event. So a decision knows all decisions before it. Measured with a server
  that each replica asks every few milliseconds, four workers spent most of their CPU time on waking up.
* While a request is queued here, other replicas' files are read every `interval`: when one of their requests ends, the
  queued request may be sent.
* A replica holds a lock on its file while it lives: if the lock is free, the replica died. A replica that hangs is lost
  when its heartbeat is older than a lease (`replicas.lease`), and joins again at its next heartbeat.
* A reader that was overtaken by the writer, or finds an incomplete record, asks for a snapshot. So nothing depends on
  the order in which one process sees the memory accesses of another.
* Any replica that finds the files of a dead one deletes them.
"""

import asyncio
import errno
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
from fairlead.pool.aio import set_within
from fairlead.server.files import lock, unfinished, write_whole
from fairlead.server.replicas import SNAPSHOT_PAUSE_S, Own, Replicas, log

FACTS, SNAPSHOTS = ".facts", ".snapshot"
#: The first and second number of a file. Files of another version are not read.
_MAGIC, _VERSION = int.from_bytes(b"fairlead"), 1
#: Fields of the header, 8 bytes each. `_WRITTEN`: bytes written since the file was made. `_HEARTBEAT`: the writer's
#: `time.monotonic`.
_MAGIC_AT, _VERSION_AT, _WRITTEN, _HEARTBEAT = range(4)
_HEADER = 64
#: Bytes of the ring. A reader that is half a ring behind counts as overtaken.
RING = 2 << 20
#: MiB for the files of one replica: the ring, and its snapshot.
ROOM_MIB = 3
_BEHIND, _LARGEST = RING // 2, RING // 4
#: Errors of a directory without room for another file: the disk, the quota or the permitted size of a file.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: Before each record: its kind, 0, the length of its content, the checksum of kind and content, when it was written.
_RECORD = Layout("<HHIId")
BATCH, SNAPSHOT, WANTED, GONE, _PADDING = range(5)
#: Seconds between two reads of other replicas' files while this replica handles no event.
LOOK_S = 0.1


class FileReplicas(Replicas):
    """Shares facts through files. Events for the pipeline must go through `feed`, which first feeds the facts of other
    replicas."""

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
        await self._look()
        self._task = asyncio.create_task(self._keep_looking())
        await self._joined()

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
        """Read the facts of other replicas, handle the event, and have the resulting facts written."""
        try:
            self._read()
        except Exception as error:  # the event must be handled even if other replicas' facts cannot be read
            log.error("could not read what other replicas wrote", exc=error)
        self._feed(event)
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._write_facts)

    # ---- regularly ----

    async def _keep_looking(self) -> None:
        while True:
            await set_within(self._soon, self._settings.interval if self._facts.waits() else LOOK_S)
            self._soon.clear()
            await self._look()

    def _look_soon(self) -> None:
        self._soon.set()

    async def _look(self) -> None:
        """Do everything that is not done for each event: find replicas, read, write, ask for snapshots."""
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
                await self._write_snapshot()
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
        """Write our heartbeat, and find replicas that are new, died, or hang. Raises `OSError` or `ValueError`."""
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
        """Make our own file, for the first time or because it was deleted. Raises `OSError`."""
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
            return  # the file is being made or deleted, or has another format
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
        """Delete the files of a replica, unless it has made new ones."""
        path = self._directory / f"{name}{FACTS}"
        with suppress(OSError):
            if ring.is_file(path):
                snapshot = path.with_suffix(SNAPSHOTS)
                for file in (path, snapshot, unfinished(snapshot)):
                    file.unlink(missing_ok=True)

    # ---- writing ----

    def _write_facts(self) -> None:
        self._due = False
        if self._own is not None:
            batch = self._facts.batch()
            if batch and self._write(BATCH, batch):
                self.counts.sent += 1
                self.counts.sent_bytes += len(batch)

    def _write(self, kind: int, payload: bytes) -> bool:
        """Write a record. False = it is too large, so a snapshot will follow instead, or we have no file."""
        if self._own is None:
            return False
        written = self._own.write(kind, payload)
        if not written:
            self.counts.dropped += 1
            self._owes_snapshot = True
        return written

    async def _write_snapshot(self) -> None:
        self._write_facts()  # batches that the snapshot includes must be read before it
        snapshot = await self._snapshot()
        write_whole(self._directory / f"{self.origin}{SNAPSHOTS}", (snapshot,), on_disk=False)
        self._write(SNAPSHOT, b"")
        self._owes_snapshot, self._snapshot_at = False, time.monotonic()
        self.counts.snapshots_sent += 1
        self.counts.sent_bytes += len(snapshot)

    # ---- reading ----

    def _read(self) -> None:
        if self._reading:  # called again: the facts that are being read led to a new event
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
            lag_s = max(time.monotonic() - written_at, 0.0)
            self._delayed(lag_s)
            if kind == BATCH:
                self._received(name, peer, payload, lag_s, at_once=True)
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
    """A file of facts, mapped into memory. `position`: bytes written, or for a reader bytes read, since the file was
    made. `lost`: some records could not be read."""

    def __init__(self, descriptor: int, writes: bool) -> None:
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _HEADER + RING, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0))
        header = memoryview(self._memory)[:_HEADER]
        # Aligned 8 bytes are read and written in one access, so a reader never sees half of a number.
        self._numbers, self._times = header.cast("Q"), header.cast("d")
        self.position = self._numbers[_WRITTEN]
        self.lost = False

    @classmethod
    def make(cls, path: Path) -> "_Ring":
        """Make a file for writing. Raises `OSError`."""
        new = path.with_suffix(".making")
        descriptor = lock(new, f"another replica makes {new}")
        try:
            # Write all bytes: a full disk is an error here. In a file that was only extended, it would kill the
            # process later, when it writes to the mapped memory. A write that fills the disk is only cut short.
            left = _HEADER + RING
            while left:
                left -= os.write(descriptor, bytes(left))
            ring = cls(descriptor, writes=True)
        except BaseException as error:
            new.unlink(missing_ok=True)
            os.close(descriptor)
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                raise OSError(f"{error.strerror}: each worker needs {ROOM_MIB} MiB there") from None
            raise
        ring._numbers[_MAGIC_AT], ring._numbers[_VERSION_AT] = _MAGIC, _VERSION
        ring.heartbeat = time.monotonic()
        new.rename(path)
        return ring

    @classmethod
    def open(cls, path: Path) -> "_Ring":
        """Open another replica's file for reading. Raises `OSError`, or `ValueError` for another kind of file."""
        # Without O_NONBLOCK, opening a named pipe would wait for somebody who writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
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
        """Whether `path` is the mapped file. Raises `OSError`."""
        return os.path.samestat(os.fstat(self._descriptor), path.stat())

    def is_left(self) -> bool:
        """Whether the writer of the file has ended: its lock is free."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def write(self, kind: int, payload: bytes) -> bool:
        """Write a record. False = it is too large."""
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
        """Return the records since the last call: kind, content, and when each was written (`time.monotonic`). Sets
        `lost` if some cannot be read."""
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
    """The bytes that a record with `length` bytes of content takes."""
    return (_RECORD.size + length + 7) & ~7
