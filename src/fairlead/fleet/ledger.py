"""Leases: what we sent to each endpoint and have not yet seen end.

Rules
* A lease is charged in the very call that decides. Between two scrapes it is the only thing that keeps a burst from
  herding onto one endpoint.
* The prefill part is released at the first token, the rest at the end. Cancel, loss, expiry and the departure of the
  endpoint release whatever is left. Each part is released once; a lease remembers what it charged, so nothing that
  changed in between can make the columns drift.
* Every lease expires: end-of-request signals can be lost (a gateway drops access-log entries while nobody listens).
* An endpoint that reports itself idle in three scrapes in a row holds none of our older leases: they are dropped.
"""

from collections import deque
from collections.abc import Iterator

from msgspec import Struct

from fairlead.fleet.table import EndpointTable
from fairlead.model.request import Request

#: Scrapes in a row that must show an idle engine before leases are doubted; a step's end can fake one or two.
IDLE_SCRAPES = 3


class Lease(Struct):
    """One request at one endpoint."""

    request: Request
    slot: int
    #: Who held the slot when it was charged; slots are reused.
    endpoint_id: str
    charged_at: float
    #: Prompt tokens to compute, and tokens of KV held to the end (prompt + half the expected output).
    uncached_tokens: float
    kv_tokens: float
    #: Predicted cached prompt tokens, to compare with what the engine reports.
    hit_tokens: int
    #: Still before its first token.
    pending: bool = True


class Ledger:
    """All leases, and the columns they add up to."""

    def __init__(self, table: EndpointTable, ttl: float = 900.0) -> None:
        self._table = table
        self._ttl = ttl
        self._leases: dict[int, Lease] = {}
        #: Charge times of recent leases per slot: how many a scrape that started at t cannot know yet.
        self._recent: dict[int, deque[float]] = {}
        self._idle: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, request_id: int) -> Lease | None:
        return self._leases.get(request_id)

    def charge(self, lease: Lease) -> None:
        assert lease.request.id not in self._leases, "a request is charged once"
        self._leases[lease.request.id] = lease
        table, slot = self._table, lease.slot
        table.inflight[slot] += 1
        table.pending[slot] += 1
        table.queue[slot] += 1
        table.pending_tokens[slot] += lease.uncached_tokens
        table.kv_tokens[slot] += lease.kv_tokens
        recent = self._recent.get(slot)
        if recent is None:
            recent = self._recent[slot] = deque(maxlen=4096)
        recent.append(lease.charged_at)

    def first_token(self, request_id: int) -> Lease | None:
        """The prefill is over. Returns the lease if this was news."""
        lease = self._leases.get(request_id)
        if lease is None or not lease.pending:
            return None
        self._release_prefill(lease)
        self._table.active[lease.slot] += 1
        return lease

    def release(self, request_id: int) -> Lease | None:
        """The request is over, one way or another. Returns the lease the first time."""
        lease = self._leases.pop(request_id, None)
        if lease is None:
            return None
        table, slot = self._table, lease.slot
        if lease.pending:
            self._release_prefill(lease)
        else:
            table.active[slot] = max(table.active[slot] - 1, 0)
        table.inflight[slot] -= 1
        table.kv_tokens[slot] -= lease.kv_tokens
        if not table.inflight[slot]:  # sums of floats: an empty endpoint is exactly empty
            table.kv_tokens[slot] = table.pending_tokens[slot] = 0.0
        return lease

    def _release_prefill(self, lease: Lease) -> None:
        table, slot = self._table, lease.slot
        lease.pending = False
        table.pending[slot] -= 1
        table.pending_tokens[slot] = max(table.pending_tokens[slot] - lease.uncached_tokens, 0)
        table.queue[slot] = max(table.queue[slot] - 1, 0)

    def of_slot(self, slot: int) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.slot == slot]

    def forget_slot(self, slot: int) -> None:
        """The endpoint left; its leases must have been released."""
        self._recent.pop(slot, None)
        self._idle.pop(slot, None)

    def expired(self, now: float) -> Iterator[int]:
        """Ids of leases past their time, oldest first."""
        for request_id, lease in self._leases.items():
            if lease.charged_at + self._ttl > now:
                return
            yield request_id

    def reconcile(self, slot: int, started: float, waiting: float, running: float) -> list[int]:
        """Set the effective columns from a scrape sent at `started`. Returns ids the endpoint cannot hold any more."""
        table = self._table
        recent = self._recent.get(slot)
        since = 0
        if recent:
            while recent and recent[0] < started:
                recent.popleft()
            since = len(recent)
        own_active = table.inflight[slot] - table.pending[slot]
        table.queue[slot] = waiting + min(since, table.pending[slot])
        table.active[slot] = max(running, own_active)
        if waiting or running or not table.inflight[slot]:
            self._idle[slot] = 0
            return []
        self._idle[slot] = seen = self._idle.get(slot, 0) + 1
        if seen < IDLE_SCRAPES:
            return []
        # Older than the first of the idle scrapes can be approximated by "not charged since the last one began".
        return [lease.request.id for lease in self.of_slot(slot) if lease.charged_at < started - 2.0]

    def own_accounting(self, slot: int) -> None:
        """No fresh scrape: the effective columns are what we know ourselves."""
        table = self._table
        table.queue[slot] = table.pending[slot]
        table.active[slot] = table.inflight[slot] - table.pending[slot]

    def validate(self) -> None:
        """Raise `AssertionError` unless every column is exactly the sum of the leases."""
        table = self._table
        for slot in range(len(table)):
            leases = self.of_slot(slot)
            pending = [lease for lease in leases if lease.pending]
            assert table.inflight[slot] == len(leases)
            assert table.pending[slot] == len(pending)
            assert abs(table.pending_tokens[slot] - sum(lease.uncached_tokens for lease in pending)) < 1e-3
            assert abs(table.kv_tokens[slot] - sum(lease.kv_tokens for lease in leases)) < 1e-3
            assert not leases or table.endpoints[slot] is not None
