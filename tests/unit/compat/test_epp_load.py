"""Configurations of the reference picker: which plugins of ours they become."""

from pathlib import Path
from random import Random

import pytest

from fairlead.cli.main import main
from fairlead.compat.load import load, problems
from fairlead.config.plugins import build_hasher, build_policy
from fairlead.config.schema import Config
from fairlead.core.errors import ConfigError
from fairlead.core.fleet import Fleet
from fairlead.core.policy import Context, Picked
from fairlead.core.profile import Profile
from fairlead.plugins.scorers.metric import MetricParams
from fairlead.testing import assert_routed, endpoint, fleet, holds, request

FOLDER = Path(__file__).parents[2] / "data" / "epp-configs"
FILES = sorted(path.name for path in FOLDER.glob("*.yaml") if path.name != "endpoints.yaml")
HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"

#: File → filters, scorers with weights, picker.
EXPECTED: dict[str, tuple[list[str], list[tuple[str, float]], str]] = {
    "epp-config.yaml": (["role"], [("prefix-aware", 2)], "max-score"),
    "epp-estimate-prefix-cache-config.yaml": (["role"], [("prefix-aware", 1), ("queue-threshold", 1)], "max-score"),
    "epp-precise-prefix-cache-config.yaml": (
        ["role"], [("prefix-aware", 2), ("kv-utilization", 1), ("queue", 1)], "max-score",
    ),
    "optimized-baseline.yaml": (
        [], [("queue", 2), ("kv-utilization", 2), ("prefix-aware", 3), ("no-hit-lru", 2)], "max-score",
    ),
    "performance-profile.yaml": (
        [], [("queue", 2), ("kv-utilization", 2), ("prefix-aware", 3), ("no-hit-lru", 2)], "max-score",
    ),
    "random-only.yaml": ([], [], "random"),
    "sim-epp-kvcache-config.yaml": (["role"], [("prefix-aware", 10)], "max-score"),
    "sticky-until-saturated.yaml": (["prefix-affinity"], [("inflight-tokens", 2), ("metric", 1)], "max-score"),
}  # fmt: skip


def read(text: str, need_endpoints: bool = False) -> Config:
    return load(text, need_endpoints=need_endpoints)


def test_every_sample_is_expected() -> None:
    assert {*FILES} == {*EXPECTED, "pd-epp-config.yaml"}


@pytest.mark.parametrize("name", EXPECTED)
def test_samples_become_the_plugins_that_mean_the_same(name: str) -> None:
    config = load(FOLDER / name, need_endpoints=False)
    filters, scorers, picker = EXPECTED[name]
    policy = config.policy
    assert [spec.type for spec in policy.filters] == ["subset", "health", *filters]
    assert [(spec.type, spec.weight) for spec in policy.scorers] == scorers
    assert policy.picker is not None and policy.picker.type == picker
    assert isinstance(build_policy(config), Profile)
    assert build_hasher(config).finest == 64 * 4


@pytest.mark.parametrize("name", FILES)
def test_samples_are_valid(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["validate", str(FOLDER / name)])
    out = capsys.readouterr().out
    assert (stopped.value.code or 0) == 0, out
    assert f"{name}: valid." in out


@pytest.mark.parametrize("version", ["llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1", "llm-d.ai/v1"])
def test_versions(version: str) -> None:
    assert read(f"apiVersion: {version}\nkind: EndpointPickerConfig\n").policy.name == "default"


def test_endpoints_come_from_file_discovery() -> None:
    endpoints = load(FOLDER / "performance-profile.yaml").endpoints
    assert (endpoints.file, endpoints.watch) == (str(FOLDER / "endpoints.yaml"), False)


def test_the_newer_place_of_discovery() -> None:
    text = HEAD + "plugins: [{name: mine, type: file-discovery, parameters: {path: /e.yaml, watchFile: true}}]\n"
    config = read(text + "dataLayer: {discovery: {endpoints: {pluginRef: mine}}}", need_endpoints=True)
    assert (config.endpoints.file, config.endpoints.watch) == ("/e.yaml", True)


def test_own_sections_may_stand_beside() -> None:
    config = read(HEAD + "gateway: none\nendpoints: ['10.0.0.1:8000']\nmetrics: {interval: 1s}\nseed: 3", True)
    assert (config.gateway.mode, len(config.endpoints.static), config.metrics.interval, config.seed) == (
        "none", 1, 1.0, 3,
    )  # fmt: skip


def test_no_note_says_that_tokens_and_kv_events_beside_the_document_are_missing() -> None:
    text = (FOLDER / "sim-epp-kvcache-config.yaml").read_text()
    tokens = 'tokens: {models: {"*": {render: engine}}}\n'
    notes = [[note.message.split(":")[0] for note in read(text + beside).notes] for beside in ("", tokens)]
    assert notes == [["token-producer", "precise-prefix-cache-producer"], ["precise-prefix-cache-producer"]]
    assert read(text + tokens + "kvEvents: {enabled: true}\n").notes == ()


@pytest.mark.parametrize(
    ("source", "page", "verify"),
    [
        ("{path: /metrics}", ("http", "", 0), True),
        ("{port: 9400, path: /m}", ("http", "/m", 9400), True),
        ("{scheme: https}", ("https", "", 0), True),
        ("{scheme: https, insecureSkipVerify: true}", ("https", "", 0), False),
        ("{scheme: https, caCertPath: ca.pem}", ("https", "", 0), True),
    ],
)
def test_where_a_data_source_reads_its_pages(source: str, page: tuple[str, str, int], verify: bool) -> None:
    metrics = read(HEAD + f"plugins: [{{type: metrics-data-source, parameters: {source}}}]", False).metrics
    assert ((metrics.scheme, metrics.path, metrics.port), metrics.tls.verify) == (page, verify)


def test_settings_of_data_sources_become_our_sections() -> None:
    config = load(FOLDER / "sticky-until-saturated.yaml", need_endpoints=False)
    metrics = config.metrics
    assert (metrics.interval, metrics.idle_interval, metrics.default_engine) == (0.1, 0.1, "sglang")
    mine = metrics.engines["mine"]
    assert (mine.waiting, mine.running, mine.kv_usage) == (["my_queue"], ["my_requests{state=running}"], [])
    assert metrics.engines["vllm"].extra == {"temperature": "gpu_temperature"}
    assert config.policy.scorers[1].parameters == MetricParams(
        metric="temperature", better="low", range=(20.0, 90.0), missing=0.0
    )
    affinity = config.policy.filters[2].parameters
    assert (affinity.affinity_threshold, affinity.max_ttft_penalty_ms) == (0.7, 9000.0)
    assert config.policy.scorers[0].parameters.threshold_tokens == 1_000_000


def test_our_own_section_has_the_last_word() -> None:
    text = HEAD + "plugins: [{type: metrics-data-source, parameters: {interval: 50ms}}]\n"
    assert read(text).metrics.interval == 0.05
    assert read(text + "metrics: {interval: 1s}").metrics.interval == 1.0


def test_without_profiles_all_plugins_make_one_in_their_order() -> None:
    plugins = "plugins: [{type: random-picker}, {type: queue-scorer}, {type: decode-filter}, {type: load-aware}]"
    policy = read(f"{HEAD}{plugins}").policy
    assert [spec.type for spec in policy.filters] == ["subset", "health", "role"]
    assert [(spec.type, spec.weight) for spec in policy.scorers] == [("queue", 1.0), ("load-aware", 1.0)]
    assert policy.picker is not None and policy.picker.type == "random"


def test_one_plugin_may_be_filter_and_scorer() -> None:
    plugins = "plugins: [{type: context-length-aware, parameters: {enableFiltering: true, label: len}}]"
    policy = read(f"{HEAD}{plugins}").policy
    assert [spec.type for spec in policy.filters] == ["subset", "health", "context-length"]
    assert [spec.parameters.label for spec in (*policy.filters[2:], *policy.scorers)] == ["len", "len"]


def test_the_block_of_the_producer_is_ours_and_never_finer_than_the_reference() -> None:
    for given, expected in ((16, 64), (256, 256)):
        producer = f"{{type: approx-prefix-cache-producer, parameters: {{blockSizeTokens: {given}}}}}"
        policy = read(f"{HEAD}plugins: [{producer}, {{type: prefix-cache-scorer}}]").policy
        assert policy.scorers[0].parameters.hash_block_size == expected


def test_a_weighted_match_length_is_another_scorer() -> None:
    parameters = "{matchLengthWeight: 0.4, matchLengthScaleTokens: 100}"
    policy = read(f"{HEAD}plugins: [{{type: prefix-cache-scorer, parameters: {parameters}}}]").policy
    assert policy.scorers[0].type == "prefix-length"
    assert policy.scorers[0].parameters.match_length_weight == 0.4


def roles() -> Fleet:
    return fleet(
        endpoint("e0", labels={"llm-d.ai/role": "prefill"}), endpoint("e1", labels={"llm-d.ai/role": "decode"})
    )


def prefiller(config: Config, prompt: str, pool: Fleet) -> int:
    answer = build_policy(config).choose(request(prompt), pool, Context(0.0, Random(0)))
    assert isinstance(answer, Picked) and answer.slot == 1
    return answer.prefill_slot


def test_disaggregation_forms_pairs_where_the_decider_says_so() -> None:
    config = load(FOLDER / "pd-epp-config.yaml", need_endpoints=False)
    assert config.policy.name == "decode"
    assert any("it is split where 'prefix-based-pd-decider' says so" in note.message for note in config.notes)
    assert prefiller(config, "hello", roles()) == -1, "fewer than 16 tokens"
    assert prefiller(config, "hello " * 400, roles()) == 0
    known = "x" * 2560
    cached = roles()
    holds(cached, "e1", request(known))
    assert prefiller(config, known, cached) == -1, "fewer than 16 tokens are not cached where it is decoded"


@pytest.mark.parametrize(
    ("parameters", "split"),
    [
        ("nonCachedTokens: 16", True),
        ("NONCACHEDTOKENS: 16, promptTokens: 500", True),
        ("nonCachedTokens: 16, promptTokens: 700", False),
        ("nonCachedTokens: 0", False),
    ],
)
def test_the_thresholds_of_a_decider_count(parameters: str, split: bool) -> None:
    config = read(
        f"{HEAD}plugins:\n- type: pd-profile-handler\n  parameters: {{deciderPluginName: d}}\n"
        f"- {{name: d, type: prefix-based-pd-decider, parameters: {{{parameters}}}}}\n"
        "- type: decode-filter\nschedulingProfiles: [{name: decode, plugins: [{pluginRef: decode-filter}]}]"
    )
    assert prefiller(config, "hello " * 400, roles()) == (0 if split else -1)


def test_requests_that_may_wait_are_not_split() -> None:
    text = (FOLDER / "pd-epp-config.yaml").read_text() + "featureGates: [flowControl]\n"
    config = read(text)
    assert any("cannot be split" in note.message for note in config.notes)
    assert prefiller(config, "hello " * 400, roles()) == -1


def test_a_profile_may_list_what_it_has_no_use_for() -> None:
    config = read(
        f"{HEAD}plugins: [{{type: queue-scorer}}, {{type: predicted-latency-producer}}, {{type: openai-parser}}]\n"
        "schedulingProfiles:\n- name: a\n  plugins:\n  - pluginRef: predicted-latency-producer\n"
        "  - pluginRef: openai-parser\n  - pluginRef: queue-scorer\n    weight: -2\n"
    )
    assert [(spec.type, spec.weight) for spec in config.policy.scorers] == [("queue", -2.0)]
    ignored = [note.path for note in config.notes if "a profile has no use for it" in note.message]
    assert ignored == [f"$.schedulingProfiles[0].plugins[{i}].pluginRef" for i in (0, 1)]


def test_a_negative_weight_prefers_the_lowest_score() -> None:
    profile = "schedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer, weight: -1}]}]"
    policy = build_policy(read(f"{HEAD}plugins: [{{type: queue-scorer}}]\n{profile}"))
    assert_routed(policy, request("hi"), fleet("e0", "e1", samples={"e1": {"waiting": 9}}), "e1")


def test_defaults_need_no_declaration() -> None:
    config = read(
        f"{HEAD}featureGates: [flowControl]\n"
        "flowControl:\n  saturationDetector: {pluginRef: utilization-detector}\n"
        "  defaultPriorityBand: {orderingPolicyRef: fcfs-ordering-policy}\n"
        "requestHandler: {parsers: [{pluginRef: openai-parser}, {pluginRef: anthropic-parser}, "
        "{pluginRef: vertexai-parser}]}\n"
        "dataLayer: {sources: [{pluginRef: metrics-data-source, extractors: [{pluginRef: core-metrics-extractor}]}]}"
    )
    assert config.flow_control is not None and config.flow_control.saturation is not None
    assert config.flow_control.saturation.type == "utilization-detector"


def test_names_of_parameters_count_in_any_case() -> None:
    config = read(
        f"{HEAD}plugins:\n- type: endpoint-attribute-scorer\n"
        "  parameters: {AttributeKey: kvUsage, Algorithm: {Type: linear_lower_is_better, "
        "normalization: {FixedRange: {Min: 0, max: 1}}}}"
    )
    assert config.policy.scorers[0].parameters == MetricParams(metric="kvUsage", better="low", range=(0.0, 1.0))


def test_the_highest_score_is_taken_however_near_the_next_is() -> None:
    policy = build_policy(load(FOLDER / "optimized-baseline.yaml", need_endpoints=False))
    pool, warm = fleet(samples={"e0": {"kv_usage": 0.101}, "e1": {"kv_usage": 0.1}}), request("hello " * 400)
    for name in ("e0", "e1", "e2"):
        holds(pool, name, warm)
    pool.down("e2")
    assert_routed(policy, warm, pool, "e1")


def test_a_translated_configuration_routes_as_the_reference_would() -> None:
    policy = build_policy(load(FOLDER / "optimized-baseline.yaml", need_endpoints=False))
    asked = request("a long conversation " * 100)
    idle = {"waiting": 0, "running": 0, "kv_usage": 0.0}
    pool = fleet(samples=dict.fromkeys(("e0", "e1", "e2"), idle))
    holds(pool, "e2", asked)
    assert_routed(policy, asked, pool, "e2")
    busy = fleet(samples={"e0": idle, "e1": idle, "e2": {"waiting": 40, "running": 256, "kv_usage": 1.0}})
    holds(busy, "e2", asked)
    assert_routed(policy, asked, busy, {"e0", "e1"})


def test_plugins_of_ours_and_weights_keep_their_lines() -> None:
    profile = "schedulingProfiles:\n- name: a\n  plugins:\n  - pluginRef: queue-scorer\n    weight: 3\n"
    scorer = read(f"{HEAD}plugins:\n- type: queue-scorer\n{profile}").policy.scorers[0]
    assert (scorer.path, scorer.lines, scorer.stands_for) == ("$.plugins[0]", {"type": 4, "weight": 9}, "queue-scorer")


@pytest.mark.parametrize("picker", ["max-score-picker", "random-picker", "weighted-random-picker"])
@pytest.mark.parametrize(("most", "named"), [(0, 1), (1, 1), (3, 3)])
def test_an_answer_names_as_many_endpoints_as_the_picker_says(picker: str, most: int, named: int) -> None:
    text = f"{HEAD}plugins: [{{type: {picker}, parameters: {{maxNumOfEndpoints: {most}}}}}]\n"
    assert read(text).ext_proc.max_endpoints == named
    if named > 1:
        with pytest.raises(ConfigError, match="the embedded gateway takes one endpoint"):
            read(f"{text}gateway: embedded\nextProc: {{maxEndpoints: {most}}}\n")
        (problem,) = problems(f"{text}gateway: embedded\n", need_endpoints=False)
        assert (problem.path, problem.line) == ("$.plugins[0].parameters.maxNumOfEndpoints", text.count("\n"))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("featureGates: [flowControl]\n", "$.plugins"),
        ("plugins: [{type: decode-filter}]\n", "$.plugins"),
        (
            "plugins: [{type: queue-scorer}, {type: decode-filter}]\n"
            "schedulingProfiles: [{name: default, plugins: [{pluginRef: decode-filter}]}]\n",
            "$.schedulingProfiles",
        ),
        ("plugins: [{type: queue-scorer}]\n", ""),
        ("plugins: [{type: random-picker}]\n", ""),
    ],
)
def test_a_policy_without_a_scorer_is_noted(text: str, place: str) -> None:
    notes = [note for note in read(HEAD + text).notes if "without a scorer" in note.message]
    assert [note.path for note in notes] == ([place] if place else [])


def test_models_are_read_as_often_as_their_source_says() -> None:
    for said, seconds in (("", 30.0), (", parameters: {interval: 5s}", 5.0)):
        config = read(f"{HEAD}plugins: [{{type: queue-scorer}}, {{type: models-data-source{said}}}]\n")
        assert config.metrics.models_interval == seconds
        assert not [note for note in config.notes if "models-data-source" in note.message]


def test_only_the_picker_of_the_profile_that_runs_says_how_many_endpoints_an_answer_names() -> None:
    two = "{type: random-picker, parameters: {maxNumOfEndpoints: 2}}"
    profile = "schedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}, {pluginRef: %s}]}]\n"
    text = f"{HEAD}plugins: [{{type: queue-scorer}}, {two}, {{type: max-score-picker}}]\n{profile}"
    unused = read(text % "max-score-picker")
    assert unused.ext_proc.max_endpoints == 1
    assert not any("several endpoints" in note.message for note in unused.notes)
    used = read(text % "random-picker")
    assert used.ext_proc.max_endpoints == 2
    assert any("several endpoints" in note.message for note in used.notes)


SOURCES = """plugins:
- {type: metrics-data-source, parameters: {port: 9000}}
- {type: metrics-data-source, name: spare, parameters: {port: 9999}}
- {type: core-metrics-extractor}
- {type: core-metrics-extractor, name: other, parameters: {defaultEngine: sglang}}
"""


def test_sources_and_extractors_that_are_declared_but_not_listed_change_nothing() -> None:
    listed = "{pluginRef: metrics-data-source, extractors: [{pluginRef: core-metrics-extractor}]}"
    config = read(f"{HEAD}{SOURCES}dataLayer: {{sources: [{listed}]}}\n")
    assert (config.metrics.port, config.metrics.default_engine) == (9000, "vllm")
    assert not any("is a second" in note.message for note in config.notes)
    assert read(f"{HEAD}{SOURCES}").metrics.port == 9999, "where none is listed, what is declared counts"


def test_a_second_listed_source_of_a_type_is_noted() -> None:
    both = "{pluginRef: metrics-data-source}, {pluginRef: spare}"
    config = read(f"{HEAD}{SOURCES}dataLayer: {{sources: [{both}]}}\n")
    (note,) = (note for note in config.notes if "is a second" in note.message)
    assert (note.path, note.line) == ("$.plugins[1]", 5)


def test_staleness_outlasts_the_interval_of_a_source() -> None:
    """The reference takes any interval, and its documents have no field for staleness."""
    text = f"{HEAD}plugins: [{{type: metrics-data-source, parameters: {{interval: 5s}}}}]\n"
    config = read(text)
    assert (config.metrics.interval, config.metrics.staleness) == (5.0, 6.0)
    assert any("metrics.staleness is 6s" in note.message for note in config.notes)
    assert read(HEAD, need_endpoints=False).metrics.staleness == 2.0
    with pytest.raises(ConfigError, match="endpoints would look stale"):
        read(f"{text}metrics: {{staleness: 2s}}\n")


@pytest.mark.parametrize(
    ("handler", "decider", "split"),
    [
        ("type: pd-profile-handler", "type: prefix-based-pd-decider, parameters: {nonCachedTokens: 16}", True),
        ("type: pd-profile-handler", "type: always-disagg-pd-decider", False),
        ("type: pd-profile-handler, parameters: {threshold: 0}", "type: queue-scorer", True),
        ("type: pd-profile-handler, parameters: {threshold: 9}", "type: queue-scorer", False),
        ("type: disagg-profile-handler, parameters: {deciderPluginName: d}", "type: always-disagg-pd-decider", True),
        ("type: disagg-profile-handler", "type: always-disagg-pd-decider", False),
    ],
)
def test_handlers_of_other_versions_find_their_decider(handler: str, decider: str, split: bool) -> None:
    name = ", name: d" if "deciderPluginName" in handler else ""
    config = read(
        f"{HEAD}plugins: [{{{handler}}}, {{{decider}{name}}}, {{type: decode-filter}}]\n"
        "schedulingProfiles: [{name: decode, plugins: [{pluginRef: decode-filter}]}]\n"
    )
    assert prefiller(config, "hello " * 400, roles()) == (0 if split else -1)


def test_filters_of_the_prefill_profile_that_are_not_used_are_noted() -> None:
    text = (
        f"{HEAD}plugins: [{{type: disagg-profile-handler, parameters: {{deciders: {{prefill: d}}}}}}, "
        "{type: always-disagg-pd-decider, name: d}, {type: decode-filter}, {type: prefill-filter}, "
        "{type: label-selector-filter, parameters: {matchLabels: {gpu: h100}}}]\nschedulingProfiles:\n"
        "- {name: decode, plugins: [{pluginRef: decode-filter}]}\n- {name: prefill, plugins: [%s]}\n"
    )
    notes = read(text % "{pluginRef: prefill-filter}, {pluginRef: label-selector-filter}").notes
    assert any("filters of the profile 'prefill' are not used: label-selector-filter" in note.message for note in notes)
    assert not any("are not used" in note.message for note in read(text % "{pluginRef: prefill-filter}").notes)


def test_a_wrong_handler_is_no_missing_one() -> None:
    faults = problems(
        f"{HEAD}plugins: [{{type: disagg-profile-handler, parameters: {{odd: 1}}}}]\n"
        "schedulingProfiles: [{name: decode}, {name: prefill}]\n",
        need_endpoints=False,
    )
    assert [fault.path for fault in faults] == ["$.plugins[0].parameters.odd"]


PRECISE = "plugins:\n- type: queue-scorer\n- type: precise-prefix-cache-producer\n  parameters:\n    kvEventsConfig: "


@pytest.mark.parametrize(
    ("said", "beside", "events"),
    [
        ("{zmqEndpoint: 'tcp://*:5557'}", "enabled: true", ("tcp://*:5557", 0, 0)),
        ("{zmqEndpoint: 'tcp://*:5557', podDiscoveryConfig: {socketPort: 7}}", "enabled: true", ("tcp://*:5557", 0, 0)),
        ("{podDiscoveryConfig: {socketPort: 7, replaySocketPort: 8}}", "enabled: true", ("", 7, 8)),
        ("{podDiscoveryConfig: {replaySocketPort: 8}}", "enabled: true", ("", 5557, 8)),
        ("{discoverPods: false, podDiscoveryConfig: {socketPort: 7}}", "enabled: true", ("", 0, 0)),
        ("{zmqEndpoint: 'tcp://*:5557'}", "enabled: true, port: 9", ("", 9, 0)),
        ("{zmqEndpoint: 'tcp://*:5557'}", "enabled: true, indexer: {url: 'http://i:9090'}", ("", 0, 0)),
        ("{zmqEndpoint: 'tcp://*:5557'}", "enabled: false", ("", 0, 0)),
    ],
)
def test_engines_are_dialled_or_connect_as_the_producer_says(
    said: str, beside: str, events: tuple[str, int, int]
) -> None:
    kv = read(f"{HEAD}{PRECISE}{said}\nkvEvents: {{{beside}}}\n").kv_events
    assert (kv.bind, kv.port, kv.replay_port) == events


@pytest.mark.parametrize(
    ("said", "note"),
    [
        (f"{PRECISE}{{topicFilter: 'kv@'}}\n", ""),
        (f"{PRECISE}{{topicFilter: x}}\n", "no effect here: topicFilter"),
        (
            f"{PRECISE}{{zmqEndpoint: 'tcp://*:1', podDiscoveryConfig: {{socketPort: 7, podNamespace: n}}}}\n",
            "no effect here: podNamespace, socketPort",
        ),
        (
            f"{PRECISE}{{}}\n    indexerConfig: {{kvBlockIndexConfig: {{enableMetrics: true, redis: {{}}}}}}\n"
            "    speculativeTTL: 1s\n",
            "no effect here: redis, speculativeTTL",
        ),
        (
            "plugins: [{type: queue-scorer}, {type: token-producer, parameters: {estimate: {image: {}}}}]\n",
            "estimate has no effect",
        ),
        (
            "plugins: [{type: queue-scorer}, "
            "{type: utilization-detector, parameters: {metricsStalenessThreshold: 5s}}]",
            "metricsStalenessThreshold has no effect",
        ),
        (
            "plugins: [{type: queue-scorer}]\nrequestHandler: {parsers: [{pluginRef: openai-parser}]}\n",
            "requests to other paths are scheduled too",
        ),
        (
            "plugins: [{type: queue-scorer}]\n"
            "requestHandler: {parsers: [{pluginRef: openai-parser}, {pluginRef: passthrough-parser}]}\n",
            "",
        ),
        ("plugins: [{type: queue-scorer}]\ndataLayer: {injectDefaults: false}\n", "metrics of endpoints are read"),
        (
            "plugins: [{type: queue-scorer}]\n"
            "dataLayer: {injectDefaults: false, sources: [{pluginRef: metrics-data-source}]}\n",
            "",
        ),
    ],
)
def test_what_has_no_effect_is_noted(said: str, note: str) -> None:
    beside = "kvEvents: {enabled: true}\n"
    notes = [each.message for each in read(f"{HEAD}{said}\n{beside}").notes]
    assert len(notes) == bool(note) and all(note in each for each in notes), notes


@pytest.mark.parametrize(
    ("plugin", "place"),
    [
        ("{type: core-metrics-extractor, parameters: {defaultEngine: foo}}", "defaultEngine"),
        (
            "{type: precise-prefix-cache-producer, parameters: {kvEventsConfig: {zmqEndpoint: 5}}}",
            "kvEventsConfig.zmqEndpoint",
        ),
    ],
)
def test_problems_of_settings_name_the_parameter(plugin: str, place: str) -> None:
    text = f"{HEAD}plugins:\n- type: queue-scorer\n- {plugin}\n"
    (problem,) = problems(f"{text}kvEvents: {{enabled: true}}\n", need_endpoints=False)
    assert (problem.path, problem.line) == (f"$.plugins[1].parameters.{place}", 5)
    own = f"{text}kvEvents: {{enabled: true, bind: ''}}\nmetrics: {{defaultEngine: vllm}}\n"
    assert problems(own, need_endpoints=False) == []


def test_a_note_on_staleness_names_the_interval() -> None:
    text = f"{HEAD}plugins:\n- type: queue-scorer\n- {{type: metrics-data-source, parameters: {{interval: 5s}}}}\n"
    (note,) = read(text).notes
    assert (note.path, note.line) == ("$.plugins[1].parameters.interval", 5)


def test_a_latency_scorer_goes_by_latency_without_an_slo_too() -> None:
    plugins = "plugins: [{type: latency-scorer, parameters: {ttftWeight: 2}}, {type: max-score-picker}]\n"
    profile = "schedulingProfiles: [{name: default, plugins: [{pluginRef: latency-scorer}]}]\n"
    (scorer,) = read(HEAD + plugins + profile).policy.scorers
    assert (scorer.parameters.without_slo, scorer.parameters.ttft_weight) == ("latency", 2.0)


@pytest.mark.parametrize(
    "producer",
    [
        "mm-embeddings-cache-producer", "precise-prefix-cache-producer", "precise-prefix-cache-scorer",
        "inflight-load-producer", "approx-prefix-cache-producer",
    ],
)  # fmt: skip
def test_what_follows_endpoints_may_stand_as_an_extractor(producer: str) -> None:
    plugins = f"plugins: [{{type: endpoint-notification-source}}, {{type: {producer}}}]\n"
    source = f"{{pluginRef: endpoint-notification-source, extractors: [{{pluginRef: {producer}}}]}}"
    read(f"{HEAD}{plugins}dataLayer: {{sources: [{source}]}}\n")


def test_cross_replica_of_v1_is_known() -> None:
    head = HEAD.replace("v1alpha1", "v1") + "plugins: [{type: queue-scorer}]\n"
    read(head + "dataLayer: {crossReplica: {syncInterval: 200ms, publishTimeout: 1s}}\n")
    with pytest.raises(ConfigError, match="leave it out"):
        read(head + "dataLayer: {crossReplica: {syncerPluginRef: s}}\n")
