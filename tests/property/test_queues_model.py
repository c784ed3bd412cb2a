"""The queues against a plain list of what waits: nothing is lost, doubled or stuck, and every count is right."""

import os
import tracemalloc
from math import inf

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fairlead.core.fairness import (
    DeficitRoundRobin,
    EarliestDeadline,
    Fcfs,
    LeastAttained,
    LeastWork,
    RoundRobin,
    Strict,
)
from fairlead.core.flow import FlowRule, Limit, Limits, Waiting
from fairlead.core.policy import Refused
from fairlead.core.queues import FLOW_MEMORY, MOST_IDLE, Queues
from fairlead.core.request import Request

FAIRNESS = {10: Strict, 0: DeficitRoundRobin, -10: LeastAttained, -20: RoundRobin}
ORDERING = {10: Fcfs, 0: LeastWork, -10: EarliestDeadline, -20: Fcfs}
LIMITS = Limits(
    total=Limit(12, 4000),
    band=Limit(8, 3000),
    flow=Limit(5, 2500),
    bands={-20: Limit(3)},
    rules=(FlowRule(tenant="b", limit=Limit(2), weight=2.0),),
)
STEPS = int(os.environ.get("FAIRLEAD_QUEUE_STEPS", "2000"))


class QueuesAgainstAList(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queues = Queues(lambda priority: (FAIRNESS[priority](), ORDERING[priority]()), LIMITS)
        self.now = 0.0
        self.model: dict[int, Waiting] = {}
        self.ids = 0

    @rule(
        priority=st.sampled_from(sorted(FAIRNESS)),
        tenant=st.sampled_from(["", "a", "b", "c"]),
        size=st.integers(0, 1500),
        ttl=st.sampled_from([0.0, 1.0, 5.0, inf]),
        work=st.floats(0, 1e6),
    )
    def arrive(self, priority, tenant, size, ttl, work):
        self.ids += 1
        request = Request(id=self.ids, arrived=self.now, priority=priority, fairness_id=tenant, body_bytes=size)
        outcome, displaced = self.queues.put(request, self.now, ttl, work)
        for victim in displaced:
            assert self.model.pop(victim.request.id) is victim
            assert victim.request.priority < priority
        if isinstance(outcome, Refused):
            assert not displaced
            assert outcome.status == 429
            assert self._is_full(request)
        else:
            self.model[request.id] = outcome

    def _is_full(self, request: Request) -> bool:
        same = [w for w in self.model.values() if w.request.priority == request.priority]
        flow = [w for w in same if w.request.fairness_id == request.fairness_id]
        keep = [w for w in self.model.values() if w.request.priority >= request.priority]
        of_flow = LIMITS.rule("", request.fairness_id).limit or LIMITS.flow
        return any(
            limit.full(len(group), sum(w.size for w in group), request.body_bytes)
            for limit, group in ((of_flow, flow), (LIMITS.of_band(request.priority), same), (LIMITS.total, keep))
        )

    @precondition(lambda self: self.model)
    @rule(window=st.integers(1, 6), turn=st.integers(0, 3), place=st.integers(0, 5), data=st.data())
    def dispatch(self, window, turn, place, data):
        bands = [band for band in self.queues.bands() if band.count]
        band = data.draw(st.sampled_from(bands))
        turns = list(self.queues.turns(band, window))
        chosen = turns[turn % len(turns)]
        waiting = chosen[place % len(chosen)]
        assert waiting.request.priority == band.priority
        self.queues.dispatch(waiting, self.now, waiting.work)
        assert self.model.pop(waiting.request.id) is waiting

    @rule(number=st.integers(1, 200))
    def cancel(self, number):
        waiting = self.model.pop(number, None)
        if waiting is not None:
            self.queues.remove(waiting)

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, FLOW_MEMORY + 1]))
    def pass_time(self, seconds):
        self.now += seconds
        late = self.queues.expire(self.now)
        assert {w.request.id for w in late} == {i for i, w in self.model.items() if w.deadline <= self.now}
        for waiting in late:
            del self.model[waiting.request.id]
        assert self.queues.next_deadline() == min((w.deadline for w in self.model.values()), default=inf)

    @rule()
    def drain(self):
        assert {w.request.id for w in self.queues.clear()} == set(self.model)
        self.model.clear()

    @invariant()
    def agrees(self):
        self.queues.validate()
        assert len(self.queues) == len(self.model) <= LIMITS.total.requests
        assert {id(waiting) for waiting in self.queues.members()} == {id(one) for one in self.model.values()}


TestQueues = QueuesAgainstAList.TestCase
TestQueues.settings = settings(max_examples=max(STEPS // 50, 1), stateful_step_count=50, deadline=None)


def test_a_burst_of_a_hundred_thousand_stays_within_the_limits():
    """Of as many tenants, half of whom give up at once."""
    queues = Queues(lambda priority: (DeficitRoundRobin(), LeastWork()), Limits(total=Limit(500), band=Limit(400)))
    tracemalloc.start()
    try:
        for number in range(100_000):
            request = Request(
                id=number, arrived=0.0, priority=number % 2, fairness_id=f"tenant-{number}", body_bytes=10_000
            )
            waiting, _ = queues.put(request, number * 1e-5, 60.0, 100.0)
            if number % 4 == 0 and isinstance(waiting, Waiting):
                queues.remove(waiting)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    queues.validate()
    assert len(queues) <= 500
    assert sum(len(band.flows) for band in queues.bands()) <= MOST_IDLE + 500
    assert peak < 32e6
