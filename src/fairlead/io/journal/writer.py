"""The thread that makes blocks of what was taken down, and writes them.

Rules
* It wakes every `TURN` seconds, encodes a few records at a time and lets go of the interpreter's lock in between: the
  event loop never waits for more than one small slice (0.2 ms).
* A block is written when it is large enough or `flush` seconds old. What was written survives the process; at most the
  last `flush` seconds are lost with it.
* A record that cannot be encoded, a disk that is full or fails, cost those records: counted, said in the journal where
  they are missing, and logged once until it works again.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from fairlead.io.journal.directory import Directory, Full
from fairlead.io.journal.recorder import Recorder
from fairlead.model.decision import DecisionRecord, OutcomeRecord
from fairlead.model.events import EndpointDown, EndpointUp, ModelsChanged, ShadowsJudged
from fairlead.wire.journal.blocks import block
from fairlead.wire.journal.details import Packer
from fairlead.wire.journal.records import DECIDED, DETAIL, ENDED, LOST, SEGMENT, Lost, Segment, encode, joined
from fairlead.wire.journal.short import decided, ended, sampled

TURN = 0.05
#: Records per slice; bytes after which a block is closed.
_SLICE = 16
_BLOCK = 256 << 10
#: Seconds that the last records get to reach the disk when the process ends.
_STOPPED_AFTER = 5.0


class Writer:
    """`start()`, then `close()`. `head`: the first segment's; its roster is kept up to date for later ones."""

    def __init__(
        self,
        recorder: Recorder,
        directory: Directory,
        head: Segment,
        *,
        flush_s: float = 0.25,
        fsync: str = "never",
        on_trouble: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._recorder = recorder
        self._directory = directory
        self._head = head
        self._flush_s = flush_s
        self._fsync = fsync
        self._on_trouble = on_trouble
        self._endpoints = {endpoint.id: endpoint for endpoint in head.endpoints}
        self._models = head.models
        self._scheduling = head.scheduling
        self._packer = Packer()
        self._encoded: list[bytes] = []
        self._bytes = 0
        self._began = 0.0
        self._synced = 0.0
        self._missing = 0
        self._troubled = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)

    def start(self) -> None:
        """Raises `OSError` when the directory cannot be written."""
        self._begin()
        self._thread.start()

    def close(self) -> None:
        """Write what was taken down so far, and end."""
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
        """One round of the thread. `last`: everything is written now."""
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

    def _add(self, at: float, what: Any) -> None:
        kind = type(what)
        if kind is DecisionRecord:
            self._put(DECIDED, at, decided(what))
            if what.trace is not None and sampled(what.request.id, self._head.sample):
                self._put(DETAIL, at, self._packer.pack(what))
        elif kind is OutcomeRecord:
            self._put(ENDED, at, ended(what))
        elif kind is tuple:
            name, body = what
            if name != LOST:
                self._scheduling = body
            self._put(name, at, body)
        elif kind is not ShadowsJudged:  # it changes nothing
            self._note(what)
            self._put(kind.__name__, at, what)

    def _note(self, event: Any) -> None:
        """Keep up with what a later segment must begin with."""
        if isinstance(event, EndpointUp):
            self._endpoints[event.endpoint.id] = event.endpoint
        elif isinstance(event, EndpointDown):
            self._endpoints.pop(event.endpoint_id, None)
        elif isinstance(event, ModelsChanged):
            self._models = event

    def _put(self, kind: str, at: float, body: Any) -> None:
        try:
            encoded = encode((kind, at, body))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            self._trouble(f"a {kind} cannot be written: {error}", 1)
            return
        if not self._encoded:
            self._began = time.monotonic()
        self._encoded.append(encoded)
        self._bytes += len(encoded)

    def _write(self) -> None:
        """What has come together becomes a block."""
        encoded, self._encoded, self._bytes = self._encoded, [], 0
        self._packer = Packer()
        if self._missing:
            encoded.insert(0, encode((LOST, 0.0, Lost(self._missing))))
        data = block(joined(encoded, len(encoded)))
        if not self._try(self._store, data):
            self._missing += len(encoded) - bool(self._missing)
            self._recorder.counts.unwritten += len(encoded)
            return
        self._missing = 0
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
            self._begin()
        self._directory.write(data)

    def _begin(self) -> None:
        first = self._directory.number == 0
        head = Segment(
            run=self._head.run,
            number=self._directory.number,
            epoch=self._head.epoch,
            scheduling=self._scheduling,
            chance=self._head.chance if first else None,
            endpoints=tuple(self._endpoints.values()),
            models=self._models,
            beside=self._head.beside,
            sample=self._head.sample,
        )
        self._directory.begin(block(joined([encode((SEGMENT, 0.0, head))], 1)))
        self._recorder.counts.segments += 1

    def _try(self, act: Callable[..., object], *args: Any) -> bool:
        try:
            act(*args)
        except Full:
            self._trouble("it is as large as it may be, and writing ends", 0)
            return False
        except OSError as error:
            self._recorder.counts.errors += 1
            self._trouble(str(error), 0)
            return False
        return True

    def _trouble(self, text: str, missing: int) -> None:
        self._missing += missing
        self._recorder.counts.unwritten += missing
        if not self._troubled:
            self._troubled = True
            self._on_trouble(text)
