"""Objects of an API server that say something of model names: what they mean, and what to answer in their status.

The reading is that of manifests in files (`model_kinds`). Here one object's problem is its own: it is left out and told
so by its condition, and all others count.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from fairlead.config.model_kinds import Noun, read_object
from fairlead.config.problems import Report
from fairlead.model.inference import InferenceModel, InferenceModelRewrite, InferenceObjective, ModelSet
from fairlead.route.models import Catalogue
from fairlead.wire.kube_status import ACCEPTED, Condition

#: Kind to plural.
PLURALS = {
    "InferenceModel": "inferencemodels",
    "InferenceObjective": "inferenceobjectives",
    "InferenceModelRewrite": "inferencemodelrewrites",
}
#: The groups and versions of each plural, the one that counts first where several are installed.
SERVED = {
    "inferencemodels": (
        ("inference.networking.x-k8s.io", "v1alpha2"),
        ("inference.networking.x-k8s.io", "v1alpha1"),
    ),
    "inferenceobjectives": (
        ("llm-d.ai", "v1alpha2"),
        ("llm-d.ai", "v1"),
        ("inference.networking.x-k8s.io", "v1alpha2"),
    ),
    "inferencemodelrewrites": (
        ("llm-d.ai", "v1alpha2"),
        ("inference.networking.x-k8s.io", "v1alpha2"),
    ),
}
_SHOWN = 5


class ModelObject(Struct, frozen=True):
    """One object. `item` has what is needed to write its status; `noun` is `None` when it cannot be used."""

    kind: str
    item: dict[str, Any]
    noun: Noun | None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_model_object(value: Mapping[str, Any], kind: str, version: str) -> ModelObject:
    """`version`: `group/version`. Nothing raises."""
    report = Report(lambda place: 0)
    noun = read_object(dict(value), report, (), kind, version)
    report.close()
    metadata, status = value.get("metadata"), value.get("status")
    metadata = metadata if isinstance(metadata, dict) else {}
    item = {
        "apiVersion": value.get("apiVersion") or version,
        "kind": value.get("kind") or kind,
        "metadata": {key: metadata.get(key) for key in ("name", "namespace", "generation")},
        "spec": {"pools": _pools(value)},
        "status": {"conditions": [one for one in _conditions(status) if one.get("type") == ACCEPTED]},
    }
    problems = tuple(str(problem) for problem in report.problems[:_SHOWN])
    return ModelObject(kind, item, noun, problems, tuple(str(note) for note in report.notes[:_SHOWN]))


def model_set(objects: Mapping[str, Mapping[str, ModelObject]], pool: str, namespace: str) -> ModelSet:
    """What is defined for a pool, of objects by plural and by key."""
    nouns = [one.noun for table in objects.values() for one in table.values() if one.noun is not None]
    every = ModelSet(
        tuple(noun for noun in nouns if isinstance(noun, InferenceModel)),
        tuple(noun for noun in nouns if isinstance(noun, InferenceObjective)),
        tuple(noun for noun in nouns if isinstance(noun, InferenceModelRewrite)),
    )
    return every.of_pool(pool, namespace)


def conditions(
    objects: Mapping[str, Mapping[str, ModelObject]], pool: str, namespace: str
) -> dict[tuple[str, str], Condition]:
    """What the status of each object of the pool should say, by plural and key. Objects of other pools are theirs."""
    owners = dict(Catalogue(model_set(objects, pool, namespace)).conflicts)
    found: dict[tuple[str, str], Condition] = {}
    for plural, table in objects.items():
        for key, one in table.items():
            if one.noun is not None and not one.noun.origin.is_for(pool, namespace):
                continue
            if one.noun is None and pool not in one.item["spec"]["pools"]:
                continue
            found[plural, key] = _condition(one, owners.get(key) if plural == "inferencemodels" else None)
    return found


def _condition(one: ModelObject, owner: str | None) -> Condition:
    if one.noun is None:
        return Condition(False, "Invalid", "; ".join(one.problems))
    if owner is not None and isinstance(one.noun, InferenceModel):
        message = f"modelName {one.noun.model} is taken by the older InferenceModel {owner}"
        return Condition(False, "ModelNameInUse", message)
    return Condition(True, ACCEPTED, "; ".join(("in use", *one.notes)))


def _pools(value: Mapping[str, Any]) -> list[str]:
    """Names of the pools that an object refers to, as far as that can be read."""
    spec = value.get("spec")
    if not isinstance(spec, dict):
        return []
    several = spec.get("poolRefs")
    refs = [spec.get("poolRef"), *(several if isinstance(several, list) else ())]
    return [ref["name"] for ref in refs if isinstance(ref, dict) and isinstance(ref.get("name"), str)]


def _conditions(status: object) -> list[dict[str, Any]]:
    conditions = status.get("conditions") if isinstance(status, dict) else None
    return [one for one in conditions if isinstance(one, dict)] if isinstance(conditions, list) else []
