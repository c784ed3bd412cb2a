"""The directory of segments, and the thread that packs recorded items into blocks and writes them there.

Rules of the thread
* It wakes every `TURN` seconds, encodes a few records at a time and releases the interpreter lock in between. So the
  event loop never waits for more than one small slice (0.2 ms).
* A block is written when it is large enough or `flush` seconds old. Written blocks survive the process; if it is
  killed, at most the last `flush` seconds are lost.
* Records that cannot be encoded, or not be written because the disk is full or fails, are lost and counted. The journal
  says where they are missing, and the log reports it once until writing works again. The same applies at the start,
  and while another scheduler still writes there.
"""

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from fairlead.compat.recorded import record
from fairlead.core.endpoint import NOT_READ
from fairlead.core.events import AdaptersListed, EndpointDown, EndpointUp, ModelsChanged, Reconfigured
from fairlead.core.instructions import AdoptConfiguration
from fairlead.core.records import DecisionRecord, OutcomeRecord
from fairlead.server.files import Held, lock
from fairlead.server.journal.blocks import MAGIC, block, decided, ended, sampled
from fairlead.server.journal.recorder import Recorder
from fairlead.server.journal.records import (
    DECIDED,
    DETAIL,
    ENDED,
    LOST,
    POLICY,
    SEGMENT,
    WORKER,
    Lost,
    Packer,
    Segment,
    encode,
    joined,
)

# The directory of segments: one segment is open, and all segments together are never larger than the limit.
#
# Rules
# * Old segments are deleted before a write, never after it, so the directory is never too large. Segments of former
#   runs are included, and are deleted first.
# * Files can be read by their owner only: they name models, tenants and sessions.
# * Only one process writes: it holds a lock until it ends. Two processes would delete each other's segments. The next
#   process serves without a journal until then: in a rolling update the old pod ends only after the new one is ready.
# * A name has the time and the run: `20261121T101530-3f2a9c01-000000.journal`, so that names sort by age. The time of a
#   run is always later than that of the run before, even if the system's clock was ahead then (`label`).

SUFFIX = ".journal"
_TIME = "%Y%m%dT%H%M%S"
#: Errors of the disk.
_DISK_FAILS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})
#: A segment is at most this part of the limit, so that deleting one leaves most of the journal.
_LEAST_SEGMENTS = 4


def _may_pass(error: OSError) -> bool:
    """Whether the error may pass without a change of the configuration."""
    return isinstance(error, Held) or error.errno in _DISK_FAILS


def segments(path: str) -> list[Path] | None:
    """The segments in the directory, oldest first; `None` = no path is set."""
    return sorted(Path(path).glob(f"*{SUFFIX}")) if path else None


def former_workers(path: Path, workers: int) -> list[Path]:
    """The directories that the first worker's directory has of workers that this scheduler does not have."""
    numbers = {directory: directory.name.removeprefix(WORKER) for directory in path.glob(f"{WORKER}*")}
    return [directory for directory, number in numbers.items() if number.isdecimal() and int(number) >= workers]


def label(path: Path, run: str, now: float) -> str:
    """The beginning of the file names of a run that starts at `now` (seconds since 1970)."""
    began = datetime.fromtimestamp(int(now), UTC).replace(tzinfo=None)
    for old in segments(str(path)) or ():
        with suppress(ValueError, OverflowError):  # not a name of ours
            began = max(began, datetime.strptime(old.name.partition("-")[0], _TIME) + timedelta(seconds=1))
    return f"{began.strftime(_TIME)}-{run}"


class Full(Exception):
    """The limit is reached, and nothing may be deleted."""


class Directory:
    """The directory of segments. Sizes are in bytes. `keep_oldest`: never delete a segment; when the limit is reached,
    raise `Full`. `label`: the beginning of file names. `former`: directories of former workers; segments in those whose
    lock can be taken count, and are deleted, like those of former runs. Raises `OSError` if the directory cannot be
    used; errors that may pass (of the disk, or `Held`) are raised only at `begin` and later."""

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        segment_bytes: int,
        keep_oldest: bool,
        label: str,
        former: Sequence[Path] = (),
    ) -> None:
        self.path = path
        self._former = former
        self._max = max_bytes
        self._segment = min(segment_bytes, max_bytes // _LEAST_SEGMENTS)
        self._keep_oldest = keep_oldest
        self._label = label
        self._file = -1
        self._size = 0
        #: The number of segments that this run has begun.
        self.number = 0
        self._sizes: dict[Path, int] = {}
        self._current: Path | None = None
        #: Descriptors that hold the locks: of the directory itself, then of former workers' directories.
        self._locks: list[int] = []
        try:
            self._open()
        except OSError as error:
            if not _may_pass(error):
                raise

    def _open(self) -> None:
        """Make the directory, take the locks, and note the segments of former runs."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        held = "another scheduler writes its journal there; each needs its own directory"
        self._locks.append(lock(self.path / ".lock", held))
        owned = [self.path]
        for former in self._former:
            with suppress(OSError):  # a scheduler with more workers may still write there
                self._locks.append(lock(former / ".lock", held))
                owned.append(former)
        try:
            there = [old for where in owned for old in segments(str(where)) or ()]
            self._sizes = {old: old.stat().st_size for old in sorted(there, key=lambda old: old.name)}
        except OSError:
            self.release()
            raise

    @property
    def size(self) -> int:
        """The bytes of all segments."""
        return sum(self._sizes.values())

    def wants_segment(self, size: int) -> bool:
        """Whether a block of this size should begin a new segment."""
        return self._file < 0 or (self._size + size > self._segment and self._size > len(MAGIC))

    def begin(self, head: bytes) -> None:
        """Begin a new segment with the block `head`. Raises `Full` or `OSError`. If the disk fails, the incomplete file
        is removed."""
        self.close()
        if not self._locks:
            self._open()
        self._make_room(len(MAGIC) + len(head))
        path = self.path / f"{self._label}-{self.number:06d}{SUFFIX}"
        self._file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._current, self._size = path, 0
        self._sizes[path] = 0
        try:
            self._write(MAGIC + head)
        except OSError:
            self.close()
            with suppress(OSError):  # a file that cannot be removed is overwritten by the next attempt
                path.unlink(missing_ok=True)
            del self._sizes[path]
            raise
        self.number += 1

    def write(self, block: bytes) -> None:
        """Append a block to the segment. Raises `Full` or `OSError`."""
        self._make_room(len(block))
        self._write(block)

    def sync(self) -> None:
        if self._file >= 0:
            os.fsync(self._file)

    def removed(self) -> bool:
        """Whether somebody has removed, moved or cut the present segment, for example to free the disk. If so, release
        the lock: the next `begin` makes the directory again, in case that was removed too."""
        if self._current is None:
            return False
        try:
            there = os.stat(self._current)
            gone = there.st_size < self._size or not os.path.samestat(there, os.fstat(self._file))
        except OSError as error:  # of others, a write tells
            gone = error.errno in (errno.ENOENT, errno.ENOTDIR)
        if gone:
            self.release()
        return gone

    def release(self) -> None:
        """Close the segment and release the locks."""
        self.close()
        while self._locks:
            os.close(self._locks.pop())

    def close(self) -> None:
        """Close the present segment."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._current = None

    def _write(self, data: bytes) -> None:
        """Write all of `data`. If the disk takes only a part, the file has an incomplete block, which readers skip."""
        assert self._current is not None
        left = memoryview(data)
        while left:
            written = os.write(self._file, left)
            self._size += written
            self._sizes[self._current] += written
            left = left[written:]

    def _make_room(self, size: int) -> None:
        total = self.size
        if size > self._max - len(MAGIC):
            raise Full
        while total + size > self._max:
            oldest = next((path for path in self._sizes if path != self._current), None)
            if oldest is None or self._keep_oldest:
                raise Full
            oldest.unlink(missing_ok=True)
            total -= self._sizes.pop(oldest)


TURN = 0.05
#: Records that are encoded before the interpreter lock is released; a block with this many bytes is written.
_SLICE = 16
_BLOCK = 256 << 10
#: Seconds that writing the last records may take when the process ends.
_STOPPED_AFTER = 5.0


class Writer:
    """The thread that writes. Call `start()`, and `close()` at the end. `head`: the head of the first segment. Heads of
    later segments have the endpoints and models of their time. `epoch` is called for each head. `fsync`: `never`,
    `second` or `always`. `on_trouble` receives the reason when writing fails."""

    def __init__(
        self,
        recorder: Recorder,
        directory: Directory,
        head: Segment,
        *,
        epoch: Callable[[], float] = float,
        flush_s: float = 0.25,
        fsync: str = "never",
        on_trouble: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._recorder = recorder
        self._directory = directory
        self._head = head
        self._epoch = epoch
        self._flush_s = flush_s
        self._fsync = fsync
        self._on_trouble = on_trouble
        self._endpoints = {endpoint.id: endpoint for endpoint in head.endpoints}
        self._models = head.models
        self._listed: dict[str, AdaptersListed] = {}
        self._scheduling = head.scheduling
        self._packer = Packer()
        self._encoded: list[bytes] = []
        self._bytes = 0
        self._began = 0.0
        self._synced = 0.0
        self._missing = 0
        #: The number of records in the last block that was written.
        self._newest = 0
        self._troubled = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)

    def start(self) -> None:
        """Begin the first segment and start the thread. Raises `OSError` if the directory cannot be used. If the disk
        fails, another scheduler writes there, or the journal has reached its limit, the scheduler starts all the same,
        and `turn` tries again."""
        try:
            self.begin()
        except (OSError, Full) as error:
            if isinstance(error, OSError) and not _may_pass(error):
                raise
            self._failed(error)
        self._thread.start()

    def close(self) -> None:
        """Write everything that was recorded so far, within `_STOPPED_AFTER` seconds, and stop."""
        self._recorder.close()
        self._stop.set()
        self._thread.join(_STOPPED_AFTER)

    # ---- the thread ----

    def _run(self) -> None:
        while not self._stop.wait(TURN):
            self.turn(False)
        self.turn(True)
        self._directory.release()

    def turn(self, last: bool) -> None:
        """One round of the thread. `last`: write everything now."""
        waiting = self._recorder.waiting
        while waiting:
            for _ in range(min(len(waiting), _SLICE)):
                self._add(*waiting.popleft())
            if self._bytes >= _BLOCK:
                self._write()
            time.sleep(0)
        now = time.monotonic()
        if self._encoded and (last or now - self._began >= self._flush_s):
            self._write()
        if last and self._fsync != "never":
            self._try(self._directory.sync)

    def _add(self, now: float, what: Any) -> None:
        kind = type(what)
        if kind is DecisionRecord:
            self._put(DECIDED, now, decided(what))
            if what.trace is not None and sampled(what.request.id, self._head.sample):
                self._put(DETAIL, now, self._packer.pack(what))
        elif kind is OutcomeRecord:
            self._put(ENDED, now, ended(what))
        elif kind is tuple:
            name, body = what
            self._put(name, now, body)
        elif kind is Reconfigured:
            self._put(POLICY, now, record(what.document))
        elif kind is AdoptConfiguration:
            self._scheduling = record(what.document)
        else:
            self._note(what)
            self._put(kind.__name__, now, what)

    def _note(self, event: Any) -> None:
        """Update the endpoints and models for the head of the next segment."""
        if isinstance(event, EndpointUp):
            endpoint, before = event.endpoint, self._endpoints.get(event.endpoint.id)
            if event.listing and (before is None or before.address != endpoint.address):
                self._listed[endpoint.id] = AdaptersListed(endpoint.id, None, NOT_READ)
            self._endpoints[endpoint.id] = endpoint
        elif isinstance(event, EndpointDown):
            self._endpoints.pop(event.endpoint_id, None)
            self._listed.pop(event.endpoint_id, None)
        elif isinstance(event, AdaptersListed):
            self._listed[event.endpoint_id] = event
        elif isinstance(event, ModelsChanged):
            self._models = event

    def _put(self, kind: str, now: float, body: Any) -> None:
        try:
            encoded = encode((kind, now, body))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            self._missing += 1
            self._recorder.counts.unencoded += 1
            self._trouble(f"a {kind} cannot be encoded: {error}", 0)
            return
        if not self._encoded:
            self._began = time.monotonic()
        self._encoded.append(encoded)
        self._bytes += len(encoded)

    def _write(self) -> None:
        """Write the collected records as a block."""
        encoded, self._encoded, self._bytes = self._encoded, [], 0
        self._packer = Packer()
        if self._directory.removed():
            self._trouble("its segment was removed, moved or cut; a new one begins", self._newest)
        if self._missing:
            encoded.insert(0, encode((LOST, 0.0, Lost(self._missing))))
        data = block(joined(encoded, len(encoded)))
        if not self._try(self._store, data):
            self._missing += len(encoded) - bool(self._missing)
            self._recorder.counts.unwritten += len(encoded)
            return
        self._missing, self._newest = 0, len(encoded)
        self._troubled = False
        counts = self._recorder.counts
        counts.records += len(encoded)
        counts.bytes += len(data)
        counts.size = self._directory.size
        now = time.monotonic()
        if self._fsync == "always" or (self._fsync == "second" and now - self._synced >= 1.0):
            self._synced = now
            self._try(self._directory.sync)

    def _store(self, data: bytes) -> None:
        if self._directory.wants_segment(len(data)):
            self.begin()
        self._directory.write(data)

    def begin(self) -> None:
        """Begin a segment. `start` does this; a caller that runs `turn` without the thread must call it first."""
        first = self._directory.number == 0
        head = replace(
            self._head,
            number=self._directory.number,
            epoch=self._epoch(),
            scheduling=self._scheduling,
            chance=self._head.chance if first and not self._missing else None,
            endpoints=tuple(self._endpoints.values()),
            models=self._models,
            listed=tuple(self._listed.values()),
        )
        self._directory.begin(block(joined([encode((SEGMENT, 0.0, head))], 1)))
        self._recorder.counts.segments += 1

    def _try(self, act: Callable[..., object], *args: Any) -> bool:
        try:
            act(*args)
        except (OSError, Full) as error:
            self._failed(error)
            return False
        return True

    def _failed(self, error: OSError | Full) -> None:
        if isinstance(error, Full):
            self._trouble("it has reached its size limit, and nothing more is written", 0)
        else:
            self._recorder.counts.errors += 1
            self._trouble(str(error), 0)

    def _trouble(self, text: str, missing: int) -> None:
        self._missing += missing
        self._recorder.counts.unwritten += missing
        if not self._troubled:
            self._troubled = True
            self._on_trouble(text)
