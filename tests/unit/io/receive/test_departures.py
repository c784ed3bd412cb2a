"""Leases whose session has left: ended by a log entry without a lease, or by the death of their gateway."""

from random import Random

import pytest

from fairlead.fleet.fleet import Fleet
from fairlead.io.receive import departures as module
from fairlead.io.receive.departures import GRACE, Departures
from fairlead.io.receive.driver import Driver
from fairlead.model.endpoint import Endpoint
from fairlead.model.events import EndpointUp, RequestArrived, ResponseEnded
from fairlead.model.request import Request
from fairlead.parse.tokens import TokenEstimator
from fairlead.pipeline import Pipeline
from fairlead.plugins.params import NoParams
from fairlead.plugins.pickers.round_robin import RoundRobin
from fairlead.schedule.profile import Profile
from fairlead.testing import SimClock


class Stream:
    """A stream that was left. `up`: its connection is there."""

    up = True

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
    def __init__(self):
        self.clock, self.observer = SimClock(), Observer()
        pipeline = Pipeline(
            self.clock, Random(1), Fleet(), Profile("rr", [], [], RoundRobin(NoParams())), TokenEstimator()
        )
        self.driver = Driver(pipeline, self.clock, self.observer)
        self.departures = Departures(self.driver)
        self.driver.feed(EndpointUp(Endpoint("e", "10.0.0.1:80")))

    def request(self, number, gateway_id=""):
        stream = Stream()
        self.driver.feed(RequestArrived(Request(id=number, arrived=self.clock.time())))
        self.departures.left(number, gateway_id, stream)
        return stream

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
    office.departures.over("b")
    assert office.charged == 1
    assert office.observer.seen[-1] == ("stream-lost", 2)
    office.departures.over("b")
    office.departures.over("nobody's")
    assert office.charged == 1


def test_an_entry_that_is_read_before_its_request_is_remembered(office):
    office.departures.over("a")
    office.request(1, "a")
    office.clock.advance(0.01)
    assert office.charged == 0
    assert office.observer.seen == [("decided", 1), ("stream-lost", 1)]


def test_an_id_that_comes_twice_ends_nothing(office):
    """A foreign gateway that forwards the header as its client sends it."""
    office.request(1, "mine")
    office.request(2, "mine")
    office.departures.over("mine")
    assert office.charged == 2


def test_no_id_matches_nothing(office):
    office.request(1)
    office.request(2)
    office.departures.over("")
    office.request(3)
    office.clock.advance(1.0)
    assert office.charged == 3


def test_a_dead_gateway_ends_the_leases_that_came_over_its_connections(office):
    dead, alive = office.request(1, "a"), office.request(2, "b")
    office.departures.log_lost()
    dead.up = False
    office.clock.advance(GRACE / 2)
    assert office.charged == 2, "its other connections may be told a moment later"
    office.clock.advance(GRACE)
    assert office.charged == 1
    assert alive.up


def test_memory_is_bounded_by_the_leases_that_live(office, monkeypatch):
    monkeypatch.setattr(module, "_REMEMBERED", 50)
    office.departures._sweep_at = 100
    monkeypatch.setattr(module, "_FEW", 100)
    for number in range(1, 5000):
        office.request(number, f"id-{number}")
        office.departures.over(f"other-{number}")
        if number % 50:
            office.end(number)
    kept = office.departures
    assert office.charged == 99
    assert len(kept) <= 200
    assert len(kept._requests) <= 200
    assert len(kept._over) == 50
    for number in range(50, 5000, 50):
        kept.over(f"id-{number}")
    assert office.charged == 0, "what lives is never swept out"
