"""One publisher's batches, put in order: what is applied, what is missing, whether the engine was restarted.

Theory
* A publisher numbers its batches from 0 (or 1) after every start and says nothing while idle. Batches arrive in order;
  one that is missing was dropped on the way, or was sent while nobody listened.
* The number alone does not tell a restart from a gap: a restarted engine may be further on than the old one was. So a
  replay always asks from the last batch we know, and compares its time stamp. Another one there, or none: restarted.
* While something is missing and can be replayed, live batches wait (in ZMQ's queue): blocks are counted by copies, and
  removals must not overtake stores. If it cannot be had, what follows is used all the same, as *provisional* knowledge:
  a long-lived engine whose history is cut off would otherwise never be known at all.

Rules
* `step` does a bounded piece of work (128 blocks) and returns whether there is more. Nothing else takes longer.
* Pure: sockets and time belong to the caller. `wanted` says from where a replay should start.
"""

from collections.abc import Iterator
from enum import Enum, auto

from msgspec import Struct

from fairlead.core.kv.cache import RankCache
from fairlead.core.kv.events import KvEvent, apply
from fairlead.core.kv.index import KvIndex
from fairlead.pool.kv_events.wire import Batch, BatchDecoder, Frames

#: How often a replay that has a hole is asked for again.
_RETRIES = 1
_LAST = object()


class Count(Struct):
    """Batches, unless it says otherwise."""

    batches: int = 0
    events: int = 0
    bad_events: int = 0
    #: What the last of them was.
    bad_reason: str = ""
    bad_batches: int = 0
    duplicates: int = 0
    replayed: int = 0
    #: Missing for good.
    lost: int = 0
    gaps: int = 0
    restarts: int = 0
    replays: int = 0
    failed_replays: int = 0


class Sync(Enum):
    """`LIVE`: batches are applied as they come. `WANTED`, `REPLAYING`: live ones wait."""

    LIVE = auto()
    WANTED = auto()
    REPLAYING = auto()


class Feed:
    """Everything about one rank of one endpoint that lies between sockets and index."""

    def __init__(self, index: KvIndex, cache: RankCache, can_replay: bool) -> None:
        self.cache = cache
        self.count = Count()
        self.sync = Sync.LIVE
        #: Where a replay should start, while `sync` is `WANTED`.
        self.wanted = 0
        self.can_replay = can_replay
        #: A replay that was wanted could not be had.
        self.unsure = False
        #: Sequence and time stamp of the last batch that was taken; -1 = none.
        self.last = -1
        self.last_ts = 0.0
        self._index = index
        self._decoder = BatchDecoder()
        self._waiting: tuple[Frames, Batch] | None = None
        self._events: Iterator[KvEvent | None] | None = None
        self._batch: Batch | None = None
        self._steps: Iterator[int] | None = None
        self._reconnected = self._resumed = False
        #: A replay is needed after the one that is under way.
        self._again = False
        #: For which waiting batch, and after which one, a replay was asked for: once is enough.
        self._asked = (-1, -1)
        self._retries = 0
        #: The rest of this replay is of no use.
        self._spoiled = False
        #: Time stamp of the first batch of this life of the engine that was applied.
        self._life_ts = 0.0
        #: The batch before the one that is being applied.
        self._before = (-1, 0.0)
        if can_replay:
            self._want(0)

    # ---------------------------------------------------------------- input

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do without new input."""
        return self._events is not None or (self._waiting is not None and self.sync is Sync.LIVE)

    @property
    def hungry(self) -> bool:
        """Whether a live batch may be given now."""
        return self.sync is Sync.LIVE and self._waiting is None and self._events is None

    def resume(self, last: int, ts: float) -> None:
        """What the index holds of this rank came from a snapshot, and is true up to that batch."""
        self._note(last, ts)
        self._life_ts = ts
        self.cache.heard = self._resumed = True
        self.connection_lost()
        if self._reconnected and self.can_replay:
            self._want(last)

    @property
    def applied(self) -> tuple[int, float]:
        """Sequence and time stamp of the last batch that was applied to its end; (-1, 0) = none is known."""
        return (self.last, self.last_ts) if self._events is None else self._before

    def live(self, frames: Frames, batch: Batch | None = None) -> None:
        """A batch came. Only when `hungry`. `batch`: if it was decoded already."""
        decoded = batch or self._decode(frames)
        if decoded is not None:
            self._waiting = frames, decoded
            self._admit()

    def unreadable(self) -> None:
        """Something came that is no batch, or too large for one."""
        self.count.bad_batches += 1

    def connection_lost(self) -> None:
        """What comes next may be of another life of the engine."""
        self._reconnected = self.last >= 0

    def connected(self) -> None:
        """Fill what was sent before we were heard, if that is possible: later nothing would tell of it."""
        if not self.can_replay:
            return
        if self.sync is Sync.LIVE:
            self._want(self.last)
        else:
            self._again = True

    def gone(self) -> None:
        """The rank is no more: drop what is under way."""
        self._events = self._steps = self._waiting = None

    # ---------------------------------------------------------------- replay

    def replay_begins(self) -> None:
        self.sync = Sync.REPLAYING
        self._spoiled = False
        self.count.replays += 1

    def replayed(self, frames: Frames) -> None:
        """A reply came; only while nothing is being applied (`busy` is false)."""
        if self._spoiled:
            return
        batch = self._decode(frames)
        if batch is None:
            # Its place in the sequence is known, so it is lost, but no gap.
            self._note(frames.sequence, self.last_ts)
            self.count.lost += 1
            return
        number = frames.sequence
        if number == self.last and batch.ts == self.last_ts:
            self._reconnected = False
            self.cache.provisional &= not self._resumed  # the snapshot is of this life
            self._resumed = False
            return
        if number <= self.last and batch.ts <= self.last_ts:
            self.count.duplicates += 1
            return
        if number <= self.last or (self.last >= 0 and self._reconnected):
            # Not the batch that we know: another life. Its beginning is asked for once this replay is over.
            self._restart()
            self._spoiled = True
            return
        if self._waiting is not None and number >= self._waiting[0].sequence:
            # From there on live batches are at hand, which may be more than what the publisher still has.
            self._spoiled = True
            return
        if self.last >= 0 and number > self.last + 1 and self._retries < _RETRIES:
            self._retries += 1
            self._want(self.last)
            self._spoiled = True
            return
        self.count.replayed += 1
        self._take(frames, batch)

    def replay_ends(self, complete: bool) -> None:
        """The end marker came, or (`complete` false) nothing more will come."""
        if not complete:
            self.count.failed_replays += 1
            if self.sync is Sync.REPLAYING:
                self._want(self.last)
        if self.sync is Sync.WANTED:
            return
        if self._reconnected:
            # The engine has not even the batch that we know: it is another life, and its beginning is missing.
            self._restart()
            return
        self.sync = Sync.LIVE
        self.unsure = False
        self._retries = 0
        if self._again:
            self._again = False
            self._want(self.last)

    def give_up(self) -> None:
        """No replay can be had: go on without what is missing, until `retry`."""
        self.sync = Sync.LIVE
        self.unsure = True

    def retry(self) -> None:
        """Some time after `give_up`: perhaps it works now."""
        if self.unsure and self.sync is Sync.LIVE:
            self._want(self.last)

    def _want(self, start: int) -> None:
        self.sync = Sync.WANTED
        self.wanted = max(0, start)

    # ---------------------------------------------------------------- work

    def step(self, now: float) -> bool:
        """Do some of what is under way."""
        if self._steps is not None:
            self._guarded(now)
            return True
        if self._events is not None:
            event = next(self._events, _LAST)
            if event is _LAST:
                self._finish()
            elif isinstance(event, KvEvent):
                self.count.events += 1
                self._guarded(now, event)
            return True
        if self._waiting is not None and self.sync is Sync.LIVE:
            self._admit()
            return self._events is not None
        return False

    def _guarded(self, now: float, event: KvEvent | None = None) -> None:
        try:
            if event is not None:
                self._steps = apply(self._index, self.cache, event, now)
            elif self._steps is not None and next(self._steps, None) is None:
                self._steps = None
        except ValueError as error:
            self._steps = None
            self.cache.told.malformed += 1
            self.count.bad_events += 1
            self.count.bad_reason = str(error)

    def _finish(self) -> None:
        assert self._batch is not None
        self.count.bad_events += self._batch.bad
        self.count.bad_reason = self._batch.bad_reason or self.count.bad_reason
        self.cache.told.malformed += self._batch.bad
        self._events = self._batch = None

    def _decode(self, frames: Frames) -> Batch | None:
        try:
            return self._decoder.decode(frames.payload)
        except ValueError:
            self.count.bad_batches += 1
            return None

    def _admit(self) -> None:
        """Decide about the batch that waits: apply it, drop it, or let it wait for a replay."""
        assert self._waiting is not None
        frames, batch = self._waiting
        number = frames.sequence
        if self.last < 0:
            # 0 is vLLM's first number, 1 that of llm-d's simulator.
            if number > 1 and self._ask(number):
                return
            if number > 1:
                self.cache.provisional = True
        elif number <= self.last:
            if batch.ts <= self.last_ts:
                self.count.duplicates += 1
                self._waiting = None
                return
            self._restart()
            if self.sync is Sync.LIVE:
                self._admit()
            return
        elif number > self.last + 1:
            if self._ask(number):
                return
            if self._reconnected:
                # Nothing tells whether it is the same life. To believe it would credit blocks that may not be there.
                self._restart()
                if self.sync is Sync.LIVE:
                    self._admit()
                return
            self._missed(number - self.last - 1)
        self._waiting = None
        self._take(frames, batch)

    def _ask(self, number: int) -> bool:
        """Want a replay for a batch that waits, unless one has just failed to bring what is missing."""
        if not self.can_replay or self._asked == (number, self.last):
            return False
        self._asked = (number, self.last)
        self._want(self.last)
        return True

    def _take(self, frames: Frames, batch: Batch) -> None:
        number = frames.sequence
        if self.last < 0 and number > 1:
            self.cache.provisional = True
        elif 0 <= self.last < number - 1 and self.sync is Sync.REPLAYING:
            self._missed(number - self.last - 1)
        if self.last < 0:
            self._life_ts = batch.ts
        self._before = (self.last, self.last_ts)
        self._note(number, batch.ts)
        self._reconnected = False
        self._asked = (-1, -1)
        self.cache.heard = True
        self.count.batches += 1
        self._batch = batch
        self._events = batch.each()

    def _note(self, number: int, ts: float) -> None:
        self.last, self.last_ts = number, ts

    def _missed(self, batches: int) -> None:
        self.count.gaps += 1
        self.count.lost += batches
        self.cache.provisional = True

    def _restart(self) -> None:
        """Another life of the engine: nothing of the last one is there any more."""
        self.count.restarts += 1
        self.cache.lives += 1
        self._events = self._steps = self._batch = None
        self._index.clear_rank(self.cache)
        self.cache.provisional = False
        self._note(-1, 0.0)
        self._reconnected = False
        self._retries = 0
        if self.can_replay:
            self._want(0)
