"""Whole configurations: what loads, and what is said about what does not."""

from pathlib import Path

import pytest

from fairlead.compat.load import load, problems
from fairlead.config.builtins import DEFAULT_POLICY
from fairlead.config.plugins import build_policy
from fairlead.config.problems import InvalidConfig
from fairlead.config.schema import SECTIONS, Config, EndpointSource, PluginSpec
from fairlead.core.errors import ConfigError

EXAMPLES = Path(__file__).parents[3] / "examples"
ONE = "endpoints: ['127.0.0.1:8000']\n"

SHORT_FORM = """\
inferenceExtension:
  replicas: 2
  resources: {requests: {cpu: 500m, memory: 512Mi}, limits: {cpu: 1000m, memory: 1Gi}}
  pluginsCustomConfig:
    filters:
    - {type: queue-depth, parameters: {maxQueueLength: 50}}
    - {type: memory-pressure, parameters: {maxKVUtilization: 0.95, checkInterval: 5s}}
    scorers:
    - {type: prefix-aware, weight: 100, parameters: {hashBlockSize: 5, cacheIndexerURL: "http://kv-cache-indexer:9090"}}
    - {type: load-aware, weight: 50, parameters: {queueWeightFactor: 0.7, activeRequestsWeight: 0.3}}
  kvcacheIndexer: {enabled: true, zmqSubscriberURL: "tcp://*:5555"}
"""


def types(specs: tuple[PluginSpec, ...]) -> list[str]:
    return [spec.type for spec in specs]


def weights(config: Config) -> dict[str, float]:
    return {spec.name: spec.weight for spec in config.policy.scorers}


def test_nothing_but_endpoints_gives_the_default_policy() -> None:
    policy = load(ONE).policy
    assert policy.name == "default"
    assert types(policy.filters) == ["role", "subset", "model-compatibility", "health"]
    assert policy.plugin is not None and policy.plugin.type == DEFAULT_POLICY
    assert (policy.scorers, policy.picker) == ((), None)


def test_a_selection_alone_has_the_default_scorers() -> None:
    config = load(f"selection: {{topK: 1}}\n{ONE}")
    assert weights(config) == {
        "prefix-aware": 100, "load-aware": 50, "kv-utilization": 100, "inflight-tokens": 100, "lora-aware": 100,
        "session-affinity": 20,
    }  # fmt: skip
    assert config.policy.scorers[0].parameters.hash_block_size == 64


def test_short_form_loads_as_it_stands_in_chart_values() -> None:
    config = load(SHORT_FORM, need_endpoints=False)
    policy = config.policy
    assert policy.name == "custom"
    assert types(policy.filters)[4:] == ["queue-depth", "memory-pressure"]
    assert policy.filters[4].parameters.max_queue_length == 50
    assert weights(config) == {"prefix-aware": 100, "load-aware": 50}
    assert policy.scorers[0].parameters.hash_block_size == 5
    assert policy.picker is not None
    assert (policy.picker.type, policy.picker.parameters.k) == ("top-k", 3)
    assert policy.scorers[1].path == "$.inferenceExtension.pluginsCustomConfig.scorers[1]"
    assert [(note.path, note.line) for note in config.notes] == [
        ("$.inferenceExtension.replicas", 2),
        ("$.inferenceExtension.resources", 3),
        ("$.inferenceExtension.kvcacheIndexer", 11),
    ]
    assert (config.kv_events.enabled, config.kv_events.indexer.url) == (True, "http://kv-cache-indexer:9090")


def test_short_form_means_the_same_at_the_top_of_the_file() -> None:
    below = load(SHORT_FORM, need_endpoints=False).policy
    custom = SHORT_FORM.split("pluginsCustomConfig:\n")[1].split("  kvcacheIndexer")[0]
    above = load("\n".join(line[4:] for line in custom.splitlines()), need_endpoints=False).policy
    assert [s.parameters for s in above.scorers] == [s.parameters for s in below.scorers]
    assert [s.parameters for s in above.filters] == [s.parameters for s in below.filters]
    assert above.picker is not None and below.picker is not None
    assert above.picker.parameters == below.picker.parameters


@pytest.mark.parametrize("key", ["parameters", "params", "config"])
def test_parameters_have_three_names_and_may_stand_beside_the_type(key: str) -> None:
    under = load(f"filters: [{{type: queue-depth, {key}: {{maxQueueLength: 7}}}}]\n{ONE}")
    beside = load(f"filters: [{{type: queue-depth, maxQueueLength: 7}}]\n{ONE}")
    assert under.policy.filters[4].parameters.max_queue_length == 7
    assert under.policy.filters == beside.policy.filters


@pytest.mark.parametrize(
    ("selection", "picker"),
    [
        ("selection: {topK: 1}", "max-score"),
        ("selection: {topK: 2}", "top-k"),
        ("selection: {picker: max}", "max-score"),
        ("selection: {picker: max, parameters: {nearTie: 0.1}}", "max-score"),
        ("selection: {picker: round-robin}", "round-robin"),
        ("selection: {picker: weighted-random-picker, parameters: {}}", "weighted-random"),
        ("scorers: [{type: load-aware}]", "top-k"),
        ("selection: {picker: top-k, k: 4, name: mine}", "top-k"),
    ],
)
def test_selection(selection: str, picker: str) -> None:
    found = load(f"{selection}\n{ONE}").policy.picker
    assert found is not None and found.type == picker


def test_an_absent_list_has_its_default_and_an_empty_one_is_empty() -> None:
    assert len(load(f"filters: []\n{ONE}").policy.filters) == 4
    assert load(f"scorers: []\n{ONE}").policy.scorers == ()
    assert len(load(f"scorers: []\n{ONE}").policy.filters) == 5


@pytest.mark.parametrize("key", ["selection", "flowControl", "inferenceExtension", *SECTIONS])
@pytest.mark.parametrize("nothing", ["", "{}"])
def test_a_section_with_nothing_in_it_counts_as_absent(key: str, nothing: str) -> None:
    text = f"{ONE}{key}: {nothing}\n"
    if (key, nothing) == ("flowControl", "{}"):
        assert load(text).flow_control is not None, "on, with defaults"
    elif (key, nothing) == ("gateway", ""):
        assert problems(text) != [], "it might mean none"
    else:
        assert load(text) == load(ONE)


@pytest.mark.parametrize("nothing", ["", "{}", "[]"])
def test_endpoints_with_nothing_in_them_are_absent(nothing: str) -> None:
    assert load(f"endpoints: {nothing}\nkubernetes: {{pool: p}}\n").endpoints == EndpointSource()
    assert "$.endpoints: no endpoints" in str(problems(f"endpoints: {nothing}\n")[0])


def test_a_selection_with_nothing_in_it_leaves_that_of_scorers() -> None:
    own = load(f"selection: {{}}\nscorers: [{{type: load-aware}}]\n{ONE}").policy
    assert own.picker is not None and (own.picker.type, own.picker.parameters.k) == ("top-k", 3)
    assert load(f"selection: {{}}\npolicy: random\n{ONE}").policy.name == "random"


def test_ability_filters_come_first_unless_replaced_or_switched_off() -> None:
    own = "filters: [{type: queue-depth}, {type: prefill-filter}]\n"
    policy = load(own + ONE).policy
    assert types(policy.filters) == ["subset", "model-compatibility", "health", "queue-depth", "role"]
    assert policy.filters[4].parameters.stage == "prefill"
    assert types(load(f"{own}builtinFilters: false\n{ONE}").policy.filters) == ["queue-depth", "role"]


@pytest.mark.parametrize(
    ("name", "scorers", "picker"),
    [
        ("round-robin", [], "round-robin"),
        ("random", [], "random"),
    ],
)
def test_shorthand_policies(name: str, scorers: list[str], picker: str) -> None:
    config = load(f"policy: {name}\n{ONE}")
    assert config.policy.name == name
    assert types(config.policy.filters) == ["role", "subset", "model-compatibility", "health"]
    assert types(config.policy.scorers) == scorers
    assert config.policy.picker is not None and config.policy.picker.type == picker
    assert build_policy(config).name == name


def test_sections_with_units_and_what_depends_on_other_sections() -> None:
    config = load(
        ONE
        + """
gateway: {mode: none}
extProc: {port: 9100, healthPort: 9103, tls: {certDir: /certs}}
als:
metrics: {interval: 50ms, idleInterval: 1, staleness: 1m30s, tokenFile: /token, tls: {verify: false}}
ledger: {leaseTtl: 2h}
parsing: {maxBodyBytes: 1.5Mi}
seed: 7
"""
    )
    assert (config.ext_proc.host, config.ext_proc.port, config.als.port) == ("::", 9100, 9100)
    assert config.ext_proc.tls is not None and config.ext_proc.tls.cert_dir == "/certs"
    assert (config.metrics.interval, config.metrics.idle_interval, config.metrics.staleness) == (0.05, 1.0, 90.0)
    assert config.metrics.tls.verify is False
    assert (config.ledger.lease_ttl, config.parsing.max_body_bytes, config.seed) == (7200.0, 3 << 19, 7)
    assert load(ONE).ext_proc.host == "127.0.0.1"
    assert load(f"gateway: none\n{ONE}").gateway.mode == "none"


def test_relative_paths_begin_at_the_file(tmp_path: Path) -> None:
    tls = "tls: {caFile: PATH/7, certDir: PATH/8}"
    text = f"""
extProc: {{tls: {{certDir: PATH/1}}}}
admin: {{tls: {{certDir: PATH/2}}, tokenFile: PATH/3}}
metrics: {{tokenFile: PATH/4, tls: {{caFile: PATH/5}}}}
gateway: {{upstreamTokenFile: PATH/6}}
kubernetes: {{kubeconfig: PATH/11}}
canary: {{percent: 1, scheduler: {{address: "127.0.0.1:1", {tls}}}}}
shadows: {{policies: [{{name: a, scheduler: {{address: "127.0.0.1:2", {tls}}}}}]}}
journal: {{path: PATH/9}}
state: {{file: PATH/10}}
"""
    config = tmp_path / "fairlead.yaml"
    loaded = []
    for path in ("x", f"{tmp_path}/x"):
        config.write_text(ONE + text.replace("PATH", path))
        loaded.append(load(config))
    assert loaded[0] == loaded[1] and loaded[0].journal.path == f"{tmp_path}/x/9"


@pytest.mark.parametrize("mode", ["none", "{mode: none}"])
def test_a_flag_for_the_gateway_keeps_its_mode(mode: str) -> None:
    gateway = load(f"gateway: {mode}\n{ONE}", flags={"gateway": {"port": 8081}}).gateway
    assert (gateway.mode, gateway.port) == ("none", 8081)


def test_json_is_accepted() -> None:
    config = load('{"endpoints": ["127.0.0.1:8000"],\n\t"filters": [{"type": "queue-depth", "maxQueueLength": 9}]}')
    assert config.policy.filters[4].parameters.max_queue_length == 9


def test_anchors_and_merges() -> None:
    config = load(
        ONE
        + """
filters:
- &depth {type: queue-depth, maxQueueLength: 9}
- {<<: *depth, name: other}
"""
    )
    assert [spec.parameters.max_queue_length for spec in config.policy.filters[4:]] == [9, 9]


#: text → (path, line, part of the message, part of the hint), in the order of the lines.
BAD: list[tuple[str, list[tuple[str, int, str, str]]]] = [
    ("", [("$", 0, "no endpoints", "endpoints:")]),
    ("endpoints: []", [("$.endpoints", 1, "no endpoints", "")]),
    ("- a", [("$", 1, "expected a mapping, got a list", "")]),
    ("a: [", [("$", 1, "not valid YAML", "")]),
    (ONE + "gatway: none", [("$.gatway", 2, "unknown field 'gatway'", "'gateway'")]),
    (ONE + "log: {}\nlog: {}", [("$.log", 3, "'log' is given twice", "line 2")]),
    (ONE + "kind: EndpointPickerConfig", [("$", 1, "field 'apiVersion' is missing", "llm-d.ai/v1alpha1")]),
    (ONE + "plugins: []", [("$.plugins", 2, "unknown field 'plugins'", "kind: EndpointPickerConfig")]),
    (ONE + "gateway: embeded", [("$.gateway", 2, "unknown value 'embeded'", "'embedded'")]),
    (ONE + "gateway: ~", [("$.gateway", 2, "got nothing", "")]),
    (ONE + "gateway: {hots: x}", [("$.gateway.hots", 2, "unknown field", "'host'")]),
    (ONE + "gateway: {host: ''}", [("$.gateway.host", 2, "length >= 1", "")]),
    (ONE + "gateway: {host: localhost}", [("$.gateway.host", 2, "expected an IP address", "127.0.0.1")]),
    (ONE + "gateway: {host: 'fe80::1%eth0'}", [("$.gateway.host", 2, "cannot listen on a link-local address", "'::'")]),
    (ONE + "tracing: {endpoint: 'http://[::1'}", [("$.tracing.endpoint", 2, "no URL: Invalid IPv6", "")]),
    (ONE + "replicas: {via: 'valkey://h:99999'}", [("$.replicas.via", 2, "no URL: Port out of range", "")]),
    (ONE + "admin: {host: 'a b'}", [("$.admin.host", 2, "neither an IP address nor a host name", "no port")]),
    (ONE + "extProc: {host: '10.0.0.1:9002'}", [("$.extProc.host", 2, "neither an IP address nor", "no port")]),
    (ONE + "gateway: {host: '::1%lo'}", [("$.gateway.host", 2, "or in an IPv6 zone", "'::'")]),
    (ONE + "admin: {host: '[::1]'}", [("$.admin.host", 2, "neither an IP address nor a host name", "brackets")]),
    (ONE + "gateway: {host: '[::1]'}", [("$.gateway.host", 2, "expected an IP address, got '[::1]'", "")]),
    (ONE + "gateway: {port: 0, envoys: 2}", [("$.gateway.port", 2, "it cannot be 0", "")]),
    (ONE + "gateway: {adminPort: 65535, envoys: 2}", [("$.gateway.adminPort", 2, "have no 2 ports", "")]),
    (ONE + "gateway: {adminPort: 8079, envoys: 2}", [("$.gateway.adminPort", 2, "taken by gateway.port", "")]),
    (ONE + "gateway: {bodyLimit: 4Gi}", [("$.gateway.bodyLimit", 2, "< 4294967296", "")]),
    (ONE + "gateway: {port: 70000}", [("$.gateway.port", 2, "<= 65535, got 70000", "")]),
    (ONE + "gateway: {port: '80'}", [("$.gateway.port", 2, "expected an integer, got '80'", "")]),
    (ONE + "gateway: {port: 9002}", [("$.extProc.port", 0, "taken by gateway.port", "")]),
    (ONE + "extProc: {port: 0}", [("$.extProc.port", 2, "it cannot be 0", "")]),
    (ONE + "extProc: {port: 9090}", [("$.admin.port", 0, "taken by extProc.port", "")]),
    (ONE + "admin: {metricsPort: 8080}", [("$.admin.metricsPort", 2, "taken by gateway.port", "")]),
    (ONE + "metrics: {interval: 1.5s}", [("$.metrics.interval", 2, "look stale", "staleness at least 2.5s")]),
    (ONE + "metrics: {interval: 200}", [("$.metrics.interval", 2, "look stale", "without a unit are seconds")]),
    (
        ONE + "metrics: {staleness: 3s, idleInterval: 200}",
        [("$.metrics.staleness", 2, "look stale", "at least 201s with idleInterval 200s")],
    ),
    (
        ONE + "admin: {metricsHost: 10.0.0.5, metricsPort: 9002}",
        [("$.admin.metricsPort", 2, "taken by extProc.port", "")],
    ),
    (
        ONE + "admin: {host: localhost, metricsHost: 127.0.0.1, metricsPort: 9090}",
        [("$.admin.metricsPort", 2, "taken by admin.port", "")],
    ),
    (ONE + "admin: {metricsPort: 9090}", [("$.admin.metricsPort", 2, "taken by admin.port", "")]),
    (ONE + "admin: {metricsHost: '::', metricsPort: 9090}", [("$.admin.metricsPort", 2, "taken by admin.port", "")]),
    (ONE + "autoscaling: {port: 9090}", [("$.autoscaling.port", 2, "taken by admin.port", "")]),
    (ONE + "extProc: {tls: {}}", [("$.extProc.tls", 2, "'certDir' is missing", "")]),
    (ONE + "extProc: {transport: http3}", [("$.extProc.transport", 2, "unknown value 'http3'", "'http2'")]),
    (ONE + "admin: 5", [("$.admin", 2, "expected a mapping, got 5", "")]),
    (ONE + "admin: {debug: 1}", [("$.admin.debug", 2, "expected true or false, got 1", "")]),
    (ONE + "ledger: {leaseTtl: 5x}", [("$.ledger.leaseTtl", 2, "expected a duration such as", "")]),
    (ONE + "ledger: {leaseTtl: 0}", [("$.ledger.leaseTtl", 2, "> 0", "")]),
    (ONE + "ledger: {leaseTtl: .inf}", [("$.ledger.leaseTtl", 2, "finite", "")]),
    (ONE + "parsing: {maxBodyBytes: 64 potatoes}", [("$.parsing.maxBodyBytes", 2, "such as 64MiB", "")]),
    (ONE + "inspect: {usageSampling: 2}", [("$.inspect.usageSampling", 2, "<= 1", "")]),
    (ONE + "log: {level: loud}", [("$.log.level", 2, "unknown value 'loud'", "debug, error, info")]),
    (ONE + "seed: -1", [("$.seed", 2, ">= 0, got -1", "")]),
    (ONE + "metrics: {staleness: 1s}", [("$.metrics.staleness", 2, "look stale", "1.2s")]),
    (ONE + "metrics: {defaultEngine: vlm}", [("$.metrics.defaultEngine", 2, "unknown engine 'vlm'", "'vllm'")]),
    (
        ONE + "metrics:\n  engines:\n    mine: {waiting: [ok, '{bad'], kvUsge: x}",
        [("$.metrics.engines.mine.kvUsge", 4, "unknown field", "'kvUsage'")],
    ),
    (
        ONE + "metrics:\n  engines:\n    mine: {waiting: [ok, '{bad'], extra: {t: 'x{y'}}",
        [
            ("$.metrics.engines.mine.waiting[1]", 4, "expected a metric name", ""),
            ("$.metrics.engines.mine.extra.t", 4, "label=value", ""),
        ],
    ),
    (ONE + "policy: round-robbin", [("$.policy", 2, "unknown policy", "'round-robin'")]),
    (ONE + "policy: 3", [("$.policy", 2, "expected the name of a policy", "")]),
    (ONE + "policy: random\nscorers: []", [("$.policy", 2, "brings its own scorers", "leave out")]),
    (ONE + "builtinFilters: 1", [("$.builtinFilters", 2, "expected true or false", "")]),
    (ONE + "filters: {type: role}", [("$.filters", 2, "expected a list, got a mapping", "")]),
    (
        ONE + "filters: [role]",
        [("$.filters[0]", 2, "expected a mapping with a type, got 'role'", "write {type: role}")],
    ),
    (ONE + "filters: [{}]", [("$.filters[0]", 2, "'type' is missing", "")]),
    (ONE + "filters: [{type: 3}]", [("$.filters[0].type", 2, "expected a plugin type, got 3", "")]),
    (ONE + "filters:\n- type: queue-dept", [("$.filters[0].type", 3, "unknown filter type", "'queue-depth'")]),
    (ONE + "filters:\n- type: load-aware", [("$.filters[0].type", 3, "unknown filter type", "is a scorer")]),
    (ONE + "scorers:\n- type: load-aware-scorer", [("$.scorers[0].type", 3, "unknown scorer type", "'load-aware'")]),
    (
        ONE + "filters:\n- type: queue-depth\n  maxQueueLenght: 3",
        [("$.filters[0].maxQueueLenght", 4, "unknown field", "'maxQueueLength'")],
    ),
    (
        ONE + "filters:\n- type: queue-depth\n  params:\n    maxQueueLenght: 3",
        [("$.filters[0].params.maxQueueLenght", 5, "unknown field", "'maxQueueLength'")],
    ),
    (
        ONE + "filters:\n- type: queue-depth\n  config: {maxQueueLength: 3}\n  maxQueueLength: 4",
        [("$.filters[0].config.maxQueueLength", 4, "given twice", "")],
    ),
    (
        ONE + "filters:\n- type: queue-depth\n  config: {}\n  params: {}",
        [("$.filters[0].config", 4, "mean the same", "one of them")],
    ),
    (
        ONE + "filters:\n- {type: queue-depth, weight: 2}",
        [("$.filters[0].weight", 3, "unknown field 'weight'", "only scorers")],
    ),
    (ONE + "filters:\n- {type: queue-depth, config: 3}", [("$.filters[0].config", 3, "expected a mapping", "")]),
    (ONE + "filters: [{type: queue-depth, name: 3}]", [("$.filters[0].name", 2, "expected a name, got 3", "")]),
    (
        ONE + "filters:\n- {type: memory-pressure, checkInterval: soon}",
        [("$.filters[0].checkInterval", 3, "expected a duration such as", "")],
    ),
    (
        ONE + "filters:\n- type: label-selector\n  matchExpressions:\n  - {key: a, operator: in}",
        [("$.filters[0].matchExpressions[0].operator", 5, "unknown value 'in'", "'In'")],
    ),
    (
        ONE + "scorers:\n- {type: load-aware}\n- {type: load-aware}",
        [("$.scorers[1]", 4, "named 'load-aware' is there already", "name of its own")],
    ),
    (ONE + "scorers:\n- {type: load-aware, wieght: 2}", [("$.scorers[0].wieght", 3, "unknown field", "'weight'")]),
    (
        ONE + "scorers:\n- {type: load-aware, parameters: {weight: 2}}",
        [("$.scorers[0].parameters.weight", 3, "unknown field 'weight'", "write it beside type")],
    ),
    (
        ONE + "filters:\n- {type: queue-depth, parameters: {nam: x}}",
        [("$.filters[0].parameters.nam", 3, "unknown field 'nam'", "known: maxQueueLength")],
    ),
    (ONE + "filters: [{type: label-selector, matchLabels: 3}]", [("$.filters[0].matchLabels", 2, "a mapping", "")]),
    (
        ONE + "filters: [{type: label-selector, matchExpressions: {}}]",
        [("$.filters[0].matchExpressions", 2, "expected a list, got a mapping", "")],
    ),
    (ONE + "als: {port: 9090}", [("$.als.port", 2, "taken by admin.port", "")]),
    (ONE + "inferenceExtension: 3", [("$.inferenceExtension", 2, "expected a mapping", "")]),
    (
        ONE + "inferenceExtension: {pluginsCustomConfig: []}",
        [("$.inferenceExtension.pluginsCustomConfig", 2, "expected a mapping", "")],
    ),
    (ONE + "scorers:\n- {type: load-aware, weight: -2}", [("$.scorers[0].weight", 3, ">= 0", "")]),
    (ONE + "scorers:\n- {type: load-aware, weight: .nan}", [("$.scorers[0].weight", 3, "finite", "")]),
    (ONE + "scorers:\n- {type: load-aware, weight: much}", [("$.scorers[0].weight", 3, "a number, got 'much'", "")]),
    (
        ONE + "scorers:\n- {type: prefix-aware, hashBlockSize: 0}",
        [("$.scorers[0].hashBlockSize", 3, ">= 1, got 0", "")],
    ),
    (ONE + "selection: 3", [("$.selection", 2, "expected topK or picker, got 3", "")]),
    (ONE + "selection: {topK: 0}", [("$.selection.topK", 2, ">= 1, got 0", "")]),
    (ONE + "selection: {topK: true}", [("$.selection.topK", 2, "expected an integer, got true", "")]),
    (ONE + "selection: {topK: 2, picker: random}", [("$.selection.picker", 2, "topK is a picker itself", "")]),
    (ONE + "selection: {topK: 2, k: 3}", [("$.selection.k", 2, "unknown field", "")]),
    (ONE + "selection: {picker: best}", [("$.selection.picker", 2, "unknown picker type", "max-score")]),
    (ONE + "selection: {picker: maxx}", [("$.selection.picker", 2, "unknown picker type", "'max'")]),
    (
        ONE + "selection: {picker: none}",
        [("$.selection.picker", 2, "unknown picker type", "known: max, max-score, ran")],
    ),
    (ONE + "selection: {name: x}", [("$.selection", 2, "expected topK or picker", "topK: 3")]),
    (
        ONE + "inferenceExtension:\n  pluginCustomConfig: {}",
        [("$.inferenceExtension.pluginCustomConfig", 3, "unknown field", "'pluginsCustomConfig'")],
    ),
    (
        ONE + "filters: []\ninferenceExtension:\n  pluginsCustomConfig: {filters: []}",
        [("$.inferenceExtension.pluginsCustomConfig.filters", 4, "at the top of the file too", "once")],
    ),
    (
        ONE + "inferenceExtension:\n  pluginsCustomConfig: {admin: {}}",
        [("$.inferenceExtension.pluginsCustomConfig.admin", 3, "unknown field", "top of the file")],
    ),
    (
        ONE + "inferenceExtension:\n  pluginsCustomConfig:\n    scorers:\n    - {type: nope}",
        [("$.inferenceExtension.pluginsCustomConfig.scorers[0].type", 5, "unknown scorer type", "known: ")],
    ),
]


@pytest.mark.parametrize(("text", "expected"), BAD, ids=[text.removeprefix(ONE)[:40] or "empty" for text, _ in BAD])
def test_problems_name_path_line_and_cure(text: str, expected: list[tuple[str, int, str, str]]) -> None:
    found = problems(text)
    assert [(p.path, p.line or 0) for p in found] == [(path, line) for path, line, _, _ in _with_lines(text, expected)]
    for problem, (_, _, message, hint) in zip(found, expected, strict=True):
        assert message in problem.message
        assert hint in problem.hint


def _with_lines(text: str, expected: list[tuple[str, int, str, str]]) -> list[tuple[str, int, str, str]]:
    """A place that is not in the file gets the line of the root, if there is one."""
    return [(path, line or (1 if text else 0), message, hint) for path, line, message, hint in expected]


def test_all_problems_are_reported_at_once() -> None:
    text = "gateway: {port: x}\nfilters: [{type: nope}]\nseed: soon\nlog: {level: 3}\n"
    with pytest.raises(InvalidConfig) as caught:
        load(text)
    assert [p.path for p in caught.value.problems] == [
        "$.gateway.port", "$", "$.filters[0].type", "$.seed", "$.log.level",
    ]  # fmt: skip
    assert len(str(caught.value).splitlines()) == 5


def test_errors_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "fairlead.yaml"
    file.write_text("endpoints: ['127.0.0.1:1']\nseed: x\n")
    with pytest.raises(InvalidConfig) as caught:
        load(file)
    assert str(caught.value) == f"{file}:2: $.seed: expected an integer, got 'x'"
    assert (caught.value.path, caught.value.source) == ("$.seed", str(file))


def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "nope.yaml", "No such file"), (tmp_path, "directory")):
        with pytest.raises(ConfigError, match=reason):
            load(path)
        with pytest.raises(ConfigError, match=reason):
            problems(path)


def test_a_large_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "large.yaml"
    file.write_text("# x\n" * 300_000)
    with pytest.raises(InvalidConfig, match="larger than 1 MiB"):
        load(file)


@pytest.mark.parametrize("name", ["minimal", "documents", "file-discovery"])
def test_examples_load(name: str) -> None:
    config = load(EXAMPLES / f"{name}.yaml")
    build_policy(config)
    assert config.endpoints.static or config.endpoints.file == str(EXAMPLES / "endpoints.yaml")


def test_a_flood_of_problems_is_counted_not_listed() -> None:
    found = problems(ONE + "".join(f"fild{i}: 1\n" for i in range(5000)))
    assert len(found) == 201
    assert found[-1].message == "there are 4800 problems more"


@pytest.mark.parametrize(
    ("text", "example"),
    [
        (
            "replicas: {via: 'http://x'}",
            "'valkey://USER@HOST:PORT/DB' or 'valkey+sentinel://HOST,HOST/NAME' or 'unix:///PATH' or 'file:///PATH'",
        ),
        ("journal: {header: decision}", "'x-fairlead-decision'"),
        ("tracing: {endpoint: 'x:1'}", "'http://localhost:4318/v1/traces'"),
        ("gateway: {jwt: {issuer: a, jwksUri: 'http://x/'}}", "'https://HOST/PATH' or 'http://localhost:PORT/PATH'"),
        ("gateway: {allowedOrigins: ['*', 'https://a.example/']}", "'*' or 'https://app.example'"),
        ("gateway: {allowedOrigins: [a.example]}", "'*' or 'https://app.example'"),
        ("gateway: {allowedOrigins: ['https://A.example']}", "'*' or 'https://app.example'"),
    ],
)
def test_a_value_of_the_wrong_form_is_answered_with_examples(text: str, example: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(f"endpoints: ['127.0.0.1:1']\n{text}\n")
    assert f"expected a value like {example}, got '" in str(error.value)


@pytest.mark.parametrize("path", ["sleep", "", "/a b", "/a//b", "/a%2Fb", "/*/b", "/a?b", "/a**", "/ä", "/a#b"])
def test_paths_that_no_request_could_have_are_refused(path: str) -> None:
    (problem,) = problems(ONE + f"gateway: {{paths: [/fine/*, '{path}']}}")
    assert (problem.path, "like '/cohere/v2/chat'" in problem.message) == ("$.gateway.paths[1]", True)


def test_paths_may_name_one_or_all_below() -> None:
    load(ONE + "gateway: {paths: ['/*', /cohere/v2/chat, '/static/*', /a/, '/x-{y}~']}")


def test_a_problem_shows_no_password() -> None:
    with pytest.raises(ConfigError, match=r"got 'valkeys://u:\*\*\*@h:1/x'"):
        load("endpoints: ['127.0.0.1:1']\nreplicas: {via: 'valkeys://u:s3cret@h:1/x'}\n")
