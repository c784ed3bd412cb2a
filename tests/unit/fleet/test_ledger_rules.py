"""Leases: each part is released once, and an empty endpoint is exactly empty."""

import pytest

from fairlead.fleet.ledger import Lease, Ledger
from fairlead.fleet.table import EndpointTable
from fairlead.model.endpoint import Endpoint
from fairlead.model.request import Request


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
    ledger.charge(lease(1))
    assert row(table) == {
        "inflight": 1, "pending": 1, "pending_tokens": 100, "kv_tokens": 100.1, "queue": 1, "active": 0,
    }  # fmt: skip
    assert ledger.first_token(1) is ledger.get(1)
    assert row(table) == {
        "inflight": 1, "pending": 0, "pending_tokens": 0, "kv_tokens": 100.1, "queue": 0, "active": 1,
    }  # fmt: skip
    assert ledger.first_token(1) is None, "the second first token is no news"
    assert ledger.release(1) is not None
    assert ledger.release(1) is None, "the second end is ignored"
    assert ledger.first_token(1) is None
    assert set(row(table).values()) == {0.0}
    assert len(ledger) == 0


def test_released_before_its_first_token(table: EndpointTable) -> None:
    ledger = Ledger(table)
    ledger.charge(lease(1))
    released = ledger.release(1)
    assert released is not None
    assert not released.pending
    assert set(row(table).values()) == {0.0}


def test_sums_of_awkward_floats_end_at_exactly_zero(table: EndpointTable) -> None:
    ledger = Ledger(table)
    for number in range(1000):
        ledger.charge(lease(number, tokens=0.1 * number))
    for number in range(0, 1000, 2):
        ledger.first_token(number)
    ledger.validate()
    for number in range(1000):
        ledger.release(number)
    assert set(row(table).values()) == {0.0}
    ledger.validate()


def test_no_pending_request_has_exactly_no_tokens(table: EndpointTable) -> None:
    ledger = Ledger(table)
    for number, tokens in enumerate((0.1, 0.2, 0.3)):
        ledger.charge(lease(number, tokens=tokens))
    for number in (1, 0, 2):
        ledger.first_token(number)
    assert table.pending_tokens[0] == 0.0, "although three leases are still in flight"


def test_a_request_is_charged_once(table: EndpointTable) -> None:
    ledger = Ledger(table)
    ledger.charge(lease(1))
    with pytest.raises(AssertionError, match="charged once"):
        ledger.charge(lease(1, slot=1))
    ledger.validate()


def test_leases_expire_oldest_first_and_may_be_released_on_the_way(table: EndpointTable) -> None:
    ledger = Ledger(table, ttl=60.0)
    for number in range(5):
        ledger.charge(lease(number, slot=number % 2, at=float(number)))
    ledger.release(1)
    expired = []
    for number in ledger.expired(now=63.0):
        expired.append(number)
        ledger.release(number)
    assert expired == [0, 2, 3]
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
