from collections import Counter
from random import Random

import pytest

from fairlead.core.fairness import DeficitRoundRobin, Fcfs, LeastAttained, RoundRobin, Strict
from fairlead.core.flow import Waiting
from fairlead.core.policy import Refused
from fairlead.core.queues import Queues
from fairlead.core.request import Request

POLICIES = [Strict, RoundRobin, DeficitRoundRobin, LeastAttained]


class Drive:
    """Queues of one band, fed by hand."""

    def __init__(self, policy) -> None:
        self.queues = Queues(lambda priority: (policy(), Fcfs()))
        self.now = 0.0
        self.served: Counter[str] = Counter()
        self.order: list[str] = []
        self._id = 0

    def put(self, tenant: str, work: float = 100.0) -> Waiting:
        self._id += 1
        self.now += 0.001
        request = Request(id=self._id, arrived=self.now, fairness_id=tenant)
        waiting, _ = self.queues.put(request, self.now, 1e9, work)
        assert not isinstance(waiting, Refused)
        return waiting

    def serve(self) -> None:
        (band,) = self.queues.bands()
        waiting = next(self.queues.turns(band, 8))[0]
        self.queues.dispatch(waiting, self.now, waiting.work)
        tenant = waiting.request.fairness_id
        self.served[tenant] += round(waiting.work)
        self.order.append(tenant)


def test_strict_is_one_queue():
    drive = Drive(Strict)
    for tenant in "aaabba":
        drive.put(tenant)
    for _ in range(6):
        drive.serve()
    assert "".join(drive.order) == "aaabba"


def test_round_robin_takes_turns():
    drive = Drive(RoundRobin)
    for tenant in "aaaabbc":
        drive.put(tenant)
    for _ in range(7):
        drive.serve()
    assert "".join(drive.order) == "abcabaa"


@pytest.mark.parametrize("policy", [DeficitRoundRobin, LeastAttained])
def test_a_flow_that_sends_ten_times_more_gets_no_more_work(policy):
    drive, rng = Drive(policy), Random(7)
    backlog = {"greedy": 0, "modest": 0}
    for _ in range(6000):
        # Both always want more than there is, the greedy one ten times as often and with larger requests.
        while backlog["modest"] < 3:
            drive.put("modest", rng.uniform(50, 500))
            backlog["modest"] += 1
        while backlog["greedy"] < 30:
            drive.put("greedy", rng.uniform(50, 20_000))
            backlog["greedy"] += 1
        drive.serve()
        backlog[drive.order[-1]] -= 1
    share = drive.served["modest"] / sum(drive.served.values())
    assert share == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("policy", [DeficitRoundRobin, LeastAttained])
def test_idling_earns_no_credit(policy):
    drive = Drive(policy)
    for _ in range(500):
        drive.put("busy", 1000)
    for _ in range(200):
        drive.serve()
    for _ in range(200):
        drive.put("late", 1000)
    for _ in range(100):
        drive.serve()
    assert drive.served["late"] == pytest.approx(50_000, abs=20_000)


@pytest.mark.parametrize("policy", POLICIES)
def test_who_cannot_go_is_passed_over(policy):
    drive = Drive(policy)
    for tenant in "aaabbb":
        drive.put(tenant)
    (band,) = drive.queues.bands()
    offered = [waiting.request.fairness_id for turn in drive.queues.turns(band, 8) for waiting in turn]
    assert sorted(offered) == list("aaabbb")


@pytest.mark.parametrize("policy", POLICIES)
def test_no_flow_is_starved(policy):
    drive = Drive(policy)
    drive.put("small", 10)
    for _ in range(50):
        drive.put("large", 5000)
    for _ in range(3):
        drive.serve()
    assert drive.served["small"] == 10


def test_a_quantum_must_be_positive():
    with pytest.raises(ValueError, match="positive"):
        DeficitRoundRobin(0)
