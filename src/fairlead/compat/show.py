"""The effective configuration, value by value, with the origin of each value."""

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from fairlead.compat.locate import is_document
from fairlead.config.builtins import POLICIES
from fairlead.config.check import fields, plain
from fairlead.config.endpoint_list import Listed
from fairlead.config.problems import Place, show
from fairlead.config.schema import Config, PluginSpec, Section
from fairlead.config.yaml import Tree
from fairlead.core.text import masked
from fairlead.plugins.params import camel

DEFAULT = "default"


class Value(Struct, frozen=True):
    """`origin`: `line 7`, `default`, `policy: random (line 2)`, `built in`, `from gateway.mode`, …"""

    path: str
    value: Any
    origin: str


def effective(config: Config, tree: Tree) -> list[Value]:
    """Every value of a configuration that was read from `tree`. Passwords in URLs are masked."""
    return list(_Show(config, tree).values())


class _Show:
    def __init__(self, config: Config, tree: Tree) -> None:
        self._config = config
        self._tree = tree
        root = tree.root.value
        self._keys = root if isinstance(root, dict) else {}
        named = [spec.stands_for for spec in config.policy.plugins()]
        self._foreign = is_document(dict(self._keys)) or "router" in self._keys or any(named)

    def values(self) -> Iterator[Value]:
        yield from self._policy()
        for plural, specs in (("metricSources", self._config.metric_sources), ("parsers", self._config.parsers)):
            yield from (value for i, spec in enumerate(specs) for value in self._plugin(f"$.{plural}[{i}]", spec))
        flow = self._config.flow_control
        if flow is not None:
            yield from self._section(("flowControl",), flow.settings)
            for spec in flow.plugins():
                yield from self._plugin(f"$.flowControl.{spec.kind}", spec)
            for i, band in enumerate(flow.bands):
                yield from self._section(("flowControl", "bands", i), band.settings)
                for named in (plugin for plugin in (band.fairness, band.ordering) if plugin is not None):
                    yield from self._plugin(f"$.flowControl.bands[{i}].{named.kind}", named)
        yield from self._endpoints()
        for name, section in self._config:
            if isinstance(section, Section):
                yield from self._section((camel(name),), section)
        yield Value("$.seed", self._config.seed, self._origin(("seed",)))

    # ---- the policy ----

    def _policy(self) -> Iterator[Value]:
        policy = self._config.policy
        origin = self._origin(("policy",))
        if self._foreign:
            origin = "schedulingProfiles"
        elif policy.name == "custom":
            origin = "the lists of the file"
        yield Value("$.policy", policy.name, origin)
        if policy.plugin is not None:
            yield from self._plugin("$.policy", policy.plugin)
        for plural, specs in (("filters", policy.filters), ("scorers", policy.scorers)):
            for i, spec in enumerate(specs):
                yield from self._plugin(f"$.{plural}[{i}]", spec)
        if policy.picker is not None:
            yield from self._plugin("$.selection", policy.picker)

    def _plugin(self, path: str, spec: PluginSpec) -> Iterator[Value]:
        unsaid = self._unsaid(spec)
        named = {"type": spec.type, "name": spec.name} | ({"weight": spec.weight} if spec.kind == "scorer" else {})
        for key, value in named.items():
            line = spec.lines.get(key) or (spec.lines.get("type") if key == "name" else None)
            yield Value(f"{path}.{key}", value, self._said(line, spec) if line else unsaid)
        for key, value in plain(spec.parameters).items():
            line = spec.lines.get(key) or spec.lines.get("parameters")
            origin = self._said(line, spec) if line else DEFAULT if spec.lines else unsaid
            yield Value(f"{path}.{key}", value, origin)

    def _said(self, line: int, spec: PluginSpec) -> str:
        return f"line {line}, {spec.stands_for}" if spec.stands_for else f"line {line}"

    def _unsaid(self, spec: PluginSpec) -> str:
        """The origin of a plugin that the file does not name."""
        if spec.path.startswith("$.builtinFilters") or (self._foreign and spec.path == "$"):
            return "built in"
        if self._config.policy.name in POLICIES and self._config.policy.name != DEFAULT:
            return f"policy: {self._config.policy.name} ({self._origin(('policy',))})"
        return DEFAULT

    # ---- sections ----

    def _endpoints(self) -> Iterator[Value]:
        source = self._config.endpoints
        if source.file:
            origin = self._origin(("endpoints", "file"))
            if origin == DEFAULT:
                origin = "file-discovery"
            yield Value("$.endpoints.file", source.file, origin)
            watch = self._origin(("endpoints", "watch")) if "endpoints" in self._keys else "file-discovery"
            yield Value("$.endpoints.watch", source.watch, watch)
        for i, listed in enumerate(source.static):
            yield Value(f"$.endpoints[{i}]", _endpoint(listed), self._origin(("endpoints", i)))

    def _section(self, place: Place, section: Section) -> Iterator[Value]:
        shown = plain(section)
        for (key, field), (_, value) in zip(fields(type(section)).items(), section, strict=True):
            path = (*place, key)
            if isinstance(value, Section):
                yield from self._section(path, value)
            else:
                differs = value is not None and not field.is_required() and value != field.get_default()
                text = shown[key]
                if isinstance(text, str):
                    text = masked(text)
                yield Value(show(path), text, self._origin(path, differs))

    def _origin(self, place: Place, differs: bool = False) -> str:
        """The origin of the value at `place`. `differs`: whether the value differs from the default."""
        if self._stands(place):
            return f"line {self._tree.line(place)}"
        if place == ("gateway", "mode") and self._stands(("gateway",)) and isinstance(self._keys["gateway"].value, str):
            return f"line {self._tree.line(('gateway',))}"
        if place == ("models", "list") and self._stands(("models",)) and isinstance(self._keys["models"].value, list):
            return f"line {self._tree.line(('models',))}"
        if place == ("extProc", "host"):
            return "from gateway.mode"
        if place == ("als", "port"):
            return "from extProc.port"
        if self._foreign and differs:
            return "plugins"
        if place[0] == "kvEvents" and differs:
            return "cacheIndexerURL"
        return DEFAULT

    def _stands(self, place: Place) -> bool:
        node = self._tree.node(place)
        return node is not None and not node.missing


def _endpoint(listed: Listed) -> dict[str, Any]:
    endpoint = listed.endpoint
    more = {"labels": dict(endpoint.labels), "metricsUrl": endpoint.metrics_url}
    return {"name": endpoint.id, "address": endpoint.address, **{key: value for key, value in more.items() if value}}
