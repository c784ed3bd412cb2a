"""Records the events that the pipeline receives and its answers, for the thread that writes the journal.

Rules
* The event loop only appends a tuple to a deque (which is safe between two threads). It never waits for the disk, the
  thread or a lock. If the thread does not keep up, or the disk fails, records are dropped and counted; the journal says
  where (`lost`).
* Events and records never change once they are made, so the thread may read them later.
* The pipeline's clock stands still while it handles an event (`StillClock`). So one event has one time, and a replay
  with the same times reaches the same state.
"""

from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any

from msgspec import Struct

from fairlead.core.clock import Clock, TimerHandle
from fairlead.core.events import Event
from fairlead.core.instructions import AdoptConfiguration, Instruction
from fairlead.core.records import DecisionRecord, OutcomeRecord
from fairlead.core.scheduler import Pipeline
from fairlead.gateway.driver import Driver, Handlers, Observer
from fairlead.server.journal.records import LOST, Lost

#: At most this many records wait for the thread: some seconds of full load.
MAX_WAITING = 20_000


class Counts(Struct):
    """Counts since the start. Only one thread changes each of them; any thread may read them."""

    #: Records lost because too many were waiting; because the disk failed or a segment was removed; and because they
    #: have a value that cannot be encoded.
    dropped: int = 0
    unwritten: int = 0
    unencoded: int = 0
    records: int = 0
    bytes: int = 0
    segments: int = 0
    #: Present size of the directory in bytes.
    size: int = 0
    #: Failures of the disk.
    errors: int = 0


class StillClock:
    """A clock that shows `now` until `now` is set again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.now = clock.time()

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[..., object], /, *args: Any) -> TimerHandle:
        return self._clock.call_at(when, callback, *args)


class Recorder:
    """The event loop's side of the journal. `waiting`: items (clock seconds, record) in their order."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self.waiting: deque[tuple[float, Any]] = deque()
        self.counts = Counts()
        self._max = max_waiting
        self._gap = 0
        self._closed = False

    def take(self, now: float, what: Any) -> None:
        waiting = self.waiting
        if self._gap or len(waiting) >= self._max:
            self._squeeze(now, what)
        else:
            waiting.append((now, what))

    @property
    def oldest(self) -> float:
        """The clock seconds of the oldest record that waits for the thread; inf = none waits."""
        try:
            return self.waiting[0][0]
        except IndexError:
            return inf

    def close(self) -> None:
        """Record nothing from now on."""
        self._closed = True
        self._gap = 1

    def _squeeze(self, now: float, what: Any) -> None:
        """Record or drop an item while the queue is full, or after it was full."""
        if self._closed:
            return
        if len(self.waiting) >= self._max // 2:  # wait until half is free: one long gap instead of many short ones
            self._gap += 1
            self.counts.dropped += 1
            return
        self.waiting.append((now, (LOST, Lost(self._gap))))
        self.waiting.append((now, what))
        self._gap = 0


class RecordedDriver(Driver):
    """A driver that records every event, decision, outcome and adopted configuration."""

    def __init__(
        self,
        pipeline: Pipeline,
        clock: Clock,
        still: StillClock,
        observer: Observer,
        recorder: Recorder,
        handlers: Handlers | None = None,
    ) -> None:
        all_handlers = dict(handlers or {})
        adopt = all_handlers.get(AdoptConfiguration)

        def adopted(instruction: AdoptConfiguration) -> None:
            recorder.take(still.now, instruction)
            if adopt is not None:
                adopt(instruction)

        all_handlers[AdoptConfiguration] = adopted
        super().__init__(pipeline, clock, _Recorded(observer, recorder), all_handlers)
        self._still = still
        self._now = clock.time
        self._take = recorder.take
        self._handle = self._take_down

    def start(self) -> None:
        self._still.now = self._clock.time()
        super().start()

    def _take_down(self, event: Event) -> list[Instruction]:
        self._still.now = now = self._now()
        self._take(now, event)
        return self.pipeline.handle(event)


class _Recorded:
    """Passes decisions and outcomes to the recorder and to the observer."""

    def __init__(self, observer: Observer, recorder: Recorder) -> None:
        self._observer = observer
        self._recorder = recorder

    def on_decision(self, record: DecisionRecord, duration_s: float) -> None:
        self._recorder.take(record.at, record)
        self._observer.on_decision(record, duration_s)

    def on_outcome(self, record: OutcomeRecord) -> None:
        self._recorder.take(record.at, record)
        self._observer.on_outcome(record)

    def on_failure(self, instruction: str) -> None:
        self._observer.on_failure(instruction)
