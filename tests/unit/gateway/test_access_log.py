"""Leases whose session has left: ended by a log entry without a lease, or by the death of their gateway."""

from random import Random

import pytest

from fairlead.core.endpoint import Endpoint
from fairlead.core.events import EndpointUp, RequestArrived, ResponseEnded
from fairlead.core.fleet import Fleet
from fairlead.core.profile import Profile
from fairlead.core.request import Request
from fairlead.core.scheduler import Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.gateway.access_log import GRACE, AccessLogs
from fairlead.gateway.answers import Answers
from fairlead.gateway.driver import Driver
from fairlead.plugins.params import NoParams
from fairlead.plugins.pickers import RoundRobin
from fairlead.testing import SimClock


class Sender:
    """A session that left at the pick. `up`: its connection is there."""

    up = True

    def route(self, route):
        pass

    def connected(self):
        return self.up


class Observer:
    def __init__(self):
        self.seen = []

    def on_decision(self, record, duration_s):
        self.seen.append(("decided", record.request.id))

    def on_outcome(self, record):
        self.seen.append((record.cause, record.request.id))


class Office:
    def __init__(self, **bounds):
        self.clock, self.observer = SimClock(), Observer()
        pipeline = Pipeline(
            self.clock, Random(1), Fleet(), Profile("rr", [], [], RoundRobin(NoParams())), TokenEstimator()
        )
        self.driver = Driver(pipeline, self.clock, self.observer)
        self.logs = AccessLogs(self.driver, Answers("ab"), self.observer, **bounds)
        self.driver.feed(EndpointUp(Endpoint("e", "10.0.0.1:80")))

    def request(self, number, gateway_id=""):
        sender = Sender()
        self.driver.feed(RequestArrived(Request(id=number, arrived=self.clock.time()), sender))
        if gateway_id:
            self.logs.left(gateway_id, number)
        return sender

    def end(self, number):
        self.driver.feed(ResponseEnded(request_id=number, status=200))

    @property
    def charged(self):
        self.driver.pipeline.validate()
        return len(self.driver.pipeline.fleet.ledger)


@pytest.fixture
def office():
    return Office()


def test_an_entry_without_a_lease_ends_the_lease_that_was_given_under_its_id(office):
    office.request(1, "a")
    office.request(2, "b")
    office.logs.over("b")
    assert office.charged == 1
    assert office.observer.seen[-1] == ("stream-lost", 2)
    office.logs.over("b")
    office.logs.over("nobody's")
    assert office.charged == 1


def test_an_entry_that_is_read_before_its_request_is_remembered(office):
    office.logs.over("a")
    office.request(1, "a")
    office.clock.advance(0.01)
    assert office.charged == 0
    assert office.observer.seen == [("decided", 1), ("stream-lost", 1)]


def test_an_id_that_comes_twice_ends_nothing(office):
    """A foreign gateway that forwards the header as its client sends it."""
    office.request(1, "mine")
    office.request(2, "mine")
    office.logs.over("mine")
    assert office.charged == 2


def test_no_id_matches_nothing(office):
    office.request(1)
    office.request(2)
    office.logs.over("")
    office.request(3)
    office.clock.advance(1.0)
    assert office.charged == 3


def test_a_dead_gateway_ends_the_leases_that_came_over_its_connections(office):
    dead, alive = office.request(1, "a"), office.request(2, "b")
    office.logs.lost()
    dead.up = False
    office.clock.advance(GRACE / 2)
    assert office.charged == 2, "its other connections may be told a moment later"
    office.clock.advance(GRACE)
    assert office.charged == 1
    assert alive.up


def test_memory_is_bounded_by_the_leases_that_live():
    office = Office(few=100, remembered=50)
    for number in range(1, 5000):
        office.request(number, f"id-{number}")
        office.logs.over(f"other-{number}")
        if number % 50:
            office.end(number)
    kept = office.logs
    assert office.charged == 99
    assert len(kept) <= 200 + 50
    for number in range(50, 5000, 50):
        kept.over(f"id-{number}")
    assert office.charged == 0, "what lives is never swept out"
