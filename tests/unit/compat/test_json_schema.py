"""The JSON Schema for editors says what the loader does."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from fairlead.compat.json_schema import DIALECT, json_schema
from fairlead.compat.load import FIELDS, problems
from fairlead.config.builtins import ALIASES, BUILTINS
from fairlead.config.check import fields
from fairlead.config.schema import SECTIONS

ROOT = Path(__file__).parents[3]
SCHEMA = json_schema()
ONE = "endpoints: ['127.0.0.1:8000']\n"
GOOD = [
    *(path.read_text() for path in sorted((ROOT / "examples").glob("*.yaml")) if path.name != "endpoints.yaml"),
    *(p.read_text() for p in sorted((ROOT / "tests/data/epp-configs").glob("*.yaml")) if p.name != "endpoints.yaml"),
    *re.findall(r"^```yaml(?: fragment)?\n(.*?)^```", (ROOT / "docs/configuration.md").read_text(), re.M | re.S),
    *(ONE + f"{key}: {nothing}" for key in ("selection", "metrics") for nothing in ("", "{}")),
    *(ONE + f"{key}:" for key in ("policy", "filters", "scorers", "builtinFilters", "parsers", "metricSources")),
    ONE + "policy: {type: random}",
    ONE + "policy: {type: default, parameters: {interference: 1}}",
    ONE + "models: [{name: chat, targets: {a: 90, b: 10}}]",
    ONE + "models: {list: [{name: chat}], sticky: session}",
    *(f"endpoints: {nothing}\nkubernetes: {{pool: p}}" for nothing in ("", "{}")),
]
BAD = [
    ONE + "gatway: none",
    ONE + "filters: [{type: quue}]",
    ONE + "filters: [{type: queue-depth, maxQueueLenght: 3}]",
    ONE + "filters: [{type: queue-depth, parameters: {maxQueueLenght: 3}}]",
    ONE + "filters: [{type: queue-depth, maxQueueLength: 0}]",
    ONE + "scorers: [{type: load-aware, weight: -1}]",
    ONE + "selection: {topK: 0}",
    ONE + "selection: {name: x}",
    ONE + "gateway:",
    ONE + "models: [{targets: {a: 1}}]",
    ONE + "policy: rondom",
    ONE + "policy: {type: random, seed: 1}",
    ONE + "policy: {type: default, interferenc: 1}",
    ONE + "metrics: {interval: soon}",
    ONE + "gateway: {port: 70000}",
    ONE + "parsing: {maxBodyBytes: lots}",
    "endpoints: [{name: x}]",
    "kind: EndpointPickerConfig\napiVersion: x\n" + ONE,
    "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugin: []\n" + ONE,
]


def test_it_is_plain_json_of_the_right_dialect() -> None:
    assert SCHEMA["$schema"] == DIALECT
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*map(references, node.values())) if node else own
    return set().union(*map(references, node)) if isinstance(node, list) else set()


def test_every_reference_leads_somewhere() -> None:
    for reference in references(SCHEMA):
        node: Any = SCHEMA
        for step in reference.removeprefix("#/").split("/"):
            assert step in node, reference
            node = node[step]


def test_every_field_and_every_plugin_is_in_it() -> None:
    own = SCHEMA["$defs"]["Fairlead"]["properties"]
    assert {*FIELDS} <= {*own}
    for kind in SECTIONS.values():
        properties = SCHEMA["$defs"][kind.__name__]["properties"]
        assert {*fields(kind)} == {*properties}
    for name, table in BUILTINS.items():
        types = SCHEMA["$defs"][f"plugin-{name}"]["properties"]["type"]["enum"]
        assert {*table, *ALIASES[name]} <= {*types}


def test_quantities_may_be_written_as_text() -> None:
    interval = SCHEMA["$defs"]["Metrics"]["properties"]["interval"]
    assert interval["type"] == ["number", "string"]
    assert re.search(interval["pattern"], "1m30s") and not re.search(interval["pattern"], "soon")
    body = SCHEMA["$defs"]["Parsing"]["properties"]["maxBodyBytes"]
    assert body["type"] == ["integer", "string"] and re.search(body["pattern"], "64MiB")


def validator() -> Any:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    return jsonschema.Draft202012Validator(SCHEMA)


def test_what_loads_is_valid() -> None:
    check = validator()
    for text in GOOD:
        assert [error.message for error in check.iter_errors(yaml.safe_load(text))] == [], text


def test_what_does_not_load_is_not() -> None:
    check = validator()
    for text in BAD:
        assert problems(text) != [], text
        assert not check.is_valid(yaml.safe_load(text)), text
