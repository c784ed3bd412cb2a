"""Bands are strict and service counts over all schedulers of a pool, as far as one hears of the others in time."""

from math import inf
from random import Random

import pytest

from fairlead.compat.load import load
from fairlead.config.building import build_pipeline
from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.events import (
    EndpointUp,
    MetricsSampled,
    PeerHeard,
    PeerLost,
    PeerSnapshot,
    Reconfigured,
    RequestArrived,
    ResponseEnded,
    TimerFired,
)
from fairlead.core.facts import Held, read_batch
from fairlead.core.fairness import StartTimeFair
from fairlead.core.flow import FlowKey
from fairlead.core.flow_control import DISPATCH_TIMER
from fairlead.core.instructions import Route
from fairlead.core.peer_queues import DELAY_S, MOST_FLOWS, TURN, YIELD, PeerQueues
from fairlead.core.queues import FLOW_MEMORY, MOST_BANDS, Queues
from fairlead.core.reports import SharedFleet
from fairlead.core.request import Request
from fairlead.plugins.flow_control import Fcfs
from fairlead.testing import SimClock

YIELD_S = YIELD * DELAY_S
#: One request at each endpoint at a time.
CONFIG = "flowControl: {saturation: {type: concurrency-detector, maxConcurrency: 1}}"


class Scheduler:
    def __init__(self, clock, name):
        self.clock, self.name = clock, name
        config = load(CONFIG, need_endpoints=False)
        self.pipeline = build_pipeline(config, clock, Random(1), fleet=SharedFleet())
        self.feed(EndpointUp(Endpoint("e0", "10.0.0.0:8000")))
        self.feed(MetricsSampled("e0", clock.time(), Sample(waiting=0.0, running=0.0)))

    @property
    def control(self):
        return self.pipeline.flow_controller.flow

    def feed(self, event):
        """Ids of the requests that go."""
        instructions = self.pipeline.handle(event)
        self.pipeline.validate()
        return [made.request_id for made in instructions if isinstance(made, Route)]

    def send(self, number, priority=0, tenant=""):
        request = Request(number, self.clock.time(), prompt_tokens=500, priority=priority, fairness_id=tenant)
        return self.feed(RequestArrived(request))

    def end(self, number):
        return self.feed(ResponseEnded(request_id=number, status=200))

    def tell(self, other):
        payload = self.pipeline.fleet.reports.batch(self.clock.time())
        return other.feed(PeerHeard(self.name, payload, DELAY_S, other.name)) if payload else []


@pytest.fixture
def clock():
    return SimClock()


@pytest.fixture
def two(clock):
    return Scheduler(clock, "a"), Scheduler(clock, "b")


def full_with_a_higher_band_at_the_peer(a, b):
    """The endpoint is full, a low request waits at `a`, and a high one at `b`."""
    assert a.send(1, tenant="x") == [1]
    a.tell(b)
    assert b.send(1, priority=5) == []
    b.tell(a)
    assert a.send(2) == []
    a.tell(b)


def test_an_endpoint_that_opens_is_left_to_the_higher_band_of_a_peer(two):
    a, b = two
    full_with_a_higher_band_at_the_peer(a, b)
    assert a.end(1) == [], "it is open here, and not taken"
    assert a.tell(b) == [1]
    b.tell(a)
    assert len(a.control) == 1 and a.control.peers.top < 0
    b.end(1)
    assert b.tell(a) == [2]


def test_what_a_peer_does_not_take_the_lower_band_may_have(two, clock):
    a, b = two
    full_with_a_higher_band_at_the_peer(a, b)
    a.end(1)
    clock.advance(YIELD_S / 2)
    assert a.feed(TimerFired(DISPATCH_TIMER)) == []
    clock.advance(YIELD_S)
    assert a.feed(TimerFired(DISPATCH_TIMER)) == [2]


def test_a_newcomer_of_a_lower_band_does_not_overtake_those_that_wait_elsewhere(two, clock):
    a, b = two
    a.send(1, tenant="x")
    a.tell(b)
    b.send(1, priority=5)
    b.tell(a)
    a.end(1)
    assert a.send(2) == []
    assert a.send(3, priority=7) == [3], "a higher one does"


def test_within_a_band_the_oldest_goes_first_and_the_next_one_after_a_turn(two, clock):
    a, b = two
    assert a.send(1, tenant="x") == [1]
    a.tell(b)
    b.send(1)
    clock.advance(0.001)
    a.send(2)
    b.tell(a)
    a.tell(b)
    assert a.end(1) == [], "b has an older one"
    clock.advance(TURN * DELAY_S / 2)
    assert a.feed(TimerFired(DISPATCH_TIMER)) == [] and a.send(3) == [], "nor may a newcomer"
    assert a.tell(b) == [1], "b had nobody to wait for"
    b.tell(a)
    b.end(1)
    assert b.tell(a) == [2]


def test_a_turn_that_nobody_takes_passes(two, clock):
    a, b = two
    a.send(1, tenant="x")
    a.tell(b)
    b.send(1)
    clock.advance(0.001)
    a.send(2)
    b.tell(a)
    a.end(1)
    clock.advance(2 * TURN * DELAY_S)
    assert a.feed(TimerFired(DISPATCH_TIMER)) == [2]


def test_what_waited_at_a_lost_peer_holds_up_nobody(two):
    a, b = two
    full_with_a_higher_band_at_the_peer(a, b)
    a.end(1)
    assert a.feed(PeerLost("b")) == [2]


def test_one_flow_alone_counts_as_soon_as_a_peer_has_another(two):
    a, b = two
    a.send(1, tenant="x")
    assert a.control.uncounted is not None
    b.send(1, tenant="x")
    b.tell(a)
    assert a.control.uncounted is not None, "the same one"
    b.send(2, tenant="y")
    b.tell(a)
    assert a.control.uncounted is None
    a.end(1)
    a.control.relax()
    assert a.control.uncounted is None, "it still has"


def test_service_that_a_peer_gave_counts_here(two):
    a, b = two
    for scheduler in two:
        scheduler.send(1, tenant="busy")
        scheduler.send(2, tenant="x")
        scheduler.send(3, tenant="y")
    b.tell(a)
    turns = a.control.queues.turns(a.control.queues.bands()[0], 9)
    assert [window[0].request.fairness_id for window in turns] == ["x", "y"]
    b.end(1)
    b.tell(a)
    turns = a.control.queues.turns(a.control.queues.bands()[0], 9)
    assert [window[0].request.fairness_id for window in turns] == ["y", "x"], "x had its turn at the peer"
    own = {key.tenant: flow.served for key, flow in a.control.queues.bands()[0].flows.items()}
    assert own["x"] == 0.0, "what is told on is what was given here"


def test_flows_are_told_when_they_change_and_in_a_snapshot(two, clock):
    a, b = two
    a.send(1, tenant="x")
    a.send(2, tenant="y")
    held = read_batch(a.pipeline.fleet.reports.batch(clock.time())).held
    assert {(flow.tenant, flow.count, flow.wanted) for flow in held} >= {("x", 0, 1), ("y", 1, 1)}
    assert a.pipeline.fleet.reports.batch(clock.time()) == b""
    b.feed(PeerSnapshot("a", b"".join(a.pipeline.fleet.reports.snapshot())))
    assert b.control.peers.top == 0
    assert b.send(1, priority=-1) == []


@pytest.mark.parametrize("tenants", ["xy", "xx"], ids=["counted", "one flow alone"])
def test_once_flow_control_is_off_peers_hear_that_its_flows_want_nothing(two, tenants):
    a, b = two
    assert a.send(1, tenant=tenants[0]) == [1]
    a.send(2, tenant=tenants[1])
    a.tell(b)
    mine = FlowKey(0, "", "mine")
    assert b.control.peers.beside(mine)
    a.feed(Reconfigured(load("flowControl: {enabled: false}", need_endpoints=False)))
    assert a.pipeline.flow_controller is None and len(a.pipeline.requests) == 2
    a.tell(b)
    assert not b.control.peers.beside(mine)
    a.end(1)
    a.end(2)
    b.feed(PeerSnapshot("a", b"".join(a.pipeline.fleet.reports.snapshot())))
    assert not b.control.peers.beside(mine)
    b.send(1, tenant="y")
    b.tell(a)
    a.feed(Reconfigured(load(CONFIG, need_endpoints=False)))
    b.end(1)
    b.tell(a)
    assert a.send(3) == [3]


def held(priority, tenant, count, wanted, served_ms=0.0):
    return Held(priority, "m", tenant, count, 0, wanted, served_ms)


def tag_after(*reports):
    """The tag of a peer's flow after reports of (requests wanted, work in ms)."""
    queues, peers = Queues(lambda priority: (StartTimeFair(), Fcfs())), PeerQueues()
    for now, (wanted, served_ms) in enumerate(reports):
        peers.take("a", [held(0, "t", 0, wanted, served_ms)], queues, float(now))
    flow = queues.named(FlowKey(0, "m", "t"), float(len(reports)))[1]
    assert flow.served == 0.0
    return flow.tag


def test_a_correction_at_a_peer_is_no_new_work():
    assert tag_after((0, 0.0), (3, 1500.0), (2, 1490.0), (1, 1480.0), (0, 980.0)) == 980.0
    assert tag_after((0, 0.0), (2, 1000.0), (0, 700.0), (1, 500.0), (0, 300.0)) == 1000.0, "it counts from 0 again"


def test_an_uncounted_flow_is_not_forgotten_while_peers_are_told_of_it(two, clock):
    a, b = two
    a.send(1, tenant="x")
    a.send(2, tenant="y")
    a.tell(b)
    a.end(1)
    a.end(2)
    a.control.relax()
    a.send(3, tenant="x")
    assert a.control.uncounted == FlowKey(0, "", "x")
    served = {flow.key.tenant: flow.served for flow in a.control.queues.bands()[0].flows.values()}
    for _ in range(4):
        clock.advance(FLOW_MEMORY / 2)
        a.tell(b)
        a.control.queues.served_elsewhere(FlowKey(0, "", "z"), 1.0, clock.time())
    a.end(3)
    a.send(4, tenant="z")
    flows = {flow.key.tenant: flow.served for flow in a.control.queues.bands()[0].flows.values()}
    assert "y" not in flows
    assert flows["x"] == served["x"] > 0.0


def test_names_that_want_nothing_make_room_for_new_ones():
    """Clients choose the names of models and tenants. The peer itself forgets idle ones."""
    queues = Queues(lambda priority: (StartTimeFair(), Fcfs()))
    peers = PeerQueues()
    for number in range(MOST_FLOWS):
        peers.take("a", [held(0, f"t{number}", 0, 1), held(0, f"t{number}", 0, 0, 5.0)], queues, float(number))
    mine = FlowKey(0, "m", "mine")
    assert not peers.beside(mine)
    peers.take("a", [held(10, "new", 1, 1)], queues, 1e5)
    assert peers.top == 10 and peers.beside(mine) and not peers.beside(FlowKey(10, "m", "new"))
    assert peers.ahead(10, inf) == 1
    for number in range(MOST_FLOWS):
        peers.take("a", [held(0, f"busy{number}", 1, 1)], queues, 1e5)
    assert peers.top == 10, "what waits is kept"
    peers.drop("a")
    assert peers.top == -inf and not peers.beside(mine)


def test_priorities_and_flows_of_a_peer_are_bounded():
    queues, peers = Queues(lambda priority: (StartTimeFair(), Fcfs())), PeerQueues()
    for served in (1.0, 2.0):
        peers.take("a", [held(number, "t", 0, 0, served) for number in range(MOST_FLOWS)], queues, 0.0)
    assert len(queues.bands()) == MOST_BANDS
    peers.take("b", [held(number, "t", 1, 1) for number in range(MOST_FLOWS + 5)], queues, 0.0)
    assert peers.top == MOST_FLOWS - 1 and peers.ahead(MOST_FLOWS - 1, inf) == 1
    peers.take("b", [held(MOST_FLOWS - 1, "t", 0, 1)], queues, 0.0)
    assert peers.top == MOST_FLOWS - 2 and peers.ahead(MOST_FLOWS - 1, inf) == 0


def test_a_snapshot_ends_waits_whose_end_was_lost(two, clock):
    a, b = two
    full_with_a_higher_band_at_the_peer(a, b)
    assert a.control.peers.top == 5
    a.end(1)
    a.tell(b)
    b.end(1)
    assert b.pipeline.fleet.reports.batch(clock.time()), "it is lost"
    clock.advance(1.0)
    b.send(7, tenant="z")
    b.tell(a)
    assert a.pipeline.peers.gaps() == ["b"]
    a.feed(PeerSnapshot("b", b"".join(b.pipeline.fleet.reports.snapshot())))
    assert not len(b.control)
    assert a.control.peers.top == -inf
    assert a.control.peers.beside(FlowKey(0, "", "")), "what it has running counts as before"
