"""The section `kubernetes`, and the flags that count before it."""

import time
from pathlib import Path
from typing import Any

import pytest

from fairlead.cli.serve import labels, overlay, port_numbers
from fairlead.compat.load import load, overlaid, problems
from fairlead.config.reload import plan_reload
from fairlead.core.errors import ConfigError
from fairlead.pool.model_kinds import MAX_OBJECT, conditions, model_set, read_model_object


def test_a_pool_stands_for_endpoints() -> None:
    config = load("kubernetes: {pool: llama, namespace: serving}")
    assert config.kubernetes.on
    assert not config.kubernetes.leader_election.enabled
    assert not load("endpoints: ['10.0.0.1:80']").kubernetes.on


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("endpoints: ['10.0.0.1:80']\nkubernetes: {pool: a}", "come from Kubernetes already"),
        ("kubernetes: {pool: a, selector: {a: b}, targetPorts: [1]}", "not both"),
        ("kubernetes: {namespaces: [a], pool: a}", "give 'pool' or 'namespaces', not both"),
        ("kubernetes: {namespaces: [a]}", "the embedded gateway has one pool"),
        ("kubernetes: {pool: a, podSelector: {a: b}}", "it is for several pools"),
        ("gateway: none\nkubernetes: {namespaces: [a], leaderElection: {enabled: true, service: s}}", "a service each"),
        (
            "gateway: none\nkubernetes: {namespaces: [a]}\nreplicas: {via: 'valkey://x:1'}",
            "do not share what they know",
        ),
        ("gateway: none\nkubernetes: {namespaces: [a]}\nautoscaling: {port: 1}", "KEDA asks for one pool"),
        ("gateway: none\nkubernetes: {namespaces: [a]}\nals: {port: 9}", "an access log does not name its pool"),
        ("gateway: none\nkubernetes: {namespaces: [a]}\npools: {llama: {}}", "'llama' names no pool"),
        ("gateway: none\nkubernetes: {namespaces: [a]}\npools: {a/b: {log: {}}}", "all pools share it"),
        (
            "gateway: none\nkubernetes: {namespaces: [a]}\npools: {a/b: {scorers: [{type: x}]}}",
            '$.pools["a/b"].scorers[0]',
        ),
        ("kubernetes: {pool: a}\npools: {a/b: {}}", "there are not several pools"),
        ("kubernetes: {selector: {a: b}}", "'targetPorts' is missing"),
        ("kubernetes: {pool: a, targetPorts: [80]}", "'selector' is missing"),
        ("kubernetes: {selector: {a: b}, targetPorts: [80, 80]}", "unique"),
        ("kubernetes: {selector: {a: b}, targetPorts: [1, 2, 3, 4, 5, 6, 7, 8, 9]}", "at most 8 ports"),
        ("kubernetes: {pool: a, group: other}", "unknown value"),
        ("endpoints: ['10.0.0.1:80']\nkubernetes: {leaderElection: {enabled: true}}", "no pool to lead"),
        ("kubernetes: {pool: a, leaderElection: {service: epp-leader}}", "no leader to lead to"),
        ("kubernetes: {pool: a, leaderElection: {leaseDuration: 5s}}", "shorter than leaseDuration"),
        ("kubernetes: {pool: a, leaderElection: {retryPeriod: 6s}}", "shorter than renewDeadline"),
        (
            "kubernetes: {pool: a, leaderElection: {leaseDuration: 0.9, renewDeadline: 0.5, retryPeriod: 0.1}}",
            "whole seconds",
        ),
        ("{}", "or a pool: under kubernetes:"),
    ],
)
def test_what_does_not_fit_together(text: str, said: str) -> None:
    assert any(said in str(problem) for problem in problems(text)), problems(text)


def test_flags_count_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("kubernetes: {pool: a, namespace: x}\nextProc: {port: 7}\n")
    flags = overlay(
        {
            "kubernetes.pool": "b",
            "kubernetes.leaderElection": {"enabled": True},
            "extProc.healthPort": 9003,
            "admin.port": 0,
        }
    )
    config = load(file, flags=flags)
    assert (config.kubernetes.pool, config.kubernetes.namespace) == ("b", "x")
    assert config.kubernetes.leader_election.enabled
    assert (config.ext_proc.port, config.ext_proc.health_port) == (7, 9003)
    changes, refused = plan_reload(config, load(file, flags=config.flags))
    assert (changes.paths, refused) == ((), [])


def test_flags_of_pods_without_a_pool() -> None:
    assert labels("app=vllm, tier = gpu") == {"app": "vllm", "tier": "gpu"}
    assert port_numbers("8000,8001") == [8000, 8001]
    assert overlay({"kubernetes.selector": labels(""), "kubernetes.targetPorts": port_numbers("")}) == {}
    for read, wrong in ((labels, "app"), (labels, "=x"), (port_numbers, "http"), (port_numbers, ",")):
        with pytest.raises(ConfigError):
            read(wrong)


def test_nested_mappings_are_merged() -> None:
    assert overlaid({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 4}, "d": {"e": 5}}) == {
        "a": {"b": 1, "c": 4},
        "d": {"e": 5},
    }


def test_another_pool_needs_a_restart() -> None:
    _, refused = plan_reload(load("kubernetes: {pool: a}"), load("kubernetes: {pool: b}"))
    assert [problem.path for problem in refused] == ["$.kubernetes.pool"]


X = "inference.networking.x-k8s.io/v1alpha2"


def model(name: str, asked: Any, created: str = "2026-01-01T00:00:00Z", pool: str = "p") -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "n", "creationTimestamp": created, "generation": 2, "uid": "u"},
        "spec": {"modelName": asked, "poolRef": {"name": pool}},
    }


def table(*values: dict[str, Any]) -> Any:
    objects = [read_model_object(value, "InferenceModel", X) for value in values]
    return {
        "inferencemodels": {f"n/{value['metadata']['name']}": one for value, one in zip(values, objects, strict=True)}
    }


def test_the_oldest_has_the_name_and_the_broken_one_is_told() -> None:
    objects = table(
        model("late", "chat", "2026-02-01T00:00:00Z"),
        model("early", "chat"),
        model("broken", 7),
        model("foreign", "chat", "2020-01-01T00:00:00Z", pool="q"),
    )
    found = {key: (one.status, one.reason) for (_, key), one in conditions(objects, "p", "n").items()}
    assert found == {
        "n/late": (False, "ModelNameInUse"),
        "n/early": (True, "Accepted"),
        "n/broken": (False, "Invalid"),
    }
    assert len(model_set(objects, "p", "n").models) == 2


def test_fields_of_a_newer_crd_are_left_out_and_told() -> None:
    value = model("a", "chat")
    value["spec"].update(newField="Auto", targetModels=[{"name": "base", "mode": "x"}])
    one = read_model_object(value, "InferenceModel", X)
    plain = {**value["spec"], "targetModels": [{"name": "base"}]}
    del plain["newField"]
    assert one.definition == read_model_object({**value, "spec": plain}, "InferenceModel", X).definition is not None
    (said,) = conditions({"inferencemodels": {"n/a": one}}, "p", "n").values()
    left_out = ["$.spec.newField", "$.spec.targetModels[0].mode"]
    assert said.status
    assert all(f"{path}: unknown field; it is left out" in said.message for path in left_out)


def test_a_match_with_a_field_of_a_newer_crd_is_not_widened() -> None:
    match = {"model": {"type": "Exact", "value": "chat"}, "headers": [{"name": "x-beta"}]}
    rules = [{"matches": [match], "targets": [{"modelRewrite": "base"}]}]
    value = {**model("a", "chat"), "spec": {"poolRef": {"name": "p"}, "rules": rules}}
    one = read_model_object(value, "InferenceModelRewrite", "llm-d.ai/v1alpha2")
    assert one.definition is None
    assert "headers" in one.problems[0]


def test_an_object_with_thousands_of_faults_is_told_at_once() -> None:
    targets = [{"modelRewrite": ""}] * 10_000
    value = {**model("a", ""), "spec": {"poolRef": {"name": "p"}, "rules": [{"targets": targets}]}}
    began = time.process_time()
    one = read_model_object(value, "InferenceModelRewrite", "llm-d.ai/v1alpha2")
    assert time.process_time() - began < 5.0, "each fault was compared with all others"
    assert one.definition is None
    assert "modelRewrite" in one.problems[0]


def test_an_object_that_takes_long_to_read_is_left_out() -> None:
    one = read_model_object(model("a", "chat"), "InferenceModel", X, MAX_OBJECT + 1)
    (said,) = conditions({"inferencemodels": {"n/a": one}}, "p", "n").values()
    assert (said.status, said.message) == (False, "$.spec: the object is larger than 256 KiB")


def test_only_what_is_needed_is_kept() -> None:
    one = read_model_object({**model("a", "b"), "status": {"conditions": [{"type": "Ready"}]}}, "InferenceModel", X)
    again = read_model_object({**model("a", "b"), "status": {}}, "InferenceModel", X)
    assert one == again
    assert one.item["metadata"] == {"name": "a", "namespace": "n", "generation": 2}


@pytest.mark.parametrize(
    "value", [{}, {"metadata": 7}, {"metadata": {"name": 7}, "spec": [], "status": {"conditions": 1}}]
)
def test_odd_objects_are_told_not_raised(value: dict[str, Any]) -> None:
    one = read_model_object(value, "InferenceModel", X)
    assert one.definition is None
    assert one.problems
