"""What is said about configurations of the reference picker that cannot be used."""

import pytest

from fairlead.compat.load import load, problems

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"

#: Text after the head → (path, line, part of the message, part of the hint).
BAD: list[tuple[str, list[tuple[str, int, str, str]]]] = [
    ("plugin: []", [("$.plugin", 3, "unknown field 'plugin'", "'plugins'")]),
    ("plugins: 3", [("$.plugins", 3, "expected a list, got 3", "")]),
    ("plugins: [{}]", [("$.plugins[0]", 3, "'type' is missing", "")]),
    (
        "plugins: [{type: edf}]",
        [("$.plugins[0].type", 3, "'edf' is an ordering, which cannot stand here", "a filter, scorer or picker")],
    ),
    ("plugins: [{type: queue-scorr}]", [("$.plugins[0].type", 3, "unknown plugin type", "'queue-scorer'")]),
    ("plugins: [{type: queue-scorer, wieght: 1}]", [("$.plugins[0].wieght", 3, "unknown field", "")]),
    (
        "plugins:\n- type: load-aware-scorer\n  parameters: {treshold: 1}",
        [("$.plugins[0].parameters.treshold", 5, "unknown field 'treshold'", "'threshold'")],
    ),
    (
        "plugins:\n- type: load-aware-scorer\n  parameters: {threshold: 0}",
        [("$.plugins[0].parameters.threshold", 5, ">= 1, got 0", "")],
    ),
    (
        "plugins: [{type: queue-scorer}, {type: queue-scorer}]",
        [("$.plugins[1]", 3, "named 'queue-scorer' is there already, at $.plugins[0]", "name of its own")],
    ),
    ("featureGates: [flowcontrol]", [("$.featureGates[0]", 3, "unknown feature gate", "'flowControl'")]),
    ("featureGates: [prepareDataPlugins]", [("$.featureGates[0]", 3, "unknown feature gate", "always on now")]),
    ("saturationDetector: {queueDepthThreshold: 5}", [("$.saturationDetector", 3, "missing", "utilization-detector")]),
    ("plugins: [{type: dp-rank-header-handler}]", [("$.plugins[0].type", 3, "no counterpart", "list every rank")]),
    ("featureGates: [flowControl=yes]", [("$.featureGates[0]", 3, "flowControl=true or flowControl=false", "")]),
    (
        "schedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}]}]",
        [("$.schedulingProfiles[0].plugins[0].pluginRef", 3, "unknown plugin", "declare it under plugins")],
    ),
    (
        "plugins: [{type: queue-scorer}]\nschedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorr}]}]",
        [("$.schedulingProfiles[0].plugins[0].pluginRef", 4, "unknown plugin 'queue-scorr'", "'queue-scorer'")],
    ),
    (
        "plugins: [{type: queue-scorer}]\nrequestHandler: {parsers: [{pluginRef: queue-scorer}]}",
        [("$.requestHandler.parsers[0].pluginRef", 4, "cannot stand here", "a profile plugin")],
    ),
    (
        "plugins: [{type: prefix-cache-scorer, parameters: {hashBlockSize: 64, lruCapacityPerServer: 9}}]",
        [
            ("$.plugins[0].parameters.hashBlockSize", 3, "unknown field", "blockSizeTokens (tokens, not characters)"),
            ("$.plugins[0].parameters.lruCapacityPerServer", 3, "unknown field", "approx-prefix-cache-producer"),
        ],
    ),
    (
        "plugins: [{type: load-aware-scorer, parameters: {TRESHOLD: 1}}]",
        [("$.plugins[0].parameters.TRESHOLD", 3, "unknown field 'TRESHOLD'", "'threshold'")],
    ),
    (
        "plugins: [{type: max-score-picker}, {type: random-picker}]\nschedulingProfiles:\n"
        "- {name: a, plugins: [{pluginRef: max-score-picker}, {pluginRef: random-picker}]}",
        [("$.schedulingProfiles[0].plugins[1]", 5, "a second picker", "")],
    ),
    (
        "schedulingProfiles: [{name: a}, {name: b}]",
        [("$.schedulingProfiles", 3, "2 profiles, and nothing that chooses", "disagg-profile-handler")],
    ),
    (
        "plugins: [{type: single-profile-handler}]\nschedulingProfiles: [{name: a}, {name: b}]",
        [("$.schedulingProfiles", 4, "2 profiles, and nothing that chooses", "")],
    ),
    (
        "schedulingProfiles: [{name: a}, {name: a}]",
        [
            ("$.schedulingProfiles", 3, "2 profiles", ""),
            ("$.schedulingProfiles[1].name", 3, "named 'a' is there already", ""),
        ],
    ),
    (
        "plugins: [{type: single-profile-handler}, {type: disagg-profile-handler}]\n"
        "schedulingProfiles: [{name: decode}]",
        [("$.plugins[1]", 3, "a profile handler already", "single-profile-handler")],
    ),
    (
        "plugins: [{type: disagg-profile-handler, parameters: {deciders: {prefill: nobody}}}]\n"
        "schedulingProfiles: [{name: decode}]",
        [("$.plugins[0].parameters.deciders.prefill", 3, "unknown plugin 'nobody'", "")],
    ),
    (
        "plugins: [{type: disagg-profile-handler}]\nschedulingProfiles: [{name: a}, {name: b}]",
        [("$.plugins[0].parameters.profiles.decode", 3, "unknown profile 'decode'", "decode profile says")],
    ),
    (
        "plugins: [{type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: precise}}]",
        [("$.plugins[0].parameters.prefixMatchInfoProducerName", 3, "unknown plugin 'precise'", "")],
    ),
    (
        "plugins: [{type: data-parallel-profile-handler}]",
        [("$.plugins[0].type", 3, "has no counterpart here", "list every rank as an endpoint")],
    ),
    (
        "plugins: [{type: request-attribute-reporter, parameters: {attributes: []}}]",
        [("$.plugins[0].type", 3, "has no counterpart here", "leave it out")],
    ),
    (
        "plugins: [{type: session-id-producer, parameters: {cookieName: sid}}]",
        [("$.plugins[0].parameters", 3, "cannot do that here", "x-session-id")],
    ),
    (
        "plugins: [{type: metrics-data-source, parameters: {clientCertPath: a}}]",
        [("$.plugins[0].parameters", 3, "cannot do that here", "metrics.tokenFile")],
    ),
    (
        "dataLayer: {discovery: {pluginRef: file-discovery}}",
        [("$.dataLayer.discovery.pluginRef", 3, "unknown plugin", "declare it")],
    ),
    ("dataLayer: {discovery: {}}", [("$.dataLayer.discovery", 3, "'pluginRef' is missing", "")]),
    ("dataLayer: {peerDiscovery: {pluginRef: x}}", [("$.dataLayer.peerDiscovery", 3, "not shared", "leave it out")]),
    (
        "flowControl: {saturationDetector: {pluginRef: concurrency-detector}}",
        [("$.flowControl.saturationDetector.pluginRef", 3, "unknown plugin", "declare it")],
    ),
    ("flowControl: {maxByte: 1}", [("$.flowControl.maxByte", 3, "unknown field", "'maxBytes'")]),
    (
        "plugins: [{type: endpoint-attribute-scorer, parameters: "
        "{attributeKey: heat, algorithm: {type: linear_lower_is_better}}}]",
        [("$.plugins[0].metric", 3, "unknown metric 'heat'", "metrics.engines.vllm.extra")],
    ),
    ("filters: []", [("$.filters", 3, "unknown field 'filters'", "")]),
]


@pytest.mark.parametrize(("text", "expected"), BAD, ids=[text[:60] for text, _ in BAD])
def test_problems_name_path_line_and_the_way_out(text: str, expected: list[tuple[str, int, str, str]]) -> None:
    found = problems(HEAD + text, need_endpoints=False)
    assert sorted((p.path, p.line) for p in found) == sorted((path, line) for path, line, _, _ in expected)
    by_path = {p.path: p for p in found}
    for path, _, message, hint in expected:
        assert message in by_path[path].message
        assert hint in by_path[path].hint


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("kind: EndpointPickerConfig", "$"),
        ("apiVersion: llm-d.ai/v1alpha1", "$"),
        ("apiVersion: llm-d.ai/v2\nkind: EndpointPickerConfig", "$.apiVersion"),
        ("apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPicker", "$.kind"),
        ("apiVersion: 3\nkind: EndpointPickerConfig", "$.apiVersion"),
    ],
)
def test_identity(text: str, path: str) -> None:
    assert [problem.path for problem in problems(text, need_endpoints=False)] == [path]


def test_several_problems_at_once() -> None:
    text = HEAD + "plugins:\n- {type: nope}\n- {type: load-aware-scorer, parameters: {threshold: x}}\ndataLayer: 3\n"
    assert [p.path for p in problems(text, need_endpoints=False)] == [
        "$.plugins[0].type", "$.plugins[1].parameters.threshold", "$.dataLayer",
    ]  # fmt: skip


def test_without_endpoints_it_says_how_to_name_some() -> None:
    (problem,) = problems(HEAD)
    assert "file-discovery" in problem.hint


def test_text_inside_of_values_keeps_its_lines() -> None:
    text = "router:\n  epp:\n    pluginsCustomConfig:\n      a.yaml: |\n"
    lines = ["apiVersion: llm-d.ai/v1alpha1", "kind: EndpointPickerConfig", "plugins:", "- type: nope"]
    inner = "".join(f"        {line}\n" for line in lines)
    (problem,) = problems(text + inner, need_endpoints=False)
    assert (problem.path, problem.line) == ('$.router.epp.pluginsCustomConfig["a.yaml"].plugins[0].type', 8)


def test_older_values_carry_the_text_too() -> None:
    text = "inferenceExtension:\n  pluginsConfigFile: b.yaml\n  pluginsCustomConfig:\n    b.yaml: |\n"
    inner = "      apiVersion: llm-d.ai/v1\n      kind: EndpointPickerConfig\n      plugins: [{type: random-picker}]\n"
    policy = load(text + inner, need_endpoints=False).policy
    assert policy.picker is not None and policy.picker.type == "random"


@pytest.mark.parametrize(
    ("text", "path", "message"),
    [
        ("router: {epp: {}}", "$.router.epp.pluginsCustomConfig", "expected files by name"),
        ("router: {}", "$.router", "no EndpointPickerConfig"),
        (
            "router: {epp: {pluginsConfigFile: c, pluginsCustomConfig: {a: x, b: y}}}",
            "$.router.epp.pluginsConfigFile",
            "none of the files",
        ),
        ("router: {epp: {pluginsCustomConfig: {a: 'x: ['}}}", "$.router.epp.pluginsCustomConfig.a", "not valid YAML"),
        ("router: {epp: {pluginsCustomConfig: {a: text}}}", "$.router.epp.pluginsCustomConfig.a", "got 'text'"),
    ],
)
def test_values_without_a_usable_text(text: str, path: str, message: str) -> None:
    found = problems(text, need_endpoints=False)
    assert (found[0].path, message in found[0].message) == (path, True), found
