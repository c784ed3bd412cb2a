"""Who gets series of their own: names that are declared or were answered, and only while they are used."""

import re
from typing import Any

import pytest

from fairlead.core.records import DecisionRecord, OutcomeRecord
from fairlead.core.request import Request
from fairlead.server.observe import metrics
from fairlead.server.observe.fleet_gauges import FleetStatus
from fairlead.server.observe.metrics import SchedulerMetrics


class Counted:
    """Metrics with a clock of our own."""

    def __init__(self, **options: Any) -> None:
        self.now = 100.0
        self.served: list[str] = []
        self.metrics = SchedulerMetrics(lambda: self.now, FleetStatus, served=lambda: self.served, **options)
        self.number = 0

    def arrive(self, model: str = "m", fairness_id: str = "", priority: int = 0) -> Request:
        self.number += 1
        labels = {"model": model, "fairness_id": fairness_id, "priority": priority}
        asked = Request(self.number, self.now, prompt_tokens=10, **labels)
        decision = DecisionRecord(request=asked, at=self.now, policy="p", endpoint="n/e", address="x:1")
        self.metrics.on_decisions([decision], [0.001])
        return asked

    def end(self, asked: Request, status: int = 200) -> None:
        over = OutcomeRecord(request=asked, at=self.now, endpoint="n/e", status=status, ttft_ms=5.0, duration_ms=9.0)
        self.metrics.on_outcomes([over])

    def page(self) -> str:
        return self.metrics.render().decode()

    def value(self, name: str, **labels: str) -> float | None:
        """The sum of the series with these labels; `None` = there is none."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        found = [
            float(line.rpartition(" ")[2])
            for line in self.page().splitlines()
            if re.match(rf"{name}[{{ ]", line) and all(pair in line for pair in wanted)
        ]
        return sum(found) if found else None

    def requests(self, model: str, **labels: str) -> float | None:
        return self.value("llm_d_epp_request_total", model_name=model, **labels)

    def running(self, model: str) -> float | None:
        return self.value("llm_d_epp_request_running", model_name=model)


def test_a_thousand_names_that_nobody_serves_make_no_series() -> None:
    counted = Counted()
    before = len(counted.page())
    for i in range(1000):
        asked = counted.arrive(f"bogus-{i}")
        assert "bogus" not in counted.page() if i % 100 == 0 else True  # not even while it runs
        counted.end(asked, 404)
    assert "bogus" not in counted.page()
    assert len(counted.page()) - before < 100_000
    assert counted.requests("other") == 1000
    assert counted.running("other") == 0
    assert counted.value("fairlead_metrics_folded_total", metric="llm_d_epp_request_total") == 1000


def test_an_answer_earns_a_name_its_series_and_its_decision_too() -> None:
    counted = Counted()
    first, second, third = counted.arrive(), counted.arrive(), counted.arrive()
    assert counted.requests("m") is None
    assert counted.running("other") == 3
    counted.end(first)
    assert (counted.requests("m"), counted.running("m"), counted.running("other")) == (1, 0, 2)
    fourth = counted.arrive()
    assert (counted.requests("m"), counted.running("m"), counted.running("other")) == (2, 1, 2)
    for asked in (second, third, fourth):
        counted.end(asked, 500)
    assert (counted.requests("m"), counted.running("m"), counted.running("other")) == (4, 0, 0)
    assert counted.value("llm_d_epp_request_error_total", model_name="m") == 3
    assert counted.value("llm_d_epp_request_duration_seconds_count", model_name="m") == 4
    assert counted.metrics.unproven == 0


def test_a_declared_name_has_its_series_at_once() -> None:
    counted = Counted()
    counted.metrics.declare(["defined"])
    counted.served = ["served"]
    for model in ("defined", "served", "neither"):
        counted.arrive(model)
    assert [counted.requests(model) for model in ("defined", "served", "neither")] == [1, 1, None]


def test_a_tenant_is_told_apart_once_it_was_answered() -> None:
    counted = Counted()
    counted.served = ["m"]
    for i in range(50):
        counted.end(counted.arrive("m", f"minted-{i}"), 429)
    counted.end(counted.arrive("m", "paying"))
    assert "minted" not in counted.page()
    assert counted.requests("m", fairness_id="other") == 50
    assert counted.requests("m", fairness_id="paying") == 1


def test_there_are_at_most_so_many_at_once_and_idle_ones_make_room() -> None:
    counted = Counted(cap=10, idle_s=60.0)
    for i in range(40):
        counted.end(counted.arrive(f"m{i}"))
    lasting = counted.arrive("m3")
    assert counted.value("fairlead_metrics_label_sets") == 10
    assert counted.requests("other") == 30
    counted.now += 100.0
    counted.page()
    assert [counted.requests(name) for name in ("m0", "m3")] == [None, 2]  # a request of m3 is running
    assert counted.value("fairlead_metrics_label_sets") == 1
    assert 'model_name="m0"' not in counted.page()
    counted.end(counted.arrive("m39"))
    assert counted.requests("m39") == 1
    counted.end(lasting)
    assert counted.running("m3") == 0


def test_refused_requests_leave_room_for_those_that_are_answered() -> None:
    counted = Counted(cap=20)
    for i in range(12):
        counted.end(counted.arrive("m", f"t{i}"))
        counted.metrics.on_client_error(400, f"t{i}")
    assert counted.value("fairlead_metrics_label_sets") == 12 + 5
    counted.end(counted.arrive("m", "late"))
    assert counted.requests("m", fairness_id="late") == 1


def test_a_name_that_is_declared_stays_though_idle() -> None:
    counted = Counted(idle_s=60.0)
    counted.metrics.declare(["m"])
    counted.end(counted.arrive("m"))
    counted.now += 1000.0
    assert counted.requests("m") == 1
    counted.metrics.declare([])
    counted.now += 1000.0
    counted.page()
    assert counted.requests("m") is None


def test_requests_that_wait_for_their_place_are_bounded() -> None:
    counted = Counted()
    asked = [counted.arrive(f"bogus-{i}") for i in range(5000)]
    assert counted.metrics.unproven == 4096
    for request in asked:
        counted.end(request, 404)
    assert (counted.requests("other"), counted.running("other"), counted.metrics.unproven) == (5000, 0, 0)


def test_tenants_and_priorities_take_no_room_from_declared_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients choose their fairness ids."""
    monkeypatch.setattr(metrics, "MOST_DECLARED", 3)
    counted = Counted()
    counted.served = ["a", "b", "c"]
    for name in counted.served:
        for priority in range(4):
            counted.end(counted.arrive(name, "tenant", priority), 500)
            counted.end(counted.arrive(name, "", priority))
    assert counted.requests("a") == 4, "of its eight sets, four have series"
    assert [counted.requests(name) for name in ("b", "c", "other")] == [1, 1, 18]
    counted.now += 1000.0
    counted.page()
    counted.end(counted.arrive("b", "", 3))
    assert (counted.requests("a"), counted.requests("b")) == (None, 1)


def test_of_very_many_declared_models_some_have_series_and_idle_ones_make_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics, "MOST_DECLARED", 3)
    counted = Counted()
    counted.served = [f"lora-{number}" for number in range(10)]
    for name in counted.served:
        counted.end(counted.arrive(name))
    assert [counted.requests(name) for name in counted.served] == [1, 1, 1, *[None] * 7]
    assert (counted.requests("other"), counted.running("other")) == (7, 0)
    shown = counted.metrics.labels(Request(id=1, arrived=0.0, model="lora-9"))
    assert shown[:2] == ("other", "other")
    counted.now += 1000.0
    counted.page()
    counted.end(counted.arrive("lora-9"))
    assert (counted.requests("lora-0"), counted.requests("lora-9")) == (None, 1)
