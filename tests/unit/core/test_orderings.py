from math import inf

import pytest
from leases import dispatched

from fairlead.core.fairness import Strict
from fairlead.core.flow import Limit, Limits, Waiting
from fairlead.core.queues import Queues
from fairlead.core.request import Request
from fairlead.plugins.flow_control import EarliestDeadline, Fcfs, LeastWork, LeastWorkParams


def waiting(since: float, deadline: float = inf, work: float = 1.0, slo_ms: float = 0.0) -> Waiting:
    request = Request(id=0, arrived=since, slo_ttft_ms=slo_ms)
    return Waiting(request, since, deadline, work, 0)


def first(ordering, *entries: Waiting) -> Waiting:
    return min(entries, key=ordering.key)


def test_fcfs_goes_by_arrival():
    early, late = waiting(1.0, work=9e9), waiting(2.0)
    assert first(Fcfs(), late, early) is early


def test_edf_goes_by_the_earlier_of_time_to_live_and_objective():
    patient, urgent, soonest = waiting(1.0, deadline=60.0), waiting(2.0, deadline=30.0), waiting(3.0, 90.0, slo_ms=500)
    ordering = EarliestDeadline()
    assert first(ordering, patient, urgent) is urgent
    assert first(ordering, patient, urgent, soonest) is soonest
    assert first(ordering, waiting(0.0), patient) is patient


def test_least_work_lets_short_ones_pass():
    long, short = waiting(0.0, work=50_000), waiting(1.0, work=100)
    assert first(LeastWork(), long, short) is short


def test_nobody_is_overtaken_for_longer_than_work_divided_by_ageing():
    ordering, long = LeastWork(), waiting(0.0, work=50_000)
    assert ordering.key(waiting(49.9, work=1)) < ordering.key(long)
    assert ordering.key(waiting(50.1, work=1)) > ordering.key(long)


@pytest.mark.parametrize("ageing", [0.0, -1.0, float("nan")])
def test_least_work_without_ageing_is_refused(ageing):
    with pytest.raises(ValueError, match="ageing"):
        LeastWorkParams(ageing=ageing)


class Line:
    """One flow, of which one request leaves per second."""

    def __init__(self, ordering) -> None:
        self.queues = Queues(lambda priority: (Strict(), ordering), Limits(band=Limit()))
        self._id = 0

    def put(self, now, ttl=1e9, work=1.0, slo_ms=0.0):
        self._id += 1
        return self.queues.put(Request(id=self._id, arrived=now, slo_ttft_ms=slo_ms), now, ttl, work)[0]

    def serve(self, now):
        waiting = next(self.queues.turns(self.queues.bands()[0], 1))[0]
        dispatched(self.queues, waiting, now, 1.0)
        return waiting

    def until(self, wanted, adversary, seconds=300):
        """Seconds after which `wanted` leaves, while `adversary(now)` adds one more request each second."""
        for now in range(1, seconds):
            adversary(float(now))
            if self.serve(float(now)) is wanted:
                return now
        raise AssertionError("it starves")


def test_fcfs_waits_for_those_before_it_only():
    line = Line(Fcfs())
    for _ in range(20):
        line.put(0.0)
    assert line.until(line.put(0.0, work=1e6), lambda now: line.put(now, work=1.0, slo_ms=1.0)) == 21


def test_least_work_is_overtaken_for_work_divided_by_ageing():
    line = Line(LeastWork())
    assert line.until(line.put(0.0, work=50_000), lambda now: line.put(now)) == pytest.approx(50, abs=1)


def test_edf_is_overtaken_until_its_deadline_less_the_shortest_time_to_live():
    line = Line(EarliestDeadline())
    assert line.until(line.put(0.0, ttl=60.0), lambda now: line.put(now, ttl=10.0)) == pytest.approx(50, abs=1)
