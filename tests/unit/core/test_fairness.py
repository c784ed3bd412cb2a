from collections import Counter
from math import inf
from random import Random

import pytest
from leases import dispatched

from fairlead.core.fairness import LINGER, SHARE, Charge, Demand, RoundRobin, StartTimeFair, Strict
from fairlead.core.flow import Flow, FlowKey, Waiting
from fairlead.core.policy import Refused
from fairlead.core.queues import Queues
from fairlead.core.request import Request
from fairlead.core.table import EndpointTable
from fairlead.plugins.flow_control import Fcfs
from fairlead.testing.builders import fleet

POLICIES = [Strict, RoundRobin, StartTimeFair]


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

    def serve(self, cost: float = 0.0) -> Charge:
        """`cost`: 0 = its work."""
        (band,) = self.queues.bands()
        waiting = next(self.queues.turns(band, 8))[0]
        charge = dispatched(self.queues, waiting, self.now, cost or waiting.work)
        tenant = waiting.request.fairness_id
        self.served[tenant] += round(waiting.work)
        self.order.append(tenant)
        return charge

    def settle(self, charge: Charge, done_ms: float) -> None:
        self.queues.settle(charge, done_ms, 1.0, self.now)


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


def test_a_flow_that_sends_ten_times_more_gets_no_more_work():
    drive, rng = Drive(StartTimeFair), Random(7)
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


def test_idling_earns_no_credit():
    drive = Drive(StartTimeFair)
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


def test_one_huge_request_that_is_refused_changes_nothing_for_others():
    """Once a quantum grew with it, for good: then a flow of short requests sent hundreds in a row."""
    drive = Drive(StartTimeFair)
    drive.put("huge")
    drive.put("a", 10)
    drive.settle(drive.serve(1e7), 0.0)
    for _ in range(20):
        drive.put("a", 10)
        drive.put("huge", 10)
    for _ in range(20):
        drive.serve()
    assert drive.order[1:].count("a") == pytest.approx(10, abs=1)


def test_work_that_was_not_done_is_made_up_for():
    drive = Drive(StartTimeFair)
    for _ in range(20):
        drive.put("cut", 100)
        drive.put("whole", 100)
    for _ in range(20):
        charge = drive.serve()
        drive.settle(charge, 50.0 if drive.order[-1] == "cut" else 100.0)
    assert drive.served["cut"] == pytest.approx(2 * drive.served["whole"], abs=200)


def flow_of(queues: Queues, tenant: str, weight: float = 1.0) -> Flow:
    flow = queues.of(Request(id=1, arrived=0.0, fairness_id=tenant), 0.0)[1]
    flow.weight = weight
    return flow


def demand_of(queues: Queues) -> Demand:
    (band,) = queues.bands()
    return band.demand


def sent(queues: Queues, tenant: str, ms: float = 10.0, slot: int = 0, now: float = 0.0) -> Charge:
    flow = flow_of(queues, tenant)
    charge = Charge(flow, slot, now, ms, 0.0, ms, demand_of(queues).light(flow, ms))
    queues.sent(charge, 13.0)
    return charge


def two_tenants() -> Queues:
    """`many` has 30 requests in flight at slot 0."""
    queues = Queues(lambda priority: (StartTimeFair(), Fcfs()))
    for _ in range(30):
        sent(queues, "many")
    return queues


def test_light_is_half_an_even_share_and_heavy_more_than_one():
    queues = two_tenants()
    few, many = flow_of(queues, "few"), flow_of(queues, "many")
    demand = demand_of(queues)
    assert demand.light(few, 10.0) and not demand.heavy(few, 10.0)
    assert not demand.heavy(many, 10.0), "alone it may have all"
    while demand.light(few, 10.0):
        sent(queues, "few")
    assert (few.in_flight, demand.heavy(many, 10.0), demand.heavy(few, 10.0)) == (10, True, False)


def test_nobody_of_many_equals_is_heavy():
    queues = two_tenants()
    for number in range(8):
        for _ in range(15):
            sent(queues, f"tenant-{number}")
    assert not demand_of(queues).heavy(flow_of(queues, "many"), 10.0), "twice an even share, but no quarter of all"


def test_past_the_gate_goes_no_more_than_went_through_it():
    queues = two_tenants()
    for number in range(100):
        if demand_of(queues).fits(10.0) and demand_of(queues).light(flow_of(queues, f"tenant-{number}"), 10.0):
            sent(queues, f"tenant-{number}")
    assert len(demand_of(queues)) <= 60


def table(max_seqs: float = 0.0, active: float = 0.0) -> EndpointTable:
    known = fleet("e0", "e1").table
    known.max_seqs[0], known.active[0] = max_seqs, active
    return known


def test_heavy_requests_are_spaced_where_light_ones_run_and_a_moment_longer():
    queues = two_tenants()
    demand = demand_of(queues)
    light = sent(queues, "few")
    assert demand.calm(table(), 0.0)[0] is None
    for _ in range(2):
        sent(queues, "many")
    calm, until = demand.calm(table(), 0.0)
    assert calm is not None and calm.tolist() == [False, True]
    # Two prompts of 10 ms take a fifth of the time; one step's worth may be made up for.
    assert until == pytest.approx(2 * 0.010 / SHARE - 0.013)
    assert demand.calm(table(), until)[0] is None
    queues.settle(light, 10.0, 10.0, 0.0)
    assert demand.calm(table(), 0.0)[0] is not None
    for _ in range(100):
        sent(queues, "many")
    assert demand.calm(table(), LINGER)[0] is None


def test_spacing_does_not_believe_in_the_length_of_what_was_refused():
    queues = two_tenants()
    sent(queues, "few")
    huge = sent(queues, "many", 1e8)
    assert demand_of(queues).calm(table(), 1.0)[1] > 1e4
    queues.settle(huge, 0.0, 100.0, 1.0)
    assert demand_of(queues).calm(table(), 1.0)[1] == pytest.approx(1.0 + 0.1 * (1 / SHARE - 1))


def test_sequences_are_left_free_for_light_requests():
    queues = two_tenants()
    first, _ = sent(queues, "few"), sent(queues, "few")
    assert demand_of(queues).held(0, table(8, 7), 0.0) < 0.0, "both are there"
    queues.settle(first, 10.0, 10.0, 0.0)
    assert demand_of(queues).held(0, table(8, 7), 0.0) == inf
    assert demand_of(queues).held(0, table(8, 6), 0.0) < 0.0
    assert demand_of(queues).held(1, table(8, 7), 0.0) < 0.0, "elsewhere nobody is protected"


@pytest.mark.parametrize(
    ("status", "tokens", "took_ms", "done"),
    [(200, 20, 1e6, 140.0), (200, -1, 1e6, 300.0), (200, -1, 50.0, 50.0), (400, -1, 1e6, 0.0), (503, 20, 1e6, 0.0),
     (0, -1, 70.0, 70.0)],
)  # fmt: skip
def test_what_was_done_of_a_request(status, tokens, took_ms, done):
    flow = Flow(FlowKey(0, "", "t"), 1, 0.0)
    assert Charge(flow, 0, 0.0, 100.0, 2.0, 300.0, False).done_ms(status, tokens, took_ms) == done
