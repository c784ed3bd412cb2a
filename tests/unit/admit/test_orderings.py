from math import inf

import pytest

from fairlead.admit.framework import Waiting
from fairlead.admit.ordering import EarliestDeadline, Fcfs, LeastWork
from fairlead.model.request import Request


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
    assert first(LeastWork(ageing=1000.0), long, short) is short


def test_nobody_is_overtaken_for_longer_than_work_divided_by_ageing():
    ordering, long = LeastWork(ageing=1000.0), waiting(0.0, work=50_000)
    assert ordering.key(waiting(49.9, work=1)) < ordering.key(long)
    assert ordering.key(waiting(50.1, work=1)) > ordering.key(long)


@pytest.mark.parametrize("ageing", [0.0, -1.0, float("nan")])
def test_least_work_without_ageing_is_refused(ageing):
    with pytest.raises(ValueError, match="wait for ever"):
        LeastWork(ageing)
