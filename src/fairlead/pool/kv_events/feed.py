"""Put a publisher's batches in order: apply them, find missing batches, and detect restarts of the engine.

Theory
* A publisher numbers its batches from 0 (or 1) after every start and sends nothing while idle. Batches arrive in order.
  A missing batch was dropped on the way, or was sent while there was no subscriber.
* The number alone does not distinguish a restart from a gap, because a restarted engine may be further than before. So
  a replay always starts at the last known batch, and its timestamp is compared. If it differs or the batch is missing,
  the engine was restarted.
* While batches are missing that can be replayed, live batches wait (in ZMQ's queue): the index counts copies of blocks,
  and removals must not overtake stores. If the missing batches are not available, later batches are used anyway, as
  *provisional* knowledge. Otherwise nothing would ever be known of a long-lived engine whose history is lost.

Rules
* `step` reads an event, or stores up to 128 of its blocks, and returns whether there is more. No other method takes
  longer. An event as large as `Limits.max_batch` allows takes 1 to 10 ms to read.
* The module is pure: sockets and time belong to the caller. `wanted` is the batch at which a replay shall start.
"""

from collections.abc import Iterator
from enum import Enum, auto

from msgspec import Struct

from fairlead.core.kv.cache import RankCache
from fairlead.core.kv.events import KvEvent, apply
from fairlead.core.kv.index import KvIndex
from fairlead.core.kv.snapshot import Place
from fairlead.pool.kv_events.wire import Batch, BatchDecoder, Frames

#: How often a replay with a gap is requested again.
_RETRIES = 1
_LAST = object()


class Count(Struct):
    """Counts of batches, unless named otherwise."""

    batches: int = 0
    events: int = 0
    bad_events: int = 0
    #: Why the last bad event was bad.
    bad_reason: str = ""
    bad_batches: int = 0
    replayed: int = 0
    #: Batches that stay missing.
    lost: int = 0
    gaps: int = 0
    restarts: int = 0
    #: Connections, the first one too.
    connections: int = 0
    replays: int = 0
    failed_replays: int = 0


class Sync(Enum):
    """`LIVE`: batches are applied as they arrive. `WANTED`, `REPLAYING`: live batches wait for a replay."""

    LIVE = auto()
    WANTED = auto()
    REPLAYING = auto()


class Feed:
    """The batches of one rank of an endpoint, on their way from the sockets to the index."""

    def __init__(self, index: KvIndex, cache: RankCache, can_replay: bool) -> None:
        self.cache = cache
        self.cache.heard = self.cache.behind = False
        self.count = Count()
        self.sync = Sync.LIVE
        #: The batch at which a replay shall start, while `sync` is `WANTED`.
        self.wanted = 0
        self.can_replay = can_replay
        #: A wanted replay was given up, so blocks may be missing in the index.
        self.unsure = False
        #: Sequence and timestamp of the last batch taken; -1 = none.
        self.last = -1
        self.last_ts = 0.0
        self._index = index
        self._decoder = BatchDecoder()
        self._waiting: tuple[Frames, Batch] | None = None
        #: What waited when the connection was lost.
        self._waited: tuple[Frames, Batch] | None = None
        #: Number of the last batch in a replay that could not be read; -1 = none.
        self._unread = -1
        self._events: Iterator[KvEvent | None] | None = None
        self._batch: Batch | None = None
        self._steps: Iterator[int] | None = None
        self._reconnected = False
        #: The rank is provisional only because its blocks were loaded.
        self._unconfirmed = False
        #: Another replay is needed after the current one.
        self._replay_again = False
        #: The waiting batch for which a replay was requested, and the batch before the gap. One request is enough.
        self._asked = (-1, -1)
        self._retries = 0
        #: The rest of the current replay is ignored.
        self._spoiled = False
        if can_replay:
            self._want(0)

    # ---------------------------------------------------------------- input

    @property
    def busy(self) -> bool:
        """Whether `step` has work without new input."""
        return self._events is not None or self.held or (self._waiting is not None and self.sync is Sync.LIVE)

    @property
    def held(self) -> bool:
        """Whether no batch may begin, because the rank's blocks are being saved."""
        return self.cache.holds > 0

    @property
    def hungry(self) -> bool:
        """Whether `live` may be called now."""
        return self.sync is Sync.LIVE and self._waiting is None and self._events is None and not self.held

    def resume(self, place: Place) -> None:
        """Take note that the index was loaded from a snapshot, which is up to date to that batch."""
        self._note(place.last, place.last_ts)
        self.cache.heard = True
        self._unconfirmed = not place.provisional
        self.connection_lost()
        if self._reconnected and self.can_replay:
            self._want(place.last)

    @property
    def applied(self) -> Place | None:
        """The last batch applied; `None` = it is still being applied."""
        if self._events is not None:
            return None
        return Place(self.last, self.last_ts, self.cache.provisional and not self._unconfirmed)

    def live(self, frames: Frames, batch: Batch | None = None) -> None:
        """Take a live batch; only if `hungry`. `batch`: the decoded batch, if available."""
        decoded = batch or self._decode(frames)
        if decoded is not None:
            self._waiting = frames, decoded
            self._admit()

    def unreadable(self) -> None:
        """Count a message that is not a batch, or too large."""
        self.count.bad_batches += 1

    def connection_lost(self) -> None:
        """Take note that the connection was lost: the next batch may come from a restarted engine. Replies to a replay
        may still be the former engine's, so a current replay is asked for again."""
        self._reconnected = self.last >= 0
        self._waited = self._waiting
        if self.sync is Sync.REPLAYING:
            self._want(self.last)
            self._spoiled = True

    def connected(self) -> None:
        """Request the batches that were sent before the connection was up, if replays are possible."""
        self.count.connections += 1
        if not self.can_replay:
            return
        if self.sync is Sync.LIVE:
            self._want(self.last)
        else:
            self._replay_again = True

    def gone(self) -> None:
        """Drop all work in progress, because the rank is gone."""
        self._events = self._steps = self._waiting = None

    # ---------------------------------------------------------------- replay

    def replay_begins(self) -> None:
        self.sync = Sync.REPLAYING
        self._spoiled = False
        self.count.replays += 1

    def replayed(self, frames: Frames) -> None:
        """Take a reply of a replay; only if not `busy`."""
        if self._spoiled:
            return
        batch = self._decode(frames)
        number = frames.sequence
        if batch is None:
            if number == self._unread:  # as before, so the engine is the same
                self._reconnected = False
            elif number > self.last:
                self._missed(1)
                self._note(number, self.last_ts)
                self._unread = number
            return
        if number == self.last and batch.ts == self.last_ts:
            self._reconnected = False
            if self._unconfirmed:  # the engine has not restarted since the snapshot
                self.cache.provisional = self.cache.dropped
            self._unconfirmed = False
            return
        if number <= self.last and batch.ts <= self.last_ts:
            return
        if number <= self.last or (self.last >= 0 and self._reconnected):
            # Not the known batch: the engine was restarted. Its first batches are requested after this replay.
            self._restarted(emptied=number <= self.last)
            self._spoiled = True
            return
        if self._waiting is not None and number >= self._waiting[0].sequence:
            # The live batches from here on are waiting, and may be more than the publisher still has.
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
        """End a replay. `complete`: its end marker arrived; otherwise no more replies will arrive."""
        if not complete:
            self.count.failed_replays += 1
            if self.sync is Sync.REPLAYING:
                self._want(self.last)
        if self.sync is Sync.WANTED:
            return
        if self._reconnected:
            # The engine does not have the known batch: it was restarted, and its first batches are missing.
            self._restarted()
            return
        self._live()
        self.unsure = False
        self._retries = 0
        if self._replay_again:
            self._replay_again = False
            self._want(self.last)

    def give_up(self) -> None:
        """Continue without the missing batches, because no replay is available, until `retry`."""
        self._live()
        self.unsure = True

    def retry(self) -> None:
        """Ask for the replay again, some time after `give_up`."""
        if self.unsure and self.sync is Sync.LIVE:
            self._want(self.last)

    def _live(self) -> None:
        self.sync = Sync.LIVE
        self.cache.behind = False

    def _want(self, start: int) -> None:
        self.sync = Sync.WANTED
        self.cache.behind = True
        self.wanted = max(0, start)

    # ---------------------------------------------------------------- work

    def step(self, now: float) -> bool:
        """Do a bounded amount of work; return whether there may be more."""
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
        if self._waiting is not None and self.sync is Sync.LIVE and not self.held:
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
            self.cache.counts.malformed += 1
            self.count.bad_events += 1
            self.count.bad_reason = str(error)

    def _finish(self) -> None:
        assert self._batch is not None
        self.count.bad_events += self._batch.bad
        self.count.bad_reason = self._batch.bad_reason or self.count.bad_reason
        self.cache.counts.malformed += self._batch.bad
        self._events = self._batch = None

    def _decode(self, frames: Frames) -> Batch | None:
        try:
            return self._decoder.decode(frames.payload)
        except ValueError:
            self.count.bad_batches += 1
            return None

    def _admit(self) -> None:
        """Decide about the waiting batch: apply it, drop it, or let it wait for a replay."""
        assert self._waiting is not None
        frames, batch = self._waiting
        number = frames.sequence
        if self.last < 0:
            if number > 0 and self._ask(number):
                return
            if number > 1:  # vLLM's first number is 0, that of llm-d's simulator is 1
                self.cache.provisional = True
        elif number <= self.last:
            if batch.ts <= self.last_ts and not self._reconnected:  # sent once, so not again after the connection broke
                self._waiting = None
                return
            self._restart(emptied=True)
            if self.sync is Sync.LIVE:
                self._admit()
            return
        elif number > self.last + 1:
            if self._ask(number):
                return
            if self._reconnected:
                # It is unknown whether the engine was restarted. Trusting the index could credit lost blocks.
                self._restart()
                if self.sync is Sync.LIVE:
                    self._admit()
                return
            self._missed(number - self.last - 1)
        self._waiting = None
        self._take(frames, batch)

    def _ask(self, number: int) -> bool:
        """Ask for a replay for the waiting batch. Return false if no replay is possible, or one just failed."""
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
        self._note(number, batch.ts)
        self._reconnected = False
        self._asked = (-1, -1)
        self.cache.heard = True
        self.count.batches += 1
        self._batch = batch
        self._events = batch.each()
        self.cache.begin_batch()

    def _note(self, number: int, ts: float) -> None:
        self.last, self.last_ts = number, ts

    def _missed(self, batches: int) -> None:
        self.count.gaps += 1
        self.count.lost += batches
        self.cache.provisional = True
        self._unconfirmed = False

    def _restarted(self, emptied: bool = False) -> None:
        """Start again after a replay that shows another engine, as in `_restart`. A batch that waits since before the
        connection was lost is the former engine's."""
        if self._waiting is self._waited:
            self._waiting = None
        self._restart(emptied)

    def _restart(self, emptied: bool = False) -> None:
        """Start again, because the engine was restarted. `emptied`: that is certain, so it has lost all its blocks;
        otherwise perhaps only the connection was lost."""
        self.count.restarts += 1
        self._events = self._steps = self._batch = None
        self._index.restarted(self.cache)
        if emptied:
            self.cache.note_emptied()
        self._note(-1, 0.0)
        self._unread = -1
        self._reconnected = self._unconfirmed = False
        self._retries = 0
        if self.can_replay:
            self._want(0)
