"""The effective configuration, value by value, with the origin of each."""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from fairlead.config.defaults import POLICIES
from fairlead.config.epp.locate import is_document
from fairlead.config.schema import SECTIONS, Config, PluginSpec, Section
from fairlead.wire.endpoint_entry import Listed
from fairlead.wire.plain_yaml import Node, Tree
from fairlead.wire.problem import Place, show

DEFAULT = "default"


class Value(Struct, frozen=True):
    """`origin`: `line 7`, `default`, `policy: random (line 2)`, `built in`, `from gateway.mode`, …"""

    path: str
    value: Any
    origin: str


def effective(config: Config, tree: Tree) -> list[Value]:
    """Every value of a configuration that was read from `tree`."""
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
        for plural, specs in (
            ("metricSources", self._config.metric_sources),
            ("parsers", self._config.parsers),
        ):
            yield from (value for i, spec in enumerate(specs) for value in self._plugin(f"$.{plural}[{i}]", spec))
        flow = self._config.flow_control
        if flow is not None:
            yield from self._section(("flowControl",), flow.settings)
            for spec in flow.plugins():
                yield from self._plugin(f"$.flowControl.{spec.kind}", spec)
            for i, band in enumerate(flow.bands):
                yield from self._section(("flowControl", "bands", i), band.settings)
                for named in (one for one in (band.fairness, band.ordering) if one is not None):
                    yield from self._plugin(f"$.flowControl.bands[{i}].{named.kind}", named)
        yield from self._endpoints()
        for key, kind in SECTIONS.items():
            yield from self._section((key,), getattr(self._config, _attribute(kind)))
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
        for field in msgspec.structs.fields(type(spec.parameters)):
            line = spec.lines.get(field.encode_name) or spec.lines.get("parameters")
            origin = self._said(line, spec) if line else DEFAULT if spec.lines else unsaid
            value = msgspec.to_builtins(getattr(spec.parameters, field.name))
            yield Value(f"{path}.{field.encode_name}", value, origin)

    def _said(self, line: int, spec: PluginSpec) -> str:
        return f"line {line}, {spec.stands_for}" if spec.stands_for else f"line {line}"

    def _unsaid(self, spec: PluginSpec) -> str:
        """Why a plugin is there that the file does not name."""
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
        for field in msgspec.structs.fields(type(section)):
            value, at = getattr(section, field.name), (*place, field.encode_name)
            if isinstance(value, Section):
                yield from self._section(at, value)
            else:
                yield Value(show(at), msgspec.to_builtins(value), self._origin(at, value, field.default))

    def _origin(self, place: Place, value: Any = None, default: Any = None) -> str:
        if self._stands(place):
            return f"line {self._tree.line(place)}"
        if place == ("gateway", "mode") and self._stands(("gateway",)) and isinstance(self._keys["gateway"].value, str):
            return f"line {self._tree.line(('gateway',))}"
        if place == ("extProc", "host"):
            return "from gateway.mode"
        if place == ("als", "port"):
            return "from extProc.port"
        if self._foreign and value is not None and default is not msgspec.NODEFAULT and value != default:
            return "plugins"
        if place[0] == "kvEvents" and value is not None and default is not msgspec.NODEFAULT and value != default:
            return "cacheIndexerURL"
        return DEFAULT

    def _stands(self, place: Place) -> bool:
        node: Node | None = self._tree.root
        for step in place:
            inner = node.value if node else None
            if isinstance(inner, dict) and isinstance(step, str):
                node = inner.get(step)
            elif isinstance(inner, list) and isinstance(step, int) and step < len(inner):
                node = inner[step]
            else:
                return False
        return node is not None and not node.missing


def _endpoint(listed: Listed) -> dict[str, Any]:
    endpoint = listed.endpoint
    more = {"labels": dict(endpoint.labels), "metricsUrl": endpoint.metrics_url}
    return {"name": endpoint.id, "address": endpoint.address, **{key: value for key, value in more.items() if value}}


def _attribute(kind: type[Section]) -> str:
    """The field of `Config` that holds such a section."""
    return next(field.name for field in msgspec.structs.fields(Config) if field.type is kind)
