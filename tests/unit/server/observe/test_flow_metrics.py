"""What the metrics page says about the queue."""

from math import isnan

import pytest
from waiting_rules import AbleRules

from fairlead.core.binding import PairBinder
from fairlead.core.endpoint import Endpoint
from fairlead.core.fairness import StartTimeFair
from fairlead.core.fleet import Fleet
from fairlead.core.flow import Limit, Limits, Times
from fairlead.core.flow_control import FlowControl, FlowController
from fairlead.core.gates import LedgerGate
from fairlead.core.queues import Queues
from fairlead.core.records import DecisionRecord, OutcomeRecord
from fairlead.core.request import Request
from fairlead.plugins.flow_control import Fcfs
from fairlead.server.observe.flow_metrics import jains_index
from fairlead.server.observe.snapshot import FLOW_ROWS, queue_rows
from fairlead.server.observe.watch import Watch


class Shop:
    """One endpoint that is full from the start, and a watch."""

    def __init__(self, no_endpoints: float = 60.0, **limits: Limit) -> None:
        self.now = 100.0
        self.fleet = Fleet()
        self.fleet.up(Endpoint("e0", "10.0.0.1:80"))
        queues = Queues(lambda priority: (StartTimeFair(), Fcfs()), Limits(**limits))
        self.flow_controller = FlowController(
            FlowControl(queues, LedgerGate(requests=8), PairBinder(AbleRules()), Times(no_endpoints=no_endpoints)),
            "p",
            1.0,
        )
        self.watch = Watch(self.fleet, lambda: self.now, served=lambda: ["m", "n"])
        self.watch.watch_queue(self.flow_controller)
        for i in range(1, 9):
            self.fleet.charge(Request(id=i, arrived=0.0, prompt_tokens=10), 0, self.now, 0, 10)

    def arrive(self, number: int, **fields: object) -> None:
        self.flow_controller.flow.arrived(
            Request(id=number, arrived=self.now, prompt_tokens=10, **fields), self.fleet, self.now
        )

    def page(self) -> dict[str, float]:
        lines = b"".join(self.watch.exposition()).decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}


def test_nothing_is_said_while_it_is_off() -> None:
    watch = Watch(Fleet(), lambda: 0.0)
    watch.on_decision(DecisionRecord(request=Request(id=1, arrived=0.0), at=0.0, policy="p"), 0.0)
    page = b"".join(watch.exposition()).decode()
    assert "# TYPE llm_d_epp_flow_control_queue_size gauge" in page
    samples = [line for line in page.splitlines() if "_flow" in line or "desired" in line]
    assert all(line.startswith("#") for line in samples), samples


def test_the_gate_is_asked_once_for_both_names_of_the_saturation(monkeypatch: pytest.MonkeyPatch) -> None:
    shop, levels = Shop(), iter((0.25, 0.5))
    monkeypatch.setattr(LedgerGate, "level", lambda *arguments: next(levels))
    for level in (0.25, 0.5):
        saturations = [value for name, value in shop.page().items() if "pool_saturation" in name]
        assert saturations == [level, level]


def test_what_was_said_of_queues_is_gone_once_it_is_off() -> None:
    shop = Shop()
    shop.arrive(20, model="m", body_bytes=100)
    waiting = [name for name in shop.page() if 'model_name="m"' in name and "_queue_" in name]
    shop.watch.watch_queue(None)
    assert waiting and not {*waiting} & {*shop.page()}


def test_the_dashboard_lists_the_flows_with_the_most_that_waits() -> None:
    shop = Shop()
    for number in range(20, 40):
        shop.arrive(number, model="m", fairness_id=f"t{min(number - 20, 7)}", body_bytes=100)
        shop.now += 1
    queues = queue_rows(shop.watch, shop.now)
    assert queues is not None
    (band,) = queues.bands
    assert (band.waiting, band.flows, len(band.longest)) == (20, 8, FLOW_ROWS)
    longest = band.longest[0]
    assert (longest.tenant, longest.model, longest.waiting, longest.oldest_s, longest.bytes) == (
        "t7",
        "m",
        13,
        13.0,
        1300,
    )


def test_the_dashboard_shows_the_fullest_limit() -> None:
    for limits, used in (
        ({"total": Limit(20)}, 0.5),
        ({"total": Limit(20), "band": Limit(100, 1250)}, 0.8),
        ({"total": Limit(20, 1010)}, 1000 / 1010),
        ({"band": Limit()}, 0.0),
    ):
        shop = Shop(**limits)
        for number in range(20, 30):
            shop.arrive(number, model="m", body_bytes=100)
        queues = queue_rows(shop.watch, shop.now)
        assert queues is not None
        assert queues.bands[0].used == used


def test_queues_by_flow_and_band() -> None:
    shop = Shop(band=Limit(10, 1000))
    answered = Request(id=1, arrived=0.0, model="m", fairness_id="t")
    shop.watch.on_outcome(OutcomeRecord(request=answered, at=1.0, endpoint="e0", status=200))
    shop.arrive(20, model="m", fairness_id="t", body_bytes=100)
    shop.now += 2
    shop.arrive(21, model="m", fairness_id="t", body_bytes=50)
    shop.arrive(22, model="n", priority=10)
    shop.arrive(23, model="n", priority=10, fairness_id="never-answered")
    shop.now += 1
    page = shop.page()
    labels = 'fairness_id="t",inference_pool="default",model_name="m",priority="0",target_model_name="m"'
    for prefix in ("llm_d_epp_", "inference_extension_"):
        assert page[f"{prefix}flow_control_queue_size{{{labels}}}"] == 2
        assert page[f"{prefix}flow_control_queue_bytes{{{labels}}}"] == 150
    folded = 'fairness_id="other",inference_pool="default",model_name="n",priority="10",target_model_name="n"'
    assert page[f"llm_d_epp_flow_control_queue_size{{{folded}}}"] == 1
    band = 'inference_pool="default",priority="0"'
    assert page[f"llm_d_epp_flow_control_capacity_utilization_requests{{{band}}}"] == 0.2
    assert page[f"llm_d_epp_flow_control_capacity_utilization_bytes{{{band}}}"] == 0.15
    assert page['llm_d_epp_flow_control_pool_saturation{inference_pool="default",stage="effective"}'] == 1
    assert page['fairlead_flow_head_age_seconds{priority="0"}'] == 3
    assert page['fairlead_flow_head_age_seconds{priority="10"}'] == 1
    assert page["fairlead_desired_replicas"] == 3, "one waits three times as long as it should"
    shop.flow_controller.flow.stop(shop.now)
    page = shop.page()
    assert not [name for name in page if "queue_size{" in name and 'model_name="m"' in name]
    assert page['fairlead_flow_head_age_seconds{priority="0"}'] == 0
    assert "fairlead_desired_replicas" not in page, "nobody waits, and too little is known of the load"


def test_outcomes_and_waits() -> None:
    shop = Shop()
    endings = [
        ("routed", 0.0, "Dispatched"),
        ("routed", 300.0, "Dispatched"),
        ("rejected-saturated", 0.0, "RejectedCapacity"),
        ("rejected-saturated", 5.0, "RejectedCapacity"),
        ("rejected-ttl-expired", 5.0, "EvictedTTL"),
        ("rejected-no-endpoints", 0.0, "RejectedNoEndpoints"),
        ("rejected-no-endpoints", 5.0, "EvictedNoEndpoints"),
        ("rejected-context-cancelled", 5.0, "EvictedContextCancelled"),
        ("rejected-shutting-down", 5.0, "EvictedOther"),
    ]
    for i, (reason, waited, _) in enumerate(endings):
        request = Request(id=i, arrived=0.0, model="m")
        endpoint = "e0" if reason == "routed" else ""
        shop.watch.on_decision(
            DecisionRecord(
                request=request, at=0.0, policy="p", outcome=reason, endpoint=endpoint, queued_ms=waited, status=200
            ),
            0.0,
        )
    shop.flow_controller.evicted[-10] = 2
    page = shop.page()
    assert page['llm_d_epp_flow_control_revocations_issued_total{inference_pool="default",priority="-10"}'] == 2
    for name in {outcome for _, _, outcome in endings}:
        found = page[f'llm_d_epp_flow_control_requests_total{{inference_pool="default",outcome="{name}",priority="0"}}']
        assert found == [outcome for _, _, outcome in endings].count(name)
    sums = [
        value
        for name, value in page.items()
        if name.startswith("llm_d_epp_flow_control_request_queue_duration_seconds_sum") and "Dispatched" in name
    ]
    assert sums == [0.3]
    assert shop.watch.decisions(8)[0]["queued_ms"] == 5.0


def test_names_that_clients_make_up_do_not_pile_up() -> None:
    shop = Shop()
    for i in range(1100):
        shop.arrive(100 + i, model="m", fairness_id=f"t{i}")
    sizes = {n: v for n, v in shop.page().items() if n.startswith("llm_d_epp_flow_control_queue_size{")}
    assert len(sizes) <= 1001
    assert sum(sizes.values()) == 1100


def test_jains_index() -> None:
    assert jains_index([5.0, 5.0, 5.0]) == 1.0
    assert jains_index([9.0, 0.0, 0.0]) == 1 / 3
    assert isnan(jains_index([]))


def test_a_cold_start_takes_what_the_first_request_waited_for_any_endpoint() -> None:
    shop = Shop()
    shop.fleet.down("e0")
    assert shop.watch.queue.on_endpoint() == 0.0, "nobody waits for it"
    shop.arrive(20)
    assert shop.page()["fairlead_desired_replicas"] == 1.0
    shop.now += 42.0
    assert shop.watch.queue.on_endpoint() == 42.0
    shop.fleet.up(Endpoint("e1", "10.0.0.2:80"))
    assert shop.watch.queue.on_endpoint() == 0.0, "there is one already"
    page = shop.page()
    assert page["fairlead_cold_start_seconds_count"] == 1.0 and page["fairlead_cold_start_seconds_sum"] == 42.0
    assert page['fairlead_cold_start_seconds_bucket{le="30"}'] == 0.0


def test_cold_starts_are_shown_where_requests_may_wait_for_the_first_endpoint() -> None:
    name = "fairlead_cold_start_seconds_count"
    holding = Shop()
    assert holding.page()[name] == 0.0
    assert name not in Shop(no_endpoints=0.0).page()
    holding.watch.watch_queue(None)
    assert name not in holding.page(), "flow control is off"
