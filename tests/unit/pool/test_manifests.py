"""Manifests of model names, as operators write them."""

from math import inf
from pathlib import Path
from random import Random

import pytest

from fairlead.core.models import InferenceModel, Latency, Target
from fairlead.pool.model_kinds import Manifests, read_manifests

MODEL = """\
apiVersion: inference.networking.x-k8s.io/v1alpha2
kind: InferenceModel
metadata:
  name: chat
  namespace: serving
  creationTimestamp: 2026-01-31T12:00:00Z
spec:
  modelName: chat
  criticality: Critical
  poolRef: {name: pool}
  targetModels:
  - {name: llama-3-8b, weight: 90}
  - {name: llama-3-8b-tuned, weight: 10}
"""
OBJECTIVE = """\
apiVersion: llm-d.ai/v1alpha2
kind: InferenceObjective
metadata: {name: batch}
spec: {priority: -5, poolRef: {name: pool, group: llm-d.ai}}
status: {conditions: []}
"""
REWRITE = """\
apiVersion: llm-d.ai/v1alpha2
kind: InferenceModelRewrite
metadata: {name: canary, labels: {a: b}, managedFields: [{}]}
spec:
  poolRef: {name: pool}
  rules:
  - matches: [{model: {type: Exact, value: chat}}, {model: {value: chat-2}}]
    targets: [{modelRewrite: new, weight: 1}, {modelRewrite: old, weight: 99}]
  - targets: [{modelRewrite: fallback}]
"""
POOL = """\
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {name: pool}
spec: {selector: {matchLabels: {app: x}}}
"""


def read(text: str) -> Manifests:
    return read_manifests(text.encode())


def problems(text: str) -> list[str]:
    found = read(text)
    return [str(problem) for problem in found.problems]


def test_all_kinds_in_one_file() -> None:
    found = read(f"# names\n---\n{MODEL}---\n{OBJECTIVE}\n---  # next\n{REWRITE}...\n---\n{POOL}")
    assert not found.problems
    (model,), (objective,), (rewrite,) = found.models.models, found.models.objectives, found.models.rewrites
    assert (str(model.origin), model.origin.created, model.origin.pools) == ("serving/chat", 1769860800, ("pool",))
    assert (model.model, model.criticality) == ("chat", "Critical")
    assert model.targets == (Target("llama-3-8b", 90), Target("llama-3-8b-tuned", 10))
    assert (str(objective.origin), objective.origin.created, objective.priority) == ("default/batch", inf, -5)
    first, second = rewrite.rules
    assert first.models == ("chat", "chat-2")
    assert first.targets == (Target("new", 1), Target("old", 99))
    assert (second.models, second.targets) == ((), (Target("fallback"),))
    (note,) = found.notes
    assert str(note) == "line 36, $.kind: InferencePool says nothing of model names; it is left out"


@pytest.mark.parametrize("kind", ["List", "InferenceModelList"])
def test_lists(kind: str) -> None:
    version = "v1" if kind == "List" else "inference.networking.x-k8s.io/v1alpha2"
    item = "".join(f"  {line}\n" for line in MODEL.splitlines())
    if kind != "List":
        item = "".join(item.splitlines(keepends=True)[2:])
    found = read(f"apiVersion: {version}\nkind: {kind}\nitems:\n-{item[1:]}")
    assert not found.problems
    assert [model.model for model in found.models.models] == ["chat"]


def test_json() -> None:
    text = '{"apiVersion":"llm-d.ai/v1alpha2","kind":"InferenceObjective","metadata":{"name":"o"},'
    found = read(text + '\n\t"spec":{"poolRef":{"name":"p"}}}')
    assert not found.problems
    assert found.models.objectives[0].priority == 0


def test_older_and_newer_forms() -> None:
    found = read(MODEL.replace("v1alpha2", "v1alpha1").replace("Critical", "Default").replace("10}", "0}"))
    assert not found.problems
    assert found.models.models[0].criticality == "Default"
    later = OBJECTIVE.replace("poolRef: {name: pool, group: llm-d.ai}", "poolRefs: [{name: a}, {name: b}]")
    assert read(later).models.objectives[0].origin.pools == ("a", "b")
    every = OBJECTIVE.replace("poolRef: {name: pool, group: llm-d.ai}", "poolSelector: {}")
    assert read(every).models.objectives[0].origin.pools == ()


def test_latencies_are_annotations() -> None:
    annotated = 'annotations: {fairlead.dev/slo-ttft-ms: "500", fairlead.dev/slo-tpot-ms: "40.5", other: "x"}'
    found = read(OBJECTIVE.replace("{name: batch}", f"{{name: batch, {annotated}}}"))
    assert not found.problems and found.models.objectives[0].latency == Latency(500.0, 40.5)
    found = read(MODEL.replace("spec:", f"  {annotated}\nspec:", 1))
    assert not found.problems and found.models.models[0].latency == Latency(500.0, 40.5)
    assert read(OBJECTIVE).models.objectives[0].latency == Latency()
    wrong = OBJECTIVE.replace("{name: batch}", "{name: batch, annotations: {fairlead.dev/slo-ttft-ms: soon}}")
    (problem,) = problems(wrong)
    assert "slo-ttft-ms" in problem and "expected milliseconds such as '500', got 'soon'" in problem


def test_an_object_in_both_groups_counts_once() -> None:
    legacy = OBJECTIVE.replace("llm-d.ai/v1alpha2", "inference.networking.x-k8s.io/v1alpha2").replace("-5", "9")
    for text in (f"{OBJECTIVE}---\n{legacy}", f"{legacy}---\n{OBJECTIVE}"):
        found = read(text)
        assert [objective.priority for objective in found.models.objectives] == [-5]
        assert not found.problems
        assert len(found.notes) == 1


@pytest.mark.parametrize("text", ["", "\n", "---\n---\n", "# nothing\n", "%YAML 1.1\n---\n", "---\n# x\n---\n...\n"])
def test_nothing_defined(text: str) -> None:
    assert read(text) == Manifests()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (MODEL.replace("modelName", "modelname"), "line 8, $.spec.modelname: unknown field 'modelname' (did you mean"),
        (MODEL.replace("weight: 90", "wieght: 90"), "line 12, $.spec.targetModels[0].wieght: unknown field 'wieght'"),
        (MODEL.replace(", weight: 10", ""), "line 11, $.spec.targetModels: weights should be set for all models"),
        (MODEL.replace("90", "1000001"), "line 12, $.spec.targetModels[0].weight: expected an integer <= 1000000"),
        (MODEL.replace("90", "ninety"), "line 12, $.spec.targetModels[0].weight: expected an integer"),
        (MODEL.replace("Critical", "critical"), "line 9, $.spec.criticality: unknown value 'critical' (did you mean"),
        (MODEL.replace("  poolRef: {name: pool}\n", ""), "line 7, $.spec: field 'poolRef' is missing"),
        (MODEL.replace("{name: pool}", "{name: pool, kind: Service}"), "$.spec.poolRef.kind: expected InferencePool"),
        (MODEL.replace("modelName: chat", "modelName: 1.10"), "line 8, $.spec.modelName: expected a string"),
        (MODEL.replace("v1alpha2", "v2"), "line 1, $.apiVersion: InferenceModel has no version"),
        (MODEL.replace("  name: chat\n", ""), "line 3, $.metadata.name: expected a string"),
        (MODEL.replace("2026-01-31T12:00:00Z", "yesterday"), "line 6, $.metadata.creationTimestamp: expected a time"),
        (MODEL.replace("spec:", "specs:"), "line 7, $.specs: unknown field 'specs' (did you mean 'spec'?)"),
        (REWRITE.replace("[{modelRewrite: fallback}]", "[]"), "$.spec.rules[1].targets: at least one target is needed"),
        (
            REWRITE.replace("type: Exact", "type: Prefix"),
            "$.spec.rules[0].matches[0].model.type: unknown value 'Prefix'",
        ),
        (
            REWRITE.replace("weight: 99", "weight: 0"),
            "line 8, $.spec.rules[0].targets[1].weight: expected an integer >= 1",
        ),
        (OBJECTIVE.replace("-5", "2147483648"), "$.spec.priority: expected an integer <= 2147483647"),
        (OBJECTIVE.replace(", poolRef: {name: pool, group: llm-d.ai}", ""), "$.spec: field 'poolRef' is missing"),
        (f"{MODEL}---\n{MODEL}", "line 15: InferenceModel serving/chat is given twice"),
        ("kind: [x]\n", "field 'kind' is missing"),
        ("just text\n", "expected an object, got 'just text'"),
        ("- a\n", "expected an object, got a list"),
        ("kind: List\nitems: 3\n", "$.items: expected a list, got 3"),
        ("kind: List\nitems: [{kind: List, items: []}, 7]\n", "$.items[1]: expected an object, got 7"),
        (f"{MODEL}---\na: [\n", "line 15: not valid YAML"),
        ("a: 1\na: 2\n", "line 2, $.a: 'a' is given twice"),
        ("\x00", "not valid YAML"),
    ],
)
def test_problems(text: str, problem: str) -> None:
    found = problems(text)
    assert any(problem in one for one in found), found


def test_a_wrong_object_does_not_hide_others() -> None:
    found = read(f"{MODEL.replace('Critical', 'x')}---\n{OBJECTIVE.replace('-5', 'y')}---\n{REWRITE}")
    assert [problem.line for problem in found.problems] == [9, 18]
    assert found.models.rewrites


def test_mixed_weights_of_a_rewrite_are_worth_a_note() -> None:
    found = read(REWRITE.replace(", weight: 99", ""))
    assert not found.problems
    assert "get nothing" in found.notes[0].message


def test_what_is_too_much() -> None:
    assert "larger than 1 MiB" in problems(" " * (1 << 20) + " ")[0]
    bomb = "x: &a [1,1,1,1,1,1,1,1]\ny: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nz: &c [*b,*b,*b,*b,*b,*b,*b,*b]\n"
    bomb += "v: &d [*c,*c,*c,*c,*c,*c,*c,*c]\nw: [*d,*d,*d,*d,*d,*d,*d,*d]\n---\n"
    assert any(
        "more than 300000 values" in problem
        for problem in problems("kind: x\n" + bomb + "kind: x\n" + ("kind: x\n" + bomb) * 50)
    )
    items = "".join("- {kind: X}\n" for _ in range(10_001))
    assert any("more than 10000 objects" in problem for problem in problems(f"kind: List\nitems:\n{items}"))


def test_the_documents_example_is_right() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    (example,) = [block for block in page.split("```") if "kind: InferenceModel\n" in block]
    found = read(example.partition("\n")[2])
    assert not found.problems
    assert found.models.models[0].model == "chat"


def test_nothing_raises() -> None:
    rng = Random(3)
    whole = f"{MODEL}---\n{OBJECTIVE}---\n{REWRITE}".encode()
    for _ in range(300):
        text = bytearray(whole)
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(text))
            text[at : at + rng.randrange(4)] = rng.choice(
                [b"", b"---\n", b"[", b"\xff", b"- ", b"null", b"&a ", b"*a", b"\n"]
            )
        found = read_manifests(bytes(text))
        assert found.problems or isinstance(found.models.models, tuple)
        assert all(isinstance(model, InferenceModel) for model in found.models.models)
