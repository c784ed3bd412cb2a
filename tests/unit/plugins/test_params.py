"""Parameters as they stand in files: camelCase, unknown fields refused, durations."""

import pytest
from pydantic import ValidationError

from fairlead.plugins.filters.ability import LabelSelector, ModelCompatibility, Role, Subset
from fairlead.plugins.filters.availability import Health
from fairlead.plugins.filters.load import MemoryPressure, QueueDepth
from fairlead.plugins.params import Params, Seconds
from fairlead.plugins.pickers import MaxScore, RoundRobin, TopK, Uniform, WeightedRandom
from fairlead.plugins.scorers.load import InflightTokens, KvUtilization, LoadAware
from fairlead.plugins.scorers.lora import LoraAware
from fairlead.plugins.scorers.prefix import PrefixAware
from fairlead.plugins.scorers.session_affinity import SessionAffinity

FULL = [
    (QueueDepth, {"maxQueueLength": 200}),
    (MemoryPressure, {"maxKVUtilization": 0.9, "checkInterval": 5.0}),
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
    params = plugin.Params.model_validate(parameters)  # type: ignore[attr-defined]
    written = params.model_dump(mode="json")
    assert {name: written[name] for name in parameters} == parameters
    assert plugin(params).name == plugin.type  # type: ignore[attr-defined]
    assert plugin(params, "mine").name == "mine"
    assert plugin(plugin.Params()).name == plugin.type, "every field has a default"  # type: ignore[attr-defined]
    with pytest.raises(ValidationError, match="wieght"):
        plugin.Params.model_validate({**parameters, "wieght": 1})  # type: ignore[attr-defined]


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
    with pytest.raises(ValidationError):
        plugin.Params.model_validate(parameters)  # type: ignore[attr-defined]


class Waiting(Params):
    wait: Seconds = 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5s", 5.0), ("250ms", 0.25), ("1m30s", 90.0), ("2h", 7200.0), ("1.5s", 1.5), ("7us", 7e-6), ("0", 0.0), (3, 3.0)],
)
def test_durations(text: str | float, expected: float) -> None:
    assert Waiting.model_validate({"wait": text}).wait == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "5", "s", "5\ts", "-5s", "5seks", "1m-30s", "5S", -1, True])
def test_what_is_no_duration(text: object) -> None:
    with pytest.raises(ValidationError):
        Waiting.model_validate({"wait": text})


def test_a_tuple_is_made_of_a_list_and_nothing_else() -> None:
    made = LabelSelector.Params.model_validate({"matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]})
    assert made.match_expressions[0].values == ("b",)
    with pytest.raises(ValidationError):
        LabelSelector.Params.model_validate({"matchExpressions": "ab"})
