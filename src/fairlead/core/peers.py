"""Other schedulers that serve the same pool, as far as they have told of themselves (`fairlead.core.facts`).

Theory
* Each origin's facts are a view of its own, and only that origin changes it. So views cannot conflict, and what is
  believed of the pool is their sum. A peer's lease stands in the ledger like an own one: columns, scrapes and forecasts
  need to know nothing of peers.
* Batches are counted. One that came already changes nothing. As long as some are missing, ends and first tokens that
  come are remembered, so that a lease which is charged late is not charged for ever; a snapshot of the origin fills
  what never came (`View.gap`).

Rules
* A peer's lease gives no record and nobody waits for its end. It ends with its origin's word, the endpoint's
  (`Account.reconcile`), or after the ledger's time.
* Of an origin that is lost the leases stay until the next scrape of their endpoint: that shows what still runs there
  as the load of others, without a dip in between.
* A message that makes no sense changes nothing; `View.problem` says why.
"""

from collections.abc import Callable
from typing import TypeVar

from msgspec import Struct, field

from fairlead.core.clock import Clock
from fairlead.core.facts import (
    AGE_UNIT,
    BROKEN,
    Batch,
    Charged,
    Ended,
    Snapshot,
    read_batch,
    read_snapshot,
    rising,
)
from fairlead.core.fleet import Fleet
from fairlead.core.flow_control import FlowControl
from fairlead.core.ledger import Lease
from fairlead.core.records import Forecast
from fairlead.core.request import NO_PREFIX, PrefixChain, Request

#: Origins, leases of one, batches behind a missing one, blocks of a dictionary, and endpoints that are not known here.
MOST_ORIGINS, MOST_LEASES, MOST_BEYOND, MOST_BLOCKS, MOST_UNKNOWN = 256, 262_144, 4096, 262_144, 1024
#: A peer's request is not known here: which one it is does not matter, only whether its first token is seen.
_REQUESTS = {stream: Request(id=-1, arrived=0.0, stream=stream) for stream in (False, True)}
_Message = TypeVar("_Message", Batch, Snapshot)
#: A chain and how much of it is meant: from the start, and of one that was never told.
_START, _NOT_KNOWN = (NO_PREFIX, 0), (NO_PREFIX, -1)


class View(Struct, eq=False):
    """What one origin has told."""

    #: All batches up to this one are known, and these behind it.
    sequence: int = 0
    beyond: set[int] = field(default_factory=set)
    #: Up to this batch something could not be used, and a snapshot can tell it again; -1 = all could.
    unusable: int = -1
    #: By number. Those that are over here, but not by the origin's word, stay until it says so.
    leases: dict[int, Lease] = field(default_factory=dict)
    #: Leases told to have begun to answer since the first missing batch, and whether they have ended.
    early: dict[int, bool] = field(default_factory=dict)
    generation: int = 0
    #: Block → a chain that has it, and how deep.
    dictionary: "Dictionary" = field(default_factory=dict)
    #: Endpoints that it sends to and that are not in the pool here.
    unknown: set[str] = field(default_factory=set)
    #: Messages taken, and refused; why the last one was.
    messages: int = 0
    refused: int = 0
    problem: str = ""

    @property
    def gap(self) -> bool:
        """Whether something is missing that only a snapshot can tell. Of the last batches of an origin that is silent
        now nobody knows: compare `sequence` with its own (`Reports.sequence`)."""
        return bool(self.beyond) or self.unusable >= 0

    @property
    def newest(self) -> int:
        """Of the batches that came."""
        return max(self.beyond, default=self.sequence)

    def missed(self) -> None:
        self.unusable = self.newest

    def received(self, sequences: set[int]) -> None:
        """These batches are known now, too."""
        self.beyond |= sequences
        while self.sequence + 1 in self.beyond:
            self.sequence += 1
            self.beyond.remove(self.sequence)


Dictionary = dict[int, tuple[PrefixChain, int]]


class Peers:
    """Changed by events alone; see the module's rules."""

    def __init__(self, clock: Clock, fleet: Fleet, flow: FlowControl | None = None) -> None:
        self._clock = clock
        self._fleet = fleet
        self._flow = flow
        #: By origin.
        self.views: dict[str, View] = {}
        #: Leases of origins that are lost, and when they were.
        self._orphans: dict[str, tuple[float, dict[int, Lease]]] = {}

    def follow(self, flow: FlowControl) -> None:
        """Flow control was turned on: tell it of what waits elsewhere."""
        self._flow = flow

    @property
    def leases(self) -> set[Lease]:
        """All that are on the books."""
        views = [view.leases for view in self.views.values()] + [leases for _, leases in self._orphans.values()]
        return {lease for leases in views for lease in leases.values() if lease.held}

    def gaps(self) -> list[str]:
        """Origins that should be asked for a snapshot, unless what is missing is still on its way."""
        return [origin for origin, view in self.views.items() if view.gap]

    # ---- messages ----

    def batch(self, origin: str, payload: bytes) -> None:
        """A batch came."""
        view, batch = self._read(origin, payload, read_batch)
        if view is None or batch is None or batch.sequence <= view.sequence or batch.sequence in view.beyond:
            return
        if len(view.beyond) >= MOST_BEYOND:
            view.missed()
            return
        view.received({batch.sequence})
        now = self._clock.time()
        for number, charged in enumerate(batch.charged, batch.number):
            self._charge(view, number, charged, batch.names)
        if batch.generation > view.generation:
            view.generation, view.dictionary = batch.generation, {}
        self._insert(view, batch, view.dictionary if batch.generation == view.generation else {})
        for first in batch.first_tokens:
            if view.beyond:
                view.early.setdefault(first.number, False)
            self._first_token(view, first.number, now - first.age * AGE_UNIT)
        for ended in batch.ended:
            if view.beyond:
                view.early[ended.number] = True
            self._end(view, ended, now)
        self._hold(origin, view, batch, now)
        self._settle(view)

    def snapshot(self, origin: str, payload: bytes) -> None:
        """All that it has running. What it began or ended after that, and was heard before, stands."""
        view, snapshot = self._read(origin, payload, read_snapshot)
        if view is None or snapshot is None or snapshot.sequence < view.sequence:
            return
        if view.unusable <= snapshot.sequence:
            view.unusable = -1
        live = dict(zip(snapshot.numbers, snapshot.charged, strict=True))
        for number, lease in list(view.leases.items()):
            if not lease.held or (number < snapshot.number and number not in live):
                self._fleet.ledger.release(view.leases.pop(number))
        pending, now = set(snapshot.pending), self._clock.time()
        for number, charged in live.items():
            self._charge(view, number, charged, snapshot.names)
            if number not in pending:
                self._first_token(view, number, now)
        self._insert(view, snapshot, {})
        self._hold(origin, view, snapshot, now)
        view.sequence = snapshot.sequence
        view.beyond = {sequence for sequence in view.beyond if sequence > snapshot.sequence}
        view.received(set())
        self._settle(view)

    def lost(self, origin: str) -> None:
        """It ended, or nobody hears of it."""
        view = self.views.pop(origin, None)
        if self._flow is not None:
            self._flow.peers.drop(origin)
        if view is not None and view.leases:
            self._orphans[origin] = self._clock.time(), view.leases

    def _read(
        self, origin: str, payload: bytes, read: Callable[[bytes], _Message]
    ) -> tuple[View | None, _Message | None]:
        view = self.views.get(origin)
        if view is None:
            if len(self.views) >= MOST_ORIGINS:
                return None, None
            # If it was lost and is back, its snapshot will say which of them it has still.
            _, orphans = self._orphans.pop(origin, (0.0, {}))
            view = self.views[origin] = View(leases={number: lease for number, lease in orphans.items() if lease.held})
        try:
            message = read(payload)
        except ValueError as error:
            view.refused, view.problem = view.refused + 1, str(error)
            view.missed()
            return view, None
        view.messages += 1
        return view, message

    @staticmethod
    def _settle(view: View) -> None:
        if not view.beyond:
            view.early.clear()

    # ---- facts ----

    def _hold(self, origin: str, view: View, message: Batch | Snapshot, now: float) -> None:
        """Flows as they stand now: what is older than was told already says nothing."""
        if self._flow is not None and message.sequence >= view.newest:
            self._flow.peers.take(origin, message.held, self._flow.queues, now)

    def _charge(self, view: View, number: int, charged: Charged, names: tuple[str, ...]) -> None:
        if number in view.leases or view.early.get(number, False):
            return
        fleet, name, now = self._fleet, names[charged.endpoint], self._clock.time()
        slot = fleet.table.slot(name)
        if slot is None or len(view.leases) >= MOST_LEASES:
            self._unknown(view, name)
            return
        lease = view.leases[number] = Lease(
            _REQUESTS[not charged.blind],
            slot,
            name,
            now,
            float(max(charged.uncached, 1)),
            float(max(charged.kv, 1)),
            0,
            float(charged.work_us),
            float(charged.growth),
            Forecast(charged.ttft_ms),
            auxiliary=True,
            blind=charged.blind,
        )
        fleet.ledger.charge(lease)
        if charged.adapter:
            lease.adapter = charged.adapter
            fleet.ledger.starts(lease)
        if fleet.stalls.retried:
            fleet.stalls.charged(slot, now)
        if number in view.early:
            self._first_token(view, number, now)

    def _first_token(self, view: View, number: int, seen: float) -> None:
        lease = view.leases.get(number)
        if lease is not None and lease.held and lease.pending:
            self._fleet.first_token(lease, seen)

    def _end(self, view: View, ended: Ended, now: float) -> None:
        lease = view.leases.pop(ended.number, None)
        if lease is not None and lease.held:
            self._fleet.ledger.release(lease)
            if ended.tokens > BROKEN:
                self._fleet.completed(lease, now, ended.tokens)

    def _insert(self, view: View, message: Batch | Snapshot, dictionary: Dictionary) -> None:
        hashes, ends = message.blocks.read()
        begin = 0
        for sent in message.sent:
            fresh = slice(begin, begin + sent.blocks)
            begin += sent.blocks
            slot = self._fleet.table.slot(message.names[sent.endpoint])
            base, depth = dictionary.get(sent.parent, _NOT_KNOWN) if sent.parent else _START
            if depth < len(base.hashes) or sent.blocks:
                base = PrefixChain((*base.hashes[:depth], *hashes[fresh]), (*base.ends[:depth], *ends[fresh]))
            if depth < 0 or not rising(base.ends[max(depth - 1, 0) :]) or len(dictionary) > MOST_BLOCKS:
                view.missed()
                continue
            for position in range(depth, depth + sent.blocks):
                dictionary[base.hashes[position]] = base, position + 1
            if slot is None:
                self._unknown(view, message.names[sent.endpoint])
            elif base.hashes:
                self._fleet.prefix.insert(slot, base)

    # ---- endpoints ----

    @staticmethod
    def _unknown(view: View, endpoint_id: str) -> None:
        view.missed()
        if len(view.unknown) < MOST_UNKNOWN:
            view.unknown.add(endpoint_id)

    def joined(self, endpoint_id: str) -> None:
        """An endpoint is in the pool (again): what was told of it before can be used."""
        for view in self.views.values():
            gone = (not lease.held and lease.endpoint_id == endpoint_id for lease in view.leases.values())
            if endpoint_id in view.unknown or any(gone):
                view.unknown.discard(endpoint_id)
                view.missed()

    def sampled(self, endpoint_id: str, started: float) -> None:
        """A scrape that was sent at `started` is about to be taken. It shows what lost origins still have there."""
        for origin, (lost_at, leases) in list(self._orphans.items()):
            if lost_at <= started:
                for number in [number for number, lease in leases.items() if lease.endpoint_id == endpoint_id]:
                    self._fleet.ledger.release(leases.pop(number))
                if not leases:
                    del self._orphans[origin]

    def expire(self, now: float) -> None:
        """Leases that are past their time are over, whatever their origin says."""
        for leases in [view.leases for view in self.views.values()] + [leases for _, leases in self._orphans.values()]:
            for lease in list(leases.values()):
                if lease.charged_at + self._fleet.ledger.ttl > now:
                    break
                self._fleet.ledger.release(lease)
