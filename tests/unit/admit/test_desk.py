"""What is said to those that wait, and to whoever scales the pool."""

import pytest

from fairlead.admit.binding import PairBinder
from fairlead.admit.control import FlowControl
from fairlead.admit.desk import GROWTH, Desk
from fairlead.admit.fairness import Strict
from fairlead.admit.framework import Limit
from fairlead.admit.gates import LedgerGate
from fairlead.admit.limits import Limits
from fairlead.admit.ordering import Fcfs
from fairlead.admit.queues import Queues
from fairlead.fleet.fleet import Fleet
from fairlead.model.endpoint import Endpoint
from fairlead.model.instructions import Instruction, Reject
from fairlead.model.request import Request


class Shop:
    """One endpoint; eight requests keep it busy."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.now = 1000.0
        self.fleet = Fleet()
        self.fleet.up(Endpoint("e0", "10.0.0.1:80"))
        queues = Queues(lambda priority: (Strict(), Fcfs()), limits)
        self.desk = Desk(FlowControl(queues, LedgerGate(), PairBinder(lambda *_: None)), "p", target_s=2.0)
        self._ids = 0

    def arrive(self) -> list[Instruction]:
        self._ids += 1
        request = Request(id=self._ids, arrived=self.now, prompt_tokens=10, stream=True)
        held = self.desk.arrived(request, self.fleet, self.now)
        if held is None:
            self.fleet.charge(request, 0, self.now, 0, 10)
        return held or []

    def one_ends(self, after: float) -> None:
        self.now += after
        oldest = next(iter(self.fleet.ledger.of_slot(0)))
        self.fleet.ledger.release(oldest.request.id)
        self.desk.dispatched(self._send, self.fleet, self.now)

    def _send(self, bound, now: float) -> list[Instruction]:
        self.fleet.charge(bound.waiting.request, bound.slot, now, 0, 10)
        return []


def filled(waiting: int, limits: Limits | None = None) -> Shop:
    shop = Shop(limits)
    for _ in range(8 + waiting):
        shop.arrive()
    assert len(shop.desk) == waiting
    return shop


def test_retry_after_is_what_the_queue_takes_at_its_pace() -> None:
    shop = filled(300, Limits(total=Limit(300)))
    for _ in range(150):
        shop.one_ends(after=0.2)
    while len(shop.desk) < 300:
        shop.arrive()
    (reject, _) = shop.arrive()
    assert isinstance(reject, Reject) and reject.status == 429
    assert reject.retry_after_s == pytest.approx(60, abs=2), "300 of them, five a second"


def test_quiet_hours_say_nothing_about_the_pace() -> None:
    shop = filled(1)
    shop.one_ends(after=0.1)
    assert not len(shop.desk)
    before = shop.desk._gap
    shop.now += 3600.0
    shop.arrive()
    shop.one_ends(after=0.1)
    assert shop.desk._gap == pytest.approx(before, rel=0.2)


def test_more_endpoints_are_wanted_the_longer_requests_wait() -> None:
    shop = filled(0)
    assert shop.desk.wanted(3, shop.now) == 3
    shop.arrive()
    assert shop.desk.wanted(3, shop.now) == 3, "not yet"
    assert shop.desk.wanted(3, shop.now + 4.0) == 6
    assert shop.desk.wanted(3, shop.now + 400.0) == 3 * GROWTH
    assert shop.desk.wanted(0, shop.now) == 1, "somebody waits for an empty pool"
