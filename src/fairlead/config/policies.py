"""The scheduling part of a file (`policy`, `filters`, `scorers`, `selection`, `builtinFilters`) → a `PolicySpec`."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from fairlead.config.check import INVALID, check, struct
from fairlead.config.defaults import ABILITY_FILTERS, CUSTOM_SELECTION, FILTERS, POLICIES, SCORERS, SELECTION
from fairlead.config.problems import Report, describe
from fairlead.config.registry import Found, Kind, Registry
from fairlead.config.schema import PluginSpec, PolicySpec
from fairlead.model.errors import PluginError
from fairlead.wire.problem import Place, shorten, show

#: Names in the file that belong here.
KEYS = ("policy", "filters", "scorers", "selection", "builtinFilters")
#: The three names for the mapping of a plugin's parameters.
PARAMETERS = ("parameters", "params", "config")


def _own(kind: Kind) -> set[str]:
    """Keys of an entry that are not parameters."""
    return {"type", "name", *PARAMETERS} | ({"weight"} if kind == "scorer" else set())


class Source(Struct):
    """The values of `KEYS`, and where each stands."""

    values: dict[str, Any]
    places: dict[str, Place]

    def place(self, key: str) -> Place:
        return self.places.get(key, (key,))


def read_policy(source: Source, report: Report, registry: Registry) -> PolicySpec | None:
    """`None` when something was wrong; the report has what."""
    values = {key: value for key, value in source.values.items() if value is not None}
    before = len(report.problems)
    reader = _Reader(source, report, registry)
    shorthand = _shorthand(values, source, report)
    own = any(key in values for key in ("filters", "scorers", "selection"))
    if shorthand != "default":
        values = {**POLICIES[shorthand], **{k: v for k, v in values.items() if k == "builtinFilters"}}
    name = shorthand if shorthand != "default" or not own else "custom"
    filters = reader.filters(values.get("filters", FILTERS), values.get("builtinFilters", True))
    scorers = reader.plugins("scorer", "scorers", values.get("scorers", SCORERS))
    fallback = CUSTOM_SELECTION if "scorers" in values else SELECTION
    picker = reader.picker(values.get("selection", fallback))
    if len(report.problems) > before or picker is None:
        return None
    return PolicySpec(name=name, filters=tuple(filters), scorers=tuple(scorers), picker=picker)


def _shorthand(values: Mapping[str, Any], source: Source, report: Report) -> str:
    name = values.get("policy", "default")
    place = source.place("policy")
    if not isinstance(name, str):
        report.add(place, f"expected the name of a policy, got {describe(name)}", f"known: {', '.join(POLICIES)}")
        return "default"
    if name not in POLICIES:
        report.unknown(place, "policy", name, POLICIES)
        return "default"
    clashing = [key for key in ("filters", "scorers", "selection") if key in values]
    if name != "default" and clashing:
        report.add(place, f"policy '{name}' brings its own {', '.join(clashing)}", "leave out one or the other")
        return "default"
    return name


class _Reader:
    """Checks lists of plugins against the registry."""

    def __init__(self, source: Source, report: Report, registry: Registry) -> None:
        self._source = source
        self._report = report
        self._registry = registry

    def filters(self, node: object, builtin: object) -> list[PluginSpec]:
        """The configured filters, behind those ability filters that they do not replace."""
        if not isinstance(builtin, bool):
            self._report.add(self._source.place("builtinFilters"), f"expected true or false, got {describe(builtin)}")
        own = self.plugins("filter", "filters", node)
        if not builtin:
            return own
        taken = {spec.type for spec in own}
        missing = [entry for entry in ABILITY_FILTERS if entry["type"] not in taken]
        front = [self._plugin("filter", entry, ("builtinFilters", i)) for i, entry in enumerate(missing)]
        return [*(spec for spec in front if spec), *own]

    def plugins(self, kind: Kind, key: str, node: object) -> list[PluginSpec]:
        place = self._source.place(key)
        if not isinstance(node, (list, tuple)):
            self._report.add(place, f"expected a list, got {describe(node)}")
            return []
        specs: list[PluginSpec] = []
        seen: dict[str, str] = {}
        for i, entry in enumerate(node):
            spec = self._plugin(kind, entry, (*place, i))
            if spec is None:
                continue
            if spec.name in seen:
                problem = f"a {kind} named '{shorten(spec.name)}' is there already, at {seen[spec.name]}"
                self._report.add((*place, i), problem, "give it a name of its own")
            seen.setdefault(spec.name, spec.path)
            specs.append(spec)
        return specs

    def picker(self, node: object) -> PluginSpec | None:
        """`{topK: 3}` or `{picker: type, parameters: {…}}`."""
        place = self._source.place("selection")
        if not isinstance(node, Mapping) or not node:
            self._report.add(place, f"expected topK or picker, got {describe(node)}")
            return None
        if "topK" in node:
            return self._top_k(node, place)
        if "picker" not in node:
            self._report.add(place, "expected topK or picker", "for example selection: {topK: 3}")
            return None
        entry = {("type" if key == "picker" else key): value for key, value in node.items()}
        return self._plugin("picker", entry, place, {"type": (*place, "picker")})

    def _top_k(self, node: Mapping[str, Any], place: Place) -> PluginSpec | None:
        for key in node:
            if key == "picker":
                self._report.add((*place, key), "topK is a picker itself", "give topK or picker")
            elif key != "topK":
                self._report.unknown((*place, key), "field", key, ("topK", "picker"))
        k = node["topK"]
        if k == 1 and not isinstance(k, bool):
            return self._plugin("picker", {"type": "max-score"}, place)
        return self._plugin("picker", {"type": "top-k", "k": k}, place, {"k": (*place, "topK")})

    def _plugin(
        self, kind: Kind, entry: object, place: Place, places: Mapping[str, Place] | None = None
    ) -> PluginSpec | None:
        """One entry of a list. `places` says where its keys stand if not under `place`."""
        where = dict(places or {})
        if not isinstance(entry, Mapping):
            self._report.add(place, f"expected a mapping with a type, got {describe(entry)}")
            return None
        found = self._find(kind, entry.get("type"), where.get("type", (*place, "type")))
        name = entry.get("name", found.type if found else "")
        if not isinstance(name, str) or (found and not name):
            self._report.add((*place, "name"), f"expected a name, got {describe(name)}")
        weight = self._weight(kind, entry, place, found)
        if found is None:
            return None
        given = self._parameters(kind, entry, place, where)
        parameters = struct(
            found.params,
            {**found.implied, **given},
            place,
            self._report,
            where,
            hints={"weight": "only scorers have a weight"},
            siblings=_own(kind),
        )
        if parameters is INVALID or not isinstance(name, str):
            return None
        self._unused(parameters, place)
        return PluginSpec(kind=kind, type=found.type, name=name, weight=weight, parameters=parameters, path=show(place))

    def _find(self, kind: Kind, name: object, place: Place) -> Found | None:
        if not isinstance(name, str):
            problem = "field 'type' is missing" if name is None else f"expected a plugin type, got {describe(name)}"
            self._report.add(place[:-1] if name is None else place, problem)
            return None
        try:
            found = self._registry.find(kind, name)
            if found is None:
                other = self._registry.kind_of(name)
                hint = f"'{name}' is a {other}" if other else ""
                self._report.unknown(place, f"{kind} type", name, self._registry.types(kind), hint)
            return found
        except PluginError as error:
            self._report.plugin(place, error)
            return None

    def _weight(self, kind: Kind, entry: Mapping[str, Any], place: Place, found: Found | None) -> float:
        default = getattr(found.cls, "weight", 1.0) if found else 1.0
        if kind != "scorer" or "weight" not in entry:
            return float(default) if kind == "scorer" else 0.0
        weight = check(float, entry["weight"], (*place, "weight"), self._report)
        if weight is INVALID:
            return 0.0
        if weight < 0:
            self._report.add((*place, "weight"), f"expected a number >= 0, got {describe(entry['weight'])}")
        return float(weight)

    def _parameters(
        self, kind: Kind, entry: Mapping[str, Any], place: Place, where: dict[str, Place]
    ) -> dict[str, Any]:
        """What stands beside `type`, and what stands under `parameters`; `where` learns the places of the latter."""
        given = {key: value for key, value in entry.items() if key not in _own(kind)}
        blocks = [key for key in PARAMETERS if entry.get(key) is not None]
        for key in blocks[1:]:
            self._report.add((*place, key), f"'{key}' and '{blocks[0]}' mean the same", "give one of them")
        for block in blocks[:1]:
            values = entry[block]
            if not isinstance(values, dict):
                self._report.add((*place, block), f"expected a mapping, got {describe(values)}")
                continue
            for key, value in values.items():
                if key in given:
                    self._report.add((*place, block, key), f"'{key}' is given twice", "once beside type, once here")
                given[key] = value
                where[key] = (*place, block, key)
        return given

    def _unused(self, parameters: Struct, place: Place) -> None:
        if getattr(parameters, "cache_indexer_url", ""):
            text = "cacheIndexerURL has no effect yet: prefix knowledge is learned from the scheduler's own decisions"
            self._report.note(place, text)
