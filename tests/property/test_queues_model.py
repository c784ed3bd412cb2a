"""The queues against a plain list of what waits: nothing is lost, doubled or stuck, and every count is right."""

import os
import tracemalloc
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from leases import dispatched

from fairlead.core.fairness import Charge, RoundRobin, StartTimeFair, Strict
from fairlead.core.flow import FlowRule, Limit, Limits, Waiting
from fairlead.core.policy import Refused
from fairlead.core.queues import FLOW_MEMORY, MOST_IDLE, Queues
from fairlead.core.request import Request
from fairlead.plugins.flow_control import EarliestDeadline, Fcfs, LeastWork

FAIRNESS = {10: Strict, 0: StartTimeFair, -10: StartTimeFair, -20: RoundRobin}
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
        self.sent: list[Charge] = []
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
        self.sent.append(dispatched(self.queues, waiting, self.now, waiting.work))
        assert self.model.pop(waiting.request.id) is waiting

    @rule(tenant=st.sampled_from(["", "a", "d"]), priority=st.sampled_from(sorted(FAIRNESS)), ms=st.floats(1e-3, 1e6))
    def go_at_once(self, tenant, priority, ms):
        band, flow = self.queues.of(Request(id=0, arrived=self.now, priority=priority, fairness_id=tenant), self.now)
        charge = Charge(flow, 0, self.now, ms, 0.0, ms, band.demand.light(flow, ms))
        self.queues.sent(charge, 13.0)
        self.sent.append(charge)

    @precondition(lambda self: self.sent)
    @rule(place=st.integers(0, 50), share=st.sampled_from([0.0, 0.5, 1.0, 3.0]))
    def end(self, place, share):
        charge = self.sent.pop(place % len(self.sent))
        self.queues.settle(charge, share * charge.ms, 100.0, self.now)

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
        assert sum(len(band.demand) for band in self.queues.bands()) == len(self.sent)


TestQueues = QueuesAgainstAList.TestCase
TestQueues.settings = settings(max_examples=max(STEPS // 50, 1), stateful_step_count=50, deadline=None)


def test_a_burst_of_fifty_thousand_stays_within_the_limits():
    """Of as many tenants, half of whom give up at once."""
    queues = Queues(lambda priority: (StartTimeFair(), LeastWork()), Limits(total=Limit(500), band=Limit(400)))
    tracemalloc.start()
    try:
        for number in range(50_000):
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
    assert peak < 10e6


COST = st.floats(0.1, 1e5)


@given(
    weights=st.tuples(st.floats(1.0, 5.0), st.floats(1.0, 5.0), st.floats(1.0, 5.0)),
    before=st.lists(st.tuples(st.integers(0, 2), COST), max_size=20),
    costs=st.lists(st.tuples(COST, COST, COST), min_size=1, max_size=60),
)
@settings(max_examples=200, deadline=None)
def test_two_flows_that_wait_are_given_the_same_work_to_within_their_largest_requests(weights, before, costs):
    """The bound of `fairlead.core.fairness`, over every interval in which both wait, whatever went before it."""
    rules = tuple(FlowRule(tenant=str(i), weight=weight) for i, weight in enumerate(weights))
    queues = Queues(lambda priority: (StartTimeFair(), Fcfs()), Limits(rules=rules))

    def put(tenant: int) -> None:
        queues.put(Request(id=0, arrived=0.0, fairness_id=str(tenant)), 0.0, inf, 1.0)

    def serve(cost_of) -> tuple[int, float]:
        waiting = next(iter(queues.turns(queues.bands()[0], 1)))[0]
        tenant = int(waiting.request.fairness_id)
        dispatched(queues, waiting, 0.0, cost_of(tenant))
        return tenant, cost_of(tenant)

    largest = [0.0] * 3
    for tenant, cost in before:  # whoever is alone gets everything
        put(tenant)
        serve(lambda _, cost=cost: cost)
        largest[tenant] = cost / weights[tenant]  # the last one before the interval counts
    for tenant in range(3):
        put(tenant)
    given_ms, history = [0.0] * 3, [(0.0,) * 3]
    for row in costs:
        tenant, cost = serve(row.__getitem__)
        put(tenant)  # it went on waiting
        given_ms[tenant] += cost / weights[tenant]
        largest[tenant] = max(largest[tenant], cost / weights[tenant])
        history.append(tuple(given_ms))
    for f in range(3):
        for g in range(f):
            ahead = [now[f] - now[g] for now in history]
            assert max(ahead) - min(ahead) <= (largest[f] + largest[g]) * (1 + 1e-9)
