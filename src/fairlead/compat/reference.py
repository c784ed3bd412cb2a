"""Descriptions of every configuration field and every built-in plugin, for the reference page and the command
`fairlead config explain`. All of it comes from the models that the loader uses.
"""

import inspect
import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

from msgspec import Struct
from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from fairlead.compat.json_schema import json_schema
from fairlead.config.builtins import ALIASES, BUILTINS, METHODS, POLICIES
from fairlead.config.check import fields
from fairlead.config.plugin_reader import BAND_KINDS, FLOW_KINDS
from fairlead.config.registry import RegisteredPlugin, Registry, declared
from fairlead.config.schema import SECTIONS, BandSettings, FlowSettings
from fairlead.plugins.params import Quantity

#: The heading of each kind of plugin, and its place in the file.
PLACES = {
    "filter": "Filters, in `filters`",
    "scorer": "Scorers, in `scorers`",
    "picker": "Pickers, in `selection.picker`",
    "policy": "Policies, in `policy`",
    "metric-source": "Metric sources, in `metricSources`",
    "parser": "Parsers, in `parsers`",
    "fairness": "Fairness, in `flowControl.fairness`",
    "ordering": "Orderings, in `flowControl.ordering`",
    "saturation": "Saturation, in `flowControl.saturation`",
    "ceiling": "Ceilings, in `flowControl.ceiling`",
}
#: Top-level keys of a file that are not sections.
TOP = {
    "policy": "Name of a policy, or a mapping with its `type` and parameters.",
    "filters": "List of filters; `[]` = none. Default: none, or `queue-depth` 200 with `scorers` or `selection`.",
    "scorers": "List of scorers, with `weight`; `[]` = none.",
    "selection": "`topK` (1 = `max-score`), or `picker` with its `parameters`. Default: `max-score`; `topK: 3` with "
    "`scorers`.",
    "builtinFilters": "`false` leaves out `role`, `subset`, `model-compatibility` and `health`, which otherwise come "
    "first unless listed.",
    "metricSources": "List of plugins that read more columns from metrics pages.",
    "parsers": "List of plugins that understand request bodies of more paths.",
    "flowControl": "Requests wait here while endpoints are busy. Default: on with the default policy and the embedded "
    "gateway.",
    "pools": "With `kubernetes.namespaces`: settings of single pools, by `namespace/name`: fields from `policy` "
    "to `builtinFilters`, `flowControl`, `models`, `autoscaling`, `inspect`.",
    "endpoints": "List of model servers, or a mapping with `file`, `watch` and `allowEmpty`.",
    "seed": "Whole number; the same seed gives the same random choices.",
    "inferenceExtension": "As in a chart's values: `pluginsCustomConfig` holds `filters`, `scorers`, `selection`.",
    "router": "As in a chart's values, with an EndpointPickerConfig.",
}

#: Alternative places of the short scheduling form, besides the top of the file.
_FORMS = ("scheduling.", "inferenceExtension.pluginsCustomConfig.")


class Entry(Struct, frozen=True):
    """A section, a plugin, or the top level."""

    #: For example `gateway`, `cost-model`; empty = the top level.
    name: str
    about: str
    #: (field, type, default, meaning); at the top level (field, "", "", meaning).
    rows: tuple[tuple[str, str, str, str], ...]
    #: The kind of a plugin.
    kind: str = ""


def top() -> Entry:
    properties = json_schema(Registry(list))["$defs"]["Fairlead"]["properties"]
    return Entry("", "", tuple((key, "", "", TOP[key]) for key in properties if key not in SECTIONS))


def sections() -> list[Entry]:
    listed = [Entry(key, _about(kind), tuple(_fields(kind, key))) for key, kind in SECTIONS.items()]
    return [*listed, Entry("flowControl", _about(FlowSettings), tuple(_fields(FlowSettings, "flowControl")))]


def bands() -> Entry:
    kinds = ", ".join(f"`{kind}`" for kind in FLOW_KINDS)
    own = ", ".join(f"`{kind}`" for kind in BAND_KINDS)
    about = (
        f"Beside these: the plugins {kinds}, and `bands`, a list whose entries have the following fields and may\n"
        f"have {own} of their own."
    )
    return Entry("flowControl.bands[]", about, tuple(_fields(BandSettings, "flowControl.bands[]")))


def plugins() -> list[Entry]:
    return [_plugin(RegisteredPlugin(kind, name)) for kind, known in BUILTINS.items() for name in known]


def _registered(wanted: str) -> list[Entry]:
    """The plugins with this type or other name, also `KIND.TYPE`, and also installed ones. Raises `PluginError`."""
    registry, (only, _, name) = Registry(), wanted.rpartition(".")
    plugins = [registry.find(kind, name) for kind in METHODS if only in ("", kind)]
    return [_plugin(plugin) for plugin in plugins if plugin is not None]


def look_up(wanted: str) -> list[Entry]:
    """The description of a field (`gateway.port`, also with `$.` before it and an index), a section or a plugin. A
    field is an entry with one row. Empty if the name is unknown. Raises `PluginError`."""
    name = re.sub(r"\[[0-9]*\]", "[]", wanted.removeprefix("$."))
    for form in _FORMS:
        name = name.removeprefix(form)
    everything = [top(), *sections(), bands(), *plugins()]
    entries = [entry for entry in everything if name in (entry.name, f"{entry.kind}.{entry.name}")]
    parts = [
        Entry(
            name, "", tuple(row for row in entry.rows if row[0] == name or row[0].startswith((f"{name}.", f"{name}[")))
        )
        for entry in everything
        if not entry.kind and entry not in entries
    ]
    return entries + [part for part in parts if part.rows] or _registered(name)


def choices(field: str) -> list[str]:
    """Names of the built-in plugins that may be used in a top-level field."""
    ready = POLICIES if field == "policy" else ()
    return [*ready, *(entry.name for entry in plugins() if PLACES[entry.kind].endswith(f"`{field}`"))]


def names() -> list[str]:
    """All names that `look_up` knows."""
    entries = [top(), *sections(), bands(), *plugins()]
    rows = (row[0] for entry in entries if not entry.kind for row in entry.rows)
    installed = Registry().types("filter") - {*BUILTINS["filter"], *ALIASES["filter"]}
    return [*filter(None, (entry.name for entry in entries)), *rows, *installed]


def _plugin(plugin: RegisteredPlugin) -> Entry:
    kind, name, cls = plugin.kind, plugin.type, plugin.cls
    aliases = ", ".join(f"`{alias}`" for alias, (target, _) in ALIASES[kind].items() if target == name)
    weight = f"Default weight {declared(cls, 'weight', 1.0):g}." if kind == "scorer" else ""
    about = " ".join(filter(None, (_about(cls), weight, f"Also called {aliases}." if aliases else "")))
    return Entry(name, about, tuple(_fields(plugin.params, "")), kind)


def _about(cls: type) -> str:
    """The first paragraph of the class's own docstring."""
    text = inspect.cleandoc(cls.__dict__.get("__doc__") or "")
    first = " ".join(text.split("\n\n")[0].split())
    return "" if first.startswith(cls.__name__ + "(") else first


def _fields(model: type[BaseModel], path: str) -> Iterator[tuple[str, str, str, str]]:
    """The rows of a model's fields. A field that is itself a model is followed by the rows of that model."""
    for key, field in fields(model).items():
        name = f"{path}.{key}" if path else key
        said = field.description or ""
        inner, many = _inner(field.annotation)
        if inner is None:
            yield name, _type(field), _default(field), said
            continue
        if many or said or _optional(field.annotation):
            default = _default(field) if many or _optional(field.annotation) else ""
            yield name, "list" if many == "[]" else "mapping", default, said
        yield from _fields(inner, name + many)


def _inner(kind: Any) -> tuple[type[BaseModel] | None, str]:
    """The model in a field's annotation (`None` = none), and what its path appends to the field's: nothing, `[]` for a
    list, or `.NAME` for a mapping."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind, ""
    for argument in get_args(kind):
        inner, _ = _inner(argument)
        if inner is not None:
            origin = get_origin(kind)
            return inner, "[]" if origin in (list, tuple) else ".NAME" if origin is dict else ""
    return None, ""


def _optional(kind: Any) -> bool:
    return type(None) in get_args(kind)


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "needed"
    if isinstance(value, BaseModel):
        return ""
    plain = to_jsonable_python(value)
    if _type(field) == "size" and isinstance(plain, int) and plain % (1 << 20) == 0:
        return f"`{plain >> 20}Mi`"
    if plain in ("", [], {}):
        return "none"
    return "none" if plain is None else f"`{json.dumps(plain, ensure_ascii=False, separators=(',', ':'))}`"


def _type(field: FieldInfo) -> str:
    units = [mark.unit for mark in _marks(field) if isinstance(mark, Quantity)]
    if units:
        return units[0]
    annotated: Any = Annotated[field.annotation, None, *field.metadata]
    return _shown(TypeAdapter(annotated).json_schema())


def _marks(field: FieldInfo) -> Iterator[Any]:
    """The annotations of a field, including those inside unions."""
    yield from field.metadata
    for argument in get_args(field.annotation):
        if get_origin(argument) is Annotated:
            yield from argument.__metadata__


def _shown(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_shown(choice) for choice in schema["anyOf"] if choice.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]) if value is not None)
    kind = schema.get("type", "any")
    if kind == "array":
        return "list of " + _shown(schema.get("items") or {}) if schema.get("items") else "list"
    if kind == "object":
        return "mapping"
    limits = [
        f"{sign} {schema[key]:,}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
        if key in schema
    ]
    name = {"string": "text", "integer": "whole number", "boolean": "`true`, `false`"}.get(kind, str(kind))
    return f"{name} {', '.join(limits)}".strip()
