"""The section `models`."""

from pathlib import Path
from random import Random

import pytest

from fairlead.compat.load import load, problems
from fairlead.core.models import Catalogue, InferenceModel, ModelSet, Origin, Resolution, Target
from fairlead.pool.models_file import listed_models
from fairlead.testing import request

BASE = "endpoints: ['10.0.0.1:8000']\n"
LISTED = "[{name: chat, targets: {a: 90, b: 10}, criticality: Critical}, {name: plain}]"


@pytest.mark.parametrize("models", [LISTED, f"{{list: {LISTED}}}"])
def test_a_list_defines_names(models: str) -> None:
    defined = listed_models(load(f"{BASE}models: {models}").models)
    chat, plain = defined.models
    assert (chat.model, chat.targets) == ("chat", (Target("a", 90), Target("b", 10)))
    catalogue, rng = Catalogue(defined), Random(1)
    drawn = [catalogue.resolve(request(model="chat"), rng) for _ in range(1000)]
    assert {answer.priority for answer in drawn if isinstance(answer, Resolution)} == {10}
    assert 60 < sum(answer.target == "b" for answer in drawn if isinstance(answer, Resolution)) < 140
    assert catalogue.resolve(request(model=plain.model), rng) == Resolution("plain", 0)
    assert catalogue.strict


def test_it_counts_before_a_manifest_of_the_same_name() -> None:
    listed = listed_models(load(f"{BASE}models: {LISTED}").models)
    manifest = InferenceModel(origin=Origin(namespace="a", name="a", created=1.0), model="chat", targets=(Target("z"),))
    catalogue = Catalogue(ModelSet(models=(manifest,)) + listed)
    assert catalogue.conflicts == [("a/a", "configuration/chat")]
    assert "z" not in catalogue.known


def test_files_stay_beside_the_list(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"{BASE}models:\n  list: {LISTED}\n  file: names.yaml\n  sticky: session\n")
    models = load(file).models
    assert (models.file, models.sticky, len(models.list)) == (str(tmp_path / "names.yaml"), "session", 2)


@pytest.mark.parametrize(
    ("models", "path", "message"),
    [
        ("[{name: c, targets: [a, b]}]", "$.models[0].targets", "each target with its weight, such as {llama-3-8b: 90"),
        ("[{name: c, target: {a: 1}}]", "$.models[0].target", "unknown field 'target'"),
        ("[{name: c, targets: {a: -1}}]", "$.models[0].targets.a", "expected an integer >= 0"),
        ("[{targets: {a: 1}}]", "$.models[0]", "field 'name' is missing"),
        ("[c]", "$.models[0]", "expected a mapping"),
        ("[{name: c}, {name: c}]", "$.models", "two models are named 'c': give the name once"),
        ("{list: [{name: c, criticality: critical}]}", "$.models.list[0].criticality", "unknown value 'critical'"),
        ("{lst: []}", "$.models.lst", "unknown field 'lst'"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(models: str, path: str, message: str) -> None:
    (problem,) = problems(f"{BASE}models: {models}")
    assert (problem.path, problem.line) == (path, 2)
    assert message in problem.message
