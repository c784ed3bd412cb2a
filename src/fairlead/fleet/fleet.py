"""The fleet: one mutating door for what is known about endpoints, and the view that policies read."""

from math import inf

from fairlead.fleet.columns import FloatColumn
from fairlead.fleet.ledger import Lease, Ledger
from fairlead.fleet.prefix import DEFAULT_CAPACITY, PrefixIndex
from fairlead.fleet.table import EndpointTable
from fairlead.model.endpoint import Endpoint, Sample
from fairlead.model.request import Request

#: Prompt bytes per KV token when a capacity in tokens is turned into a budget of text.
BYTES_PER_TOKEN = 4.2
#: Failed responses in a row before an endpoint is avoided, and for how many seconds.
ERRORS_TO_EJECT = 3
EJECT_SECONDS = 3.0


class Fleet:
    """All endpoints. Policies get this as their view: they read `table`, `prefix` and `stale`, and change nothing."""

    def __init__(self, lease_ttl: float = 900.0, staleness: float = 2.0, max_prefix_entries: int = 2_000_000) -> None:
        self.table = EndpointTable()
        self.ledger = Ledger(self.table, lease_ttl)
        self.prefix = PrefixIndex(max_prefix_entries)
        #: Seconds after which a scrape no longer counts.
        self.staleness = staleness

    def up(self, endpoint: Endpoint) -> list[Lease]:
        """An endpoint joined or changed. Leases at an address it gave up are returned, released."""
        slot = self.table.slot(endpoint.id)
        if slot is None:
            slot = self.table.add(endpoint)
            self.prefix.add_slot(slot)
            return []
        old = self.table.endpoints[slot]
        if old is not None and old.address != endpoint.address:
            leases = self.down(endpoint.id)
            self.up(endpoint)
            return leases
        self.table.replace(slot, endpoint)
        return []

    def down(self, endpoint_id: str) -> list[Lease]:
        """An endpoint left. Its leases are released and returned."""
        slot = self.table.slot(endpoint_id)
        if slot is None:
            return []
        leases = self.ledger.of_slot(slot)
        for lease in leases:
            self.ledger.release(lease.request.id)
        self.ledger.forget_slot(slot)
        self.prefix.drop_slot(slot)
        self.table.remove(slot)
        return leases

    def sampled(self, endpoint_id: str, started: float, now: float, sample: Sample) -> list[int]:
        """A scrape arrived. Returns ids of leases that the endpoint provably no longer holds."""
        table = self.table
        slot = table.slot(endpoint_id)
        if slot is None:
            return []
        table.sampled(slot, sample)
        table.failures[slot] = 0
        table.sampled_at[slot] = now
        if sample.kv_usage is not None:
            table.kv[slot] = sample.kv_usage
        if sample.adapters is not None:
            table.set_adapters(slot, sample.adapters)
            table.max_adapters[slot] = sample.max_adapters
        capacity = sample.block_size * sample.num_blocks
        if capacity and capacity != table.capacity_tokens[slot]:
            table.capacity_tokens[slot] = capacity
            self.prefix.set_capacity(slot, int(capacity * BYTES_PER_TOKEN))
        if sample.waiting is None or sample.running is None:
            return []
        table.waiting[slot] = sample.waiting
        table.running[slot] = sample.running
        return self.ledger.reconcile(slot, started, sample.waiting, sample.running)

    def scrape_failed(self, endpoint_id: str, now: float) -> None:
        slot = self.table.slot(endpoint_id)
        if slot is None:
            return
        self.table.failures[slot] += 1
        if now - self.table.sampled_at[slot] > self.staleness:
            self.ledger.own_accounting(slot)
            self.table.kv[slot] = 0.0

    def answered(self, slot: int, ok: bool, now: float) -> None:
        """A response ended. Some failures in a row make policies avoid the endpoint for a moment."""
        table = self.table
        if ok:
            table.errors[slot] = 0
            return
        table.errors[slot] += 1
        if table.errors[slot] >= ERRORS_TO_EJECT:
            table.ejected_until[slot] = now + EJECT_SECONDS

    def charge(self, request: Request, slot: int, now: float, hit_tokens: int, expected_output: float) -> Lease:
        """Charge a lease and remember the prompt's prefix for the endpoint."""
        endpoint = self.table.endpoints[slot]
        assert endpoint is not None
        lease = Lease(
            request=request,
            slot=slot,
            endpoint_id=endpoint.id,
            charged_at=now,
            uncached_tokens=float(max(request.prompt_tokens - hit_tokens, 1)),
            kv_tokens=request.prompt_tokens + expected_output / 2,
            hit_tokens=hit_tokens,
        )
        self.ledger.charge(lease)
        if request.prefix.hashes:
            self.prefix.insert(slot, request.prefix)
        return lease

    def match(self, request: Request) -> FloatColumn | None:
        """Share of the prompt (0..1, of its bytes) that each endpoint is believed to hold; `None` = nobody anything."""
        column = self.prefix.match(request.prefix, len(self.table)) if request.prefix.hashes else None
        if column is not None:
            column /= max(request.prompt_bytes, 1)
        return column

    def stale(self, slot: int, now: float) -> bool:
        return bool(now - self.table.sampled_at[slot] > self.staleness)

    def age(self, slot: int, now: float) -> float:
        """Seconds since the last good scrape; infinite when there was none."""
        sampled = float(self.table.sampled_at[slot])
        return now - sampled if sampled > -inf else inf

    def validate(self) -> None:
        self.ledger.validate()
        self.prefix.validate()


__all__ = ["DEFAULT_CAPACITY", "Fleet"]
