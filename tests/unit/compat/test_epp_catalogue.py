"""The catalogue of the reference is complete, and everything in it is either usable or refused with a way out."""

from typing import Any

import msgspec
import pytest

from fairlead.compat.catalogue import CATALOGUE, Entry
from fairlead.compat.load import load, problems
from fairlead.config.builtins import BUILTINS

#: Beta plugins of the reference, from the catalogue of its version 0.10.
BETA = [
    "label-selector-filter", "decode-filter", "prefill-filter", "encode-filter", "prefix-cache-affinity-filter",
    "slo-headroom-tier-filter", "context-length-aware", "utilization-detector", "concurrency-detector",
    "queue-scorer", "running-requests-size-scorer", "kv-cache-utilization-scorer", "lora-affinity-scorer",
    "load-aware-scorer", "token-load-scorer", "active-request-scorer", "prefix-cache-scorer", "no-hit-lru-scorer",
    "latency-scorer", "mm-embeddings-cache-scorer", "max-score-picker", "random-picker", "weighted-random-picker",
    "single-profile-handler", "disagg-profile-handler", "data-parallel-profile-handler", "always-disagg-pd-decider",
    "always-disagg-multimodal-decider", "prefix-based-pd-decider", "token-producer", "approx-prefix-cache-producer",
    "precise-prefix-cache-producer", "inflight-load-producer", "predicted-latency-producer",
    "mm-embeddings-cache-producer", "session-id-producer", "latency-slo-admitter", "probabilistic-admitter",
    "request-attribute-reporter", "global-strict-fairness-policy", "round-robin-fairness-policy",
    "program-aware-fairness", "fcfs-ordering-policy", "edf-ordering-policy", "slo-deadline-ordering-policy",
    "static-usage-limit-policy", "metrics-data-source", "core-metrics-extractor", "models-data-source",
    "models-data-extractor", "k8s-notification-source", "endpoint-notification-source", "file-discovery",
    "openai-parser", "anthropic-parser", "vllmhttp-parser", "sglanghttp-parser", "vllmgrpc-parser", "vertexai-parser",
    "passthrough-parser",
]  # fmt: skip
#: Those that nothing here stands for.
REFUSED = {"data-parallel-profile-handler", "request-attribute-reporter"}
#: Parameters of those that cannot do without.
NEEDED: dict[str, dict[str, Any]] = {
    "file-discovery": {"path": "e.yaml"},
    "priority-holdback-policy": {"minCeiling": 0.5},
    "endpoint-attribute-filter": {
        "attribute": "waiting",
        "algorithm": {"type": "threshold", "threshold": {"operator": "LessThan", "value": 3}},
    },
    "endpoint-attribute-scorer": {"attributeKey": "kvUsage", "algorithm": {"type": "linear_higher_is_better"}},
}


def document(type: str) -> str:
    plugin = {"type": type, "parameters": NEEDED.get(type, {})}
    return msgspec.json.encode(
        {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig", "plugins": [plugin]}
    ).decode()


def test_every_beta_plugin_is_there() -> None:
    assert [name for name in BETA if name not in CATALOGUE or CATALOGUE[name].status != "beta"] == []
    assert [name for name, entry in CATALOGUE.items() if entry.status == "beta" and name not in BETA] == []


@pytest.mark.parametrize("name", CATALOGUE)
def test_it_loads_or_names_the_way_out(name: str) -> None:
    entry = CATALOGUE[name]
    if isinstance(entry.refused, str) and entry.refused:
        (problem,) = problems(document(name), need_endpoints=False)
        assert (problem.path, problem.hint) == ("$.plugins[0].type", entry.refused)
        assert entry.status != "beta" or name in REFUSED
    else:
        load(document(name), need_endpoints=False)
        assert entry.counterpart, "somebody will ask what stands for it"


def test_profile_plugins_become_plugins_that_exist() -> None:
    for name, entry in CATALOGUE.items():
        if entry.use is None:
            assert entry.role != "profile" or entry.refused
            continue
        for use in entry.use(parameters(name, entry), 64):
            cls = BUILTINS[use.kind][use.type]
            assert isinstance(use.parameters, cls.Params)
            cls(use.parameters, name="n")


def parameters(name: str, entry: Entry) -> Any:
    return entry.params.model_validate(NEEDED.get(name, {}))
