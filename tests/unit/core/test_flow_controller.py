"""What is said to those that wait, and to whoever scales the pool."""

import numpy as np
import pytest
from waiting_rules import AbleRules

from fairlead.core.binding import PairBinder
from fairlead.core.endpoint import Endpoint
from fairlead.core.fairness import Strict
from fairlead.core.fleet import Fleet
from fairlead.core.flow import Limit, Limits
from fairlead.core.flow_control import GROWTH, FlowControl, FlowController
from fairlead.core.gates import LedgerGate
from fairlead.core.instructions import Evict, Instruction, Reject
from fairlead.core.policy import Refused
from fairlead.core.queues import Queues
from fairlead.core.request import Request
from fairlead.plugins.flow_control import Fcfs


class Shop:
    """One endpoint; eight requests keep it busy."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.now = 1000.0
        self.fleet = Fleet()
        self.fleet.up(Endpoint("e0", "10.0.0.1:80"))
        queues = Queues(lambda priority: (Strict(), Fcfs()), limits)
        self.flow_controller = FlowController(
            FlowControl(queues, LedgerGate(requests=8), PairBinder(AbleRules())), "p", target_s=2.0
        )
        self._ids = 0

    def arrive(self) -> list[Instruction]:
        self._ids += 1
        request = Request(id=self._ids, arrived=self.now, prompt_tokens=10, stream=True)
        outcome = self.flow_controller.flow.arrived(request, self.fleet, self.now)
        if isinstance(outcome, Refused):
            return self.flow_controller.refused(request, outcome, self.now)
        if outcome is None:
            self.fleet.charge(request, 0, self.now, 0, 10)
        return []

    def one_ends(self, after: float) -> None:
        self.now += after
        oldest = next(iter(self.fleet.ledger.of_slot(0)))
        self.fleet.ledger.release(oldest)
        self.flow_controller.dispatched(self._send, self._evict, self.fleet, self.now)

    def _send(self, bound, now: float) -> list[Instruction]:
        self.fleet.charge(bound.waiting.request, bound.slot, now, 0, 10)
        return []

    def _evict(self, lease, told) -> Evict:
        raise AssertionError("nobody has to make way")


def filled(waiting: int, limits: Limits | None = None) -> Shop:
    shop = Shop(limits)
    for _ in range(8 + waiting):
        shop.arrive()
    assert len(shop.flow_controller) == waiting
    return shop


def test_retry_after_is_what_the_queue_takes_at_its_pace() -> None:
    shop = filled(300, Limits(total=Limit(300)))
    for _ in range(150):
        shop.one_ends(after=0.2)
    while len(shop.flow_controller) < 300:
        shop.arrive()
    (reject, _) = shop.arrive()
    assert isinstance(reject, Reject) and reject.status == 429
    assert reject.retry_after_s == pytest.approx(60, abs=2), "300 of them, five a second"


def test_quiet_hours_say_nothing_about_the_pace() -> None:
    shop = filled(1)
    shop.one_ends(after=0.1)
    assert not len(shop.flow_controller)
    before = shop.flow_controller._gap
    shop.now += 3600.0
    shop.arrive()
    shop.one_ends(after=0.1)
    assert shop.flow_controller._gap == pytest.approx(before, rel=0.2)


def test_quiet_hours_after_a_client_that_left_say_nothing_about_the_pace() -> None:
    shop = filled(2)
    shop.one_ends(after=0.1)
    before = shop.flow_controller.drain_s()
    queues = shop.flow_controller.flow.queues
    (band,) = queues.bands()
    queues.remove(band.last())
    for lease in list(shop.fleet.ledger.of_slot(0)):
        shop.fleet.ledger.release(lease)
    shop.now += 3600.0
    for _ in range(8 + 2):
        shop.arrive()
    shop.one_ends(after=0.1)
    assert len(shop.flow_controller) == 1
    assert shop.flow_controller.drain_s() == before


def test_more_endpoints_are_wanted_the_longer_requests_wait() -> None:
    shop = filled(0)
    table = shop.fleet.table
    assert shop.flow_controller.wanted(table, shop.now) == 1
    shop.arrive()
    assert shop.flow_controller.wanted(table, shop.now) == 1, "not yet"
    assert shop.flow_controller.wanted(table, shop.now + 4.0) == 2
    assert shop.flow_controller.wanted(table, shop.now + 400.0) == GROWTH
    shop.fleet.down("e0")
    assert shop.flow_controller.wanted(table, shop.now) == 1, "somebody waits for an empty pool"


def test_endpoints_that_cannot_serve_what_waits_need_no_more() -> None:
    shop = Shop()
    for name in ("e1", "e2"):
        shop.fleet.up(Endpoint(name, f"{name}:80", {"model-id": "other"}))
    shop.flow_controller.follow("p", AbleRules(lambda request, fleet, now: np.array([True, False, False])))
    for _ in range(9):
        shop.arrive()
    assert len(shop.flow_controller) == 1
    assert shop.flow_controller.wanted(shop.fleet.table, shop.now + 400.0) == 2 + GROWTH
    shop.fleet.up(Endpoint("e3", "e3:80"))
    assert shop.flow_controller.wanted(shop.fleet.table, shop.now + 400.0) == 3 + GROWTH, "what it can is not known yet"


def test_not_all_that_wait_are_looked_at_to_know_what_they_can_use() -> None:
    shop = Shop()
    for _ in range(1000):
        shop.arrive()
    binder, seen = shop.flow_controller.flow.binder, []
    members = (seen.append(waiting) or waiting for waiting in shop.flow_controller.flow.queues.members())
    assert binder.reach(members, shop.fleet.table) == 1
    assert len(seen) == 1, "it can use all"


def test_one_that_only_one_endpoint_can_serve_hides_nothing_of_what_else_waits() -> None:
    shop = Shop()
    for name in ("e1", "e2", "e3"):
        shop.fleet.up(Endpoint(name, f"{name}:80"))
    shop.flow_controller.follow("p", AbleRules(lambda request, fleet, now: np.array([True, *[request.id != 12] * 3])))
    for _ in range(12):
        shop.arrive()
    assert shop.flow_controller.wanted(shop.fleet.table, shop.now + 400.0) == 4 * GROWTH
