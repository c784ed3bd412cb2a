"""Manifests made at random: what a published CRD accepts is read, what it refuses is a problem.

Needs the CRDs; they are not part of the project. `FAIRLEAD_CRDS` names a directory with their files.
"""

import json
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from fairlead.pool.model_kinds import read_manifests

DIRECTORY = os.environ.get("FAIRLEAD_CRDS", "")
pytestmark = pytest.mark.skipif(not DIRECTORY, reason="FAIRLEAD_CRDS names no directory with CRDs")
COUNT = 3000

POOL = {"name": "pool"}
GOOD: dict[str, Any] = {
    "InferenceModel": {
        "modelName": "m",
        "criticality": "Standard",
        "poolRef": POOL,
        "targetModels": [{"name": "a", "weight": 3}, {"name": "b", "weight": 1000000}],
    },
    "InferenceObjective": {"priority": -1, "poolRef": POOL},
    "InferenceModelRewrite": {
        "poolRef": POOL,
        "rules": [
            {"matches": [{"model": {"type": "Exact", "value": "m"}}], "targets": [{"modelRewrite": "t", "weight": 1}]}
        ],
    },
}
VALUES = [
    "",
    "x",
    "Exact",
    "Critical",
    "Service",
    "y" * 254,
    "z" * 257,
    0,
    1,
    -1,
    10**6 + 1,
    2**31,
    1.5,
    True,
    None,
    [],
    {},
]


def schemas() -> list[tuple[str, str, dict[str, Any]]]:
    found = []
    for file in sorted(Path(DIRECTORY).glob("*.yaml")):
        crd = yaml.load(file.read_text(), yaml.CSafeLoader)
        kind = crd["spec"]["names"]["kind"]
        for version in crd["spec"]["versions"]:
            if kind in GOOD:
                schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
                found.append((kind, f"{crd['spec']['group']}/{version['name']}", schema))
    return found


def valid(value: Any, schema: dict[str, Any]) -> bool:
    """As far as these schemas go. Unknown fields count as wrong, as with strict validation."""
    match schema["type"]:
        case "object":
            known = schema.get("properties", {})
            return (
                isinstance(value, dict)
                and all(key in value for key in schema.get("required", ()))
                and all(key in known and valid(item, known[key]) for key, item in value.items())
            )
        case "array":
            fits = isinstance(value, list) and schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 10**9)
            return fits and all(valid(item, schema["items"]) for item in value)
        case "string":
            fits = isinstance(value, str) and schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**9)
            return fits and value in schema.get("enum", [value])
        case "integer":
            low, high = schema.get("minimum", -(2**31)), schema.get("maximum", 2**31 - 1)
            return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    raise AssertionError(schema)


def weighted_alike(kind: str, spec: Any) -> bool:
    """The CEL rule of targetModels."""
    targets = objects(spec, "targetModels") if isinstance(spec, dict) and kind == "InferenceModel" else []
    return len({"weight" in target for target in targets}) < 2


def change(value: Any, rng: Random) -> Any:
    """Something in it is another thing."""
    if rng.random() < 0.3 or not value or not isinstance(value, dict | list):
        return rng.choice(VALUES)
    if isinstance(value, list):
        items = [*value, *value] if rng.random() < 0.2 else list(value)
        at = rng.randrange(len(items))
        return [*items[:at], change(items[at], rng), *items[at + 1 :]]
    key = rng.choice(list(value))
    changed = {k: v for k, v in value.items() if k != key or rng.random() < 0.7}
    if key in changed:
        changed[key] = change(value[key], rng)
    return changed if rng.random() < 0.9 else {**changed, "surprise": 1}


def wanted_difference(spec: Any, kind: str) -> bool:
    """Where we mean to differ: nothing at all is as good as absent, names must be names, weight 0 was allowed once, and
    pools of other kinds are nobody's."""
    text = json.dumps(spec)
    if "null" in text or '"weight": 0' in text or '"kind": ' in text or '"group": ' in text:
        return True
    if kind == "InferenceModel":
        return spec.get("modelName") == "" or any(target.get("name") == "" for target in objects(spec, "targetModels"))
    return '"modelRewrite": ""' in text or any("targets" not in rule for rule in objects(spec, "rules"))


def objects(spec: dict[str, Any], key: str) -> list[dict[str, Any]]:
    items = spec.get(key, [])
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def test_agrees_with_the_published_schemas() -> None:
    rng = Random(5)
    found = schemas()
    assert {kind for kind, _, _ in found} == set(GOOD)
    told = {True: 0, False: 0}
    for _ in range(COUNT):
        kind, version, schema = rng.choice(found)
        spec = GOOD[kind]
        for _ in range(rng.randrange(3)):
            spec = change(spec, rng)
        expected = valid(spec, schema) and weighted_alike(kind, spec)
        document = {"apiVersion": version, "kind": kind, "metadata": {"name": "n"}, "spec": spec}
        problems = read_manifests(json.dumps(document).encode()).problems
        if spec is None or (isinstance(spec, dict) and wanted_difference(spec, kind)):
            continue
        assert (not problems) == expected, (document, problems)
        told[expected] += 1
    assert min(told.values()) > COUNT // 10
