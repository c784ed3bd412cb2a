"""Leases: what we sent to each endpoint and have not yet seen end.

Rules
* A lease is charged in the very call that decides. Between two scrapes it is the only thing that keeps a burst from
  herding onto one endpoint.
* The prefill part is released at the first token, the rest at the end. Cancel, loss, expiry and the departure of the
  endpoint release whatever is left. Each part is released once; a lease remembers what it charged, so nothing that
  changed in between can make the columns drift.
* A reservation keeps room for a request whose endpoint is still being asked for: a lease with the id `~request.id`,
  charged like any other. Who asks is not to be led by it (`without_reserved`), and who reserves ends it.
* Every lease expires: end-of-request signals can be lost (a gateway drops access-log entries while nobody listens).
* What scrapes do to the sums, and when leases are dropped because of them: see `fairlead.fleet.account`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

from fairlead.fleet.account import Account
from fairlead.fleet.lease import Lease
from fairlead.fleet.table import EndpointTable


class Ledger:
    """All leases, and the columns they add up to."""

    def __init__(self, table: EndpointTable, ttl: float = 900.0) -> None:
        self._table = table
        self.ttl = ttl
        #: In the order of their charge.
        self._leases: dict[int, Lease] = {}
        #: Ids of reservations, all below 0.
        self.reserved: set[int] = set()
        self._accounts: dict[int, Account] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, request_id: int) -> Lease | None:
        return self._leases.get(request_id)

    def charge(self, lease: Lease) -> None:
        assert lease.request.id not in self._leases, "a request is charged once"
        self._leases[lease.request.id] = lease
        account = self._account(lease.slot)
        account.charge(lease)
        self._write(lease.slot, account)

    def first_token(self, request_id: int, now: float | None = None) -> Lease | None:
        """The prefill is over, and that of the next one begins (`now`). Returns the lease if this was news."""
        lease = self._leases.get(request_id)
        if lease is None or not lease.pending:
            return None
        account = self._accounts[lease.slot]
        account.end_prefill(lease)
        self._release_prefill(lease, now)
        if now is not None and lease.request.stream:
            account.prefill_since = now
        self._write(lease.slot, account)
        return lease

    def release(self, request_id: int) -> Lease | None:
        """The request is over, one way or another. Returns the lease the first time."""
        lease = self._leases.pop(request_id, None)
        if lease is None:
            return None
        if request_id < 0:
            self.reserved.discard(request_id)
        account = self._accounts[lease.slot]
        account.release(lease)
        self._write(lease.slot, account)
        self._release_prefill(lease, None)
        return lease

    def _release_prefill(self, lease: Lease, now: float | None) -> None:
        """The part of the lease at another endpoint, if there is one, is over."""
        other = self._leases.pop(~lease.request.id, None) if lease.prefill_slot >= 0 else None
        if other is not None:
            account = self._accounts[other.slot]
            account.release(other)
            if now is not None:
                account.prefill_since = now
            self._write(other.slot, account)

    def reserve(self, lease: Lease) -> None:
        """Charge a reservation; `lease.request.id` is below 0. `release` ends it, as does its endpoint's departure."""
        self.charge(lease)
        self.reserved.add(lease.request.id)

    @contextmanager
    def without_reserved(self) -> Iterator[None]:
        """The table as it is without reservations, for as long as this lasts. Nothing may change meanwhile."""
        slots = {self._leases[number].slot for number in self.reserved}
        for slot in slots:
            self._write(slot, self._accounts[slot].without(self.reserved))
        try:
            yield
        finally:
            for slot in slots:
                self._write(slot, self._accounts[slot])

    def of_slot(self, slot: int) -> list[Lease]:
        account = self._accounts.get(slot)
        return list(account.leases.values()) if account else []

    def abandon(self, slot: int) -> list[Lease]:
        """The endpoint left: its leases are released, in one go, and returned."""
        leases = self.of_slot(slot)
        for lease in leases:
            if lease.prefill_slot >= 0:
                self._release_prefill(lease, None)
        for number in self._accounts.pop(slot, Account()).leases:
            del self._leases[number]
            if number < 0:
                self.reserved.discard(number)
        self._write(slot, Account())
        return leases

    def expired(self, now: float, most: float = inf) -> list[int]:
        """Ids of leases past their time, oldest first, up to `most`."""
        old: list[int] = []
        for request_id, lease in self._leases.items():
            if lease.charged_at + self.ttl > now or len(old) == most:
                break
            if request_id >= 0:
                old.append(request_id)
        return old

    def reconcile(self, slot: int, started: float, waiting: float, running: float) -> list[int]:
        """Set the effective columns from a scrape sent at `started`. Returns ids the endpoint cannot hold any more.

        `waiting` and `running` are finite and not negative; `Fleet.sampled` sees to it.
        """
        account = self._account(slot)
        dropped = account.reconcile(started, waiting, running)
        self._write(slot, account)
        return dropped

    def own_accounting(self, slot: int) -> None:
        """No fresh scrape: the effective columns are what we know ourselves."""
        account = self._account(slot)
        account.forget_scrapes()
        self._write(slot, account)

    def _account(self, slot: int) -> Account:
        account = self._accounts.get(slot)
        if account is None:
            account = self._accounts[slot] = Account()
        return account

    def _write(self, slot: int, account: Account) -> None:
        table = self._table
        table.inflight[slot] = len(account.leases)
        table.pending[slot] = account.pending
        table.pending_tokens[slot] = account.pending_tokens
        tokens, work_us = account.queued()
        table.queued_tokens[slot] = tokens
        table.queued_ms[slot] = work_us * 1e-3
        table.prefill_since_ms[slot] = account.prefill_since * 1e3
        table.kv_tokens[slot] = account.kv_tokens
        table.growth_tokens[slot] = account.growth_tokens
        table.queue[slot] = account.queue
        table.active[slot] = account.active

    def validate(self) -> None:
        """Raise `AssertionError` unless every column is exactly the sum of the leases."""
        table = self._table
        nobody = Account()
        for slot in range(len(table)):
            account = self._accounts.get(slot, nobody)
            account.validate()
            assert table.endpoints[slot] is not None or not account.leases
            assert table.inflight[slot] == len(account.leases)
            assert table.pending[slot] == account.pending
            assert table.pending_tokens[slot] == account.pending_tokens
            tokens, work_us = account.queued()
            assert (table.queued_tokens[slot], table.queued_ms[slot]) == (tokens, work_us * 1e-3)
            assert table.prefill_since_ms[slot] == account.prefill_since * 1e3
            assert table.kv_tokens[slot] == account.kv_tokens
            assert table.growth_tokens[slot] == account.growth_tokens
            assert table.queue[slot] == account.queue >= 0
            assert table.active[slot] == account.active >= 0
        held = {number: lease for account in self._accounts.values() for number, lease in account.leases.items()}
        assert held == self._leases
        assert all(number < 0 and number in held for number in self.reserved)


__all__ = ["Lease", "Ledger"]
