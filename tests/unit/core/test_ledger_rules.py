"""Leases: each part is released once, and an empty endpoint is exactly empty."""

import pytest

from fairlead.core.endpoint import Endpoint
from fairlead.core.ledger import Lease, Ledger
from fairlead.core.request import Request
from fairlead.core.table import EndpointTable


@pytest.fixture
def table() -> EndpointTable:
    table = EndpointTable()
    for number in range(2):
        table.add(Endpoint(f"e{number}", f"10.0.0.{number}:8000"))
    return table


def lease(number: int, slot: int = 0, at: float = 0.0, tokens: float = 100.0) -> Lease:
    return Lease(
        Request(id=number, arrived=at),
        slot,
        f"e{slot}",
        charged_at=at,
        uncached_tokens=tokens,
        kv_tokens=tokens + 0.1,
        hit_tokens=0,
    )


def row(table: EndpointTable, slot: int = 0) -> dict[str, float]:
    names = ("inflight", "pending", "pending_tokens", "kv_tokens", "queue", "active")
    return {name: float(getattr(table, name)[slot]) for name in names}


def test_charge_first_token_release(table: EndpointTable) -> None:
    ledger = Ledger(table)
    first = lease(1)
    ledger.charge(first)
    assert row(table) == {
        "inflight": 1, "pending": 1, "pending_tokens": 100, "kv_tokens": 100.1, "queue": 1, "active": 0,
    }  # fmt: skip
    assert ledger.first_token(first)
    assert row(table) == {
        "inflight": 1, "pending": 0, "pending_tokens": 0, "kv_tokens": 100.1, "queue": 0, "active": 1,
    }  # fmt: skip
    assert not ledger.first_token(first), "the second first token is no news"
    ledger.release(first)
    ledger.release(first)  # the second end is ignored
    assert not ledger.first_token(first)
    assert set(row(table).values()) == {0.0}
    assert len(ledger) == 0


def test_released_before_its_first_token(table: EndpointTable) -> None:
    ledger = Ledger(table)
    released = lease(1)
    ledger.charge(released)
    ledger.release(released)
    assert not released.pending and not released.held
    assert set(row(table).values()) == {0.0}


def test_sums_of_awkward_floats_end_at_exactly_zero(table: EndpointTable) -> None:
    ledger = Ledger(table)
    leases = [lease(number, tokens=0.1 * number) for number in range(1000)]
    for one in leases:
        ledger.charge(one)
    for one in leases[::2]:
        ledger.first_token(one)
    ledger.validate()
    for one in leases:
        ledger.release(one)
    assert set(row(table).values()) == {0.0}
    ledger.validate()


def test_no_pending_request_has_exactly_no_tokens(table: EndpointTable) -> None:
    ledger = Ledger(table)
    leases = [lease(number, tokens=tokens) for number, tokens in enumerate((0.1, 0.2, 0.3))]
    for one in leases:
        ledger.charge(one)
    for number in (1, 0, 2):
        ledger.first_token(leases[number])
    assert table.pending_tokens[0] == 0.0, "although three leases are still in flight"


def test_a_lease_is_charged_once(table: EndpointTable) -> None:
    ledger, charged = Ledger(table), lease(1)
    ledger.charge(charged)
    with pytest.raises(AssertionError, match="charged once"):
        ledger.charge(charged)
    ledger.validate()


def test_leases_expire_oldest_first_and_may_be_released_on_the_way(table: EndpointTable) -> None:
    ledger = Ledger(table, ttl=60.0)
    leases = [lease(number, slot=number % 2, at=float(number)) for number in range(5)]
    for one in leases:
        ledger.charge(one)
    ledger.release(leases[1])
    expired = ledger.expired(now=63.0)
    for one in expired:
        ledger.release(one)
    assert [one.request.id for one in expired] == [0, 2, 3]
    assert [e.request.id for e in ledger.of_slot(0)] == [4]
    ledger.validate()


def test_a_reading_is_written_to_the_columns(table: EndpointTable) -> None:
    ledger = Ledger(table)
    ledger.charge(lease(1, slot=1, at=5.0))
    assert ledger.reconcile(1, started=4.0, waiting=2.0, running=9.0) == []
    assert (table.queue[1], table.active[1]) == (3.0, 9.0)
    assert (table.queue[0], table.active[0]) == (0.0, 0.0)
    ledger.own_accounting(1)
    assert (table.queue[1], table.active[1]) == (1.0, 0.0)
    ledger.validate()


@pytest.mark.parametrize("column", ["inflight", "pending", "pending_tokens", "kv_tokens", "queue", "active"])
def test_validate_sees_a_column_that_was_tampered_with(table: EndpointTable, column: str) -> None:
    ledger = Ledger(table)
    ledger.charge(lease(1))
    ledger.validate()
    getattr(table, column)[0] += 1
    with pytest.raises(AssertionError):
        ledger.validate()
