"""Requests by the model asked for and the model that served."""

from typing import Any

from fairlead.core.records import DecisionRecord, OutcomeRecord
from fairlead.core.request import Request
from fairlead.server.observe.fleet_gauges import FleetStatus
from fairlead.server.observe.metrics import SchedulerMetrics


def request(number: int, target: str = "", **more: Any) -> Request:
    return Request(id=number, arrived=0.0, model=more.pop("model", "chat"), target=target, prompt_tokens=10, **more)


def page(metrics: SchedulerMetrics) -> str:
    return metrics.render().decode()


def test_a_split() -> None:
    metrics = SchedulerMetrics(lambda: 1.0, FleetStatus, served=lambda: ["chat", "a", "b"])
    for number, target in enumerate(["a", "a", "b"]):
        asked = request(number, target, rewritten_by="n/r" if target == "b" else "")
        metrics.on_decisions(
            [DecisionRecord(request=asked, at=0.0, policy="p", endpoint="n/e", address="x:1")], [0.001]
        )
        metrics.on_outcomes([OutcomeRecord(request=asked, at=1.0, endpoint="n/e", status=200, completion_tokens=4)])
    text = page(metrics)
    assert 'inference_model_request_total{model_name="chat",target_model_name="a"} 2\n' in text
    assert 'inference_model_request_total{model_name="chat",target_model_name="b"} 1\n' in text
    assert 'inference_model_output_tokens_count{model_name="chat",target_model_name="a"} 2\n' in text
    assert 'inference_model_running_requests{model_name="chat"} 0\n' in text
    labels = 'model_name="chat",model_rewrite_name="r",target_model="b"'
    assert f"llm_d_epp_model_rewrite_decisions_total{{{labels}}} 1\n" in text
    assert f"inference_extension_model_rewrite_decisions_total{{{labels}}} 1\n" in text


def test_names_that_clients_make_up_get_no_labels() -> None:
    metrics = SchedulerMetrics(lambda: 1.0, FleetStatus, served=lambda: ["chat"])
    for number in range(50):
        asked = request(number, model=f"made-up-{number}")
        refused = DecisionRecord(request=asked, at=0.0, policy="p", outcome="model_not_found", status=404)
        metrics.on_decisions([refused], [0.001])
    asked = request(99)
    metrics.on_decisions([DecisionRecord(request=asked, at=0.0, policy="p", endpoint="n/e", address="x:1")], [0.001])
    text = page(metrics)
    assert "made-up" not in text
    assert 'inference_model_request_total{model_name="other",target_model_name="other"} 50\n' in text
    assert 'inference_model_request_total{model_name="chat",target_model_name="chat"} 1\n' in text
    assert 'fairlead_rejected_total{reason="model_not_found"} 50\n' in text
