"""The other schedulers (peers) of the same pool, as known from the facts that they report (`fairlead.core.facts`).

Theory
* There is one view per origin, and only the facts of that origin change it. So views cannot conflict, and the state of
  the pool is their sum. A peer's lease is kept in the ledger like an own one, so columns, scrapes and forecasts need no
  knowledge of peers.
* Batches are numbered. A batch that arrives twice changes nothing. While a batch is missing, ends and first tokens are
  remembered, so that a lease which is charged late does not stay charged forever. A snapshot of the origin fills in
  batches that never arrive (`View.gap`). It may have thousands of leases, which are charged in several calls.

Rules
* A peer's lease gives no record, and nothing waits for its end. It ends when its origin reports the end, when the
  endpoint no longer has it (`Account.reconcile`), or when it expires in the ledger.
* When an origin is lost, its leases are kept until the next scrape of their endpoint. The scrape shows what still runs
  there as the load of others, so the load does not dip in between.
* Two schedulers that choose at the same time do not see each other's choice. So each prefers some endpoints, and all
  know which. For a prompt that is cached nowhere, a scheduler avoids endpoints that a peer prefers, if others cost
  nearly the same. "Nearly" grows with the work that the peer sends before its report arrives
  (`EndpointTable.collisions`). Cached prompts do not move, because that costs more when memory is short.
* An invalid message changes nothing; `View.problem` says what is wrong with it.
"""

from collections import deque
from collections.abc import Callable
from math import inf
from typing import TypeVar

import numpy as np
from msgspec import Struct, field

from fairlead.core.apis import IMAGES, OTHER
from fairlead.core.clock import Clock
from fairlead.core.cost import LONG_TOKENS
from fairlead.core.demand import PeersLoad
from fairlead.core.facts import (
    AGE_UNIT,
    BROKEN,
    CHAIN_BLOCKS,
    SIZE_BYTES,
    Batch,
    Charged,
    Dictionary,
    Snapshot,
    block_hashes,
    endpoint_hash,
    read_batch,
    read_snapshot,
    sized_ends,
    usual_ends,
)
from fairlead.core.fleet import Fleet
from fairlead.core.flow_control import FlowControl
from fairlead.core.ledger import Lease
from fairlead.core.records import Forecast
from fairlead.core.reports import SharedFleet
from fairlead.core.request import NO_PREFIX, PrefixChain, Request

#: Upper bounds: origins; per origin leases, batches after a missing one, and unknown endpoints.
MOST_ORIGINS, MOST_LEASES, MOST_BEYOND, MOST_UNKNOWN = 256, 262_144, 4096, 1024
#: Name of the timer for the next part of a snapshot, and the leases that are charged in one call.
TIMER, CHARGED_AT_ONCE = "peer-snapshots", 128
#: Upper bound of a dictionary's `size`: of 16 bytes each. One that is full of the longest prompts has 8 million.
MOST_BLOCKS = 8 << 20
#: Stand-ins for the requests of peers, which are not known here. What matters is whether the first token is seen, and
#: whether tokens say how long the answer takes: by (`Charged.blind`, `Charged.untimed`).
_REQUESTS = {
    (blind, untimed): Request(id=-1, arrived=0.0, api=IMAGES if untimed else OTHER, stream=not blind)
    for blind in (False, True)
    for untimed in (False, True)
}
#: Seconds between two measurements of the work that peers send, and the weight of the newest one.
SPREAD_S, SPREAD_SHARE = 1.0, 0.5
DELAY_SHARE = 0.1
#: Factor on the work that a peer sends before its report arrives. Above 1, because in a collision the second request
#: waits and the first is slowed down, and because a peer sends more to the endpoints that it prefers. In simulations, 3
#: to 8 do equally well.
COLLIDES = 5.0
_Message = TypeVar("_Message", Batch, Snapshot)
#: (chain, how many of its blocks): the empty beginning of a prompt, and a chain that was never reported.
_START, _NOT_KNOWN = (NO_PREFIX, 0), (NO_PREFIX, -1)


class _Taken(Struct, eq=False):
    """A snapshot that came at `time` (clock seconds): its leases that are not charged yet; those `pending` in it."""

    snapshot: Snapshot
    time: float
    left: deque[tuple[int, Charged]]
    pending: set[int]


class View(Struct, eq=False):
    """What one origin has reported."""

    #: All batches up to this one arrived, and these later ones.
    sequence: int = 0
    beyond: set[int] = field(default_factory=set)
    #: A fact in a batch up to this one could not be used, and a snapshot can repeat it; -1 = all could be used.
    unusable: int = -1
    #: Leases by number. A lease that ended here without a report of its origin stays until the origin reports it.
    leases: dict[int, Lease] = field(default_factory=dict)
    #: The snapshot of which leases are still to be charged.
    taken: _Taken | None = None
    #: Leases whose first token or end was reported since the first missing batch or since `taken`; True = ended.
    early: dict[int, bool] = field(default_factory=dict)
    generation: int = 0
    dictionary: Dictionary = field(default_factory=Dictionary)
    #: Hashes of endpoints that it sends to and that are not in the pool here.
    unknown: set[int] = field(default_factory=set)
    #: Hashes of endpoints that it avoids, until when (clock seconds), and the number of the message that said so.
    avoided: dict[int, float] = field(default_factory=dict)
    avoided_sequence: int = 0
    #: Sum over charges since the last measurement of prompt milliseconds times the seconds until the charge was
    #: reported to us; and the average milliseconds that are charged but not yet reported to us.
    unheard: float = 0.0
    unheard_ms: float = 0.0
    #: As in `PeerHeard`: no charge is unreported when we decide.
    at_once: bool = False
    #: Seconds from a charge until it is reported to us, as a moving average.
    delay_s: float = 0.0
    #: Messages accepted and refused, and why the last one was refused; empty = it was not.
    messages: int = 0
    refused: int = 0
    problem: str = ""
    #: The name of its policy; empty = it did not say.
    policy: str = ""

    @property
    def gap(self) -> bool:
        """Whether facts are missing that only a snapshot can repeat. Does not notice that the last batches of a silent
        origin are missing: for that, compare `sequence` with the origin's own (`Reports.sequence`)."""
        return bool(self.beyond) or self.unusable >= 0

    @property
    def newest(self) -> int:
        """The highest number of a batch that arrived."""
        return max(self.beyond, default=self.sequence)

    @property
    def waits(self) -> bool:
        """Whether leases may be charged after their first token or end was reported."""
        return bool(self.beyond) or self.taken is not None

    def missed(self) -> None:
        self.unusable = self.newest

    def received(self, sequences: set[int]) -> None:
        self.beyond |= sequences
        while self.sequence + 1 in self.beyond:
            self.sequence += 1
            self.beyond.remove(self.sequence)


class Peers:
    """The views of all peers. Only events change them; see the module's rules."""

    def __init__(self, clock: Clock, fleet: Fleet, flow: FlowControl | None = None) -> None:
        self._clock = clock
        self._fleet = fleet
        self._flow = flow
        #: By origin.
        self.views: dict[str, View] = {}
        #: Lost origins: when each was lost (clock seconds), and its leases.
        self.orphans: dict[str, tuple[float, dict[int, Lease]]] = {}
        #: Hash of an endpoint's id, as peers use it → id.
        self._ids: dict[int, str] = {}
        self._name = ""
        #: The dictionary of our own reports, if we send any.
        self._own: list[Dictionary] = []
        if isinstance(fleet, SharedFleet):
            self._own.append(fleet.reports.dictionary)
            fleet.reports.known_elsewhere = self._known
        self._spread_at = -inf
        self.load = PeersLoad()

    def follow(self, flow: FlowControl | None) -> None:
        """Flow control was turned on (`None` = off): keep it informed of the queues of peers."""
        self._flow = flow

    @property
    def leases(self) -> set[Lease]:
        """All leases of peers that are charged here."""
        views = [view.leases for view in self.views.values()] + [leases for _, leases in self.orphans.values()]
        return {lease for leases in views for lease in leases.values() if lease.held}

    def gaps(self) -> list[str]:
        """Return origins that should be asked for a snapshot, unless the missing batches are still on their way."""
        return [origin for origin, view in self.views.items() if view.gap]

    def problem(self, origin: str) -> str:
        """Return why facts of the origin cannot be used; empty = they can."""
        view = self.views.get(origin)
        if view is None:
            return ""
        ours, theirs = self._cut, view.dictionary.cut
        if view.problem or not ours or theirs in (0, ours):
            return view.problem
        return f"it cuts prompts into blocks of {theirs} bytes, this one of {ours}: set one hashBlockSize everywhere"

    def difference(self, origin: str) -> str:
        """Return how the origin decides, if it decides otherwise than this scheduler; empty = it does not."""
        view, fleet = self.views.get(origin), self._fleet
        ours = fleet.reports.policy if isinstance(fleet, SharedFleet) else ""
        if view is None or not ours or view.policy in ("", ours):
            return ""
        return f"{origin} decides by the policy {view.policy}, this one by {ours}: give all the same configuration"

    @property
    def _cut(self) -> int:
        """`Dictionary.cut` of our own prompts; 0 = we have sent none."""
        return self._own[0].cut if self._own else 0

    # ---- messages ----

    def batch(self, origin: str, payload: bytes, lag_s: float = 0.0, to: str = "", at_once: bool = False) -> None:
        """Handle a batch that was made `lag_s` seconds ago. `to`: our own name. `at_once`: as in `PeerHeard`."""
        self._name = to
        view, batch = self._read(origin, payload, read_batch)
        if view is None or batch is None or batch.sequence <= view.sequence or batch.sequence in view.beyond:
            return
        if len(view.beyond) >= MOST_BEYOND:
            view.missed()
            return
        view.received({batch.sequence})
        now = self._clock.time()
        view.at_once = at_once
        made, next_number = now - lag_s, batch.number + len(batch.charged)
        for number, charged in enumerate(batch.charged, batch.number):
            self._charge(view, number, charged, batch, made)
        if batch.generation > view.generation:
            view.generation = batch.generation
            view.dictionary.begin()
        self._insert(view, batch, view.dictionary if batch.generation == view.generation else Dictionary())
        for first in batch.first_tokens:
            number = next_number - first.back
            if view.waits:
                view.early.setdefault(number, False)
            self._first_token(view, number, made - first.age * AGE_UNIT)
        for ended in batch.ended:
            number = next_number - ended.back
            if view.waits:
                view.early[number] = True
            self._end(view, number, ended.tokens, now)
        for position in batch.failed:
            slot = self._slot(batch.endpoints[position])
            if slot is not None:
                self._fleet.answered(slot, False, now, own=False)
        self._hold(origin, view, batch, now)
        self._settle(view)
        if now >= self._spread_at:
            self._spread(now)

    def snapshot(self, origin: str, payload: bytes) -> None:
        """Handle a snapshot: all leases that the origin held when it was made. Later facts that have already arrived
        remain in force. `take_some` charges what this call leaves."""
        view, snapshot = self._read(origin, payload, read_snapshot)
        if view is None or snapshot is None or snapshot.sequence < view.sequence:
            return
        if view.unusable <= snapshot.sequence:
            view.unusable = -1
        live = dict(zip(snapshot.numbers, snapshot.charged, strict=True))
        for number, lease in list(view.leases.items()):
            if not lease.held or (number < snapshot.number and number not in live):
                self._fleet.ledger.release(view.leases.pop(number))
        now = self._clock.time()
        self._hold(origin, view, snapshot, now)
        view.taken = _Taken(snapshot, now, deque(live.items()), set(snapshot.pending))
        view.sequence = snapshot.sequence
        view.beyond = {sequence for sequence in view.beyond if sequence > snapshot.sequence}
        view.received(set())
        self._take_some(view, view.taken)

    @property
    def unfinished(self) -> bool:
        """Whether leases of a snapshot are still to be charged."""
        return any(view.taken is not None for view in self.views.values())

    def take_some(self) -> None:
        """Charge some more leases of one unfinished snapshot, of each in turn."""
        for origin, view in self.views.items():
            if view.taken is not None:
                self._take_some(view, view.taken)
                self.views[origin] = self.views.pop(origin)  # the next call begins with others
                return

    def _take_some(self, view: View, taken: _Taken) -> None:
        """Charge some more leases of the snapshot, and insert its prompts at the end."""
        for _ in range(min(CHARGED_AT_ONCE, len(taken.left))):
            number, charged = taken.left.popleft()
            self._charge(view, number, charged, taken.snapshot, taken.time)
            if number not in taken.pending:
                self._first_token(view, number, taken.time)
        if not taken.left:
            view.taken = None
            self._insert(view, taken.snapshot, Dictionary())
            self._settle(view)

    def lost(self, origin: str) -> None:
        """The origin ended, or is silent for too long."""
        view = self.views.pop(origin, None)
        self.load.breaks += view is not None
        if self._flow is not None:
            self._flow.peers.drop(origin)
        if view is not None and view.leases:
            self.orphans[origin] = self._clock.time(), view.leases
        for endpoint in view.avoided if view is not None else ():
            self._avoid(endpoint)
        self._prefer()

    def _read(
        self, origin: str, payload: bytes, read: Callable[[bytes], _Message]
    ) -> tuple[View | None, _Message | None]:
        view = self.views.get(origin)
        if view is None:
            if len(self.views) >= MOST_ORIGINS:
                return None, None
            self.load.breaks += 1
            # If the origin was lost and is back, its snapshot will say which of these leases it still has.
            _, orphans = self.orphans.pop(origin, (0.0, {}))
            view = self.views[origin] = View(leases={number: lease for number, lease in orphans.items() if lease.held})
        try:
            message = read(payload)
        except ValueError as error:
            view.refused, view.problem = view.refused + 1, str(error)
            view.missed()
            return view, None
        view.messages, view.problem = view.messages + 1, ""
        return view, message

    @staticmethod
    def _settle(view: View) -> None:
        if not view.waits:
            view.early.clear()

    # ---- facts ----

    def _hold(self, origin: str, view: View, message: Batch | Snapshot, now: float) -> None:
        """Take over the message's flows and avoided endpoints, unless a newer message has already reported them."""
        view.policy = message.policy or view.policy
        if self._flow is not None and message.sequence >= view.newest:
            complete = isinstance(message, Snapshot)
            self._flow.peers.take(origin, message.held, self._flow.queues, now, complete)
        if message.avoided is not None and message.sequence >= view.avoided_sequence:
            before, view.avoided_sequence = view.avoided, message.sequence
            view.avoided = {message.endpoints[each.endpoint]: now + each.left_ms * 1e-3 for each in message.avoided}
            for endpoint in before | view.avoided:
                self._avoid(endpoint)

    def _avoid(self, endpoint: int) -> None:
        """Avoid the endpoint until the latest time that any peer avoids it."""
        slot = self._slot(endpoint)
        if slot is not None:
            until = max((view.avoided.get(endpoint, -inf) for view in self.views.values()), default=-inf)
            self._fleet.avoid(slot, until, own=False)

    def _slot(self, endpoint: int) -> int | None:
        """Return the slot of the endpoint with this hash; `None` = it is not in the pool here."""
        endpoint_id = self._ids.get(endpoint)
        return None if endpoint_id is None else self._fleet.table.slot(endpoint_id)

    def _charge(self, view: View, number: int, charged: Charged, message: Batch | Snapshot, made: float) -> None:
        if number in view.leases or view.early.get(number, False):
            return
        fleet, endpoint = self._fleet, message.endpoints[charged.endpoint]
        slot, now = self._slot(endpoint), made - charged.age * AGE_UNIT
        if slot is None or len(view.leases) >= MOST_LEASES:
            self._unknown(view, endpoint)
            return
        lease = view.leases[number] = Lease(
            _REQUESTS[charged.blind, charged.untimed],
            slot,
            self._ids[endpoint],
            now,
            float(max(charged.uncached, 1)),
            float(max(charged.kv, 1)),
            0,
            float(charged.work_us),
            float(charged.growth),
            Forecast(charged.ttft_ms),
            auxiliary=True,
            blind=charged.blind,
            sequences=charged.sequences,
        )
        fleet.ledger.charge_late(lease)
        if isinstance(message, Batch):  # a snapshot repeats leases that are counted already, or too old to count
            self.load.count(charged)
        if charged.uncached >= LONG_TOKENS:
            fleet.sent_long_prompt(slot, charged.work_us * 1e-3, now)
        delay_s = self._clock.time() - now
        if not view.at_once:
            view.unheard += charged.work_us * 1e-3 * delay_s
        view.delay_s += (DELAY_SHARE if view.delay_s else 1.0) * (delay_s - view.delay_s)
        if charged.adapter:
            lease.adapter = charged.adapter
            fleet.ledger.starts(lease)
        if fleet.stalls.retried:
            fleet.stalls.charged((slot,), now)
        if number in view.early:
            self._first_token(view, number, now)

    def _first_token(self, view: View, number: int, seen: float) -> None:
        lease = view.leases.get(number)
        if lease is not None and lease.held and lease.pending:
            self._fleet.first_token(lease, seen)

    def _end(self, view: View, number: int, tokens: int, now: float) -> None:
        lease, fleet = view.leases.pop(number, None), self._fleet
        if lease is not None and lease.held:
            fleet.ledger.release(lease)
            if tokens > BROKEN:
                if fleet.table.troubled:
                    fleet.answered(lease.slot, True, now, own=False)
                fleet.completed(lease, now, tokens)

    def _insert(self, view: View, message: Batch | Snapshot, dictionary: Dictionary) -> None:
        hashes, cut = block_hashes(message.blocks), self._cut
        begin = 0
        for sent in message.sent:
            fresh = slice(begin, begin + sent.blocks)
            begin += sent.blocks
            slot = self._slot(message.endpoints[sent.endpoint])
            base, depth = (dictionary.find(sent.parent) or self._find(sent.parent)) if sent.parent else _START
            before = base.ends[depth - 1] if depth > 0 else 0
            if message.sizes:
                ends = sized_ends(before, message.sizes[SIZE_BYTES * fresh.start : SIZE_BYTES * fresh.stop])
            else:
                ends = usual_ends(before, sent.blocks) if sent.blocks else ()
            long = depth + sent.blocks > CHAIN_BLOCKS or dictionary.size > MOST_BLOCKS
            if depth < 0 or ends is None or long:
                view.missed()
                continue
            if depth < len(base.hashes) or sent.blocks:
                base = PrefixChain((*base.hashes[:depth], *hashes[fresh]), (*base.ends[:depth], *ends))
            dictionary.add(base, depth)
            if slot is None:
                self._unknown(view, message.endpoints[sent.endpoint])
            elif base.hashes and cut in (0, base.ends[0]):
                self._fleet.table.free_cache[slot] = self._fleet.prefix.insert(slot, base)

    def _known(self, block: int) -> bool:
        """Whether a peer reported the block recently."""
        return any(block in view.dictionary.blocks for view in self.views.values())

    def _find(self, block: int) -> tuple[PrefixChain, int]:
        """Return (a reported chain with this block, the block's depth in it), own or of a peer; depth -1 = unknown."""
        for dictionary in (*self._own, *(view.dictionary for view in self.views.values())):
            entry = dictionary.find(block)
            if entry is not None:
                return entry
        return _NOT_KNOWN

    # ---- endpoints ----

    def _spread(self, now: float) -> None:
        """Measure the work that peers send and that was not yet reported to us."""
        passed, self._spread_at = now - self._spread_at + SPREAD_S, now + SPREAD_S
        for view in self.views.values():
            view.unheard_ms += SPREAD_SHARE * (view.unheard / min(passed, 2.0 * SPREAD_S) - view.unheard_ms)
            view.unheard = 0.0
        delay_s = max(view.delay_s for view in self.views.values())
        if self._flow is not None and delay_s:
            self._flow.peers.measured(delay_s)
        self._prefer()

    def _prefer(self) -> None:
        """Deal the endpoints, in the order of their hashes, to the schedulers in turn: each prefers its own ones."""
        table = self._fleet.table
        table.collisions = np.zeros(len(table.endpoints)) if self.views else None
        if table.collisions is None:
            return
        names = sorted([self._name, *self.views])
        slots = [slot for _, slot in sorted((endpoint_hash(endpoint.id), slot) for slot, endpoint in table.slots())]
        own: list[int] = []
        for number, name in enumerate(names):
            preferred = slots[number % max(len(slots), 1) :: len(names)]
            if name in self.views:
                table.collisions[preferred] += COLLIDES * self.views[name].unheard_ms
            else:
                own = preferred
        table.collisions[own] = 0.0

    @staticmethod
    def _unknown(view: View, endpoint: int) -> None:
        view.missed()
        if len(view.unknown) < MOST_UNKNOWN:
            view.unknown.add(endpoint)

    def joined(self, endpoint_id: str) -> None:
        """An endpoint is in the pool (again): facts that were reported about it before can now be used."""
        endpoint, table = endpoint_hash(endpoint_id), self._fleet.table
        returns = endpoint in self._ids
        if not returns and len(self._ids) > 2 * len(table) + MOST_UNKNOWN:
            self._ids = {endpoint_hash(known.id): known.id for _, known in table.slots()}
        self._ids[endpoint] = endpoint_id
        if table.collisions is not None:  # thousands may join at once: `_spread` deals them within a second
            table.collisions = np.append(table.collisions, np.zeros(len(table) - len(table.collisions)))
            table.collisions[table.slot(endpoint_id)] = 0.0
        for view in self.views.values():
            gone = (not lease.held and lease.endpoint_id == endpoint_id for lease in view.leases.values())
            if endpoint in view.unknown or (returns and any(gone)):
                view.unknown.discard(endpoint)
                view.missed()
            if endpoint in view.avoided:
                self._avoid(endpoint)

    def sampled(self, endpoint_id: str, started: float) -> None:
        """A scrape that was sent at `started` is about to be handled. It includes the requests that lost origins still
        have there, so their leases end."""
        for origin, (lost_at, leases) in list(self.orphans.items()):
            if lost_at <= started:
                for number in [number for number, lease in leases.items() if lease.endpoint_id == endpoint_id]:
                    self._fleet.ledger.release(leases.pop(number))
                if not leases:
                    del self.orphans[origin]

    def expire(self, now: float) -> None:
        """End leases that have expired, whatever their origin says, and stop avoiding endpoints whose time is over."""
        for view in self.views.values():
            for endpoint in [endpoint for endpoint, until in view.avoided.items() if until <= now]:
                del view.avoided[endpoint]
                self._avoid(endpoint)
            self._expire(view.leases, now)
        for origin, (_, leases) in list(self.orphans.items()):
            self._expire(leases, now)
            for number in [number for number, lease in leases.items() if not lease.held]:
                del leases[number]
            if not leases:
                del self.orphans[origin]

    def _expire(self, leases: dict[int, Lease], now: float) -> None:
        # All are checked: those of a snapshot come behind newer ones of batches.
        ledger = self._fleet.ledger
        for lease in leases.values():
            if lease.charged_at + ledger.ttl <= now:
                ledger.release(lease)
