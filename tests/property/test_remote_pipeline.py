"""Whatever a scheduler in another process answers, and when: each request is answered once, the ledger ends at zero."""

import random
from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fairlead.core.endpoint import Endpoint
from fairlead.core.events import (
    EndpointDown,
    EndpointUp,
    RemoteDown,
    RemotePick,
    RemotePicked,
    RemoteUp,
    RequestArrived,
    ResponseEnded,
    StreamLost,
)
from fairlead.core.fleet import Fleet
from fairlead.core.remote import RemotePolicy
from fairlead.core.request import Request
from fairlead.core.scheduler import Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.gateway.driver import Driver
from fairlead.plugins.policies.cost_model import CostModel
from fairlead.testing import SimClock

NAMES = st.sampled_from(["a", "b", "c", "never"])


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.clock = SimClock()
        self.answers, self.decided, self.ended, self.lost = Counter(), Counter(), Counter(), set()
        self.arrived: list[int] = []
        self.policy = RemotePolicy("remote", CostModel(), lambda request, fleet, now: None, 0.005)
        fleet, remotes = Fleet(lease_ttl=60.0), {"remote": self.policy}
        self.pipeline = Pipeline(self.clock, random.Random(7), fleet, self.policy, TokenEstimator(), remotes=remotes)
        self.driver = Driver(self.pipeline, self.clock, self)
        self.driver.start()

    def on_decision(self, record, duration_s):
        self.decided[record.request.id] += 1
        self.ended[record.request.id] += not record.endpoint

    def on_outcome(self, record):
        self.ended[record.request.id] += 1

    @rule(name=NAMES, port=st.integers(1, 3))
    def up(self, name, port):
        self.driver.feed(EndpointUp(Endpoint(name, f"10.0.0.1:{port}")))

    @rule(name=NAMES)
    def down(self, name):
        self.driver.feed(EndpointDown(name))

    @rule(up=st.booleans())
    def connection(self, up):
        self.driver.feed(RemoteUp("remote") if up else RemoteDown("remote"))

    @rule(tokens=st.integers(0, 10_000))
    def arrive(self, tokens):
        number = len(self.arrived) + 1
        self.arrived.append(number)
        machine = self

        class Waiting:
            def route(self, route):
                machine.answers[number] += 1

            def reject(self, reject):
                machine.answers[number] += 1

        request = Request(id=number, arrived=self.clock.time(), prompt_tokens=tokens)
        self.driver.feed(RequestArrived(request, Waiting()))

    @rule(
        numbers=st.lists(st.integers(1, 12), max_size=4),
        outcome=st.integers(0, 5),
        name=NAMES | st.just(""),
        other=NAMES,
        remote=st.sampled_from(["remote", "else"]),
    )
    def answer(self, numbers, outcome, name, other, remote):
        picks = tuple(RemotePick(n, outcome, name, alternatives=((other, 1.0),), prefill=other) for n in numbers)
        self.driver.feed(RemotePicked(remote, picks))

    @rule(number=st.integers(1, 12), lost=st.booleans())
    def over(self, number, lost):
        if number in self.arrived:
            if lost and not self.answers[number]:
                self.lost.add(number)
            self.driver.feed(StreamLost(number) if lost else ResponseEnded(request_id=number, status=200))

    @rule(seconds=st.floats(0, 0.02) | st.floats(1, 30))
    def wait(self, seconds):
        self.clock.advance(seconds)

    @invariant()
    def holds(self):
        self.pipeline.validate()
        assert all(count <= 1 for counts in (self.answers, self.decided, self.ended) for count in counts.values())

    def teardown(self):
        self.clock.advance(1000.0)
        self.pipeline.validate()
        assert len(self.pipeline.parking) == 0 and len(self.pipeline.fleet.ledger) == 0
        assert all(self.answers[number] == 1 for number in self.arrived if number not in self.lost)
        assert all(self.ended[number] == self.decided[number] for number in self.arrived)
        assert not self.pipeline.fleet.table.inflight.any()


TestRemotePipeline = Machine.TestCase
TestRemotePipeline.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
