"""Requests that wait while the last endpoint leaves."""

import random

from fairlead.admit.control import FlowControl
from fairlead.admit.desk import DISPATCH_TIMER, Desk
from fairlead.admit.fairness import Strict
from fairlead.admit.ordering import Fcfs
from fairlead.admit.queues import Queues
from fairlead.fleet.fleet import Fleet
from fairlead.model import events as ev
from fairlead.model.endpoint import Endpoint
from fairlead.model.instructions import Route, SetTimer
from fairlead.model.request import Request
from fairlead.parse.tokens import TokenEstimator
from fairlead.pipeline import Pipeline
from fairlead.plugins.policies.least_requests import LeastRequests
from fairlead.testing import SimClock


class Half:
    """The gate: e0 is open, e1 is not."""

    name = "half"

    def open(self, fleet, now):
        return fleet.table.mask(("half",), lambda slot, one: one.id == "e0")

    def level(self, fleet, now):
        return 0.5


class Patient:
    """The binder: whoever waits had better wait for a tenth of a second more."""

    name = "patient"

    def look(self, request, fleet, now):
        return 1.0, None

    def bind(self, window, fleet, opened, now):
        return now + 0.1


def test_nobody_looks_again_and_again_for_endpoints_that_are_not_there():
    clock = SimClock()
    flow = FlowControl(Queues(lambda priority: (Strict(), Fcfs())), Half(), Patient())
    pipeline = Pipeline(clock, random.Random(1), Fleet(), LeastRequests(), TokenEstimator(), desk=Desk(flow))

    def feed(event):
        found = pipeline.handle(event)
        pipeline.validate()
        assert not any(isinstance(one, Route) for one in found)
        return [one.at for one in found if isinstance(one, SetTimer) and one.name == DISPATCH_TIMER]

    for name in ("e0", "e1"):
        feed(ev.EndpointUp(Endpoint(name, f"10.0.0.{name[1]}:80")))
    pipeline.fleet.charge(Request(id=99, arrived=0.0), 0, clock.time(), 0, 1.0)  # so that the policy takes e1
    assert feed(ev.RequestArrived(Request(id=1, arrived=0.0))) == [clock.time() + 0.1]
    for name in ("e1", "e0"):
        feed(ev.EndpointDown(name))
    clock.advance(0.2)
    assert feed(ev.TimerFired(DISPATCH_TIMER)) == []
    assert len(pipeline.desk) == 1
