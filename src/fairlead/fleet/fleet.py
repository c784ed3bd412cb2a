"""The fleet: one mutating door for what is known about endpoints, and the view that policies read."""

from math import inf

import numpy as np

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
#: Above any true number of requests or tokens of one endpoint. Higher readings are cut, so that sums stay exact.
MOST = 1e9


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
        if sample.adapters is not None:
            table.set_adapters(slot, sample.adapters)
            table.max_adapters[slot] = _gauge(sample.max_adapters, 0.0)
        capacity = _gauge(sample.block_size * sample.num_blocks, 0.0)
        if capacity and capacity != table.capacity_tokens[slot]:
            table.capacity_tokens[slot] = capacity
            self.prefix.set_capacity(slot, int(capacity * BYTES_PER_TOKEN))
        ran = table.running[slot]
        table.waiting[slot] = waiting = _gauge(sample.waiting, table.waiting[slot])
        table.running[slot] = running = _gauge(sample.running, ran)
        if running or not ran or not (waiting or table.inflight[slot]):
            # Otherwise the batch may just have ended: for one step the engine shows no memory in use.
            table.kv[slot] = min(_gauge(sample.kv_usage, table.kv[slot]), 1.0)
        if sample.waiting is None and sample.running is None:
            return []
        return self.ledger.reconcile(slot, started, waiting, running)

    def scrape_failed(self, endpoint_id: str, now: float) -> None:
        """No reading. When the last good one is too old, the columns become what we know of our own requests."""
        table = self.table
        slot = table.slot(endpoint_id)
        if slot is None:
            return
        table.failures[slot] += 1
        if self.stale(slot, now):
            self.ledger.own_accounting(slot)
            capacity = table.capacity_tokens[slot]
            table.kv[slot] = min(table.kv_tokens[slot] / capacity, 1.0) if capacity else 0.0

    def answered(self, slot: int, ok: bool, now: float) -> None:
        """A response ended. Some failures in a row make policies avoid the endpoint a moment, or until one works."""
        table = self.table
        if ok:
            table.errors[slot] = 0
            table.ejected_until[slot] = -inf
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
            uncached_tokens=_tokens(request.prompt_tokens - hit_tokens, 1.0),
            kv_tokens=_tokens(request.prompt_tokens + expected_output / 2, 1.0),
            hit_tokens=hit_tokens,
        )
        self.ledger.charge(lease)
        if request.prefix.hashes:
            self.prefix.insert(slot, request.prefix)
        return lease

    def match(self, request: Request) -> FloatColumn | None:
        """Share of the prompt (0..1, of its bytes) that each endpoint is believed to hold; `None` = nobody anything."""
        chain = request.prefix
        column = self.prefix.match(chain, len(self.table)) if chain.hashes else None
        if column is not None:
            # Inline media count for less in `prompt_bytes` than they take up in the chain.
            column /= max(request.prompt_bytes, chain.ends[-1])
        return column

    def stale(self, slot: int, now: float) -> bool:
        return bool(now - self.table.sampled_at[slot] > self.staleness)

    def age(self, slot: int, now: float) -> float:
        """Seconds since the last good scrape; infinite when there was none."""
        sampled = float(self.table.sampled_at[slot])
        return now - sampled if sampled > -inf else inf

    def validate(self) -> None:
        """Raise `AssertionError` when an invariant of any part is broken."""
        self.ledger.validate()
        self.prefix.validate()
        table = self.table
        assert np.isfinite([table.queue, table.active, table.kv, table.pending_tokens, table.kv_tokens]).all()
        assert ((table.kv >= 0) & (table.kv <= 1)).all()


def _gauge(value: float | None, older: float) -> float:
    """A reading in 0..`MOST`; the older one where there is none, or NaN or infinity."""
    return float(min(max(value, 0.0), MOST)) if value is not None and value < inf else float(older)


def _tokens(value: float, least: float) -> float:
    """Whole tokens in `least`..`MOST`: sums of them are exact whatever comes and goes. NaN counts as `least`."""
    return float(round(min(max(least, value), MOST)))


__all__ = ["DEFAULT_CAPACITY", "Fleet"]
