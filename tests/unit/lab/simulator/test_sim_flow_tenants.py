"""Isolation, eviction and overload by simulation: what a tenant's flood does to another, and who is served first."""

from statistics import fmean

import pytest
from msgspec import structs

from fairlead.lab.simulator.run import config_from
from fairlead.lab.simulator.simulation import Simulation
from fairlead.lab.simulator.world import Scenario, World, replicas
from fairlead.lab.workload.record import Record, Workload

pytestmark = pytest.mark.simulation

TTL = "flowControl: {ttl: 590s, limits: {band: {requests: null}}"


def records(tenant: str, rate: float, seconds: float, tokens: int = 6000, priority: int = 0) -> list[Record]:
    return [
        Record(
            id=f"{tenant}-{i}",
            arrival_us=int(i / rate * 1e6),
            in_tokens=tokens,
            out_tokens=2,
            tenant=tenant,
            priority=priority,
            block_size=64,
        )
        for i in range(int(rate * seconds))
    ]


def scenario(*groups: list[Record]) -> Scenario:
    merged = sorted((one for group in groups for one in group), key=lambda one: (one.arrival_us, one.id))
    return Scenario(
        name="tenants",
        workload=Workload(name="tenants", records=merged),
        replicas=replicas(2, block_size=64),
        world=World(),
    )


class Watch:
    def __init__(self) -> None:
        self.ttft: dict[str, list[float]] = {}
        self.work: dict[str, float] = {}
        self.causes: list[str] = []

    def __call__(self, record) -> None:
        cause = getattr(record, "cause", None)
        tenant = record.request.fairness_id
        if cause is not None:
            self.causes.append(cause)
            if cause == "natural":
                self.ttft.setdefault(tenant, []).append(record.ttft_ms)
        elif record.outcome == "routed" and 1005.0 < record.at < 1025.0:
            self.work[tenant] = self.work.get(tenant, 0.0) + record.request.prompt_tokens


def run(text: str, *groups: list[Record]) -> Watch:
    watch = Watch()
    simulation = Simulation(scenario(*groups), config_from(text)[0], watch=watch)
    assert simulation.run()
    assert len(simulation.pipeline.fleet.ledger) == 0
    flow_controller = simulation.pipeline.flow_controller
    assert flow_controller is None or len(flow_controller) == 0
    simulation.pipeline.validate()
    return watch


def test_one_tenants_flood_does_not_move_anothers_latency() -> None:
    alone = run(TTL + "}", records("modest", 2.0, 20))
    both = run(TTL + "}", records("modest", 2.0, 20), records("flood", 20.0, 20))
    apart = run("policy: default", records("modest", 2.0, 20), records("flood", 20.0, 20))
    # What the flood has just sent is in front of it, up to a step and a quarter and its own: under a second.
    assert fmean(both.ttft["modest"]) < fmean(alone.ttft["modest"]) + 1000
    assert fmean(apart.ttft["modest"]) > 10_000


@pytest.mark.parametrize("fairness", ["deficit-round-robin", "least-attained-service"])
def test_ten_times_more_requests_are_given_no_more_work(fairness: str) -> None:
    text = TTL + f", fairness: {{type: {fairness}}}}}"
    found = run(text, records("a", 9.0, 25, 3000), records("b", 90.0, 25, 3000))
    assert found.work["a"] / sum(found.work.values()) == pytest.approx(0.5, abs=0.03)


def test_long_prompts_do_not_hold_up_short_ones() -> None:
    groups = records("short", 4.0, 30, 200), records("long", 2.0, 30, 30_000)
    queued = run(TTL + "}", *groups)
    at_once = run("policy: default", *groups)
    assert fmean(queued.ttft["short"]) < fmean(at_once.ttft["short"]) / 3


def test_evicted_requests_leave_the_ledger_empty() -> None:
    idle = [structs.replace(one, out_tokens=2000) for one in records("idle", 20.0, 10, 20_000, -10)]
    text = TTL + ", eviction: {after: 100ms}}"
    found = run(text, idle, records("urgent", 1.0, 10, 6000, 10))
    assert found.causes.count("evicted") > 0
    assert max(found.ttft["urgent"]) < 3000


def test_critical_latency_in_an_overload_of_three_times_the_capacity() -> None:
    """Two servers compute 6.7 such prompts a second."""
    text = TTL + ", ceiling: {type: priority-holdback-policy, minCeiling: 0.5}}"
    urgent = records("urgent", 4.0, 30, 6000, 10)
    alone = sorted(run(text, urgent).ttft["urgent"])
    crowd = records("usual", 4.0, 30), records("idle", 12.0, 30, 6000, -10)
    beside = sorted(run(text, urgent, *crowd).ttft["urgent"])
    assert len(beside) == len(alone) == 120
    assert beside[-2] < 1.5 * max(alone[-2], 600.0)
