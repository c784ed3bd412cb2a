"""Isolation, eviction and overload by simulation: what a tenant's flood does to another, and who is served first."""

from statistics import fmean
from typing import Any

import pytest
from msgspec import structs

from fairlead.lab.simulator.run import config_from
from fairlead.lab.simulator.simulation import Simulation
from fairlead.lab.simulator.world import Scenario, World, replicas
from fairlead.lab.workload.record import Dispatch, Record, Workload

pytestmark = pytest.mark.simulation

AT_ONCE = "flowControl: {enabled: false}"
TTL = "flowControl: {ttl: 590s, limits: {band: {requests: null}}"


def records(
    tenant: str, rate: float, seconds: float, tokens: int = 6000, priority: int = 0, out: int = 2
) -> list[Record]:
    return [
        Record(
            id=f"{tenant}-{i}",
            arrival_us=int(i / rate * 1e6),
            in_tokens=tokens,
            out_tokens=out,
            tenant=tenant,
            priority=priority,
            block_size=64,
        )
        for i in range(int(rate * seconds))
    ]


def scenario(*groups: list[Record], dispatch: Dispatch = "timestamp", max_seqs: int = 0, count: int = 2) -> Scenario:
    merged = sorted((one for group in groups for one in group), key=lambda one: (one.arrival_us, one.id))
    return Scenario(
        name="tenants",
        workload=Workload(name="tenants", records=merged, dispatch=dispatch),
        replicas=replicas(count, block_size=64, max_num_seqs=max_seqs),
        world=World(),
    )


class Watch:
    def __init__(self) -> None:
        self.ttft: dict[str, list[float]] = {}
        self.took: dict[str, list[float]] = {}
        self.work: dict[str, float] = {}
        self.causes: list[str] = []

    def __call__(self, record) -> None:
        cause = getattr(record, "cause", None)
        tenant = record.request.fairness_id
        if cause is not None:
            self.causes.append(cause)
            if cause == "natural":
                self.ttft.setdefault(tenant, []).append(record.ttft_ms)
                self.took.setdefault(tenant, []).append(record.duration_ms)
        elif record.outcome == "routed" and 1005.0 < record.at < 1015.0:
            self.work[tenant] = self.work.get(tenant, 0.0) + record.request.prompt_tokens


def run(text: str, *groups: list[Record], **how: Any) -> Watch:
    watch = Watch()
    simulation = Simulation(scenario(*groups, **how), config_from(text)[0], watch=watch)
    assert simulation.run()
    assert len(simulation.pipeline.fleet.ledger) == 0
    flow_controller = simulation.pipeline.flow_controller
    assert flow_controller is None or len(flow_controller) == 0
    simulation.pipeline.validate()
    return watch


def test_one_tenants_flood_does_not_move_anothers_latency() -> None:
    alone = run(TTL + "}", records("modest", 2.0, 20))
    both = run(TTL + "}", records("modest", 2.0, 20), records("flood", 20.0, 20))
    apart = run(AT_ONCE, records("modest", 2.0, 20), records("flood", 20.0, 20))
    # What the flood has just sent is in front of it, up to a step and a quarter and its own: under a second.
    assert fmean(both.ttft["modest"]) < fmean(alone.ttft["modest"]) + 1000
    assert fmean(apart.ttft["modest"]) > 10_000


def test_ten_times_more_requests_are_given_no_more_work() -> None:
    found = run(TTL + "}", records("a", 9.0, 15, 3000), records("b", 90.0, 15, 3000))
    assert found.work["a"] / sum(found.work.values()) == pytest.approx(0.5, abs=0.03)


def test_long_prompts_do_not_hold_up_short_ones() -> None:
    groups = records("short", 4.0, 30, 200), records("long", 2.0, 30, 30_000)
    queued = run(TTL + "}", *groups)
    at_once = run(AT_ONCE, *groups)
    assert fmean(queued.ttft["short"]) < fmean(at_once.ttft["short"]) / 3


def test_a_priority_counts_where_many_short_answers_fill_all_sequences() -> None:
    """Some request begins every 25 ms, so that none ever seems to wait for a sequence slot."""
    found = run(TTL + "}", records("high", 4.0, 20, 200, 1, 100), records("flood", 60.0, 20, 200, 0, 100), max_seqs=64)
    late = {tenant: ttft[len(ttft) // 2 :] for tenant, ttft in found.ttft.items()}
    assert fmean(late["high"]) < fmean(late["flood"]) / 3


def loops(tenant: str, workers: int, each: int, tokens: int, out: int, stream: bool) -> list[Record]:
    """Each worker sends its next request when it has the answer to the last one."""
    return [
        Record(
            id=f"{tenant}-{worker}-{i}",
            arrival_us=worker * 1000 + i,
            parent=f"{tenant}-{worker}-{i - 1}" if i else "",
            in_tokens=tokens,
            out_tokens=out,
            max_tokens=out,
            tenant=tenant,
            block_size=64,
            stream=stream,
        )
        for worker in range(workers)
        for i in range(each)
    ]


def test_a_priority_counts_also_where_nobody_sees_first_tokens() -> None:
    flood = loops("flood", 24, 40, 25, 16, False)
    high = [structs.replace(record, priority=1) for record in loops("high", 2, 40, 25, 16, False)]
    simulation = Simulation(scenario(flood, high, dispatch="think", max_seqs=8, count=1), config_from(TTL + "}")[0])
    assert simulation.run()
    assert simulation.pipeline.fleet.table.max_seqs[0] == 8.0


@pytest.mark.parametrize("stream", [True, False])
def test_engines_that_are_busy_with_prompts_have_no_known_limit_of_sequences(stream: bool) -> None:
    busy = scenario(loops("busy", 20, 25, 6000, 2, stream), dispatch="think")
    simulation = Simulation(busy, config_from(AT_ONCE)[0])
    assert simulation.run()
    assert not simulation.pipeline.fleet.table.max_seqs.any()


#: One endpoint of which the gate is always open, as one is whose engine takes all that comes.
OPEN = "flowControl: {ttl: 590s, saturation: {type: concurrency-detector, maxConcurrency: 100000}}"


@pytest.mark.parametrize(
    ("text", "tokens", "out", "stream", "max_seqs"),
    [
        ("flowControl: {}", 25, 2, True, 0),
        ("flowControl: {}", 25, 16, False, 0),
        ("flowControl: {}", 200, 8, True, 0),
        ("flowControl: {}", 25, 16, True, 8),
        (OPEN, 25, 2, True, 0),
        (OPEN, 200, 8, True, 0),
    ],
)
def test_two_workers_beside_sixty(text: str, tokens: int, out: int, stream: bool, max_seqs: int) -> None:
    """Short prompts of two tenants. The engine alone would share its steps by the number of requests."""

    def times(*groups: list[Record]) -> list[float]:
        found = run(text, *groups, dispatch="think", max_seqs=max_seqs, count=1)
        assert len(found.took["few"]) == 80 and set(found.causes) == {"natural"}
        return sorted(found.took["few"][20:])  # until the first answers nobody knows who wants how much

    few, many = loops("few", 2, 40, tokens, out, stream), loops("many", 60, 20, tokens, out, stream)
    alone, beside = times(few), times(few, many)
    assert beside[30] <= 1.5 * alone[30]
    assert beside[-1] <= 1.5 * alone[-1]


@pytest.mark.parametrize(("tokens", "out"), [(250, 150), (3000, 20)])
def test_a_lower_band_takes_nothing_of_what_is_kept_for_a_light_tenant(tokens: int, out: int) -> None:
    idle = [structs.replace(one, priority=-10, arrival_us=10**6) for one in loops("idle", 10, 5, tokens, out, True)]
    usual = loops("many", 40, 15, tokens, out, True), loops("few", 10, 15, tokens, out, True)
    found = run(TTL + "}", idle, *usual, dispatch="think", max_seqs=16)
    assert "idle" not in found.work and len(found.work) == 2
    assert len(found.ttft["idle"]) == 50, "they go once nobody else waits"


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
