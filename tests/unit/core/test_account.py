"""What a scrape does to the effective load of one endpoint."""

import pytest

from fairlead.core.ledger import IDLE_SECONDS, IDLE_SECONDS_PENDING, Account, Lease, Ledger
from fairlead.core.request import Request
from fairlead.testing import builders


def books() -> Ledger:
    """Of one endpoint, which has slot 0."""
    return Ledger(builders.fleet("e0").table)


def charge(ledger: Ledger, count: int, at: float = 0.0, active: bool = False) -> list[Lease]:
    """`count` leases charged at `at`, past their first token if `active`."""
    leases, account = [], ledger.account(0)
    for _ in range(count):
        number = max((lease.request.id for lease in account.leases), default=0) + 1
        request = Request(id=number, arrived=at)
        lease = Lease(request, 0, "e", at, uncached_tokens=100.0, kv_tokens=200.0, hit_tokens=0)
        ledger.charge(lease)
        if active:
            account.release(lease, prefill_only=True)
        leases.append(lease)
    return leases


def load(account: Account) -> tuple[float, float]:
    account.validate()
    queue, active, *_ = account.row()
    return queue, active


def ids(leases: list[Lease]) -> list[int]:
    return [lease.request.id for lease in leases]


@pytest.mark.parametrize(
    ("pending", "active", "waiting", "running", "expected", "why"),
    [
        (0, 0, 0, 0, (0, 0), "idle"),
        (0, 0, 7, 30, (7, 30), "other clients only"),
        (3, 2, 3, 2, (3, 2), "the engine sees exactly ours"),
        (3, 2, 10, 20, (10, 20), "ours and others'"),
        (30, 0, 0, 30, (0, 30), "thirty that do not stream: no first token, but the engine says that none waits"),
        (30, 0, 10, 20, (10, 20), "of thirty that do not stream ten wait"),
        (10, 0, 0, 0, (10, 0), "the gauges are behind: a burst must not look like an idle endpoint"),
        (10, 5, 2, 5, (10, 5), "the gauges know two of ten yet"),
        (10, 4, 10, 0, (10, 4), "the end of a batch: four that run are in no gauge"),
        (28, 4, 28, 0, (28, 4), "the end of a batch at concurrency 32, as measured"),
        (0, 4, 4, 0, (0, 4), "all preempted: still four requests, not eight"),
        (5, 0, 2.5, 1e9, (2.5, 1e9), "nonsense does no harm"),
    ],
)
def test_reading(pending: int, active: int, waiting: float, running: float, expected: object, why: str) -> None:
    ledger = books()
    account = ledger.account(0)
    charge(ledger, active, active=True)
    charge(ledger, pending)
    assert account.reconcile(1.0, waiting, running) == []
    assert load(account) == expected, why


def test_what_was_charged_since_the_scrape_was_sent_comes_on_top() -> None:
    ledger = books()
    account = ledger.account(0)
    charge(ledger, 2, at=0.5)
    charge(ledger, 3, at=1.0)
    charge(ledger, 1, at=1.2, active=True)
    account.reconcile(1.0, waiting=2, running=7)
    assert load(account) == (2 + 3, 7 + 1)


def test_a_first_token_moves_a_request_from_where_it_was_counted() -> None:
    ledger = books()
    account = ledger.account(0)
    first, second = charge(ledger, 2)
    account.reconcile(1.0, waiting=1, running=11)  # one of ours runs already, ten of others do
    assert load(account) == (1, 11)
    account.release(first, prefill_only=True)
    assert load(account) == (1, 11), "the running one had its first token: it ran before and runs now"
    account.release(second, prefill_only=True)
    assert load(account) == (0, 12)


def test_a_first_token_of_a_later_request_does_not_count_as_one_that_ran() -> None:
    ledger = books()
    account = ledger.account(0)
    charge(ledger, 2)
    account.reconcile(1.0, waiting=0, running=2)
    (later,) = charge(ledger, 1, at=1.5)
    assert load(account) == (1, 2)
    account.release(later, prefill_only=True)
    assert load(account) == (0, 3)


def test_no_drift_between_scrapes_however_many_requests_pass() -> None:
    ledger = books()
    account = ledger.account(0)
    account.reconcile(0.0, waiting=4, running=6)
    for turn in range(50):
        leases = charge(ledger, 5, at=0.1 + turn)
        for lease in leases[:3]:
            account.release(lease, prefill_only=True)
        assert load(account) == (4 + 2, 6 + 3)
        for lease in leases:
            account.release(lease)
        assert load(account) == (4, 6), "the requests of others stay until the next reading"


def test_the_end_of_ours_is_not_taken_from_others() -> None:
    ledger = books()
    account = ledger.account(0)
    (lease,) = charge(ledger, 1)
    account.reconcile(1.0, waiting=0, running=0)  # behind: ours is not in it
    account.release(lease)
    assert load(account) == (0, 0)
    account.reconcile(1.1, waiting=0, running=8)
    assert load(account) == (0, 8)


def test_without_scrapes_only_our_own_leases_count() -> None:
    ledger = books()
    account = ledger.account(0)
    charge(ledger, 3)
    charge(ledger, 2, active=True)
    account.reconcile(1.0, waiting=20, running=30)
    account.forget_scrapes()
    assert load(account) == (3, 2)


def test_requests_that_lost_their_end_stop_counting_as_active() -> None:
    ledger = books()
    account = ledger.account(0)
    charge(ledger, 10, active=True)
    for turn, expected in enumerate([10, 10, 6, 6]):
        account.reconcile(5.0 + turn / 10, waiting=2, running=4)
        assert sum(load(account)) == expected, turn
    for lease in list(account.leases)[:4]:
        account.release(lease)
    account.reconcile(6.0, waiting=0, running=6)
    assert load(account) == (0, 6)


def test_requests_just_charged_are_never_taken_for_lost() -> None:
    """Steps of 300 ms with steady traffic: at every scrape the newest requests are in no gauge."""
    ledger = books()
    account = ledger.account(0)
    for turn in range(6):
        charge(ledger, 5, at=10 + turn * 0.1, active=True)
        account.reconcile(10.1 + turn * 0.1, waiting=0, running=0)
        assert load(account) == (0, 5 * (turn + 1))


def idle(account: Account, start: float, end: float, step: float = 0.5) -> list[int]:
    """Ids dropped by the last of a series of scrapes that show nothing."""
    dropped: list[int] = []
    now = start
    while now <= end:
        dropped = ids(account.reconcile(now, 0.0, 0.0))
        now += step
    return dropped


def test_an_endpoint_that_stays_idle_holds_none_of_our_active_leases() -> None:
    ledger = books()
    account = ledger.account(0)
    charge(ledger, 2, at=0.0, active=True)
    charge(ledger, 1, at=0.0)
    assert idle(account, 1.0, 1.0 + IDLE_SECONDS - 0.5) == []
    assert idle(account, 1.0 + IDLE_SECONDS, 1.0 + IDLE_SECONDS) == [1, 2]


def test_a_long_first_prefill_is_not_dropped() -> None:
    ledger = books()
    account = ledger.account(0)
    charge(ledger, 1, at=0.0)
    assert idle(account, 0.5, IDLE_SECONDS_PENDING - 1) == []
    assert idle(account, IDLE_SECONDS_PENDING, IDLE_SECONDS_PENDING + 1) == [1]


def test_a_lease_charged_while_the_endpoint_was_idle_is_kept() -> None:
    ledger = books()
    account = ledger.account(0)
    charge(ledger, 1, at=0.0, active=True)
    idle(account, 1.0, 4.0)
    charge(ledger, 1, at=4.2, active=True)
    assert idle(account, 4.5, 6.0) == [1]


def test_requests_of_which_nothing_was_ever_shown_are_dropped_although_others_came_before() -> None:
    ledger = books()
    account = ledger.account(0)
    charge(ledger, 1, at=0.0)
    idle(account, 1.0, 4.0)
    charge(ledger, 1, at=4.2)
    assert idle(account, 4.5, 34.0) == [1]
    assert idle(account, 34.5, 35.0) == [1, 2]


def test_one_sign_of_life_ends_the_doubt() -> None:
    ledger = books()
    account = ledger.account(0)
    charge(ledger, 1, at=0.0, active=True)
    idle(account, 1.0, 5.5)
    account.reconcile(5.8, 0.0, 1.0)
    assert idle(account, 6.0, 10.0) == []


def test_three_idle_scrapes_are_needed_however_long_apart() -> None:
    ledger = books()
    account = ledger.account(0)
    charge(ledger, 1, at=0.0, active=True)
    assert account.reconcile(10.0, 0.0, 0.0) == []
    assert account.reconcile(70.0, 0.0, 0.0) == []
    assert ids(account.reconcile(130.0, 0.0, 0.0)) == [1]
