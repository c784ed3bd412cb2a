from math import inf

import numpy as np
import pytest
from leases import lease_of
from waiting_rules import AbleRules

from fairlead.core.binding import Bound, PairBinder
from fairlead.core.endpoint import Endpoint
from fairlead.core.fairness import Charge, RoundRobin, StartTimeFair, Strict
from fairlead.core.fleet import Fleet
from fairlead.core.flow import FlowKey, Limit, Limits, Times
from fairlead.core.flow_control import PAIRS, SEARCHED, FlowControl
from fairlead.core.policy import Refused
from fairlead.core.queues import Queues
from fairlead.core.request import Request
from fairlead.plugins.flow_control import Fcfs


class AtMost:
    """Open while fewer than `limit` requests are there."""

    name = "at-most"

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def admits(self, slot, fleet, now):
        return bool(fleet.table.inflight[slot] < self.limit)

    def open(self, fleet, now):
        mask = fleet.table.inflight < self.limit
        return None if mask.all() else mask


class FirstForFirst:
    """The first request that its subset lets go, to the first open endpoint."""

    def look(self, request, fleet, now):
        return 10.0, None

    def bind(self, window, fleet, opened, now):
        for waiting in window:
            for slot in np.flatnonzero(opened):
                allowed = waiting.request.subset
                if allowed is None or fleet.table.endpoints[slot].address in allowed:
                    return Bound(waiting, int(slot), waiting.work)
        return inf

    def able(self, waiting, fleet, now):
        subset = waiting.request.subset
        there = (subset is None or endpoint.address in subset for endpoint in fleet.table.endpoints)
        return np.array(list(there))

    def version(self, table):
        return table.version, 0

    def able_bits(self, waiting, table):
        subset = waiting.request.subset
        return sum(1 << i for i, endpoint in enumerate(table.endpoints) if subset is None or endpoint.address in subset)


class FlowController:
    """Flow control over `endpoints` endpoints that take one request each."""

    def __init__(
        self,
        endpoints: int = 2,
        limits: Limits | None = None,
        times: Times | None = None,
        fairness: type[Strict] | type[RoundRobin] | type[StartTimeFair] = Strict,
    ):
        self.fleet = Fleet()
        for i in range(endpoints):
            self.fleet.up(Endpoint(f"e{i}", f"10.0.0.{i}:80"))
        queues = Queues(lambda priority: (fairness(), Fcfs()), limits)
        self.flow = FlowControl(queues, AtMost(1), FirstForFirst(), times)
        self.now = 100.0
        self._ids = 0

    def arrive(self, priority: int = 0, subset=None, ttl: float = 0.0, body: int = 0, tenant: str = ""):
        self._ids += 1
        request = Request(
            id=self._ids,
            arrived=self.now,
            priority=priority,
            subset=subset,
            ttl_s=ttl,
            body_bytes=body,
            prompt_tokens=9,
            fairness_id=tenant,
        )
        outcome = self.flow.arrived(request, self.fleet, self.now)
        if outcome is None:
            slot = next(s for s, _ in self.fleet.table.slots() if not self.fleet.table.inflight[s])
            self.fleet.charge(request, slot, self.now, 0, 10)
        return request, outcome

    def dispatch(self) -> list[tuple[int, int]]:
        gone = []
        while (bound := self.flow.dispatch(self.fleet, self.now)) is not None:
            self.fleet.charge(bound.waiting.request, bound.slot, self.now, 0, 10)
            gone.append((bound.waiting.request.id, bound.slot))
            self.flow.validate()
        return gone


def test_below_saturation_nothing_waits():
    flow_controller = FlowController()
    assert flow_controller.arrive()[1] is None
    assert len(flow_controller.flow) == 0
    assert flow_controller.dispatch() == []


def test_above_saturation_requests_wait_until_an_endpoint_opens():
    flow_controller = FlowController(endpoints=1)
    (first, _), (second, waits) = flow_controller.arrive(), flow_controller.arrive()
    assert waits is not None
    assert flow_controller.dispatch() == []
    flow_controller.fleet.ledger.release(lease_of(flow_controller.fleet, first.id))
    assert flow_controller.dispatch() == [(second.id, 0)]


@pytest.mark.parametrize("busy", [1, 2], ids=["none waits", "one waits"])
def test_what_the_model_has_nothing_to_do_for_never_waits(busy):
    flow_controller = FlowController(endpoints=1)
    for _ in range(busy):
        flow_controller.arrive()
    fleet, flow = flow_controller.fleet, flow_controller.flow

    def waits(api: str, unread: str = "") -> bool:
        request, now = Request(id=90, arrived=flow_controller.now, api=api, unread=unread), flow_controller.now
        return flow.asks(request, fleet, now) or flow.arrived(request, fleet, now) is not None

    assert not any(waits(api) for api in ("tokenize", "render", "count_tokens", "conversations", "models"))
    assert not waits("other", "empty"), "a health check"
    assert waits("other", "no-body"), "a WebSocket, or a body that the gateway does not show"
    assert waits("other", "path")
    assert waits("embeddings")


class Counting(PairBinder):
    """Counts how often it is asked where a request can be served."""

    asked = 0

    def able_bits(self, waiting, table):
        self.asked += 1
        return super().able_bits(waiting, table)


def in_the_subset(request, fleet, now):
    return np.array([request.subset is None or e.address in request.subset for e in fleet.table.endpoints])


def controller_with_pairs(waiting: int, endpoints: int = 2) -> tuple[FlowController, Counting]:
    """Return a controller of two endpoints; one is busy, and the requests wait for it."""
    controller = FlowController(endpoints)
    controller.flow.binder = binder = Counting(AbleRules(in_the_subset))
    for _ in range(waiting + 1):
        controller.arrive(subset={"10.0.0.0:80"})
    assert controller.dispatch() == []
    return controller, binder


def passes(controller: FlowController) -> list[tuple[int, int]]:
    gone = controller.dispatch()
    while controller.flow.more:
        gone += controller.dispatch()
    return gone


def test_an_idle_endpoint_gets_its_request_after_the_pool_changed():
    controller, _ = controller_with_pairs(400)
    assert passes(controller) == []
    controller.fleet.up(Endpoint("e2", "10.0.0.2:80"))
    wanted, _ = controller.arrive(subset={"10.0.0.2:80"})
    for _ in range(200):
        if (gone := passes(controller)) or controller.flow.look_again == inf:
            break
        controller.now = max(controller.now, controller.flow.look_again)
    assert gone == [(wanted.id, 2)]


def test_a_search_for_an_idle_endpoint_goes_on_from_pass_to_pass():
    """One call looks at a thousand requests, however many wait, and finds the one at the end all the same."""
    controller, binder = controller_with_pairs(4 * SEARCHED)
    wanted, _ = controller.arrive(subset={"10.0.0.1:80"})
    asked = []
    for _ in range(4):
        binder.asked = 0
        gone = controller.dispatch()
        asked.append(binder.asked)
    assert gone == [(wanted.id, 1)]
    assert max(asked) <= SEARCHED + 4 * 256


@pytest.mark.parametrize("left", [0, 100 * SEARCHED], ids=["all wait", "others have left"])
def test_a_search_for_an_idle_endpoint_ends_however_often_the_pool_changes(left):
    controller = FlowController()
    for _ in range(4 * SEARCHED + 1):
        controller.arrive(subset={"10.0.0.0:80"})
    controller.flow.queues.newest += left
    wanted, _ = controller.arrive(subset={"10.0.0.1:80"})
    gone: list[tuple[int, int]] = []
    for _ in range(5):
        controller.fleet.table.version += 1
        gone += controller.dispatch()
    assert gone == [(wanted.id, 1)]


def test_an_endpoint_that_opens_during_a_search_gets_a_request_that_was_passed():
    controller, _ = controller_with_pairs(SEARCHED, endpoints=3)
    first, _ = controller.arrive(subset={"10.0.0.2:80"})
    assert passes(controller) == [(first.id, 2)]
    second, _ = controller.arrive(subset={"10.0.0.2:80"})
    for _ in range(3 * SEARCHED):
        controller.arrive(subset={"10.0.0.0:80"})
    assert (controller.dispatch(), controller.flow.more) == ([], True)
    controller.fleet.ledger.release(lease_of(controller.fleet, first.id))
    assert passes(controller) == [(second.id, 2)]


def test_who_waits_for_a_busy_endpoint_is_looked_at_once():
    """An arrival does not cost more the more requests wait."""
    controller, binder = controller_with_pairs(1000)
    passes(controller)
    assert binder.asked >= 1000
    binder.asked = 0
    for _ in range(5):
        controller.arrive(subset={"10.0.0.0:80"})
        assert passes(controller) == []
    assert binder.asked < 1500, "the window of 256 each time"
    wanted, _ = controller.arrive(subset={"10.0.0.1:80"})
    assert passes(controller) == [(wanted.id, 1)]


def test_higher_bands_go_first_whenever_they_came():
    flow_controller = FlowController(endpoints=1)
    first, _ = flow_controller.arrive()
    sheddable, _ = flow_controller.arrive(priority=-10)
    standard, _ = flow_controller.arrive(priority=0)
    critical, _ = flow_controller.arrive(priority=10)
    order = []
    holder = first.id
    for _ in range(3):
        flow_controller.fleet.ledger.release(lease_of(flow_controller.fleet, holder))
        ((holder, _),) = flow_controller.dispatch()
        order.append(holder)
    assert order == [critical.id, standard.id, sheddable.id]


def test_what_a_band_keeps_for_its_light_requests_is_kept_from_lower_bands_where_it_could_use_it():
    flow_controller = FlowController(endpoints=3, fairness=StartTimeFair)
    flow, at = flow_controller.flow, flow_controller.now
    flow_controller.arrive()
    flow.count([], flow_controller.fleet)
    light, heavy = (flow.queues.named(FlowKey(0, "", tenant), at)[1] for tenant in ("light", ""))
    charges = [Charge(light, slot, at, 0.0, 0.0, 1.0, True) for slot in (1, 2)]
    charges += [Charge(heavy, slot, at, 100.0, 0.0, 100.0, False) for slot in (0, 1, 2)]
    for charge in charges:
        flow.queues.sent(charge, 10.0)
    flow_controller.arrive(subset=frozenset({"10.0.0.1:80"}))
    sheddable = [flow_controller.arrive(priority=-10)[0].id for _ in range(2)]
    assert flow_controller.dispatch() == [(sheddable[0], 2)]


def test_a_request_whose_endpoints_are_busy_does_not_block_others():
    flow_controller = FlowController(endpoints=2)
    flow_controller.arrive()
    (blocker, waits) = flow_controller.arrive(priority=10, subset=frozenset({"10.0.0.0:80"}))
    assert waits is not None
    free, _ = flow_controller.arrive(priority=0)
    assert flow_controller.dispatch() == [(free.id, 1)]
    assert [waiting.request.id for waiting in flow_controller.flow.queues.members()] == [blocker.id]


@pytest.mark.parametrize("tenants", [1, 100], ids=["one flow", "many flows"])
@pytest.mark.parametrize("fairness", [Strict, RoundRobin, StartTimeFair])
def test_however_many_wait_for_a_busy_endpoint_an_idle_one_gets_its_requests(tenants, fairness):
    controller = FlowController(endpoints=2, fairness=fairness)
    controller.arrive(subset={"10.0.0.0:80"})
    for number in range(400):
        controller.arrive(subset={"10.0.0.0:80"}, tenant=f"t{number % tenants}")
    controller.now += 1.0
    here, _ = controller.arrive(subset={"10.0.0.1:80"}, tenant=f"t{tenants - 1}")
    held, _ = controller.arrive(subset={"10.0.0.1:80"}, tenant="t0")
    gone = controller.dispatch()
    while controller.flow.more:
        gone += controller.dispatch()
    assert len(gone) == 1 and gone[0] in ((here.id, 1), (held.id, 1))
    controller.fleet.ledger.release(lease_of(controller.fleet, gone[0][0]))
    assert {*controller.dispatch(), *gone} == {(here.id, 1), (held.id, 1)}


def test_one_call_dispatches_one_request_and_says_that_there_is_more():
    flow_controller = FlowController(endpoints=2)
    for _ in range(3):
        flow_controller.arrive()
    for lease in list(flow_controller.fleet.ledger):
        flow_controller.fleet.ledger.release(lease)
    flow, fleet = flow_controller.flow, flow_controller.fleet
    for more in (True, False):
        bound = flow.dispatch(fleet, flow_controller.now)
        assert bound is not None and flow.more is more
        fleet.charge(bound.waiting.request, bound.slot, flow_controller.now, 0, 10)


def test_time_to_live_is_the_requests_own_or_the_default():
    flow_controller = FlowController(endpoints=1, times=Times(ttl=60.0))
    flow_controller.arrive()
    short, _ = flow_controller.arrive(ttl=2.0)
    long, _ = flow_controller.arrive()
    assert flow_controller.flow.next_deadline() == flow_controller.now + 2.0
    ((late, why),) = flow_controller.flow.expire(flow_controller.fleet, flow_controller.now + 2.0)
    assert (late.request.id, why.reason, why.status) == (short.id, "rejected-ttl-expired", 429)
    ((late, _),) = flow_controller.flow.expire(flow_controller.fleet, flow_controller.now + 60.0)
    assert late.request.id == long.id
    assert flow_controller.flow.next_deadline() == inf


def test_a_request_that_no_endpoint_can_serve_any_more_gets_503():
    flow_controller = FlowController(endpoints=2)
    flow_controller.arrive(), flow_controller.arrive()
    subset = frozenset({"10.0.0.0:80"})
    held, _ = flow_controller.arrive(ttl=2.0, subset=subset)
    flow_controller.fleet.up(Endpoint("e0", "10.0.0.9:80"))
    ((late, why),) = flow_controller.flow.expire(flow_controller.fleet, flow_controller.now + 2.0)
    assert (late.request, why.reason, why.status) == (held, "rejected-no-endpoints", 503)


def test_without_endpoints_requests_wait_for_the_first_one():
    flow_controller = FlowController(endpoints=0, times=Times(ttl=60.0, no_endpoints=5.0))
    request, waits = flow_controller.arrive()
    assert waits is not None
    flow_controller.fleet.up(Endpoint("late", "10.0.0.9:80"))
    assert flow_controller.dispatch() == [(request.id, 0)]
    empty = FlowController(endpoints=0, times=Times(ttl=60.0, no_endpoints=5.0))
    start = empty.now
    empty.arrive()
    empty.dispatch()
    empty.now += 2.0
    empty.arrive()
    assert empty.dispatch() == [] and empty.flow.next_deadline() == start + 5.0
    ((_, why),) = empty.flow.expire(empty.fleet, start + 5.0)
    assert (why.reason, why.status) == ("rejected-no-endpoints", 503)
    assert empty.flow.next_deadline() == start + 7.0


def test_the_time_without_endpoints_ends_when_the_first_comes_and_begins_when_the_last_goes():
    controller = FlowController(endpoints=0, times=Times(ttl=60.0, no_endpoints=5.0))
    start = controller.now
    waiting = [controller.arrive()[0] for _ in range(3)]
    controller.dispatch()
    controller.fleet.up(Endpoint("late", "10.0.0.9:80"))
    assert [number for number, _ in controller.dispatch()] == [waiting[0].id]
    assert controller.flow.next_deadline() == start + 60.0
    controller.now += 10.0
    controller.fleet.down("late")
    controller.dispatch()
    assert controller.flow.next_deadline() == start + 15.0
    assert controller.flow.expire(controller.fleet, start + 14.0) == []
    gone = controller.flow.expire(controller.fleet, start + 15.0)
    assert [each.request.id for each, _ in gone] == [waiting[1].id, waiting[2].id]


def test_limits_refuse_and_lower_bands_give_way():
    flow_controller = FlowController(endpoints=1, limits=Limits(total=Limit(requests=2)))
    flow_controller.arrive()
    low, _ = flow_controller.arrive(priority=-10)
    mid, _ = flow_controller.arrive(priority=0)
    _, (_, displaced) = flow_controller.arrive(priority=10)
    assert [waiting.request.id for waiting in displaced] == [low.id]
    _, refused = flow_controller.arrive(priority=-10)
    assert isinstance(refused, Refused)
    assert refused.reason == "rejected-saturated"
    assert mid.id in [waiting.request.id for waiting in flow_controller.flow.queues.members()]


def test_cancelled_requests_are_gone():
    flow_controller = FlowController(endpoints=1)
    first, _ = flow_controller.arrive()
    flow_controller.arrive()
    (waiting,) = flow_controller.flow.queues.members()
    flow_controller.flow.queues.remove(waiting)
    flow_controller.fleet.ledger.release(lease_of(flow_controller.fleet, first.id))
    assert flow_controller.dispatch() == []


def test_stopping_refuses_those_that_wait_and_those_that_come():
    flow_controller = FlowController(endpoints=1)
    flow_controller.arrive()
    second, _ = flow_controller.arrive()
    ((waiting, why),) = flow_controller.flow.stop(flow_controller.now)
    assert (waiting.request.id, why.reason, why.status) == (second.id, "rejected-shutting-down", 503)
    _, refused = flow_controller.arrive()
    assert isinstance(refused, Refused)
    assert refused.status == 503


@pytest.mark.parametrize("waiting", [0, 3])
def test_who_waits_longest_is_known(waiting):
    flow_controller = FlowController(endpoints=1)
    flow_controller.arrive()
    for _ in range(waiting):
        flow_controller.now += 1
        flow_controller.arrive()
    assert flow_controller.flow.oldest() == (101.0 if waiting else inf)


def test_on_large_pools_fewer_requests_are_compared():
    flow_controller = FlowController(endpoints=100)
    seen = []
    inner = flow_controller.flow.binder

    class Counting(FirstForFirst):
        def bind(self, window, fleet, opened, now):
            seen.append(len(window))
            return inner.bind(window, fleet, opened, now)

    flow_controller.flow.binder = Counting()
    for _ in range(400):
        flow_controller.arrive()
    flow_controller.fleet.ledger.release(lease_of(flow_controller.fleet, 1))
    flow_controller.dispatch()
    assert max(seen) == PAIRS // 100 == 20


def test_a_client_may_not_ask_for_more_than_the_longest_wait():
    flow_controller = FlowController(endpoints=0, times=Times(ttl=5, no_endpoints=50, longest=20))
    assert flow_controller.arrive(ttl=1000)[1][0].deadline == flow_controller.now + 20
    assert flow_controller.arrive()[1][0].deadline == flow_controller.now + 5


def test_while_stopping_whoever_need_not_wait_still_goes():
    flow_controller = FlowController(endpoints=1)
    flow_controller.flow.stop(flow_controller.now)
    assert flow_controller.arrive()[1] is None
    assert isinstance(flow_controller.arrive()[1], Refused)
