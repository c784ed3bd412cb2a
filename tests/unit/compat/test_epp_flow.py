"""Flow control of the reference: behind its gate, in our words."""

import pytest

from fairlead.compat.load import load, problems
from fairlead.compat.recorded import record, restore
from fairlead.config.building import build_flow_controller
from fairlead.config.plugins import build_policy

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
GATE = "featureGates: [flowControl]\n"
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


@pytest.mark.parametrize("gate", ["", "featureGates: [flowControl=false]\n", "featureGates: [flowControl=F]\n"])
def test_without_the_gate_nothing_waits_and_a_note_says_so(gate: str) -> None:
    config = load(HEAD + gate + FULL, need_endpoints=False)
    assert config.flow_control is None
    assert any("gate flowControl is off" in note.message for note in config.notes)


@pytest.mark.parametrize("gate", ["flowControl", "flowControl=true", "flowControl=True", "flowControl= 1"])
def test_the_gate_alone_turns_it_on(gate: str) -> None:
    found = flow(f"featureGates: [{gate}]\n")
    assert found.settings.ttl == 60.0 and found.plugins() == ()


def test_everything_that_has_a_counterpart() -> None:
    config = load(HEAD + "featureGates: [flowControl]\n" + FULL, need_endpoints=False)
    flow_controller = build_flow_controller(config, build_policy(config))
    assert flow_controller is not None
    band = flow_controller.flow.queues._band(0)
    assert (type(band.fairness).__name__, band.fairness.name) == ("RoundRobinFairness", "rr")
    assert (type(band.ordering).type, flow_controller.flow.gate.name) == ("edf", "concurrency-detector")
    limits = flow_controller.flow.queues.limits
    assert (limits.total.requests, limits.band.bytes, limits.band.requests) == (50, 1 << 20, 5000)
    settings = config.flow_control.settings  # type: ignore[union-attr]
    assert (settings.ttl, settings.no_endpoint_ttl) == (5.0, 5.0)
    assert settings.eviction is not None and flow_controller.evicts


@pytest.mark.parametrize(
    ("plugin", "allowed"),
    [
        ("static-usage-limit-policy, parameters: {threshold: 0.6}", [False, False]),
        ("priority-holdback-policy, parameters: {minCeiling: 0.5}", [True, False]),
        ("priority-holdback-policy, parameters: {minCeiling: 0.75, maxCeiling: 0.75}", [True, True]),
        ("soft-reflective-ceiling-policy", [True, False]),
    ],
)
def test_a_usage_limit_becomes_a_ceiling(plugin: str, allowed: list[bool]) -> None:
    text = f"plugins: [{{name: limit, type: {plugin}}}]\nflowControl: {{usageLimitPolicyPluginRef: limit}}\n"
    config = load(HEAD + GATE + text, need_endpoints=False)
    flow_controller = build_flow_controller(config, build_policy(config))
    assert flow_controller is not None and flow_controller.flow._ceiling is not None
    assert flow_controller.flow._ceiling.allowed(0.7, [0, -10]) == allowed


@pytest.mark.parametrize(
    ("plugins", "refs", "where", "what"),
    [
        ("static-usage-limit-policy, parameters: {threshold: 0}", "", "$.plugins[0].parameters.threshold", "> 0"),
        (
            "priority-holdback-policy, parameters: {minCeiling: 0.9, maxCeiling: 0.5}",
            "",
            "$.plugins[0].parameters",
            "cannot do that",
        ),
        ("probabilistic-admitter, parameters: {k: 0}", "", "$.plugins[0].parameters.k", "> 0"),
        ("fcfs-ordering-policy", "usageLimitPolicyPluginRef: p", "$.plugins[0]", "referred to as ceiling"),
        ("edf-ordering-policy", "defaultPriorityBand: {fairnessPolicyRef: p}", "$.plugins[0]", "as fairness"),
        ("fcfs-ordering-policy", "priorityBands: [{}, {}]", "$.flowControl.priorityBands[1].priority", "there already"),
    ],
)
def test_what_cannot_be_is_a_problem(plugins: str, refs: str, where: str, what: str) -> None:
    text = f"{HEAD}{GATE}plugins: [{{name: p, type: {plugins}}}]\nflowControl: {{{refs}}}\n"
    (problem,) = problems(text, need_endpoints=False)
    assert problem.path == where and what in problem.message


@pytest.mark.parametrize(
    ("said", "ttls", "noted"),
    [
        ("", (60.0, 60.0), []),
        ("defaultRequestTTL: 590s", (590.0, 590.0), []),
        ("defaultRequestTTL: 0s", (590.0, 60.0), ["defaultRequestTTL"]),
        ("defaultRequestTTL: 1h", (590.0, 590.0), ["defaultRequestTTL"]),
        ("defaultRequestTTL: 30s, noEndpointRequestTTL: 15m", (30.0, 590.0), ["noEndpointRequestTTL"]),
    ],
)
def test_requests_wait_as_long_as_a_gateway_does(said: str, ttls: tuple[float, float], noted: list[str]) -> None:
    config = load(f"{HEAD}{GATE}flowControl: {{{said}}}\n", need_endpoints=False)
    settings = config.flow_control.settings  # type: ignore[union-attr]
    assert (settings.ttl, settings.no_endpoint_ttl) == ttls
    assert [note.path for note in config.notes if "590 s" in note.message] == [f"$.flowControl.{one}" for one in noted]


BANDS = """
plugins:
- {type: round-robin-fairness-policy}
- {type: program-aware-fairness}
- {type: edf-ordering-policy}
flowControl:
  defaultPriorityBand: {maxRequests: 7, fairnessPolicyRef: round-robin-fairness-policy}
  priorityBands:
  - {priority: 10, maxRequests: 5, orderingPolicyRef: edf-ordering-policy}
  - {priority: -10, maxBytes: 2Mi, fairnessPolicyRef: program-aware-fairness}
"""


def test_each_band_has_what_the_document_says_of_it() -> None:
    config = load(HEAD + GATE + BANDS, need_endpoints=False)
    flow_controller = build_flow_controller(config, build_policy(config))
    assert flow_controller is not None
    limits = flow_controller.flow.queues.limits
    found = {}
    for priority in (10, 3, -10):
        band, limit = flow_controller.flow.queues._band(priority), limits.of_band(priority)
        found[priority] = limit.requests, limit.bytes, type(band.fairness).type, type(band.ordering).type  # type: ignore[attr-defined]
    assert found == {
        10: (5, 1e9, "start-time-fair", "edf"),
        3: (7, 1e9, "round-robin", "least-work"),
        -10: (5000, 2 << 20, "start-time-fair", "least-work"),
    }
    again = restore(record(config)).flow_control
    assert again is not None and len(again.bands) == 2, "a journal can tell it"


@pytest.mark.parametrize(
    ("negative", "noted"), [("{maxRequests: 7}", False), ("{maxRequests: 8}", True), ("{}", True), ("null", False)]
)
def test_a_template_for_negative_priorities_is_noted_if_it_says_something_else(negative: str, noted: bool) -> None:
    text = f"flowControl: {{defaultPriorityBand: {{maxRequests: 7}}, defaultNegativePriorityBand: {negative}}}\n"
    notes = [note for note in load(HEAD + GATE + text, need_endpoints=False).notes if "below 0" in note.message]
    assert [note.path for note in notes] == (["$.flowControl.defaultNegativePriorityBand"] if noted else [])


def test_the_probabilistic_admitter_becomes_early_shedding() -> None:
    text = """
plugins:
- {type: probabilistic-admitter, parameters: {power: 3, k: 20, queueDepthThreshold: 9}}
- {type: utilization-detector, parameters: {queueDepthThreshold: %s}}
flowControl: {saturationDetector: {pluginRef: utilization-detector}}
"""
    for threshold, noted in ((9, False), (5, True)):
        config = load(HEAD + GATE + text % threshold, need_endpoints=False)
        shedding = config.flow_control.settings.early_shedding  # type: ignore[union-attr]
        assert shedding is not None and (shedding.power, shedding.scale) == (3.0, 20.0)
        assert any("own thresholds" in note.message for note in config.notes) is noted


def test_without_the_gate_the_probabilistic_admitter_does_nothing_and_a_note_says_so() -> None:
    config = load(HEAD + "plugins: [{type: probabilistic-admitter}]\n", need_endpoints=False)
    assert config.flow_control is None
    (note,) = [note for note in config.notes if note.path == "$.plugins[0]"]
    assert "only with the feature gate flowControl" in note.message


def test_the_detector_counts_from_its_deprecated_place_too() -> None:
    text = "plugins: [{type: concurrency-detector}]\nsaturationDetector: {pluginRef: concurrency-detector}\n"
    found = flow(GATE + text)
    assert found.saturation is not None and found.saturation.type == "concurrency-detector"


def test_a_detector_without_the_gate_is_noted_at_the_deprecated_place_too() -> None:
    text = "plugins: [{type: utilization-detector}]\nsaturationDetector: {pluginRef: utilization-detector}\n"
    notes = load(f"apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n{text}", need_endpoints=False).notes
    assert any(note.path == "$.saturationDetector" and "nothing is shed" in note.message for note in notes)
