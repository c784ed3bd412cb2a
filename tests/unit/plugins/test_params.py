"""Parameters as they stand in files: camelCase, unknown fields refused, durations."""

import msgspec
import pytest

from fairlead.plugins.durations import Duration, seconds
from fairlead.plugins.filters.health import Health
from fairlead.plugins.filters.label_selector import LabelSelector
from fairlead.plugins.filters.memory_pressure import MemoryPressure
from fairlead.plugins.filters.model_compatibility import ModelCompatibility
from fairlead.plugins.filters.queue_depth import QueueDepth
from fairlead.plugins.filters.role import Role
from fairlead.plugins.filters.subset import Subset
from fairlead.plugins.pickers.max_score import MaxScore
from fairlead.plugins.pickers.round_robin import RoundRobin, Uniform
from fairlead.plugins.pickers.top_k import TopK
from fairlead.plugins.pickers.weighted_random import WeightedRandom
from fairlead.plugins.scorers.inflight_tokens import InflightTokens
from fairlead.plugins.scorers.kv_utilization import KvUtilization
from fairlead.plugins.scorers.load_aware import LoadAware
from fairlead.plugins.scorers.lora_aware import LoraAware
from fairlead.plugins.scorers.prefix_aware import PrefixAware
from fairlead.plugins.scorers.session_affinity import SessionAffinity

FULL = [
    (QueueDepth, {"maxQueueLength": 200}),
    (MemoryPressure, {"maxKVUtilization": 0.9, "checkInterval": "5s"}),
    (ModelCompatibility, {}),
    (Health, {"failedScrapes": 2}),
    (Role, {"stage": "prefill"}),
    (Subset, {}),
    (
        LabelSelector,
        {"matchLabels": {"a": "b"}, "matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]},
    ),
    (PrefixAware, {"hashBlockSize": 5, "cacheIndexerURL": "http://indexer"}),
    (LoadAware, {"queueWeightFactor": 0.7, "activeRequestsWeight": 0.3}),
    (KvUtilization, {}),
    (InflightTokens, {"thresholdTokens": 1000}),
    (LoraAware, {}),
    (SessionAffinity, {}),
    (MaxScore, {"nearTie": 0.01}),
    (TopK, {"k": 3}),
    (WeightedRandom, {}),
    (RoundRobin, {}),
    (Uniform, {}),
]


@pytest.mark.parametrize(("plugin", "parameters"), FULL, ids=lambda p: getattr(p, "type", None))
def test_documented_names_load_and_others_do_not(plugin: type, parameters: dict[str, object]) -> None:
    params = msgspec.convert(parameters, plugin.Params)  # type: ignore[attr-defined]
    written = msgspec.json.decode(msgspec.json.encode(params))
    assert {name: written[name] for name in parameters} == parameters
    assert plugin(params).name == plugin.type  # type: ignore[attr-defined]
    assert plugin(params, "mine").name == "mine"
    assert plugin(plugin.Params()).name == plugin.type, "every field has a default"  # type: ignore[attr-defined]
    with pytest.raises(msgspec.ValidationError, match="unknown field `wieght`"):
        msgspec.convert({**parameters, "wieght": 1}, plugin.Params)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("plugin", "parameters"),
    [
        (QueueDepth, {"maxQueueLength": 0}),
        (MemoryPressure, {"maxKVUtilization": 1.5}),
        (MemoryPressure, {"maxKVUtilization": 0}),
        (MemoryPressure, {"checkInterval": "soon"}),
        (MemoryPressure, {"checkInterval": -1}),
        (Role, {"stage": "cook"}),
        (LabelSelector, {"matchExpressions": [{"key": "a", "operator": "Like"}]}),
        (LoadAware, {"queueWeightFactor": -1}),
        (InflightTokens, {"thresholdTokens": 0}),
        (MaxScore, {"nearTie": 1}),
        (TopK, {"k": 0}),
    ],
)
def test_senseless_values_are_refused(plugin: type, parameters: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(parameters, plugin.Params)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5s", 5.0), ("250ms", 0.25), ("1m30s", 90.0), ("2h", 7200.0), ("1.5s", 1.5), ("7us", 7e-6), ("0", 0.0), (3, 3.0)],
)
def test_durations(text: str | float, expected: float) -> None:
    assert seconds(msgspec.convert(text, Duration)) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "5", "s", "5 s", "-5s", "5sec", "1m-30s", "5S"])
def test_strings_that_are_no_durations(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(text, Duration)
    with pytest.raises(ValueError, match="is not a duration"):
        seconds(text)
