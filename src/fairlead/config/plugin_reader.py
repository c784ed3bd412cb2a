"""Converts the scheduling part of a file to specs of plugins, policy and flow control, checked with the registry."""

from collections.abc import Collection, Mapping
from typing import Any

from msgspec import Struct

from fairlead.config.builtins import (
    ABILITY_FILTERS,
    CUSTOM_SELECTION,
    DEFAULT_POLICY,
    FILTERS,
    POLICIES,
    SCORERS,
    SELECTION,
    Entry,
    Kind,
    a_kind,
)
from fairlead.config.check import fields, read
from fairlead.config.checks import engine_table
from fairlead.config.problems import Place, Problem, Report, describe, shorten
from fairlead.config.registry import RegisteredPlugin, Registry, declared, takes_filters
from fairlead.config.schema import (
    BandSettings,
    BandSpec,
    Canary,
    FlowSettings,
    FlowSpec,
    Metrics,
    PluginSpec,
    PolicyEntry,
    PolicySpec,
    Section,
    Shadows,
)
from fairlead.core.errors import PluginError
from fairlead.plugins.params import Params

#: The three names for the mapping of a plugin's parameters.
PARAMETERS = ("parameters", "params", "config")


class Weighed(Params):
    """The additional key `weight` of a scorer's entry."""

    weight: float


def own_keys(kind: Kind) -> set[str]:
    """Keys of an entry that are not parameters."""
    return {"type", "name", *PARAMETERS} | ({"weight"} if kind == "scorer" else set())


class Source(Struct):
    """The values of `KEYS`, and the place of each."""

    values: dict[str, Any]
    places: dict[str, Place]

    def place(self, key: str) -> Place:
        return self.places.get(key, (key,))


class PluginReader(Struct, eq=False):
    """Checks entries against the registry."""

    source: Source
    report: Report
    registry: Registry

    def plugins(self, kind: Kind, key: str, node: object) -> list[PluginSpec]:
        place = self.source.place(key)
        if not isinstance(node, (list, tuple)):
            self.report.add(place, f"expected a list, got {describe(node)}")
            return []
        specs: list[PluginSpec] = []
        seen: dict[str, str] = {}
        for i, entry in enumerate(node):
            spec = self.plugin(kind, entry, (*place, i), written=isinstance(node, list))
            if spec is None:
                continue
            if spec.name in seen:
                problem = f"a {kind} named '{shorten(spec.name)}' is there already, at {seen[spec.name]}"
                self.report.add((*place, i), problem, "give it a name of its own")
            seen.setdefault(spec.name, spec.path)
            specs.append(spec)
        return specs

    def plugin(
        self, kind: Kind, entry: object, place: Place, places: Mapping[str, Place] | None = None, written: bool = True
    ) -> PluginSpec | None:
        """Read one entry of a list. `places`: the places of keys that are not under `place`. `written`: the entry is in
        the file; otherwise it is a default."""
        where = dict(places or {})
        if not isinstance(entry, Mapping):
            hint = f"write {{type: {shorten(entry)}}}" if isinstance(entry, str) else ""
            self.report.add(place, f"expected a mapping with a type, got {describe(entry)}", hint)
            return None
        registered = self._find(kind, entry.get("type"), where.get("type", (*place, "type")))
        name = entry.get("name", registered.type if registered else "")
        if not isinstance(name, str) or (registered and not name):
            self.report.add((*place, "name"), f"expected a name, got {describe(name)}")
        weight = self._weight(kind, entry, place, registered)
        if registered is None:
            return None
        given, parameters = self._parameters(kind, entry, place, where), None
        if written or given or registered.implied:
            parameters = read(
                registered.params,
                {**registered.implied, **given},
                place,
                self.report,
                where,
                hints={"weight": "write it beside type" if kind == "scorer" else "only scorers have a weight"},
                siblings=own_keys(kind),
            )
            if parameters is None or not isinstance(name, str):
                return None
        keys = ["type", *(["weight"] if "weight" in entry else ()), *given] if written else ()
        return PluginSpec(
            kind=kind,
            type=registered.type,
            name=name,
            weight=weight,
            given=parameters,
            path=self.report.path(place),
            lines={key: self.report.line(where.get(key, (*place, key))) for key in keys},
        )

    def _find(self, kind: Kind, name: object, place: Place) -> RegisteredPlugin | None:
        if not isinstance(name, str):
            problem = "field 'type' is missing" if name is None else f"expected a plugin type, got {describe(name)}"
            self.report.add(place[:-1] if name is None else place, problem)
            return None
        try:
            registered = self.registry.find(kind, name)
            if registered is None:
                other_kind = self.registry.kind_of(name)
                hint = f"'{name}' is {a_kind(other_kind)}" if other_kind else ""
                known = {*self.registry.types(kind), *(POLICIES if kind == "policy" else ())}
                self.report.unknown(place, "policy" if kind == "policy" else f"{kind} type", name, known, hint)
            return registered
        except PluginError as error:
            self.report.plugin(place, error)
            return None

    def _weight(self, kind: Kind, entry: Mapping[str, Any], place: Place, registered: RegisteredPlugin | None) -> float:
        default = declared(registered.cls, "weight", 1.0) if registered and kind == "scorer" else 1.0
        if kind != "scorer" or "weight" not in entry:
            return float(default) if kind == "scorer" else 0.0
        weighed = read(Weighed, {"weight": entry["weight"]}, place, self.report)
        if weighed is None:
            return 0.0
        if weighed.weight < 0:
            self.report.add((*place, "weight"), f"expected a number >= 0, got {describe(entry['weight'])}")
        return weighed.weight

    def _parameters(
        self, kind: Kind, entry: Mapping[str, Any], place: Place, where: dict[str, Place]
    ) -> dict[str, Any]:
        """The parameters next to `type` and those under `parameters`. The places of the latter are added to `where`."""
        given = {key: value for key, value in entry.items() if key not in own_keys(kind)}
        blocks = [key for key in PARAMETERS if entry.get(key) is not None]
        for key in blocks[1:]:
            self.report.add((*place, key), f"'{key}' and '{blocks[0]}' mean the same", "give one of them")
        for block in blocks[:1]:
            values = entry[block]
            if not isinstance(values, dict):
                self.report.add((*place, block), f"expected a mapping, got {describe(values)}")
                continue
            for key, value in values.items():
                if key in given:
                    self.report.add((*place, block, key), f"'{key}' is given twice", "once beside type, once here")
                given[key] = value
                where[key] = (*place, block, key)
        return given

    # ---- the parts of a policy ----

    def filters(self, values: Mapping[str, Any], default: tuple[Entry, ...] = ()) -> list[PluginSpec]:
        """The policy's filters: the built-in ability filters that the configured ones do not replace, then these."""
        builtin = values.get("builtinFilters", True)
        if not isinstance(builtin, bool):
            self.report.add(self.source.place("builtinFilters"), f"expected true or false, got {describe(builtin)}")
        own = self.plugins("filter", "filters", values.get("filters", default))
        if not builtin:
            return own
        taken = {spec.type for spec in own}
        missing = [entry for entry in ABILITY_FILTERS if entry["type"] not in taken]
        front = [self.plugin("filter", entry, ("builtinFilters", i), written=False) for i, entry in enumerate(missing)]
        return [*(spec for spec in front if spec), *own]

    def policy(self, node: str | Mapping[str, Any], values: Mapping[str, Any]) -> PolicySpec | None:
        """`policy: TYPE`, or `policy: {type: TYPE, parameters: {…}}`, where the type is that of a policy plugin."""
        place = self.source.place("policy")
        entry: Mapping[str, Any] = {"type": node} if isinstance(node, str) else node
        spec = self.plugin("policy", entry, place, {"type": place} if isinstance(node, str) else None)
        if spec is None:
            return None
        unused = [key for key in ("scorers", "selection") if key in values]
        filters: list[PluginSpec] = []
        if takes_filters(self.registry, spec.type):
            filters = self.filters(values)
        else:
            unused += [key for key in ("filters", "builtinFilters") if key in values]
        if unused:
            problem = f"policy '{entry['type']}' brings its own {', '.join(unused)}"
            self.report.add(place, problem, "leave out one or the other")
        return PolicySpec(name=entry.get("name", entry["type"]), filters=tuple(filters), plugin=spec)

    def picker(self, node: object) -> PluginSpec | None:
        """`{topK: 3}` or `{picker: type, parameters: {…}}`."""
        place = self.source.place("selection")
        if not isinstance(node, Mapping):
            self.report.add(place, f"expected topK or picker, got {describe(node)}")
            return None
        if "topK" in node:
            return self._top_k(node, place)
        if "picker" not in node:
            self.report.add(place, "expected topK or picker", "for example selection: {topK: 3}")
            return None
        entry = {("type" if key == "picker" else key): value for key, value in node.items()}
        written = "selection" in self.source.places
        return self.plugin("picker", entry, place, {"type": (*place, "picker")}, written)

    def _top_k(self, node: Mapping[str, Any], place: Place) -> PluginSpec | None:
        for key in node:
            if key == "picker":
                self.report.add((*place, key), "topK is a picker itself", "give topK or picker")
            elif key != "topK":
                self.report.unknown((*place, key), "field", key, ("topK", "picker"))
        k = node["topK"]
        if k == 1 and not isinstance(k, bool):
            return self.plugin("picker", {"type": "max-score"}, place, {"type": (*place, "topK")})
        where = (*place, "topK")
        written = "selection" in self.source.places
        return self.plugin("picker", {"type": "top-k", "k": k}, place, {"type": where, "k": where}, written)

    # ---- `metricSources`, `parsers` and `flowControl` ----

    def named(self, kind: Kind, key: str) -> tuple[PluginSpec, ...]:
        node = self.source.values.get(key)
        return () if node is None else tuple(self.plugins(kind, key, node))

    def provided(self, sources: tuple[PluginSpec, ...]) -> set[str]:
        """Names of the columns that metric sources provide."""
        plugins = [self.registry.find(source.kind, source.type) for source in sources]
        return {name for plugin in plugins if plugin for name in plugin.cls.provides}

    def flow_control(self) -> FlowSpec | None:
        node = self.source.values.get(FLOW_CONTROL)
        if FLOW_CONTROL not in self.source.values or node is None:
            return None
        if not isinstance(node, dict):
            self.report.add((FLOW_CONTROL,), f"expected a mapping, got {describe(node)}")
            return None
        settings, plugins = self._mixed(FlowSettings, node, (FLOW_CONTROL,), FLOW_KINDS, BANDS)
        bands = self._bands(node.get(BANDS))
        settings = settings or FlowSettings()
        if "no_endpoint_ttl" in settings.model_fields_set and settings.no_endpoint_ttl > settings.ttl:
            limit = f"requests wait for ttl at most, {settings.ttl:g}s: raise it as well"
            self.report.note((FLOW_CONTROL, "noEndpointTtl"), limit)
        return FlowSpec(settings=settings, bands=bands, **plugins)

    def _mixed(
        self, kind: type[Section], node: dict[str, Any], place: Place, kinds: tuple[Kind, ...], *more_keys: str
    ) -> Any:
        """Read a mapping of settings, plugins of `kinds` and `more_keys`."""
        plain = {key: value for key, value in node.items() if key not in (*kinds, *more_keys)}
        settings = read(kind, plain, place, self.report, siblings=(*kinds, *more_keys))
        given = [plugin_kind for plugin_kind in kinds if node.get(plugin_kind) is not None]
        return settings, {
            plugin_kind: self.plugin(plugin_kind, node[plugin_kind], (*place, plugin_kind)) for plugin_kind in given
        }

    def _bands(self, node: object) -> tuple[BandSpec, ...]:
        place: Place = (FLOW_CONTROL, BANDS)
        if not isinstance(node, list | None):
            self.report.add(place, f"expected a list, got {describe(node)}")
            return ()
        bands: dict[int, BandSpec] = {}
        for i, entry in enumerate(node or ()):
            if not isinstance(entry, dict):
                self.report.add((*place, i), f"expected a mapping, got {describe(entry)}")
                continue
            settings, plugins = self._mixed(BandSettings, entry, (*place, i), BAND_KINDS)
            if settings is None:
                continue
            if settings.priority in bands:
                self.report.add((*place, i, "priority"), f"the band of priority {settings.priority} is there already")
            bands[settings.priority] = BandSpec(settings=settings, **plugins)
        total = sum(band.settings.share for band in bands.values())
        if total > 1.0:
            self.report.add(place, f"the shares of all bands must be at most 1 together, not {total:g}")
        return tuple(bands.values())


# ---- the policy: `policy`, `filters`, `scorers`, `selection`, `builtinFilters` ----

#: Names in the file that make up the policy.
KEYS = ("policy", "filters", "scorers", "selection", "builtinFilters")


def read_policy(source: Source, report: Report, registry: Registry) -> PolicySpec | None:
    """Read the policy; `None` if there are problems, which are reported."""
    values = {key: value for key, value in source.values.items() if not _absent(key, value)}
    source = Source(values, {key: place for key, place in source.places.items() if key in values})
    before = len(report.problems)
    reader = PluginReader(source, report, registry)
    named = values.get("policy", "default")
    if isinstance(named, Mapping) and named.get("type") in (*POLICIES,):
        shorthand = named["type"]
        if len(named) > 1 and shorthand != "default":
            problem = f"policy '{shorthand}' takes no name and no parameters"
            report.add(source.place("policy"), problem, f"write policy: {shorthand}")
        if len(named) == 1 or shorthand != "default":
            named = values["policy"] = shorthand
    if isinstance(named, Mapping) or (isinstance(named, str) and named not in POLICIES):
        policy = reader.policy(named, values)
    else:
        policy = _profile(reader, _shorthand(values, source, report), values)
    return None if len(report.problems) > before else policy


def _absent(key: str, value: object) -> bool:
    """Whether a value counts as not given: `None`, or `{}` for `selection`. `[]` is given: it is an empty list."""
    return value is None or (key == "selection" and value == {})


def _profile(reader: PluginReader, shorthand: str, values: Mapping[str, Any]) -> PolicySpec | None:
    if shorthand == "default" and "scorers" not in values and "selection" not in values:
        return _default(reader, values)
    own = any(key in values for key in ("filters", "scorers", "selection"))
    if shorthand != "default":
        values = {**POLICIES[shorthand], **{k: v for k, v in values.items() if k == "builtinFilters"}}
    name = shorthand if shorthand != "default" or not own else "custom"
    filters = reader.filters(values, FILTERS)
    scorers = reader.plugins("scorer", "scorers", values.get("scorers", SCORERS))
    fallback = CUSTOM_SELECTION if "scorers" in values else SELECTION
    picker = reader.picker(values.get("selection", fallback))
    return PolicySpec(name=name, filters=tuple(filters), scorers=tuple(scorers), picker=picker)


def _default(reader: PluginReader, values: Mapping[str, Any]) -> PolicySpec | None:
    """The policy that needs no configuration, after the file's own filters if there are any.

    It takes queues into account itself. An additional limit would remove the endpoint that holds the prompt just when
    work must be saved: at twice the load that the servers of the shared-prefix workload can handle, hits fall from 92 %
    to 83 %.
    """
    filters = reader.filters(values)
    spec = reader.plugin("policy", {"type": DEFAULT_POLICY}, ("policy",), written=False)
    return PolicySpec(name="default", filters=tuple(filters), plugin=spec) if spec else None


def _shorthand(values: Mapping[str, Any], source: Source, report: Report) -> str:
    name = values.get("policy", "default")
    place = source.place("policy")
    if not isinstance(name, str):
        report.add(place, f"expected the name of a policy, got {describe(name)}", f"known: {', '.join(POLICIES)}")
        return "default"
    clashing = [key for key in ("filters", "scorers", "selection") if key in values]
    if name != "default" and clashing:
        report.add(place, f"policy '{name}' brings its own {', '.join(clashing)}", "leave out one or the other")
        return "default"
    return name


# ---- policies inside `canary` and `shadows` ----


def read_entry(node: PolicyEntry, place: Place, report: Report, registry: Registry) -> PolicySpec | None:
    """The policy that `policy: node` describes; `None` if there are problems, which are reported."""
    return read_policy(Source({"policy": node}, {"policy": place}), report, registry)


def check_choosers(canary: Canary, shadows: Shadows, report: Report, registry: Registry) -> None:
    if canary.policy:
        read_entry(canary.policy, ("canary", "policy"), report, registry)
    for i, shadow in enumerate(shadows.policies):
        if shadow.policy:
            read_entry(shadow.policy, ("shadows", "policies", i, "policy"), report, registry)


# ---- `metricSources`, `parsers` and `flowControl` ----

METRIC_SOURCES, PARSERS, FLOW_CONTROL = "metricSources", "parsers", "flowControl"
EXTRA_KEYS = (METRIC_SOURCES, PARSERS, FLOW_CONTROL)
#: Settings per pool, by `namespace/name`, and the allowed keys.
POOLS = "pools"
OF_A_POOL = (*KEYS, FLOW_CONTROL, "models", "autoscaling", "inspect")
FLOW_KINDS: tuple[Kind, ...] = ("fairness", "ordering", "saturation", "ceiling")
BAND_KINDS: tuple[Kind, ...] = ("fairness", "ordering")
BANDS = "bands"
FLOW_FIELDS = tuple(fields(FlowSettings))


def check_metric_names(policy: PolicySpec, provided: Collection[str], metrics: Metrics, report: Report) -> None:
    """Report plugins that use a metric that no engine or source provides. Otherwise it would be missing silently."""
    named = [spec for spec in (*policy.filters, *policy.scorers) if spec.type in ("metric", "metric-limit")]
    if not named:
        return
    from fairlead.plugins.columns import COLUMNS

    known = {*COLUMNS, *provided, *(name for engine in engine_table(metrics).values() for name in engine.extra)}
    for spec in named:
        name = spec.parameters.metric
        if name not in known:
            line = spec.lines.get("metric") or spec.lines.get("parameters") or spec.lines.get("type", 0)
            hint = f"add it under metrics.engines.{metrics.default_engine}.extra; known: {', '.join(sorted(known))}"
            report.extend([Problem(f"{spec.path}.metric", line, f"unknown metric '{shorten(name)}'", hint)])
