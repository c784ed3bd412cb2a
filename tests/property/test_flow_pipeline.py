"""The pipeline with flow control, eviction, and a scheduler in another process that answers anything at any time: each
request is answered once or was lost, evicted at most once, none is stuck, the ledger empties."""

import os
import random
from collections import Counter
from math import inf

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fairlead.admit.binding import PairBinder
from fairlead.admit.control import FlowControl
from fairlead.admit.desk import Desk
from fairlead.admit.eviction import Eviction
from fairlead.admit.fairness import DeficitRoundRobin
from fairlead.admit.framework import Limit
from fairlead.admit.gates import LedgerGate
from fairlead.admit.limits import Limits, Times
from fairlead.admit.ordering import LeastWork
from fairlead.admit.queues import Queues
from fairlead.fleet.fleet import Fleet
from fairlead.io.receive.driver import Driver
from fairlead.model import events as ev
from fairlead.model.endpoint import Endpoint, Sample
from fairlead.model.remote import RemotePick
from fairlead.model.request import PrefixChain, Request
from fairlead.parse.tokens import TokenEstimator
from fairlead.pipeline import Pipeline
from fairlead.plugins.filters.subset import Subset
from fairlead.plugins.params import NoParams
from fairlead.plugins.pickers.max_score import MaxScore, MaxScoreParams
from fairlead.plugins.scorers.load_aware import LoadAware, LoadAwareParams
from fairlead.schedule.breaker import BreakerRules
from fairlead.schedule.cycle import Context, Cycle
from fairlead.schedule.parking import Parking
from fairlead.schedule.profile import Profile
from fairlead.schedule.remote import RemotePolicy
from fairlead.testing import SimClock

NAMES = st.sampled_from(["a", "b", "c"])
STEPS = int(os.environ.get("FAIRLEAD_QUEUE_STEPS", "2000"))
LIMITS = Limits(total=Limit(12), band=Limit(8), flow=Limit(5))
BUDGET = 0.2


class Answer:
    """One request that waits for its answer."""

    def __init__(self, machine: "Machine", number: int) -> None:
        self._machine, self._number = machine, number

    def route(self, endpoint, target="", shown="", prefill="", second="") -> None:
        alive = {there.address for _, there in self._machine.pipeline.fleet.table.slots()}
        assert not second or second in alive
        self._machine.answers[self._number] += 1
        self._machine.routed.append(self._number)

    def stay(self) -> None:
        assert self._machine.priorities[self._number] < 0

    def reject(self, reject) -> None:
        assert reject.status in (429, 503)
        if reject.reason == "evicted":
            self._machine.on_evict(self._number)
            return
        assert 1.0 <= reject.retry_after_s <= 60.0
        self._machine.answers[self._number] += 1

    def hold(self, seconds) -> None:
        assert seconds > 0
        self._machine.held.add(self._number)


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.clock = SimClock()
        self.answers, self.ends = Counter(), Counter()
        self.lost, self.held, self.arrived, self.routed = set(), set(), [], []
        self.evicted, self.priorities = [], {}
        subset = Subset(NoParams())
        profile = Profile("test", [subset], [(LoadAware(LoadAwareParams()), 50.0)], MaxScore(MaxScoreParams()))
        rng = random.Random(7)
        queues = Queues(lambda priority: (DeficitRoundRobin(), LeastWork()), LIMITS)

        def able(request, fleet, now):
            return subset.keep(request, fleet, Cycle(Context(now, rng)))

        binder = PairBinder(able)
        gate = LedgerGate(tokens=5000, requests=2)
        flow = FlowControl(queues, gate, binder, Times(30.0, 10.0), batch=3)
        fleet = Fleet(lease_ttl=60.0)
        desk = Desk(flow, eviction=Eviction(0.25))
        policy = RemotePolicy("remote", profile, able, BUDGET, BreakerRules(failures=3, cooldown=1.0))
        self.pipeline = Pipeline(self.clock, rng, fleet, policy, TokenEstimator(), desk=desk)
        self.parking = self.pipeline.parking = Parking()
        self.parking.remotes = {"remote": policy}
        self.driver = Driver(self.pipeline, self.clock, self)
        self.driver.start()

    def on_decision(self, record, duration_s):
        if record.outcome == "rejected-context-cancelled":
            assert record.request.id in self.lost

    def on_outcome(self, record):
        self.ends[record.request.id] += 1
        assert record.cause != "evicted" or record.request.priority < 0

    def on_evict(self, number):
        assert number in self.routed and number not in self.evicted and not self.ends[number]
        assert self.priorities[number] < 0
        self.evicted.append(number)

    @rule(name=NAMES, port=st.integers(1, 3))
    def up(self, name, port):
        self.driver.feed(ev.EndpointUp(Endpoint(name, f"10.0.0.1:{port}")))

    @rule(name=NAMES)
    def down(self, name):
        self.driver.feed(ev.EndpointDown(name))

    @rule(
        tokens=st.integers(0, 10_000),
        chain=st.lists(st.integers(1, 5), max_size=4),
        priority=st.sampled_from([-10, 0, 10]),
        tenant=st.sampled_from(["", "t"]),
        port=st.none() | st.integers(1, 3),
        stream=st.booleans(),
        ttl=st.sampled_from([0.0, 0.0, 2.0]),
    )
    def arrive(self, tokens, chain, priority, tenant, port, stream, ttl):
        number = len(self.arrived) + 1
        ends = [100 * (i + 1) for i in range(len(chain))]
        request = Request(
            id=number,
            arrived=self.clock.time(),
            prompt_tokens=tokens,
            prompt_bytes=tokens * 4,
            prefix=PrefixChain(tuple(chain), tuple(ends)),
            priority=priority,
            fairness_id=tenant,
            stream=stream,
            subset=None if port is None else frozenset({f"10.0.0.1:{port}"}),
            ttl_s=ttl,
        )
        self.arrived.append(number)
        self.priorities[number] = priority
        self.driver.waiting[number] = Answer(self, number)
        before = len(self.parking)
        self.driver.feed(ev.RequestArrived(request))
        assert self.answers[number] or number in self.held or len(self.parking) > before

    @rule(count=st.integers(1, 6), seconds=st.sampled_from([0.0, 0.03, 0.5, 5.0]))
    def overload(self, count, seconds):
        """Sheddable requests, and one that is not."""
        for priority in [-10] * count + [10]:
            self.arrive(4000, [], priority, "", None, True, 0.0)
        self.clock.advance(seconds)

    @initialize(connected=st.booleans(), endpoints=st.integers(0, 3))
    def begin(self, connected, endpoints):
        for port, name in enumerate("abc"[:endpoints], 1):
            self.up(name, port)
        self.connection(connected)

    @rule(up=st.booleans())
    def connection(self, up):
        self.driver.feed(ev.RemoteUp("remote") if up else ev.RemoteDown("remote"))

    @precondition(lambda self: len(self.parking))
    @rule(data=st.data(), outcome=st.sampled_from([1, 1, 1, 0, 2, 3, 4]), name=NAMES, other=NAMES, pair=st.booleans())
    def answer(self, data, outcome, name, other, pair):
        asked = [number for number in self.driver.waiting if self.pipeline.desk.flow.queues.get(number) is None]
        numbers = data.draw(st.lists(st.sampled_from(asked), max_size=3))
        picks = tuple(
            RemotePick(number, outcome, name, alternatives=((other, 1.0),), prefill=other if pair else "")
            for number in numbers
        )
        self.driver.feed(ev.RemotePicked("remote", picks))

    @precondition(lambda self: self.arrived)
    @rule(back=st.integers(1, 8), name=NAMES)
    def answer_whatever(self, back, name):
        self.driver.feed(ev.RemotePicked("remote", (RemotePick(self.arrived[-back:][0], 1, name),)))

    @rule()
    def out_of_reach(self):
        """Whoever runs now cannot be told to make way any more."""
        self.driver.evictable.clear()

    @precondition(lambda self: self.arrived)
    @rule(data=st.data(), what=st.sampled_from(["token", "end", "end", "gone", "lost"]))
    def progress(self, data, what):
        number = data.draw(st.sampled_from(self.arrived[-12:]))
        if what == "token":
            self.driver.feed(ev.FirstTokenSeen(number))
        elif what == "lost":
            if self.driver.waiting.pop(number, None) is not None:
                self.lost.add(number)
            self.driver.feed(ev.StreamLost(number))
        elif self.answers[number]:
            self.driver.feed(ev.ResponseEnded(request_id=number, status=200, client_gone=what == "gone"))

    @rule(name=NAMES, waiting=st.sampled_from([0.0, 3.0]), running=st.sampled_from([0.0, 5.0]), kv=st.floats(0, 1))
    def sampled(self, name, waiting, running, kv):
        sample = Sample(waiting=waiting, running=running, kv_usage=kv, block_size=16, num_blocks=1000)
        self.driver.feed(ev.MetricsSampled(name, self.clock.time(), sample))

    @rule(seconds=st.sampled_from([0.01, 0.03, 0.5, 5.0, 40.0]))
    def wait(self, seconds):
        self.clock.advance(seconds)

    @invariant()
    def nothing_is_lost_or_doubled(self):
        self.pipeline.validate()
        queued, asked = len(self.pipeline.desk), len(self.parking)
        assert queued <= LIMITS.total.requests
        assert queued + asked == len(self.driver.waiting)
        assert len(self.pipeline.fleet.ledger.reserved) <= asked
        assert all(count == 1 for count in self.answers.values())
        assert all(count == 1 for count in self.ends.values())

    def teardown(self):
        # Time alone answers everybody who waits, and ends every lease.
        self.clock.advance(31.0)
        assert len(self.pipeline.desk) == len(self.parking) == 0
        assert not self.driver.waiting
        assert set(self.answers) | self.lost == set(self.arrived)
        assert not set(self.answers) & self.lost
        self.clock.advance(100.0)
        assert len(self.pipeline.fleet.ledger) == 0
        assert set(self.ends) == set(self.routed) >= set(self.evicted)
        assert not self.pipeline.fleet.table.inflight.any()
        assert self.pipeline.desk.flow.next_deadline() == inf


TestFlowPipeline = Machine.TestCase
TestFlowPipeline.settings = settings(max_examples=max(STEPS // 40, 1), stateful_step_count=40, deadline=None)
