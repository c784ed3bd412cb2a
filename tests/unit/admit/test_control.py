from math import inf

import numpy as np
import pytest

from fairlead.admit.control import PAIRS, Bound, FlowControl
from fairlead.admit.fairness import Strict
from fairlead.admit.framework import Limit, Refused
from fairlead.admit.limits import Limits, Times
from fairlead.admit.ordering import Fcfs
from fairlead.admit.queues import Queues
from fairlead.fleet.fleet import Fleet
from fairlead.model.endpoint import Endpoint
from fairlead.model.request import Request


class AtMost:
    """Open while fewer than `limit` requests are there."""

    name = "at-most"

    def __init__(self, limit: int) -> None:
        self.limit = limit

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


class Desk:
    """Flow control over `endpoints` endpoints that take one request each."""

    def __init__(self, endpoints: int = 2, batch: int = 16, limits: Limits | None = None, times: Times | None = None):
        self.fleet = Fleet()
        for i in range(endpoints):
            self.fleet.up(Endpoint(f"e{i}", f"10.0.0.{i}:80"))
        queues = Queues(lambda priority: (Strict(), Fcfs()), limits)
        self.flow = FlowControl(queues, AtMost(1), FirstForFirst(), times, batch=batch)
        self.now = 100.0
        self._ids = 0

    def arrive(self, priority: int = 0, subset=None, ttl: float = 0.0, body: int = 0):
        self._ids += 1
        request = Request(
            id=self._ids,
            arrived=self.now,
            priority=priority,
            subset=subset,
            ttl_s=ttl,
            body_bytes=body,
            prompt_tokens=9,
        )
        outcome = self.flow.arrived(request, self.fleet, self.now)
        if outcome is None:
            slot = next(s for s, _ in self.fleet.table.slots() if not self.fleet.table.inflight[s])
            self.fleet.charge(request, slot, self.now, 0, 10)
        return request, outcome

    def dispatch(self) -> list[tuple[int, int]]:
        gone = []
        for bound in self.flow.dispatch(self.fleet, self.now):
            self.fleet.charge(bound.waiting.request, bound.slot, self.now, 0, 10)
            gone.append((bound.waiting.request.id, bound.slot))
            self.flow.validate()
        return gone


def test_below_saturation_nothing_waits():
    desk = Desk()
    assert desk.arrive()[1] is None
    assert len(desk.flow) == 0
    assert desk.dispatch() == []


def test_above_saturation_requests_wait_until_an_endpoint_opens():
    desk = Desk(endpoints=1)
    (first, _), (second, waits) = desk.arrive(), desk.arrive()
    assert waits is not None
    assert desk.dispatch() == []
    desk.fleet.ledger.release(first.id)
    assert desk.dispatch() == [(second.id, 0)]


def test_higher_bands_go_first_whenever_they_came():
    desk = Desk(endpoints=1)
    first, _ = desk.arrive()
    sheddable, _ = desk.arrive(priority=-10)
    standard, _ = desk.arrive(priority=0)
    critical, _ = desk.arrive(priority=10)
    order = []
    holder = first.id
    for _ in range(3):
        desk.fleet.ledger.release(holder)
        ((holder, _),) = desk.dispatch()
        order.append(holder)
    assert order == [critical.id, standard.id, sheddable.id]


def test_a_request_whose_endpoints_are_busy_does_not_block_others():
    desk = Desk(endpoints=2)
    desk.arrive()
    (blocker, waits) = desk.arrive(priority=10, subset=frozenset({"10.0.0.0:80"}))
    assert waits is not None
    free, _ = desk.arrive(priority=0)
    assert desk.dispatch() == [(free.id, 1)]
    assert desk.flow.queues.get(blocker.id) is not None


def test_one_call_dispatches_a_batch_and_says_that_there_is_more():
    desk = Desk(endpoints=5, batch=2)
    holders = [desk.arrive()[0].id for _ in range(5)]
    waiting = [desk.arrive()[0].id for _ in range(5)]
    for holder in holders:
        desk.fleet.ledger.release(holder)
    assert [len(desk.dispatch()), desk.flow.more] == [2, True]
    assert [len(desk.dispatch()), desk.flow.more] == [2, True]
    assert [len(desk.dispatch()), desk.flow.more] == [1, False]
    assert len(waiting) == 5


def test_time_to_live_is_the_requests_own_or_the_default():
    desk = Desk(endpoints=1, times=Times(ttl=60.0))
    desk.arrive()
    short, _ = desk.arrive(ttl=2.0)
    long, _ = desk.arrive()
    assert desk.flow.next_deadline() == desk.now + 2.0
    ((late, why),) = desk.flow.expire(desk.fleet, desk.now + 2.0)
    assert (late.request.id, why.reason, why.status) == (short.id, "rejected-ttl-expired", 429)
    ((late, _),) = desk.flow.expire(desk.fleet, desk.now + 60.0)
    assert late.request.id == long.id
    assert desk.flow.next_deadline() == inf


def test_without_endpoints_requests_wait_for_the_first_one():
    desk = Desk(endpoints=0, times=Times(ttl=60.0, no_endpoints=5.0))
    request, waits = desk.arrive()
    assert waits is not None
    desk.fleet.up(Endpoint("late", "10.0.0.9:80"))
    assert desk.dispatch() == [(request.id, 0)]
    empty = Desk(endpoints=0, times=Times(ttl=60.0, no_endpoints=5.0))
    empty.arrive()
    ((_, why),) = empty.flow.expire(empty.fleet, empty.now + 5.0)
    assert (why.reason, why.status) == ("rejected-no-endpoints", 503)


def test_limits_refuse_and_lower_bands_give_way():
    desk = Desk(endpoints=1, limits=Limits(total=Limit(requests=2)))
    desk.arrive()
    low, _ = desk.arrive(priority=-10)
    mid, _ = desk.arrive(priority=0)
    _, (_, displaced) = desk.arrive(priority=10)
    assert [waiting.request.id for waiting in displaced] == [low.id]
    _, refused = desk.arrive(priority=-10)
    assert isinstance(refused, Refused)
    assert refused.reason == "rejected-saturated"
    assert desk.flow.queues.get(mid.id) is not None


def test_cancelled_requests_are_gone():
    desk = Desk(endpoints=1)
    first, _ = desk.arrive()
    second, _ = desk.arrive()
    assert desk.flow.cancel(second.id) is not None
    assert desk.flow.cancel(second.id) is None
    desk.fleet.ledger.release(first.id)
    assert desk.dispatch() == []


def test_stopping_refuses_those_that_wait_and_those_that_come():
    desk = Desk(endpoints=1)
    desk.arrive()
    second, _ = desk.arrive()
    ((waiting, why),) = desk.flow.stop(desk.now)
    assert (waiting.request.id, why.reason, why.status) == (second.id, "rejected-shutting-down", 503)
    _, refused = desk.arrive()
    assert isinstance(refused, Refused)
    assert refused.status == 503


@pytest.mark.parametrize("waiting", [0, 3])
def test_who_waits_longest_is_known(waiting):
    desk = Desk(endpoints=1)
    desk.arrive()
    for _ in range(waiting):
        desk.now += 1
        desk.arrive()
    assert desk.flow.oldest() == (101.0 if waiting else inf)


def test_on_large_pools_fewer_requests_are_compared():
    desk = Desk(endpoints=100)
    seen = []
    inner = desk.flow.binder

    class Counting(FirstForFirst):
        def bind(self, window, fleet, opened, now):
            seen.append(len(window))
            return inner.bind(window, fleet, opened, now)

    desk.flow.binder = Counting()
    for _ in range(400):
        desk.arrive()
    desk.fleet.ledger.release(1)
    desk.dispatch()
    assert max(seen) == PAIRS // 100 == 20


def test_a_client_may_not_ask_for_more_than_the_longest_wait():
    desk = Desk(endpoints=0, times=Times(ttl=5, no_endpoints=50, longest=20))
    assert desk.arrive(ttl=1000)[1][0].deadline == desk.now + 20
    assert desk.arrive()[1][0].deadline == desk.now + 5


def test_while_stopping_whoever_need_not_wait_still_goes():
    desk = Desk(endpoints=1)
    desk.flow.stop(desk.now)
    assert desk.arrive()[1] is None
    assert isinstance(desk.arrive()[1], Refused)
