"""Whatever mix of events comes: every request is answered once, ends once, and the ledger returns to exactly zero."""

import random
from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.events import (
    EndpointDown,
    EndpointUp,
    FirstTokenSeen,
    MetricsFailed,
    MetricsSampled,
    RequestArrived,
    ResponseEnded,
    StreamLost,
    UsageReported,
)
from fairlead.core.fleet import Fleet
from fairlead.core.profile import Profile
from fairlead.core.request import PrefixChain, Request, Usage
from fairlead.core.scheduler import Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.gateway.driver import Driver
from fairlead.plugins.filters.availability import Health, HealthParams
from fairlead.plugins.filters.load import QueueDepth, QueueDepthParams
from fairlead.plugins.pickers import MaxScore, MaxScoreParams
from fairlead.plugins.scorers.load import LoadAware, LoadAwareParams
from fairlead.plugins.scorers.prefix import PrefixAware, PrefixAwareParams
from fairlead.testing import SimClock

NAMES = st.sampled_from(["a", "b", "c"])


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.clock = SimClock()
        self.answers, self.ends, self.arrived = Counter(), Counter(), []
        profile = Profile(
            "test",
            [Health(HealthParams()), QueueDepth(QueueDepthParams(max_queue_length=3))],
            [(PrefixAware(PrefixAwareParams()), 100.0), (LoadAware(LoadAwareParams()), 50.0)],
            MaxScore(MaxScoreParams()),
        )
        fleet = Fleet(lease_ttl=60.0)
        self.pipeline = Pipeline(self.clock, random.Random(7), fleet, profile, TokenEstimator())
        self.driver = Driver(self.pipeline, self.clock, self)
        self.driver.start()

    # what the driver carries out
    def route(self, route):
        self.answers[route.request_id] += 1

    def reject(self, reject):
        self.answers[reject.request_id] += 1
        self.ends[reject.request_id] += 1

    def on_decision(self, record, duration_s):
        assert record.request.id == self.current

    def on_outcome(self, record):
        self.ends[record.request.id] += 1

    @rule(name=NAMES, port=st.integers(1, 3))
    def up(self, name, port):
        self.driver.feed(EndpointUp(Endpoint(name, f"10.0.0.1:{port}")))

    @rule(name=NAMES)
    def down(self, name):
        self.driver.feed(EndpointDown(name))

    @rule(
        tokens=st.integers(0, 10_000),
        chain=st.lists(st.integers(1, 5), max_size=4),
        limit=st.integers(0, 5000),
    )
    def arrive(self, tokens, chain, limit):
        ends = tuple(range(256, 256 * (len(chain) + 1), 256))
        hashes = tuple(hash(tuple(chain[: i + 1])) & 0xFFFF for i in range(len(chain)))
        self.current = len(self.arrived) + 1
        self.arrived.append(self.current)
        request = Request(
            id=self.current,
            arrived=self.clock.time(),
            api="chat",
            prompt_bytes=max(4 * tokens, 256 * len(chain)),
            prompt_tokens=tokens,
            max_tokens=limit,
            prefix=PrefixChain(hashes, ends),
        )
        self.driver.feed(RequestArrived(request, self))

    @precondition(lambda self: self.arrived)
    @rule(
        data=st.data(),
        kind=st.sampled_from(["first", "end", "end-400", "end-500", "gone", "reset", "unfinished", "lost", "usage"]),
    )
    def happen(self, data, kind):
        request_id = data.draw(st.sampled_from(self.arrived))
        self.driver.feed(
            {
                "first": FirstTokenSeen(request_id),
                "end": ResponseEnded(request_id=request_id, status=200, usage=Usage(prompt_tokens=7)),
                "end-400": ResponseEnded(request_id=request_id, status=400),
                "end-500": ResponseEnded(request_id=request_id, status=500),
                "gone": ResponseEnded(request_id=request_id, client_gone=True),
                "reset": ResponseEnded(request_id=request_id, status=200, upstream_reset=True),
                "unfinished": ResponseEnded(request_id=request_id, status=200, client_gone=True, upstream_reset=True),
                "lost": StreamLost(request_id),
                "usage": UsageReported(request_id, Usage(prompt_tokens=100, completion_tokens=5)),
            }[kind]
        )

    @rule(name=NAMES, waiting=st.integers(0, 60), running=st.integers(0, 60), kv=st.floats(0, 1), age=st.floats(0, 3))
    def sampled(self, name, waiting, running, kv, age):
        sample = Sample(waiting=waiting, running=running, kv_usage=kv, block_size=16, num_blocks=100)
        self.driver.feed(MetricsSampled(name, self.clock.time() - age, sample))

    @rule(name=NAMES)
    def scrape_failed(self, name):
        self.driver.feed(MetricsFailed(name, "connection refused"))

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds):
        self.clock.advance(seconds)

    @invariant()
    def holds(self):
        self.pipeline.validate()
        assert all(self.answers[request_id] == 1 for request_id in self.arrived)
        assert all(count <= 1 for count in self.ends.values())

    def teardown(self):
        self.clock.advance(1000.0)
        self.pipeline.validate()
        table = self.pipeline.fleet.table
        assert len(self.pipeline.fleet.ledger) == 0
        for column in (table.inflight, table.pending, table.pending_tokens, table.kv_tokens):
            assert not column.any()
        assert all(self.ends[request_id] == 1 for request_id in self.arrived)


TestPipeline = Machine.TestCase
TestPipeline.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
