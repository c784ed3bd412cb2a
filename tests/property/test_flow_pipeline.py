"""The pipeline with flow control, eviction, and a scheduler in another process that answers anything at any time: each
request is answered once or was lost, evicted at most once, none is stuck, the ledger empties. Sessions fail."""

import os
import random
from collections import Counter
from math import inf

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from waiting_rules import AbleRules

from fairlead.core import events as ev
from fairlead.core.binding import PairBinder
from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.events import RemotePick
from fairlead.core.fairness import StartTimeFair
from fairlead.core.fleet import Fleet
from fairlead.core.flow import Limit, Limits, Times
from fairlead.core.flow_control import Eviction, FlowControl, FlowController
from fairlead.core.gates import LedgerGate
from fairlead.core.policy import Context, Cycle
from fairlead.core.profile import Profile
from fairlead.core.queues import Queues
from fairlead.core.remote import BreakerRules, RemotePolicy
from fairlead.core.request import PrefixChain, Request
from fairlead.core.scheduler import Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.gateway.driver import Driver
from fairlead.plugins.filters.ability import Subset
from fairlead.plugins.flow_control import LeastWork
from fairlead.plugins.params import NoParams
from fairlead.plugins.pickers import MaxScore, MaxScoreParams
from fairlead.plugins.scorers.load import LoadAware, LoadAwareParams
from fairlead.testing import SimClock

NAMES = st.sampled_from(["a", "b", "c"])
STEPS = int(os.environ.get("FAIRLEAD_QUEUE_STEPS", "2000"))
LIMITS = Limits(total=Limit(12), band=Limit(8), flow=Limit(5))
BUDGET = 0.2


class Broken(Exception):
    """A session's own failure."""


class Answer:
    """One request that waits for its answer. `breaks`: what its session fails at."""

    def __init__(self, machine: "Machine", number: int, breaks: str) -> None:
        self._machine, self._number, self._breaks = machine, number, breaks
        self._gone = False

    def _break(self, at: str) -> None:
        if at == self._breaks:
            self._machine.broken += 1
            raise Broken(at)

    def fail(self) -> None:
        self._gone = True
        if self._number in self._machine.waiting:
            self._machine.lose(self._number)

    def route(self, route) -> None:
        alive = {there.address for _, there in self._machine.pipeline.fleet.table.slots()}
        assert not route.fallback or route.fallback in alive
        assert not route.evictable or self._machine.priorities[self._number] < 0
        self._machine.routed.append(self._number)
        if self._gone:  # it failed when it was held, and was routed in the same breath
            return
        self._machine.waiting.discard(self._number)
        self._machine.answers[self._number] += 1
        self._break("route")

    def reject(self, reject) -> None:
        assert reject.status in (429, 503)
        if self._gone:
            return
        if reject.reason == "evicted":
            if self._number not in self._machine.unreachable:
                self._machine.on_evict(self._number)
            self._break("evict")
            return
        self._machine.waiting.discard(self._number)
        assert 1.0 <= reject.retry_after_s <= 60.0
        self._machine.answers[self._number] += 1
        self._break("reject")

    def hold(self, seconds) -> None:
        assert seconds > 0
        self._machine.held.add(self._number)
        self._break("hold")


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.clock = SimClock()
        self.answers, self.ends = Counter(), Counter()
        self.lost, self.held, self.arrived, self.routed = set(), set(), [], []
        self.waiting, self.unreachable = set(), set()
        self.evicted, self.priorities = [], {}
        self.broken = self.failed = 0
        subset = Subset(NoParams())
        profile = Profile("test", [subset], [(LoadAware(LoadAwareParams()), 50.0)], MaxScore(MaxScoreParams()))
        rng = random.Random(7)
        queues = Queues(lambda priority: (StartTimeFair(), LeastWork()), LIMITS)

        def able(request, fleet, now):
            return subset.keep(request, fleet, Cycle(Context(now, rng)))

        binder = PairBinder(AbleRules(able))
        gate = LedgerGate(requests=2)
        flow = FlowControl(queues, gate, binder, Times(30.0, 10.0))
        fleet = Fleet(lease_ttl=60.0)
        flow_controller = FlowController(flow, eviction=Eviction(0.25))
        policy = RemotePolicy("remote", profile, able, BUDGET, BreakerRules(failures=3, cooldown=1.0))
        remotes = {"remote": policy}
        self.pipeline = Pipeline(
            self.clock, rng, fleet, policy, TokenEstimator(), flow_controller=flow_controller, remotes=remotes
        )
        self.parking = self.pipeline.parking
        self.driver = Driver(self.pipeline, self.clock, self)
        self.driver.start()

    def client(self, number, breaks):
        return Answer(self, number, breaks)

    def on_decision(self, record, duration_s):
        if record.outcome == "rejected-context-cancelled":
            assert record.request.id in self.lost

    def on_outcome(self, record):
        self.ends[record.request.id] += 1
        assert record.cause != "evicted" or record.request.priority < 0

    def on_failure(self, instruction):
        assert instruction in ("Route", "Reject", "Hold", "Evict")
        self.failed += 1

    def lose(self, number):
        self.waiting.remove(number)
        self.lost.add(number)

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
        breaks=st.sampled_from([""] * 8 + ["route", "reject", "hold", "evict"]),
    )
    def arrive(self, tokens, chain, priority, tenant, port, stream, ttl, breaks):
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
        self.waiting.add(number)
        before = len(self.parking)
        self.driver.feed(ev.RequestArrived(request, self.client(number, breaks)))
        assert self.answers[number] or number in self.held or len(self.parking) > before

    @rule(count=st.integers(1, 6), seconds=st.sampled_from([0.0, 0.03, 0.5, 5.0]))
    def overload(self, count, seconds):
        """Sheddable requests, and one that is not."""
        for priority in [-10] * count + [10]:
            self.arrive(4000, [], priority, "", None, True, 0.0, "")
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
        asked = [number for number in self.waiting if self.pipeline.requests.get(number).question is not None]
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
        self.unreachable.update(self.routed)

    @precondition(lambda self: self.arrived)
    @rule(data=st.data(), what=st.sampled_from(["token", "end", "end", "gone", "reset", "lost"]))
    def progress(self, data, what):
        number = data.draw(st.sampled_from(self.arrived[-12:]))
        if what == "token":
            self.driver.feed(ev.FirstTokenSeen(number))
        elif what == "lost":
            if number in self.waiting:
                self.lose(number)
            self.driver.feed(ev.StreamLost(number))
        elif self.answers[number]:
            cut = {"client_gone": what == "gone", "upstream_reset": what == "reset"}
            self.driver.feed(ev.ResponseEnded(request_id=number, status=200, **cut))

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
        queued, asked = len(self.pipeline.flow_controller), len(self.parking)
        assert queued <= LIMITS.total.requests
        assert queued + asked == len(self.waiting)
        assert len(self.pipeline.fleet.ledger.reserved) <= asked
        assert all(count == 1 for count in self.answers.values())
        assert all(count == 1 for count in self.ends.values())
        assert self.failed == self.broken, "nothing fails but the sessions that are to"

    def teardown(self):
        # Time alone answers everybody who waits, and ends every lease.
        self.clock.advance(31.0)
        assert len(self.pipeline.flow_controller) == len(self.parking) == 0
        assert not self.waiting
        assert set(self.answers) | self.lost == set(self.arrived)
        assert not set(self.answers) & self.lost
        self.clock.advance(100.0)
        assert len(self.pipeline.fleet.ledger) == 0
        assert set(self.ends) == set(self.routed) >= set(self.evicted)
        assert not self.pipeline.fleet.table.inflight.any()
        assert self.pipeline.flow_controller.flow.next_deadline() == inf


TestFlowPipeline = pytest.mark.failing_instructions(Machine.TestCase)
TestFlowPipeline.settings = settings(max_examples=max(STEPS // 40, 1), stateful_step_count=40, deadline=None)
