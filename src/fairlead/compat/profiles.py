"""Maps the plugins that a document declares, its scheduling profiles and their handler to the one policy that runs."""

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from fairlead.compat.catalogue import CATALOGUE, PICKERS, Entry, Settings, Use
from fairlead.compat.document import Plugin, SchedulingProfile, WeightedRef
from fairlead.compat.parameters import ApproxPrefix, DisaggHandler, PdHandler, PrecisePrefix, PrefixDecider
from fairlead.config.builtins import METHODS, SELECTION, SPLITTING, Kind, a_kind
from fairlead.config.check import any_case, fields, plain, read
from fairlead.config.problems import Place, Report, describe, shorten
from fairlead.config.registry import RegisteredPlugin, Registry
from fairlead.config.schema import PluginSpec, PolicySpec
from fairlead.core.errors import PluginError

#: The reference hashes blocks of at least this many tokens, regardless of the configuration.
LEAST_BLOCK = 64
PROFILE_KINDS: tuple[Kind, ...] = ("filter", "scorer", "picker")
#: Types that the reference instantiates if they are referred to but not declared.
MADE = (
    *(name for name, entry in CATALOGUE.items() if entry.role == "parser"),
    "utilization-detector",
    "fcfs-ordering-policy",
    "global-strict-fairness-policy",
    "static-usage-limit-policy",
    "metrics-data-source",
    "core-metrics-extractor",
)
#: Parameters that prefix-cache-scorer had in earlier versions of the reference, and where they are now.
_MOVED = "this is now {} of an approx-prefix-cache-producer; declare one under plugins"
MOVED = {
    **dict.fromkeys(("blockSize", "hashBlockSize"), _MOVED.format("blockSizeTokens (tokens, not characters)")),
    **{name: _MOVED.format(name) for name in fields(ApproxPrefix)},
}
PAIRS = (
    "prefill/decode: both endpoints of a request are chosen by what they cost it, not by the scorers of the profiles; "
    "it is split where '{}' says so"
)
NO_PAIRS = "prefill/decode pairs are not formed: every request goes whole to an endpoint of the decode profile, "
NO_DECIDER = NO_PAIRS + "since no decider for prefill splits any"
UNUSED_FILTERS = (
    "filters of the profile '{}' are not used: {}; prompts are computed on any endpoint whose llm-d.ai/role allows it"
)
#: The decider of a pd-profile-handler that names none.
_USUAL_DECIDER = "prefix-based-pd-decider"
QUEUED = (
    NO_PAIRS + "since requests that wait under flowControl cannot be split; leave the feature gate out to split them"
)
REPEATED = "'{}' is a second {}: all endpoints are read in one way here, and of what it and '{}' both set, one counts"
_PRODUCER_REFS = ("prefixMatchInfoProducerName", "inFlightLoadProducerName", "producerName")


class Instance(Struct):
    """One declared plugin. `entry` is `None` if the type is a Fairlead plugin or an installed plugin."""

    name: str
    type: str
    place: Place
    parameters: Any
    entry: Entry | None
    uses: tuple[Use, ...] = ()
    #: Lines of `type` and `parameters`.
    lines: dict[str, int] = {}

    @property
    def role(self) -> str:
        return self.entry.role if self.entry else "profile"

    def fits(self, role: str) -> bool:
        return role == self.role or (self.entry is not None and role == self.entry.also)


class Instances:
    def __init__(self, report: Report, registry: Registry) -> None:
        self._report = report
        self._registry = registry
        self.by_name: dict[str, Instance] = {}
        #: Values of plugins that are fields of Fairlead's sections: section → field → value.
        self.settings: dict[str, dict[str, Any]] = {}
        #: By JSON path of such a value in Fairlead's configuration: its JSON path and line in the document.
        self.said_at: dict[str, tuple[str, int]] = {}
        #: Whether the declaration of a profile handler is wrong.
        self.broken_handler = False
        #: Names whose declaration is wrong. References to them are not reported again.
        self._broken: set[str] = set()

    def read(self, node: object, place: Place) -> None:
        if node is None:
            return
        if not isinstance(node, list):
            self._report.add(place, f"expected a list, got {describe(node)}")
            return
        for i, item in enumerate(node):
            self._declare(item, (*place, i))
        block = self._block()
        for instance in self.by_name.values():
            for key, name in plain(instance.parameters).items():
                if key in _PRODUCER_REFS and name:
                    self.ref(name, (*instance.place, "parameters", key), "producer")
            if instance.entry is not None and instance.entry.use is not None:
                try:
                    instance.uses = tuple(instance.entry.use(instance.parameters, block))
                except (ValueError, TypeError) as error:
                    self._report.add((*instance.place, "parameters"), str(error))

    def ref(self, name: str, place: Place, role: str = "") -> Instance | None:
        """The plugin of that name; `None` after reporting that there is none, or that it does not fit the role. `role`:
        empty = any."""
        if name in MADE and name not in self.by_name and name not in self._broken:
            self._declare({"type": name}, place)
        instance = self.by_name.get(name)
        if instance is None:
            if name not in self._broken:
                hint = f"declare it under plugins: {{type: {name}}}" if name in CATALOGUE else ""
                self._report.unknown(place, "plugin", name, self.by_name, hint)
            return None
        if role and not instance.fits(role):
            self._report.add(
                place, f"'{shorten(name)}' ({instance.type}) cannot stand here", f"it is a {instance.role} plugin"
            )
            return None
        return instance

    def _declare(self, item: object, place: Place) -> None:
        plugin = read(Plugin, item, place, self._report)
        if plugin is None:
            if isinstance(item, dict):
                self._broken |= {name for key in ("name", "type") if isinstance(name := item.get(key), str)}
            return
        name = plugin.name or plugin.type
        if name in self.by_name:
            first = self._report.path(self.by_name[name].place)
            self._report.add(
                place,
                f"a plugin named '{shorten(name)}' is there already, at {first}",
                "give one of them a name of its own",
            )
            return
        entry = CATALOGUE.get(plugin.type)
        made = self._ours(name, plugin, place) if entry is None else self._theirs(name, plugin, place, entry)
        if made is None:
            self._broken.add(name)
            self.broken_handler |= entry is not None and entry.role == "handler"
            return
        given = ("type", "parameters") if plugin.parameters else ("type",)
        made.lines = {key: self._report.line((*place, key)) for key in given}
        self.by_name[name] = made

    def _theirs(self, name: str, plugin: Plugin, place: Place, entry: Entry) -> Instance | None:
        if isinstance(entry.refused, str) and entry.refused:
            self._report.add((*place, "type"), f"'{plugin.type}' has no counterpart here", entry.refused)
            return None
        parameters_place = (*place, "parameters")
        given = any_case(entry.params, plugin.parameters)
        hints = MOVED if plugin.type == "prefix-cache-scorer" else {}
        parameters = read(entry.params, given, parameters_place, self._report, hints=hints)
        if parameters is None:
            return None
        refusal = entry.refusal(parameters)
        if refusal:
            self._report.add(parameters_place, f"'{plugin.type}' cannot do that here", refusal)
            return None
        made = Instance(name, plugin.type, place, parameters, entry)
        if plugin.type not in PICKERS:
            self._remark(made, entry)
        return made

    def _remark(self, instance: Instance, entry: Entry) -> None:
        remark = entry.remark(instance.parameters)
        if remark:
            self._report.note(instance.place, f"{instance.type}: {remark}")

    def settle(self, picker: str, listed: Sequence[Instance]) -> None:
        """Take over the settings of the plugins in use. `picker`: the name of the running profile's. `listed`: the
        sources and extractors under `dataLayer`; if none of a type is listed, a declared one is in use."""
        types: dict[str, str] = {}
        for instance in {each.name: each for each in listed}.values():
            if types.setdefault(instance.type, instance.name) != instance.name:
                words = REPEATED.format(shorten(instance.name), instance.type, shorten(types[instance.type]))
                self._report.note(instance.place, words)
        for instance in self.by_name.values():
            entry = instance.entry
            picks = instance.type in PICKERS
            if entry is None or entry.settings is None or (picks and instance.name != picker):
                continue
            if picks:
                self._remark(instance, entry)
            if picks or instance in listed or instance.type not in types:
                self._take(instance, entry.settings)

    def _take(self, instance: Instance, settings: Callable[[Any, Settings], None]) -> None:
        taken = Settings()
        settings(instance.parameters, taken)
        place = (*instance.place, "parameters")
        for section, key, value, parameter in taken.values:
            self.settings.setdefault(section, {})[key] = value
            where = (*place, *parameter.split("."))
            self.said_at[f"$.{section}.{key}"] = self._report.path(where), self._report.line(where)
        if taken.unused:
            self._report.note(place, f"{instance.type}: no effect here: {', '.join(map(shorten, taken.unused))}")

    def _ours(self, name: str, plugin: Plugin, place: Place) -> Instance | None:
        """A plugin of a type that the reference does not have."""
        registered = self._find(plugin.type, (*place, "type"))
        if registered is None:
            return None
        kind, cls = registered
        values = {**cls.implied, **(plugin.parameters or {})}
        parameters = read(cls.params, values, (*place, "parameters"), self._report)
        if parameters is None:
            return None
        return Instance(name, plugin.type, place, parameters, None, (Use(kind, cls.type, parameters),))

    def _find(self, type: str, place: Place) -> tuple[Any, RegisteredPlugin] | None:
        try:
            for kind in PROFILE_KINDS:
                registered = self._registry.find(kind, type)
                if registered is not None:
                    return kind, registered
            actual = self._registry.kind_of(type)
        except PluginError as error:
            self._report.plugin(place, error)
            return None
        if actual is not None:
            problem = f"'{shorten(type)}' is {a_kind(actual)}, which cannot stand here"
            self._report.add(place, problem, f"expected a {', '.join(PROFILE_KINDS[:-1])} or {PROFILE_KINDS[-1]}")
            return None
        ours = {name for kind in METHODS for name in self._registry.types(kind)}
        self._report.unknown(place, "plugin type", type, {*CATALOGUE, *ours})
        return None

    def _block(self) -> int:
        """Tokens per prefix block, by the first producer that sets them."""
        for instance in self.by_name.values():
            if isinstance(instance.parameters, ApproxPrefix):
                return max(instance.parameters.block_size_tokens, LEAST_BLOCK)
            if isinstance(instance.parameters, PrecisePrefix):
                tokens = instance.parameters.token_processor_config
                return max(tokens.block_size_tokens or tokens.block_size or 0, LEAST_BLOCK)
        return LEAST_BLOCK


# ---- profiles ----

#: Filters that always run, because the reference does the same outside its plugins.
ALWAYS = ("subset", "health")
_DECIDER_STAGES = ("prefill", "encode", "decode")


class Profiles(Struct, eq=False):
    """`any_given`: whether the document has profiles. `queues`: whether requests may wait."""

    profiles: Sequence[tuple[int, SchedulingProfile]]
    any_given: bool
    instances: Instances
    report: Report
    queues: bool
    #: Name of the picker of the profile that runs; empty = there is none.
    picker: str = ""
    #: By name, the profiles that could be read.
    built: dict[str, PolicySpec | None] = {}

    def policy(self) -> PolicySpec | None:
        spec, handler = self._running()
        if spec is not None and spec.picker is not None:
            self.picker = spec.picker.name
        return spec if handler is None else self._split(handler, spec)

    def _running(self) -> tuple[PolicySpec | None, Instance | None]:
        """The profile that runs, and the handler that splits requests, if there is one."""
        if not self.any_given:
            refs = [(instance, None, instance.place) for instance in self.instances.by_name.values() if instance.uses]
            return self._spec("default", refs, ("plugins",)), None
        self.built = built = {profile.name: self._profile(i, profile) for i, profile in self.profiles}
        names = [profile.name for _, profile in self.profiles]
        handlers = [instance for instance in self.instances.by_name.values() if instance.role == "handler"]
        for extra in handlers[1:]:
            self.report.add(extra.place, "there is a profile handler already", f"'{handlers[0].name}'")
        if handlers and isinstance(handlers[0].parameters, (DisaggHandler, PdHandler)):
            return built.get(self._disaggregated(handlers[0], names)), handlers[0]
        if len(names) > 1 and not self.instances.broken_handler:
            problem = f"{len(names)} profiles, and nothing that chooses among them"
            hint = "add a disagg-profile-handler, or leave one profile"
            self.report.add(("schedulingProfiles",), problem, hint)
        return (built.get(names[0]) if names else None), None

    def _disaggregated(self, handler: Instance, names: list[str]) -> str:
        parameters_place = (*handler.place, "parameters")
        parameters = handler.parameters
        if parameters.decider_plugin_name:
            self.instances.ref(parameters.decider_plugin_name, (*parameters_place, "deciderPluginName"), "decider")
        if isinstance(parameters, PdHandler):
            wanted, place = parameters.decode_profile, (*parameters_place, "decodeProfile")
        else:
            for key, name in (parameters.deciders or {}).items():
                if key not in _DECIDER_STAGES:
                    self.report.unknown((*parameters_place, "deciders", key), "stage", key, _DECIDER_STAGES)
                self.instances.ref(name, (*parameters_place, "deciders", key), "decider")
            for key, name in (parameters.profiles or {}).items():
                if key not in _DECIDER_STAGES:
                    self.report.unknown((*parameters_place, "profiles", key), "stage", key, _DECIDER_STAGES)
                elif name not in names and key != "decode":
                    self.report.unknown((*parameters_place, "profiles", key), "profile", name, names)
            wanted = (parameters.profiles or {}).get("decode") or parameters.decode_profile or "decode"
            place = (*parameters_place, "profiles", "decode")
        if names and wanted not in names:
            self.report.unknown(place, "profile", wanted, names, "requests go where the decode profile says")
        return wanted

    def _profile(self, index: int, profile: SchedulingProfile) -> PolicySpec | None:
        refs: list[tuple[Instance, float | None, Place]] = []
        plugins_place: Place = ("schedulingProfiles", index, "plugins")
        for i, entry in enumerate(profile.plugins or ()):
            place = (*plugins_place, i)
            instance = self.instances.ref(entry.plugin_ref, (*place, "pluginRef"))
            if instance is not None and not instance.fits("profile"):
                words = f"'{shorten(instance.name)}' is a {instance.role} plugin; a profile has no use for it"
                self.report.note((*place, "pluginRef"), words)
            elif instance is not None:
                refs.append((instance, self._weight(entry, instance, place), place))
        return self._spec(profile.name, refs, plugins_place)

    def _split(self, handler: Instance, spec: PolicySpec | None) -> PolicySpec | None:
        """The policy that splits requests, with the filters of the decode profile `spec`; if none is split, `spec`."""
        parameters = handler.parameters
        if isinstance(parameters, PdHandler):
            prefill, name, always = parameters.prefill_profile, _USUAL_DECIDER, parameters.threshold == 0
        else:
            prefill = (parameters.profiles or {}).get("prefill") or parameters.prefill_profile or "prefill"
            name, always = (parameters.deciders or {}).get("prefill", ""), False
        name = parameters.decider_plugin_name or name
        decider = self.instances.by_name.get(name)
        given = decider.parameters if decider else None
        never = decider is None or (isinstance(given, PrefixDecider) and not given.non_cached_tokens)
        if decider is None and always:
            name, never = "threshold: 0", False
        if spec is None or self.queues or never:
            self.report.note(handler.place, QUEUED if self.queues else NO_DECIDER)
            return spec
        self.report.note(handler.place, PAIRS.format(shorten(name)))
        prefilling = self.built.get(prefill)
        unused = [each.name for each in prefilling.filters if each.type not in (*ALWAYS, "role")] if prefilling else ()
        if unused:
            self.report.note(("schedulingProfiles",), UNUSED_FILTERS.format(shorten(prefill), ", ".join(unused)))
        limits = given.model_dump() if isinstance(given, PrefixDecider) else {}
        plugin = PluginSpec(
            kind="policy",
            type=SPLITTING,
            name=handler.name,
            given=RegisteredPlugin("policy", SPLITTING).params(always=True, **limits),
            path=self.report.path(handler.place),
            lines=handler.lines,
            stands_for=handler.type,
        )
        return PolicySpec(name=spec.name, filters=spec.filters, plugin=plugin)

    def _weight(self, entry: WeightedRef, instance: Instance, place: Place) -> float | None:
        if entry.weight is None:
            return None
        if not any(use.kind == "scorer" for use in instance.uses):
            self.report.note((*place, "weight"), f"'{shorten(instance.name)}' is no scorer; its weight has no effect")
        return entry.weight

    def _spec(
        self, name: str, refs: Sequence[tuple[Instance, float | None, Place]], plugins_place: Place
    ) -> PolicySpec | None:
        parts: dict[str, list[PluginSpec]] = {"scorer": [], "picker": []}
        parts["filter"] = [_built_in("filter", name) for name in ALWAYS]
        for instance, weight, place in refs:
            lines = dict(instance.lines) | (
                {"weight": self.report.line((*place, "weight"))} if weight is not None else {}
            )
            for use in instance.uses:
                if use.kind == "picker" and parts["picker"]:
                    first = parts["picker"][0].name
                    self.report.add(place, f"a second picker; '{first}' is there already", "a profile has one")
                    continue
                spec = PluginSpec(
                    kind=use.kind,
                    type=use.type,
                    name=instance.name,
                    given=use.parameters,
                    weight=(1.0 if weight is None else weight) if use.kind == "scorer" else 0.0,
                    path=self.report.path(instance.place),
                    lines=lines,
                    stands_for=instance.type if instance.entry else "",
                )
                parts[use.kind].append(spec)
        picker = parts["picker"][0] if parts["picker"] else _built_in("picker", SELECTION["picker"], near_tie=0.0)
        return PolicySpec(name=name, filters=tuple(parts["filter"]), scorers=tuple(parts["scorer"]), picker=picker)


def _built_in(kind: Kind, type: str, **parameters: Any) -> PluginSpec:
    return PluginSpec(kind=kind, type=type, name=type, given=RegisteredPlugin(kind, type).params(**parameters))
