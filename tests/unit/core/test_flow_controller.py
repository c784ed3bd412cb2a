"""What is said to those that wait, and to whoever scales the pool."""

import numpy as np
import pytest
from waiting_rules import AbleRules

from fairlead.core.binding import PairBinder
from fairlead.core.demand import DECODE, PREFILL, Demand
from fairlead.core.endpoint import ROLE_LABEL, Endpoint
from fairlead.core.fairness import Strict
from fairlead.core.fleet import Fleet
from fairlead.core.flow import Limit, Limits
from fairlead.core.flow_control import GROWTH, FlowControl, FlowController
from fairlead.core.gates import PoolGate
from fairlead.core.instructions import Evict, Instruction, Reject
from fairlead.core.policy import Refused
from fairlead.core.queues import Queues
from fairlead.core.request import Request
from fairlead.core.view import FleetView
from fairlead.plugins.flow_control import Fcfs


class Shop:
    """One endpoint; eight requests keep it busy."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.now = 1000.0
        self.fleet = Fleet()
        self.fleet.up(Endpoint("e0", "10.0.0.1:80"))
        queues = Queues(lambda priority: (Strict(), Fcfs()), limits)
        self.flow_controller = FlowController(
            FlowControl(queues, PoolGate("eight", self._level), PairBinder(AbleRules())), "p", target_s=2.0
        )
        self._ids = 0

    def left_s(self, priority: int = 0) -> float:
        return self.flow_controller.flow.queues.drain_s(self.now, priority, "")

    def arrive(self, model: str = "", priority: int = 0) -> list[Instruction]:
        self._ids += 1
        given = {"model": model, "priority": priority}
        request = Request(id=self._ids, arrived=self.now, prompt_tokens=10, stream=True, **given)
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

    def _level(self, fleet: FleetView, now: float) -> float:
        return float(fleet.table.inflight[0]) / 8.0

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


@pytest.mark.parametrize("gap", [0.01, 0.2, 2.0, 15.0])
@pytest.mark.parametrize("slots", [1, 4])
def test_the_pace_is_known_after_eight_dispatches(gap: float, slots: int) -> None:
    shop = filled(300)
    for _ in range(8 // slots):
        for after in (gap * slots, *[0.0] * (slots - 1)):
            shop.one_ends(after)
    assert shop.left_s() == pytest.approx(292 * gap, rel=0.3)


@pytest.mark.parametrize(("before", "now"), [(0.1, 1.0), (1.0, 0.1), (4.0, 1.0), (1.0, 4.0)])
def test_a_new_pace_is_known_soon(before: float, now: float) -> None:
    shop = filled(2000)
    for _ in range(300):
        shop.one_ends(before)
    for _ in range(round(max(60.0 / now, 48.0))):
        shop.one_ends(now)
    assert shop.left_s() == pytest.approx(len(shop.flow_controller) * now, rel=0.3)


def test_a_silence_is_evidence() -> None:
    shop = filled(10)
    assert shop.left_s() == 0.0
    shop.now += 3.0
    assert shop.left_s() == 3.0, "none in three seconds, but all may be sent at once"
    for _ in range(8):
        shop.one_ends(after=0.1)
    assert shop.left_s() < 2.0
    shop.now += 100.0
    assert shop.left_s() >= 100.0


def test_a_pace_is_kept_for_a_minute_as_a_first_guess() -> None:
    for later, left_s in ((50.0, 20.0), (70.0, 0.0)):
        shop = filled(10)
        for _ in range(10):
            shop.one_ends(after=2.0)
        shop.now += later
        for _ in range(10):
            shop.arrive()
        assert shop.left_s() == left_s
        for _ in range(8):
            shop.one_ends(after=0.5)
        assert shop.left_s() == pytest.approx(2 * 0.5, rel=0.35)


def test_requests_that_leave_unsent_do_not_keep_a_pace() -> None:
    shop = filled(10)
    for _ in range(10):
        shop.one_ends(after=20.0)
    queues = shop.flow_controller.flow.queues
    for _ in range(70):
        shop.now += 1.0
        shop.arrive()
        queues.remove(next(iter(queues.bands()[0].members.values())))
    for _ in range(3):
        shop.arrive()
    assert shop.left_s() == 0.0


def test_requests_that_hardly_wait_do_not_hide_how_slow_the_queue_is() -> None:
    shop = filled(0)
    for _ in range(200):
        shop.arrive()
        shop.one_ends(after=0.001)
    for _ in range(100):
        shop.arrive()
    for _ in range(8):
        shop.one_ends(after=2.0)
    assert shop.left_s() == pytest.approx(92 * 2.0, rel=0.3)


def test_the_pace_of_one_model_is_not_that_of_another() -> None:
    shop = filled(10, Limits(total=Limit(10)))
    for _ in range(5):
        shop.one_ends(after=3.0)
    (reject, _) = [*[shop.arrive() for _ in range(5)], shop.arrive()][-1]
    assert isinstance(reject, Reject) and reject.retry_after_s == 30.0
    (reject, _) = shop.arrive(model="idle")
    assert isinstance(reject, Reject) and reject.retry_after_s == 1.0, "none of it waits"
    assert shop.flow_controller.flow.queues.drains_s(shop.now) == {0: 30.0}, "that of the slowest"


def test_lower_bands_wait_for_higher_ones() -> None:
    shop = filled(4)
    for _ in range(4):
        shop.arrive(priority=-1)
    for _ in range(2):
        shop.one_ends(after=1.0)
    assert [shop.left_s(priority) for priority in (1, 0, -1)] == [0.0, 2.0, 6.0]
    shop.arrive(model="other", priority=-1)
    shop.now += 20.0
    assert shop.flow_controller.flow.queues.drains_s(shop.now) == {0: 20.0, -1: pytest.approx(44.0)}


def test_a_queue_that_is_given_up_says_nothing_about_a_later_try() -> None:
    shop = filled(300)
    shop.now += 30.0
    for waiting, why in shop.flow_controller.flow.stop(shop.now):
        reject, _ = shop.flow_controller.refused(waiting.request, why, shop.now, waiting=waiting)
        assert isinstance(reject, Reject) and (reject.status, reject.retry_after_s) == (503, 1.0)


def test_the_paces_of_few_models_of_which_none_waits_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlead.core.queues.MOST_IDLE", 2)
    shop = filled(0)
    for model in ("a", "b", "c"):
        shop.arrive(model=model)
        shop.one_ends(after=2.0)
    for model in ("b", "c", "a"):
        for _ in range(2):
            shop.arrive(model=model)
    left = [shop.flow_controller.flow.queues.drain_s(shop.now, 0, model) for model in ("a", "b", "c")]
    assert left == [0.0, 4.0, 4.0]


def test_more_endpoints_are_wanted_the_longer_requests_wait() -> None:
    shop = filled(0)
    table = shop.fleet.table
    assert shop.flow_controller.wanted(table.alive, shop.now) == 1
    shop.arrive()
    assert shop.flow_controller.wanted(table.alive, shop.now) == 1, "not yet"
    assert shop.flow_controller.wanted(table.alive, shop.now + 4.0) == 2
    assert shop.flow_controller.wanted(table.alive, shop.now + 400.0) == GROWTH
    shop.fleet.down("e0")
    assert shop.flow_controller.wanted(table.alive, shop.now) == 1, "somebody waits for an empty pool"


def test_more_endpoints_are_wanted_for_a_pace_that_is_measured() -> None:
    shop = filled(20)
    for _ in range(7):
        shop.one_ends(after=0.3)
        assert shop.flow_controller.wanted(shop.fleet.table.alive, shop.now) <= 2, "it is what the longest has waited"
    shop.one_ends(after=0.3)
    assert shop.left_s() == pytest.approx(3.6) and shop.flow_controller.wanted(shop.fleet.table.alive, shop.now) == 2
    for _ in range(28):
        shop.arrive()
    assert shop.flow_controller.wanted(shop.fleet.table.alive, shop.now) == GROWTH


def test_a_model_that_hardly_waits_needs_no_more_for_another_one_that_does() -> None:
    shop = Shop()
    for name in ("e1", "e2"):
        shop.fleet.up(Endpoint(name, f"{name}:80", {"model-id": "other"}))
    able = {"": np.array([True, False, False]), "other": np.array([False, True, True])}
    shop.flow_controller.follow("p", AbleRules(lambda request, fleet, now: able[request.target_model]))
    for _ in range(9):
        shop.arrive()
    shop.now += 400.0
    shop.arrive(model="other")
    assert len(shop.flow_controller) == 2
    assert shop.flow_controller.wanted(shop.fleet.table.alive, shop.now) == 2 + GROWTH
    assert shop.flow_controller.wanted(shop.fleet.table.alive, shop.now + 3.0) == 3 + GROWTH
    assert shop.flow_controller.wanted(shop.fleet.table.alive, shop.now + 400.0) == 3 * GROWTH


def test_endpoints_that_cannot_serve_what_waits_need_no_more() -> None:
    shop = Shop()
    for name in ("e1", "e2"):
        shop.fleet.up(Endpoint(name, f"{name}:80", {"model-id": "other"}))
    shop.flow_controller.follow("p", AbleRules(lambda request, fleet, now: np.array([True, False, False])))
    for _ in range(9):
        shop.arrive()
    assert len(shop.flow_controller) == 1
    assert shop.flow_controller.wanted(shop.fleet.table.alive, shop.now + 400.0) == 2 + GROWTH
    shop.fleet.up(Endpoint("e3", "e3:80"))
    assert shop.flow_controller.wanted(shop.fleet.table.alive, shop.now + 400.0) == 3 + GROWTH, (
        "what it can is not known yet"
    )


def test_each_role_wants_its_own_endpoints_only() -> None:
    def wanted() -> list[int | None]:
        demands = (Demand(role=role) for role in (PREFILL, DECODE))
        return [demand.desired(shop.fleet, shop.flow_controller, shop.now + 400.0) for demand in demands]

    shop = Shop()
    for name in ("e1", "e2"):
        shop.fleet.up(Endpoint(name, f"{name}:80", {ROLE_LABEL: "prefill"}))
    shop.flow_controller.follow("p", AbleRules(lambda request, fleet, now: np.array([True, False, False])))
    for _ in range(9):
        shop.arrive()
    assert wanted() == [2, GROWTH]
    shop.fleet.down("e0")
    assert wanted() == [2, 1], "the first that decodes"


def test_not_all_that_wait_are_looked_at_to_know_what_they_can_use() -> None:
    shop = Shop()
    for _ in range(1000):
        shop.arrive()
    binder, seen = shop.flow_controller.flow.binder, []
    members = (seen.append(waiting) or waiting for waiting in shop.flow_controller.flow.queues.members())
    assert binder.reach(members, shop.fleet.table.alive).bit_count() == 1
    assert len(seen) == 1, "it can use all"


def test_one_that_only_one_endpoint_can_serve_hides_nothing_of_what_else_waits() -> None:
    shop = Shop()
    for name in ("e1", "e2", "e3"):
        shop.fleet.up(Endpoint(name, f"{name}:80"))
    shop.flow_controller.follow("p", AbleRules(lambda request, fleet, now: np.array([True, *[request.id != 12] * 3])))
    for _ in range(12):
        shop.arrive()
    assert shop.flow_controller.wanted(shop.fleet.table.alive, shop.now + 400.0) == 4 * GROWTH
