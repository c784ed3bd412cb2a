import random
from math import inf

import numpy as np
import pytest
from waiting_rules import AbleRules

from fairlead.core import events as ev
from fairlead.core.binding import PairBinder
from fairlead.core.endpoint import Endpoint
from fairlead.core.fairness import Strict
from fairlead.core.fleet import Fleet
from fairlead.core.flow import Limits
from fairlead.core.flow_control import CONFIRM, GRACE, Eviction, FlowControl, FlowController
from fairlead.core.instructions import Evict, Reject, Route
from fairlead.core.queues import Queues
from fairlead.core.records import OutcomeRecord
from fairlead.core.request import Request
from fairlead.core.scheduler import Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.plugins.flow_control import Fcfs
from fairlead.plugins.policies.by_load import LeastRequests
from fairlead.testing import SimClock


class AtMost:
    """Open while fewer than `limit` requests are there."""

    name = "at-most"

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def admits(self, slot, fleet, now):
        return bool(fleet.table.inflight[slot] < self._limit)

    def open(self, fleet, now):
        mask = fleet.table.inflight < self._limit
        return None if mask.all() else mask

    def level(self, fleet, now):
        return float(np.mean(fleet.table.inflight / self._limit))


class House:
    """A pipeline over two endpoints that take `limit` requests each."""

    def __init__(self, limit: int = 2, able=lambda *_: None) -> None:
        self.clock = SimClock()
        queues = Queues(lambda priority: (Strict(), Fcfs()), Limits())
        flow = FlowControl(queues, AtMost(limit), PairBinder(AbleRules(able)))
        self.pipeline = Pipeline(
            self.clock,
            random.Random(1),
            Fleet(),
            LeastRequests(),
            TokenEstimator(),
            flow_controller=FlowController(flow, "", 1.0, Eviction(0.25)),
        )
        for i in range(2):
            self.feed(ev.EndpointUp(Endpoint(f"e{i}", f"10.0.0.{i}:80")))
        self._id = 0

    def feed(self, event):
        found = self.pipeline.handle(event)
        self.pipeline.validate()
        return found

    def arrive(self, priority, api="chat"):
        self._id += 1
        asked = Request(id=self._id, arrived=0.0, api=api, priority=priority, prompt_tokens=100)
        return self.feed(ev.RequestArrived(asked))

    def evicted(self, after: float) -> list[int]:
        self.clock.advance(after)
        found = self.feed(ev.TimerFired("queue-dispatch"))
        return [one.reject.request_id for one in found if isinstance(one, Evict)]

    def lost(self, number):
        return self.feed(ev.StreamLost(number))


def routes(found):
    return [one.request_id for one in found if isinstance(one, Route)]


def test_the_newest_of_the_lowest_make_way_for_a_higher_one():
    house = House()
    for priority in (-10, -20, -10, 0):
        assert routes(house.arrive(priority))
    house.arrive(5)
    assert house.evicted(0.2) == [], "it has not waited long enough"
    assert house.evicted(0.1) == [2, 3]
    assert house.evicted(0.1) == [], "those two are still on their way out"


def test_the_next_ones_go_when_the_first_are_gone_and_a_moment_later():
    house = House()
    for _ in range(4):
        house.arrive(-10)
    for _ in range(6):
        house.arrive(5)
    assert house.evicted(0.3) == [4, 3]
    house.feed(ev.FirstTokenSeen(3))
    found = house.lost(4) + house.lost(3)
    ends = [(one.cause, one.status) for one in found if isinstance(one, OutcomeRecord)]
    assert ends == [("evicted", 429), ("evicted", 0)], "who had nothing yet is told so, the other one's stream is cut"
    assert len(routes(found)) == 2, "their places are taken at once"
    assert house.evicted(GRACE - 0.05) == []
    assert house.evicted(0.1) == [2, 1]
    assert house.pipeline.flow_controller.evicted == {-10: 4}
    for number in (1, 2):
        house.lost(number)
    for number in range(5, 11):
        house.feed(ev.ResponseEnded(request_id=number, status=200))
    house.clock.advance(1.0)
    assert len(house.pipeline.fleet.ledger) == len(house.pipeline.flow_controller) == 0


def test_whose_end_nobody_confirms_is_told_once():
    house = House(1)
    house.arrive(-10)
    house.arrive(-10)
    house.arrive(5)
    assert house.evicted(0.3) == [2, 1]
    assert house.evicted(CONFIRM + 1) == [], "there is nobody else"


def test_only_sheddable_requests_of_a_lower_priority_where_it_could_run():
    house = House(1)
    house.arrive(0)
    house.arrive(-10)
    house.arrive(-10)
    assert house.evicted(1.0) == [], "as urgent as those that run"
    only_first = np.array([True, False])
    house = House(1, lambda *_: only_first)
    house.arrive(-10)
    house.arrive(-10)
    house.arrive(5)
    assert len(house.evicted(1.0)) == 1, "the other endpoint is of no use"


def test_requests_that_need_no_model_make_no_room():
    house = House()
    for api in ("tokenize", "chat", "tokenize", "tokenize"):
        assert routes(house.arrive(-1, api))
    house.arrive(5)
    assert house.evicted(0.3) == [2]


def test_while_nobody_can_be_evicted_events_do_not_look_at_all_leases():
    house, looked = House(), []
    for priority in (0, 0, 0, 0, 5):
        house.arrive(priority)
    assert house.evicted(0.3) == []
    leases = house.pipeline.fleet.ledger
    house.pipeline.fleet.ledger = Watched(leases, looked)
    for _ in range(20):
        house.pipeline.handle(ev.TimerFired("queue-dispatch"))
    assert not looked
    house.clock.advance(0.06)
    house.pipeline.handle(ev.TimerFired("queue-dispatch"))
    assert looked == [4]


class Watched:
    """A ledger that notes how often all its leases are looked at."""

    def __init__(self, ledger, looked):
        self._ledger, self._looked = ledger, looked

    def __getattr__(self, name):
        return getattr(self._ledger, name)

    def __len__(self):
        return len(self._ledger)

    def __iter__(self):
        self._looked.append(len(self._ledger))
        return iter(self._ledger)


def test_evictable_requests_are_known_when_they_are_routed():
    house = House()
    found = [one for priority in (0, -1) for one in house.arrive(priority) if isinstance(one, Route)]
    assert [one.evictable for one in found] == [False, True]


def test_what_the_client_is_told():
    house = House(1)
    for priority in (-10, -10, 5):
        house.arrive(priority)
    house.clock.advance(1.0)
    told = [one.reject for one in house.feed(ev.TimerFired("queue-dispatch")) if isinstance(one, Evict)]
    assert told and all(isinstance(one, Reject) for one in told)
    assert {(one.status, one.reason) for one in told} == {(429, "evicted")}


def test_a_time_must_not_be_negative():
    with pytest.raises(ValueError, match="negative"):
        Eviction(-1.0)
    assert (
        Eviction().look_at(FlowControl(Queues(lambda p: (Strict(), Fcfs())), AtMost(1), PairBinder(AbleRules()))) == inf
    )


def test_an_endpoint_that_joins_while_somebody_waits_is_no_surprise():
    """Where the waiting one can be served was known of fewer endpoints."""
    house = House(able=lambda request, fleet, now: np.array([name in ("e0", "e1") for name in fleet.table.ids]))
    for priority in (-10, -10, -10, -10):
        assert routes(house.arrive(priority))
    assert not routes(house.arrive(5))
    house.feed(ev.EndpointUp(Endpoint("e2", "10.0.0.2:80")))
    assert len(house.evicted(0.3)) == 2
