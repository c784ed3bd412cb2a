"""Flow control of the reference: behind its gate, in our words."""

import pytest

from fairlead.config.flow import build_desk
from fairlead.config.load import load
from fairlead.config.registry import build_policy
from fairlead.model.request import Request

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
FULL = """
plugins:
- {type: round-robin-fairness-policy, name: rr}
- {type: slo-deadline-ordering-policy}
- {type: concurrency-detector, parameters: {maxConcurrency: 7}}
flowControl:
  maxRequests: 50
  defaultRequestTTL: 5s
  defaultPriorityBand: {maxBytes: 1Mi, fairnessPolicyRef: rr, orderingPolicyRef: slo-deadline-ordering-policy}
  saturationDetector: {pluginRef: concurrency-detector}
  enableEviction: true
"""


def flow(text: str):
    return load(HEAD + text, need_endpoints=False).flow_control


@pytest.mark.parametrize("gate", ["", "featureGates: [flowControl=false]\n"])
def test_without_the_gate_nothing_waits_and_a_note_says_so(gate: str) -> None:
    config = load(HEAD + gate + FULL, need_endpoints=False)
    assert config.flow_control is None
    assert any("gate flowControl is off" in note.message for note in config.notes)


@pytest.mark.parametrize("gate", ["flowControl", "flowControl=true"])
def test_the_gate_alone_turns_it_on(gate: str) -> None:
    found = flow(f"featureGates: [{gate}]\n")
    assert found.settings.ttl == 60.0 and found.plugins() == ()


def test_everything_that_has_a_counterpart() -> None:
    config = load(HEAD + "featureGates: [flowControl]\n" + FULL, need_endpoints=False)
    desk = build_desk(config, build_policy(config))
    assert desk is not None
    band = desk.flow.queues._band(0)
    assert (type(band.fairness).__name__, band.fairness.name) == ("RoundRobinFairness", "rr")
    assert (type(band.ordering).type, desk.flow.gate.name) == ("edf", "concurrency-detector")
    limits = desk.flow.queues.limits
    assert (limits.total.requests, limits.band.bytes, limits.band.requests) == (50, 1 << 20, float("inf"))
    settings = config.flow_control.settings  # type: ignore[union-attr]
    assert (settings.ttl, settings.no_endpoint_ttl) == (5.0, 5.0)
    assert settings.eviction is not None and desk.may_evict(Request(id=1, arrived=0.0, priority=-1))


def test_a_threshold_becomes_a_ceiling() -> None:
    text = """
plugins:
- {type: static-usage-limit-policy, parameters: {threshold: 0.6}}
flowControl: {usageLimitPolicyPluginRef: static-usage-limit-policy}
"""
    found = flow("featureGates: [flowControl]\n" + text)
    assert found.ceiling.parameters.threshold == 0.6


def test_for_ever_is_as_long_as_a_gateway_waits() -> None:
    assert flow("featureGates: [flowControl]\nflowControl: {defaultRequestTTL: 0s}\n").settings.ttl == 590.0


def test_bands_that_differ_are_noted() -> None:
    text = "featureGates: [flowControl]\nflowControl: {priorityBands: [{maxRequests: 5}, {maxRequests: 6}]}\n"
    config = load(HEAD + text, need_endpoints=False)
    assert config.flow_control.settings.limits.band.requests == 5  # type: ignore[union-attr]
    assert any("all bands have the limits" in note.message for note in config.notes)
