"""Scheduling profiles and their handler → the one policy that runs."""

from collections.abc import Sequence

from fairlead.config.defaults import SELECTION
from fairlead.config.epp.document import SchedulingProfile, WeightedRef
from fairlead.config.epp.instances import Instance, Instances
from fairlead.config.epp.parameters import DisaggHandler, PdHandler
from fairlead.config.problems import Report
from fairlead.config.registry import Registry
from fairlead.config.schema import PluginSpec, PolicySpec
from fairlead.wire.problem import Place, shorten

#: What the reference does outside of its plugins.
ALWAYS = ("subset", "health")
_DECIDER_STAGES = ("prefill", "encode", "decode")


class Profiles:
    def __init__(
        self,
        profiles: Sequence[tuple[int, SchedulingProfile]],
        any_given: bool,
        instances: Instances,
        report: Report,
        registry: Registry,
    ) -> None:
        self._profiles = profiles
        self._any_given = any_given
        self._instances = instances
        self._report = report
        self._registry = registry

    def policy(self) -> PolicySpec | None:
        if not self._any_given:
            refs = [(one, None, one.place) for one in self._instances.by_name.values() if one.uses]
            return self._spec("default", refs, ("plugins",))
        built = {profile.name: self._profile(i, profile) for i, profile in self._profiles}
        primary = self._primary([profile.name for _, profile in self._profiles])
        return built.get(primary)

    def _primary(self, names: list[str]) -> str:
        """The profile whose pick is the destination."""
        handlers = [one for one in self._instances.by_name.values() if one.role == "handler"]
        for extra in handlers[1:]:
            self._report.add(extra.place, "there is a profile handler already", f"'{handlers[0].name}'")
        handler = handlers[0] if handlers else None
        if handler is not None and isinstance(handler.parameters, (DisaggHandler, PdHandler)):
            return self._disaggregated(handler, names)
        if len(names) > 1:
            problem = f"{len(names)} profiles, and nothing that chooses among them"
            hint = "add a disagg-profile-handler, or leave one profile"
            self._report.add(("schedulingProfiles",), problem, hint)
        return names[0] if names else ""

    def _disaggregated(self, handler: Instance, names: list[str]) -> str:
        at = (*handler.place, "parameters")
        parameters = handler.parameters
        if isinstance(parameters, PdHandler):
            if parameters.decider_plugin_name:
                self._instances.ref(parameters.decider_plugin_name, (*at, "deciderPluginName"), "decider")
            wanted, place = parameters.decode_profile, (*at, "decodeProfile")
        else:
            for key, name in (parameters.deciders or {}).items():
                if key not in _DECIDER_STAGES:
                    self._report.unknown((*at, "deciders", key), "stage", key, _DECIDER_STAGES)
                self._instances.ref(name, (*at, "deciders", key), "decider")
            for key, name in (parameters.profiles or {}).items():
                if key not in _DECIDER_STAGES:
                    self._report.unknown((*at, "profiles", key), "stage", key, _DECIDER_STAGES)
                elif name not in names and key != "decode":
                    self._report.unknown((*at, "profiles", key), "profile", name, names)
            wanted, place = (parameters.profiles or {}).get("decode", "decode"), (*at, "profiles", "decode")
        if names and wanted not in names:
            self._report.unknown(place, "profile", wanted, names, "requests go where the decode profile says")
        return wanted

    def _profile(self, index: int, profile: SchedulingProfile) -> PolicySpec | None:
        refs: list[tuple[Instance, float | None, Place]] = []
        at: Place = ("schedulingProfiles", index, "plugins")
        for i, entry in enumerate(profile.plugins or ()):
            place = (*at, i)
            found = self._instances.ref(entry.plugin_ref, (*place, "pluginRef"), "profile")
            if found is not None:
                refs.append((found, self._weight(entry, found, place), place))
        return self._spec(profile.name, refs, at)

    def _weight(self, entry: WeightedRef, found: Instance, place: Place) -> float | None:
        if entry.weight is None:
            return None
        if entry.weight < 0:
            self._report.add((*place, "weight"), f"expected a number >= 0, got {entry.weight:g}")
        if not any(use.kind == "scorer" for use in found.uses):
            self._report.note((*place, "weight"), f"'{shorten(found.name)}' is no scorer; its weight has no effect")
        return entry.weight

    def _spec(self, name: str, refs: Sequence[tuple[Instance, float | None, Place]], at: Place) -> PolicySpec | None:
        parts: dict[str, list[PluginSpec]] = {"filter": self._always(), "scorer": [], "picker": []}
        for one, weight, place in refs:
            lines = dict(one.lines) | ({"weight": self._report.line((*place, "weight"))} if weight is not None else {})
            for use in one.uses:
                if use.kind == "picker" and parts["picker"]:
                    first = parts["picker"][0].name
                    self._report.add(place, f"a second picker; '{first}' is there already", "a profile has one")
                    continue
                spec = PluginSpec(
                    kind=use.kind,
                    type=use.type,
                    name=one.name,
                    parameters=use.parameters,
                    weight=(1.0 if weight is None else weight) if use.kind == "scorer" else 0.0,
                    path=self._report.path(one.place),
                    lines=lines,
                    stands_for=one.type if one.entry else "",
                )
                parts[use.kind].append(spec)
        picker = parts["picker"][0] if parts["picker"] else self._default_picker()
        return PolicySpec(name=name, filters=tuple(parts["filter"]), scorers=tuple(parts["scorer"]), picker=picker)

    def _always(self) -> list[PluginSpec]:
        found = [self._registry.find("filter", name) for name in ALWAYS]
        return [PluginSpec(kind="filter", type=f.type, name=f.type, parameters=f.params()) for f in found if f]

    def _default_picker(self) -> PluginSpec:
        found = self._registry.find("picker", SELECTION["picker"])
        assert found is not None
        return PluginSpec(kind="picker", type=found.type, name=found.type, parameters=found.params())
