"""Requests that wait while the last endpoint leaves."""

import random

from fairlead.core import events as ev
from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.fairness import Strict
from fairlead.core.fleet import Fleet
from fairlead.core.flow_control import DISPATCH_TIMER, FlowControl, FlowController
from fairlead.core.instructions import Route, SetTimer
from fairlead.core.queues import Queues
from fairlead.core.request import Request
from fairlead.core.scheduler import Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.plugins.flow_control import Fcfs
from fairlead.plugins.policies.by_load import LeastRequests
from fairlead.testing import SimClock


class Half:
    """The gate: e0 is open, e1 is not."""

    name = "half"

    def admits(self, slot, fleet, now):
        return fleet.table.endpoints[slot].id == "e0"

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

    def version(self, table):
        return table.version, 0

    def able_bits(self, waiting, table):
        return -1


def test_nobody_looks_again_and_again_for_endpoints_that_are_not_there():
    clock = SimClock()
    flow = FlowControl(Queues(lambda priority: (Strict(), Fcfs())), Half(), Patient())
    pipeline = Pipeline(
        clock, random.Random(1), Fleet(), LeastRequests(), TokenEstimator(), flow_controller=FlowController(flow)
    )

    def feed(event):
        found = pipeline.handle(event)
        pipeline.validate()
        assert not any(isinstance(one, Route) for one in found)
        return [one.at for one in found if isinstance(one, SetTimer) and one.name == DISPATCH_TIMER]

    for name in ("e0", "e1"):
        feed(ev.EndpointUp(Endpoint(name, f"10.0.0.{name[1]}:80")))
    busy = Sample(waiting=1.0, running=0.0)  # so that the policy takes e1
    feed(ev.MetricsSampled("e0", clock.time(), busy))
    assert feed(ev.RequestArrived(Request(id=1, arrived=0.0))) == [clock.time() + 0.1]
    for name in ("e1", "e0"):
        feed(ev.EndpointDown(name))
    clock.advance(0.2)
    assert feed(ev.TimerFired(DISPATCH_TIMER)) == []
    assert len(pipeline.flow_controller) == 1
