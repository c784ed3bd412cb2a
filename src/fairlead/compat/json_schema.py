"""The configuration as a JSON Schema (draft 2020-12), for editors. `fairlead validate` is authoritative.

Everything comes from the models that the loader uses: sections and parameters from pydantic, the rest is added around
them. Installed plugins are included too, so the schema describes this installation.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from fairlead.compat.catalogue import CATALOGUE
from fairlead.compat.document import API_VERSIONS, Document
from fairlead.compat.locate import KIND
from fairlead.config.builtins import ALIASES, BUILTINS, POLICIES, Kind
from fairlead.config.check import fields
from fairlead.config.endpoint_list import KEYS as ENTRY_KEYS
from fairlead.config.plugin_reader import (
    BAND_KINDS,
    BANDS,
    FLOW_CONTROL,
    FLOW_FIELDS,
    FLOW_KINDS,
    METRIC_SOURCES,
    OF_A_POOL,
    PARAMETERS,
    PARSERS,
    POOLS,
)
from fairlead.config.registry import RegisteredPlugin, Registry
from fairlead.config.schema import SECTIONS, BandSettings, FileSource, FlowSettings
from fairlead.core.errors import PluginError

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_REF: Final = "#/$defs/{model}"
Schema = dict[str, Any]


def json_schema(registry: Registry | None = None) -> Schema:
    """The schema for Fairlead's own configuration and for an `EndpointPickerConfig`; `kind` distinguishes them."""
    registry = registry or Registry()
    plugins = {kind: _plugins(kind, registry) for kind in BUILTINS}
    models: list[type[BaseModel]] = [*SECTIONS.values(), FlowSettings, BandSettings, FileSource, Document]
    models += [plugin.params for table in plugins.values() for plugin in table.values() if plugin is not None]
    ref, definitions = _definitions(list(dict.fromkeys(models)))
    entries = {_entry_name(kind): _entry(kind, table, ref) for kind, table in plugins.items()}
    properties = _properties(plugins, ref)
    document = _document(definitions[Document.__name__], properties)
    own = {"type": "object", "properties": {**properties, "router": {"type": "object"}}, "additionalProperties": False}
    return {
        "$schema": DIALECT,
        "title": "Fairlead configuration",
        "type": "object",
        "if": {"required": ["kind"]},
        "then": {"$ref": "#/$defs/EndpointPickerConfig"},
        "else": {"$ref": "#/$defs/Fairlead"},
        "$defs": {**definitions, **entries, KIND: document, "Fairlead": own},
    }


class _Plain(GenerateJsonSchema):
    """Leaves out the title of each field, which would only repeat its name."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _definitions(models: list[type[BaseModel]]) -> tuple[dict[type[BaseModel], Schema], Schema]:
    """The schemas of models: (a reference to each model, all definitions by name)."""
    made, document = models_json_schema(
        [(model, "validation") for model in models], ref_template=_REF, schema_generator=_Plain
    )
    definitions = document["$defs"]
    for definition in definitions.values():
        definition.pop("title", None)
    return {model: made[model, "validation"] for model in models}, definitions


def _plugins(kind: Kind, registry: Registry) -> dict[str, RegisteredPlugin | None]:
    """The plugins by every name that a file may use; `None` for an installed plugin that cannot be loaded."""
    names: Iterable[str] = [*BUILTINS[kind], *ALIASES[kind], *sorted(registry.types(kind) - {*BUILTINS[kind]})]
    by_name: dict[str, RegisteredPlugin | None] = {}
    for name in names:
        try:
            plugin = registry.find(kind, name)
        except PluginError:
            by_name[name] = None
            continue
        if plugin is not None:
            by_name[name] = plugin
    return by_name


def _entry_name(kind: Kind) -> str:
    return f"plugin-{kind}"


def _entry(kind: Kind, table: Mapping[str, RegisteredPlugin | None], ref: Mapping[type[BaseModel], Schema]) -> Schema:
    """An entry of a list, with parameters under one of three keys or next to `type`."""
    types = {*table, *(POLICIES if kind == "policy" else ())}
    names = {"type": {"enum": sorted(types)}, "name": {"type": "string", "minLength": 1}}
    if kind == "scorer":
        names["weight"] = {"type": "number", "minimum": 0}
    return {
        "type": "object",
        "required": ["type"],
        "properties": names,
        "allOf": [True, *(_parameters(name, plugin, ref) for name, plugin in table.items())],
        "unevaluatedProperties": False,
    }


def _parameters(name: str, plugin: RegisteredPlugin | None, ref: Mapping[type[BaseModel], Schema]) -> Schema:
    condition = {"properties": {"type": {"const": name}}, "required": ["type"]}
    if plugin is None:
        return {"if": condition, "then": {"additionalProperties": True}}
    schema = ref[plugin.params]
    pointer = schema["$ref"]
    beside: Schema = {field: {"$ref": f"{pointer}/properties/{_escaped(field)}"} for field in fields(plugin.params)}
    # No parameter is required beside `type` or under `parameters`, because it may be in the other place.
    under: Schema = {"type": "object", "properties": beside, "additionalProperties": False}
    return {"if": condition, "then": {"properties": {**beside, **dict.fromkeys(PARAMETERS, under)}}}


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _properties(plugins: Mapping[Kind, Mapping[str, Any]], ref: Mapping[type[BaseModel], Schema]) -> Schema:
    def listed(kind: Kind) -> Schema:
        return {"type": ["array", "null"], "items": {"$ref": f"#/$defs/{_entry_name(kind)}"}}

    scheduling: Schema = {
        "policy": {
            "anyOf": [
                {"enum": sorted({*POLICIES, *plugins["policy"]})},
                {"$ref": f"#/$defs/{_entry_name('policy')}"},
                {"type": "null"},
            ]
        },
        "filters": listed("filter"),
        "scorers": listed("scorer"),
        "builtinFilters": {"type": ["boolean", "null"]},
        "selection": {
            "type": ["object", "null"],
            "properties": {"topK": {"type": "integer", "minimum": 1}, "picker": {"enum": sorted(plugins["picker"])}},
            "anyOf": [{"required": ["topK"]}, {"required": ["picker"]}, *_ABSENT],
        },
    }
    sections = {key: _or_nothing(ref[kind]) for key, kind in SECTIONS.items()}
    sections["gateway"] = {"anyOf": [{"enum": ["embedded", "none"]}, ref[SECTIONS["gateway"]]]}
    models = ref[SECTIONS["models"]]
    sections["models"] = _or_nothing({"anyOf": [{"$ref": f"{models['$ref']}/properties/list"}, models]})
    pointer = ref[FlowSettings]["$ref"]
    flow: Schema = {field: {"$ref": f"{pointer}/properties/{field}"} for field in FLOW_FIELDS}
    for kind in FLOW_KINDS:
        flow[kind] = _or_nothing({"$ref": f"#/$defs/{_entry_name(kind)}"})
    flow[BANDS] = _or_nothing({"type": "array", "items": _band(ref[BandSettings]["$ref"], flow)})
    flow_control = _or_nothing({"type": "object", "properties": flow, "additionalProperties": False})
    everything = {**scheduling, FLOW_CONTROL: flow_control, **sections}
    of_a_pool = {"type": "object", "properties": {key: everything[key] for key in OF_A_POOL}}
    return {
        **everything,
        METRIC_SOURCES: listed("metric-source"),
        PARSERS: listed("parser"),
        POOLS: _or_nothing({"type": "object", "additionalProperties": {**of_a_pool, "additionalProperties": False}}),
        "endpoints": {"anyOf": [{"type": "array", "items": _ENDPOINT}, ref[FileSource], *_ABSENT]},
        "seed": {"type": ["integer", "null"], "minimum": 0},
        "inferenceExtension": {
            "type": "object",
            "properties": {"pluginsCustomConfig": {"type": "object", "properties": scheduling}},
        },
    }


def _band(pointer: str, flow: Schema) -> Schema:
    properties: Schema = {field: {"$ref": f"{pointer}/properties/{field}"} for field in fields(BandSettings)}
    properties |= {kind: flow[kind] for kind in BAND_KINDS}
    return {"type": "object", "required": ["priority"], "properties": properties, "additionalProperties": False}


def _or_nothing(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _document(schema: Schema, own: Schema) -> Schema:
    """The schema of an `EndpointPickerConfig`, with Fairlead's fields that may be next to those of the reference."""
    beside = {key: own[key] for key in (*SECTIONS, METRIC_SOURCES, PARSERS, "endpoints", "seed", POOLS)}
    known = {"apiVersion": {"enum": list(API_VERSIONS)}, "kind": {"const": KIND}}
    properties = {**beside, **schema["properties"], **known}
    types = {"type": "string", "examples": sorted(CATALOGUE)}
    plugins = {"properties": {"plugins": {"anyOf": [{"items": {"properties": {"type": types}}}, {"type": "null"}]}}}
    return {**schema, "properties": properties, "additionalProperties": False, "allOf": [plugins]}


#: An empty value, which counts as absent.
_ABSENT: Final[tuple[Schema, ...]] = ({"type": "null"}, {"type": "object", "maxProperties": 0})
#: An entry of a list of endpoints.
_ENDPOINT: Final[Schema] = {
    "anyOf": [
        {"type": "string", "examples": ["10.0.0.1:8000"]},
        {
            "type": "object",
            "required": ["address"],
            "properties": {
                **{key: {"type": ["string", "number"]} for key in ENTRY_KEYS},
                "labels": {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}},
            },
            "additionalProperties": False,
        },
    ]
}
