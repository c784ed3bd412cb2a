"""Entries of plugins in a file → `PluginSpec`s."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from fairlead.config.builtins import Kind
from fairlead.config.check import INVALID, check, struct
from fairlead.config.defaults import POLICIES
from fairlead.config.problems import Report, describe
from fairlead.config.registry import Found, Registry
from fairlead.config.schema import PluginSpec
from fairlead.model.errors import PluginError
from fairlead.wire.problem import Place, shorten

#: The three names for the mapping of a plugin's parameters.
PARAMETERS = ("parameters", "params", "config")


def own_keys(kind: Kind) -> set[str]:
    """Keys of an entry that are not parameters."""
    return {"type", "name", *PARAMETERS} | ({"weight"} if kind == "scorer" else set())


class Source(Struct):
    """The values of `KEYS`, and where each stands."""

    values: dict[str, Any]
    places: dict[str, Place]

    def place(self, key: str) -> Place:
        return self.places.get(key, (key,))


class PluginReader:
    """Checks entries against the registry."""

    def __init__(self, source: Source, report: Report, registry: Registry) -> None:
        self.source = source
        self.report = report
        self.registry = registry

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
        self,
        kind: Kind,
        entry: object,
        place: Place,
        places: Mapping[str, Place] | None = None,
        written: bool = True,
    ) -> PluginSpec | None:
        """One entry of a list. `places` says where its keys stand if not under `place`; `written`: it is in the file,
        and no default."""
        where = dict(places or {})
        if not isinstance(entry, Mapping):
            self.report.add(place, f"expected a mapping with a type, got {describe(entry)}")
            return None
        found = self._find(kind, entry.get("type"), where.get("type", (*place, "type")))
        name = entry.get("name", found.type if found else "")
        if not isinstance(name, str) or (found and not name):
            self.report.add((*place, "name"), f"expected a name, got {describe(name)}")
        weight = self._weight(kind, entry, place, found)
        if found is None:
            return None
        given = self._parameters(kind, entry, place, where)
        parameters = struct(
            found.params,
            {**found.implied, **given},
            place,
            self.report,
            where,
            hints={"weight": "only scorers have a weight"},
            siblings=own_keys(kind),
        )
        if parameters is INVALID or not isinstance(name, str):
            return None
        return PluginSpec(
            kind=kind,
            type=found.type,
            name=name,
            weight=weight,
            parameters=parameters,
            path=self.report.path(place),
            lines=self._lines(entry, given, place, where) if written else {},
        )

    def _lines(
        self, entry: Mapping[str, Any], given: Mapping[str, Any], place: Place, where: Mapping[str, Place]
    ) -> dict[str, int]:
        keys = ["type", *(["weight"] if "weight" in entry else ()), *given]
        return {key: self.report.line(where.get(key, (*place, key))) for key in keys}

    def _find(self, kind: Kind, name: object, place: Place) -> Found | None:
        if not isinstance(name, str):
            problem = "field 'type' is missing" if name is None else f"expected a plugin type, got {describe(name)}"
            self.report.add(place[:-1] if name is None else place, problem)
            return None
        try:
            found = self.registry.find(kind, name)
            if found is None:
                other = self.registry.kind_of(name)
                hint = f"'{name}' is a {other}" if other else ""
                known = {*self.registry.types(kind), *(POLICIES if kind == "policy" else ())}
                self.report.unknown(place, "policy" if kind == "policy" else f"{kind} type", name, known, hint)
            return found
        except PluginError as error:
            self.report.plugin(place, error)
            return None

    def _weight(self, kind: Kind, entry: Mapping[str, Any], place: Place, found: Found | None) -> float:
        default = getattr(found.cls, "weight", 1.0) if found else 1.0
        if kind != "scorer" or "weight" not in entry:
            return float(default) if kind == "scorer" else 0.0
        weight = check(float, entry["weight"], (*place, "weight"), self.report)
        if weight is INVALID:
            return 0.0
        if weight < 0:
            self.report.add((*place, "weight"), f"expected a number >= 0, got {describe(entry['weight'])}")
        return float(weight)

    def _parameters(
        self, kind: Kind, entry: Mapping[str, Any], place: Place, where: dict[str, Place]
    ) -> dict[str, Any]:
        """What stands beside `type`, and what stands under `parameters`; `where` learns the places of the latter."""
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
