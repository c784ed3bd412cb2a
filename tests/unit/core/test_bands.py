"""What bends the order of bands: shares, ceilings, early shedding, rules of single flows."""

from collections import Counter

import pytest
from leases import dispatched

from fairlead.core.fairness import StartTimeFair, Strict
from fairlead.core.flow import FlowRule, Limit, Limits, Times
from fairlead.core.gates import EarlyShedding
from fairlead.core.policy import Refused
from fairlead.core.queues import MOST, Queues, Shares
from fairlead.core.request import Request
from fairlead.plugins.flow_control import (
    Fcfs,
    HoldbackCeiling,
    HoldbackCeilingParams,
    ReflectiveCeiling,
    StaticCeiling,
    StaticCeilingParams,
)

HIGH, LOW = 10, -10


class Bands:
    """Two bands that both always want more."""

    def __init__(self, shares, limits=None, fairness=Strict) -> None:
        self.queues = Queues(lambda priority: (fairness(), Fcfs()), limits)
        self.shares = Shares(shares)
        self.served: Counter[int] = Counter()
        self._id = 0

    def put(self, priority=0, tenant="", size=0):
        self._id += 1
        request = Request(id=self._id, arrived=0.0, priority=priority, fairness_id=tenant, body_bytes=size)
        return self.queues.put(request, 0.0, 1e9, 100.0)[0]

    def serve(self, cost=100.0):
        band = next(band for band in self.shares.order(self.queues.bands()) if band.count)
        waiting = next(self.queues.turns(band, 4))[0]
        self.shares.spent(self.queues.bands(), band.priority, cost)
        dispatched(self.queues, waiting, 0.0, cost)
        self.served[band.priority] += 1
        return waiting


def test_without_shares_bands_are_strict():
    bands = Bands({})
    for _ in range(50):
        bands.put(HIGH)
        bands.put(LOW)
    for _ in range(50):
        bands.serve()
    assert bands.served == {HIGH: 50}


@pytest.mark.parametrize("share", [0.05, 0.1, 0.4])
def test_a_band_gets_its_share_while_it_waits(share):
    bands = Bands({LOW: share})
    for _ in range(1000):
        bands.put(HIGH)
        bands.put(LOW)
    for _ in range(1000):
        bands.serve()
    assert bands.served[LOW] / 1000 == pytest.approx(share, abs=0.002)


def test_nobody_is_owed_for_a_time_without_demand():
    bands = Bands({LOW: 0.5})
    for _ in range(200):
        bands.put(HIGH)
    bands.put(LOW)
    bands.serve()
    bands.serve()
    for _ in range(100):
        bands.serve()
    bands.put(LOW)
    assert bands.serve().request.priority == HIGH
    assert bands.served[LOW] == 1


def test_a_debt_is_bounded():
    bands = Bands({LOW: 0.5})
    bands.put(LOW)
    for _ in range(500):
        bands.put(HIGH)
        band = bands.queues.bands()[0]
        waiting = next(bands.queues.turns(band, 1))[0]
        bands.shares.spent(bands.queues.bands(), HIGH, 5000.0)
        dispatched(bands.queues, waiting, 0.0, 5000.0)
    assert bands.shares.owed[LOW] == MOST


@pytest.mark.parametrize("large", [500.0, 30_000.0])
def test_a_band_with_large_requests_gets_no_more_than_its_share(large):
    bands = Bands({LOW: 0.05})
    bands.put(HIGH)
    bands.put(LOW)
    work: Counter[int] = Counter()
    for _ in range(20_000):
        first = bands.shares.order(bands.queues.bands())[0].priority
        cost = large if first == LOW else 500.0
        bands.shares.spent(bands.queues.bands(), first, cost)
        work[first] += cost
    assert work[LOW] / work.total() == pytest.approx(0.05, abs=0.003)


def test_a_small_request_does_not_lower_the_debt_of_a_large_one():
    bands = Bands({LOW: 0.05})
    bands.put(LOW)
    for cost in (30_000.0, 10.0):
        bands.shares.spent(bands.queues.bands(), LOW, cost)
    assert bands.shares.owed[LOW] <= -28_499.0


@pytest.mark.parametrize("shares", [{0: 0.7, 1: 0.4}, {0: -0.1}, {0: 1.2}])
def test_impossible_shares_are_refused(shares):
    with pytest.raises(ValueError, match="at most 1"):
        Shares(shares)


def holdback(lowest: float, **more) -> HoldbackCeiling:
    return HoldbackCeiling(HoldbackCeilingParams(min_ceiling=lowest, **more))


def static(threshold: float) -> StaticCeiling:
    return StaticCeiling(StaticCeilingParams(threshold=threshold))


def test_holdback_is_linear_between_the_bands():
    assert holdback(0.6).ceilings([10, 0, -10]) == pytest.approx([1.0, 0.8, 0.6])
    assert holdback(0.5, domain="value").ceilings([10, 9, 0]) == pytest.approx([1.0, 0.95, 0.5])
    assert holdback(0.5).ceilings([0]) == [1.0]
    assert holdback(0.6).allowed(0.7, [10, 0, -10]) == [True, True, False]
    assert static(0.5).allowed(0.5, [10, 0]) == [False, False]


def test_reflective_slows_lower_bands_down_and_never_the_highest():
    ceiling = ReflectiveCeiling()
    looks = [ceiling.allowed(0.8, [10, 0, -10]) for _ in range(400)]
    assert all(look[0] for look in looks)
    # Ceilings are 1, 0.6 and 0.2: both are past theirs, and served at one look in 0.8/0.2 = 4.
    assert [sum(look[i] for look in looks) for i in (1, 2)] == [100, 100]
    assert ceiling.allowed(0.5, [10, 0, -10])[1], "0.5 is below 1 - 0.5/2"
    assert all(ceiling.allowed(0.1, [10, 0, -10]))
    assert ceiling.allowed(2.0, [10]) == [True]


@pytest.mark.parametrize("make", [lambda: static(0), lambda: holdback(0.0), lambda: holdback(0.9, max_ceiling=0.5)])
def test_ceilings_that_stop_everything_are_refused(make):
    with pytest.raises(ValueError):
        make()


def test_early_shedding_refuses_the_share_that_the_formula_says():
    shedding = EarlyShedding()
    assert shedding.probability(0.25) == pytest.approx(300 / 1024)
    assert [shedding.probability(level) for level in (-1.0, 0.0, 0.4, 5.0)] == [0.0, 0.0, 1.0, 1.0]
    assert sum(shedding.sheds(0.25) for _ in range(10_000)) == pytest.approx(2930, abs=5)
    assert not any(shedding.sheds(0.0) for _ in range(100))


def test_limits_and_times_of_bands_and_flows():
    limits = Limits(
        band=Limit(4),
        bands={LOW: Limit(1)},
        rules=(FlowRule(model="", tenant="small", limit=Limit(2), ttl=3.0),),
    )
    bands = Bands({}, limits)
    assert not isinstance(bands.put(LOW), Refused)
    assert isinstance(bands.put(LOW), Refused)
    small = [bands.put(0, "small") for _ in range(3)]
    assert [isinstance(one, Refused) for one in small] == [False, False, True]
    assert not isinstance(bands.put(0, "other"), Refused)
    times = Times(60.0, 20.0, 590.0, {LOW: 5.0})

    def ttl(priority, said=0.0, tenant="", endpoints=1):
        request = Request(id=1, arrived=0.0, priority=priority, ttl_s=said, fairness_id=tenant)
        return times.of(request, limits.rule("", tenant), endpoints)

    assert (ttl(0), ttl(LOW), ttl(LOW, tenant="small"), ttl(LOW, 9.0, "small")) == (60.0, 5.0, 3.0, 9.0)
    assert (ttl(0, endpoints=0), ttl(LOW, endpoints=0), ttl(0, 1e6)) == (60.0, 5.0, 590.0)
    assert Times(60.0, 0.0).of(Request(id=1, arrived=0.0), limits.rule("", ""), 0) == 0.0


def test_weights_share_a_band():
    rules = (FlowRule(tenant="large", weight=3.0),)
    bands, served = Bands({}, Limits(rules=rules), StartTimeFair), Counter()
    for _ in range(2000):
        bands.put(0, "large")
        bands.put(0, "plain")
    for _ in range(2000):
        served[bands.serve(1000.0).request.fairness_id] += 1
    assert served["large"] / 2000 == pytest.approx(0.75, abs=0.01)
