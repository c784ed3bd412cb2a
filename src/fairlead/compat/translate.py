"""Translates an `EndpointPickerConfig` into the policy and the settings with the same meaning.

Rules
* What the reference would refuse is refused: unknown fields, gates and plugin types, references to undeclared plugins,
  two pickers in a profile, several profiles without a handler.
* A declared plugin's parameters are checked even if nothing refers to it. A note says what differs from the reference.
* Types that the reference does not have are looked up among Fairlead's plugins and the installed ones.
* `subset` and `health` always run, because the reference does both outside its plugins.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from fairlead.compat import parameters as ref
from fairlead.compat.catalogue import narrowed
from fairlead.compat.document import (
    API_VERSIONS,
    GATES,
    PAST_GATES,
    Band,
    DataLayer,
    FlowControl,
    Parts,
    Ref,
    SchedulingProfile,
)
from fairlead.compat.locate import KIND
from fairlead.compat.parameters import FileDiscovery
from fairlead.compat.profiles import Instance, Instances, Profiles
from fairlead.config.builtins import Kind
from fairlead.config.check import fields, read
from fairlead.config.problems import Place, Report, describe, shorten
from fairlead.config.registry import RegisteredPlugin, Registry
from fairlead.config.schema import (
    LONGEST_WAIT,
    BandSettings,
    BandSpec,
    EndpointSource,
    Evicting,
    FlowSettings,
    FlowSpec,
    PluginSpec,
    PolicySpec,
    QueueLimit,
    QueueLimits,
    Shedding,
)
from fairlead.plugins.flow_control import LeastWork, StartTimeFairness
from fairlead.plugins.pickers import MaxScore

# Translates the reference's flow control. It is on only with the feature gate `flowControl`. What the document does not
# name has Fairlead's defaults, not the reference's: the reference's default detector stops the pool when scrapes fail.
#
# Rules
# * `priorityBands` become bands with their own limits and policies; `defaultPriorityBand` applies to all others. If an
#   entry leaves something out, it has the general default and not that of `defaultPriorityBand`, as in the reference.
# * Settings without a counterpart here are noted at their place, by name.

FLOW: Place = ("flowControl",)
ADMITTER = "probabilistic-admitter"
OURS = f"what is not named has Fairlead's defaults: {StartTimeFairness.type}, {LeastWork.type}, own ledger"
NO_TEMPLATE = (
    "there is no template for all priorities below 0 here: defaultPriorityBand applies to them, unless priorityBands "
    "has an entry for their priority; add one for each that is in use"
)
NO_SCORER = (
    "without a scorer all endpoints score the same, and each request goes to a random one: name scorers, or leave out "
    "apiVersion, kind and plugins for the default policy"
)
EVICTS = "requests below priority 0 make way for higher ones that have waited for {} ms, whatever the saturation is"
LONGEST = f"requests wait for {LONGEST_WAIT:g} s at most, as gateways give up after 600 s"
OTHER_LEVEL = "the pool's saturation is that of flowControl.saturationDetector: its own thresholds are not used"
MOVED_DETECTOR = (
    "thresholds are now parameters of a utilization-detector: declare it under plugins, and name it in flowControl"
)
UNSHED = "not used: without the feature gate flowControl nothing is shed, whatever the saturation and the priority are"
OTHER_PATHS = "requests to other paths are scheduled too, not answered with 400"
#: How long requests wait, in seconds, if the document does not say.
_TTL = 60.0
#: By the reference's type: Fairlead's kind and type.
_TYPES: dict[str, tuple[Kind, str]] = {
    "global-strict-fairness-policy": ("fairness", "global-strict"),
    "round-robin-fairness-policy": ("fairness", "round-robin"),
    "program-aware-fairness": ("fairness", "start-time-fair"),
    "fcfs-ordering-policy": ("ordering", "fcfs"),
    "edf-ordering-policy": ("ordering", "edf"),
    "slo-deadline-ordering-policy": ("ordering", "edf"),
    "static-usage-limit-policy": ("ceiling", "static-usage-limit-policy"),
    "priority-holdback-policy": ("ceiling", "priority-holdback-policy"),
    "soft-reflective-ceiling-policy": ("ceiling", "soft-reflective-ceiling-policy"),
    "utilization-detector": ("saturation", "utilization-detector"),
    "concurrency-detector": ("saturation", "concurrency-detector"),
}
#: Values of feature gates, in any case.
_ON, _OFF = ("true", "t", "1"), ("false", "f", "0")


class NamedBand(Struct):
    """A band of the document and the plugins that it refers to."""

    place: Place
    band: Band
    fairness: Instance | None = None
    ordering: Instance | None = None

    def says(self) -> tuple[Any, ...]:
        names = [instance.name if instance is not None else "" for instance in (self.fairness, self.ordering)]
        return self.band.max_requests, self.band.max_bytes, *names


#: Lists whose entries are checked one by one.
_LISTS = ("plugins", "schedulingProfiles")


def _limit(band: Band) -> QueueLimit:
    """The limits of a band; 0 or absent in the document = Fairlead's default."""
    usual = QueueLimits().band
    return QueueLimit(requests=band.max_requests or usual.requests, bytes=band.max_bytes or usual.bytes)


class Translation(Struct):
    policy: PolicySpec | None = None
    #: As in `Instances`.
    settings: dict[str, dict[str, Any]] = {}
    said_at: dict[str, tuple[str, int]] = {}
    #: `None` = the document names no discovery.
    endpoints: EndpointSource | None = None
    #: `None` = the document's flow control is off.
    flow: FlowSpec | None = None


class Translator:
    """Translates a document. `root` has the fields of a `Document`."""

    def __init__(self, root: dict[str, Any], report: Report, registry: Registry, base: Path | None) -> None:
        self._root = root
        self._report = report
        self._base = base
        self._instances = Instances(report, registry)
        self._flow_gate = GATES["flowControl"]
        self._picker = ""
        self._listed: list[Instance] = []
        self._parts = self._read()

    def translation(self) -> Translation:
        """If problems are reported, its `policy` is `None`."""
        before = len(self._report.problems)
        self._identity()
        self._gates()
        self._instances.read(self._root.get("plugins"), ("plugins",))
        policy = self._policy()
        parts = self._parts
        detector = self._ref(parts.saturation_detector, ("saturationDetector", "pluginRef"), "saturation")
        control = self._flow(parts.flow_control, detector)
        handler = parts.request_handler
        for i, parser in enumerate((handler.parsers or ()) if handler else ()):
            self._ref(parser, ("requestHandler", "parsers", i, "pluginRef"), "parser")
        self._ref(parts.parser, ("parser", "pluginRef"), "parser")
        self._note_other_paths()
        endpoints = self._data_layer()
        self._instances.settle(self._picker, self._listed)
        failed = len(self._report.problems) > before
        made = self._instances
        return Translation(None if failed else policy, made.settings, made.said_at, endpoints, control)

    def _read(self) -> Parts:
        """The valid parts. An invalid part is reported and then counts as absent."""
        given = {key: self._root[key] for key in fields(Parts) if key in self._root and key not in _LISTS}
        detector = given.get("saturationDetector")
        if isinstance(detector, dict) and "pluginRef" not in detector:
            self._report.add(("saturationDetector",), "field 'pluginRef' is missing", MOVED_DETECTOR)
            del given["saturationDetector"]
        right = {key: value for key, value in given.items() if read(Parts, {key: value}, (), self._report)}
        return Parts.model_validate(right)

    def _identity(self) -> None:
        for key, known in (("apiVersion", API_VERSIONS), ("kind", (KIND,))):
            value = self._root.get(key)
            if value is None:
                self._report.add((), f"field '{key}' is missing", f"for example {key}: {known[0]}")
            elif not isinstance(value, str):
                self._report.add((key,), f"expected {key}, got {describe(value)}")
            elif value not in known:
                self._report.unknown((key,), key, value, known)

    def _gates(self) -> None:
        for i, text in enumerate(self._parts.feature_gates or ()):
            name, equals, value = text.partition("=")
            place: Place = ("featureGates", i)
            if name not in GATES:
                hint = "it is always on now: leave it out" if name in PAST_GATES else ""
                self._report.unknown(place, "feature gate", name, GATES, hint)
            elif equals and value.strip().lower() not in (*_ON, *_OFF):
                self._report.add(place, f"expected {name}=true or {name}=false, got {describe(text)}")
            elif name == "flowControl":
                self._flow_gate = value.strip().lower() not in _OFF

    def _policy(self) -> PolicySpec | None:
        nodes = self._root.get("schedulingProfiles")
        if nodes is not None and not isinstance(nodes, list):
            self._report.add(("schedulingProfiles",), f"expected a list, got {describe(nodes)}")
            nodes = None
        profiles: list[tuple[int, SchedulingProfile]] = []
        for i, node in enumerate(nodes or ()):
            profile = read(SchedulingProfile, node, ("schedulingProfiles", i), self._report)
            if profile is None:
                continue
            if profile.name in {earlier.name for _, earlier in profiles}:
                self._report.add(
                    ("schedulingProfiles", i, "name"), f"a profile named '{shorten(profile.name)}' is there already"
                )
            profiles.append((i, profile))
        made = Profiles(profiles, bool(nodes), self._instances, self._report, self._flow_gate)
        policy = made.policy()
        self._picker = made.picker
        if policy is not None and policy.picker and not policy.scorers and policy.picker.type == MaxScore.type:
            self._report.note(("schedulingProfiles",) if nodes else ("plugins",), NO_SCORER)
        return policy

    def _note_other_paths(self) -> None:
        """Add a note if the document lists parsers and no `passthrough-parser`."""
        handler, single = self._parts.request_handler, self._parts.parser
        refs = [*((handler.parsers or ()) if handler else ()), *((single,) if single else ())]
        named = [self._instances.by_name.get(ref.plugin_ref) for ref in refs]
        if refs and not any(instance is None or instance.type == "passthrough-parser" for instance in named):
            self._report.note(("requestHandler", "parsers") if handler else ("parser",), OTHER_PATHS)

    def _ref(self, named: Ref | str | None, place: Place, role: str) -> Instance | None:
        name = named.plugin_ref if isinstance(named, Ref) else named
        return self._instances.ref(name, place, role) if name else None

    # ---- flow control ----

    def _flow(self, given: FlowControl | None, detector: Instance | None) -> FlowSpec | None:
        """The flow control; `None` if the feature gate is off, as in the reference. `detector`: the saturation detector
        that the document names at the deprecated place. What has no counterpart is noted."""
        flow, note = given or FlowControl(), self._report.note
        default = self._band(("defaultPriorityBand",), flow.default_priority_band)
        negative = self._band(("defaultNegativePriorityBand",), flow.default_negative_priority_band)
        bands = [self._band(("priorityBands", i), band) for i, band in enumerate(flow.priority_bands or ())]
        saturation = detector
        if flow.saturation_detector:
            saturation = self._ref(flow.saturation_detector, (*FLOW, "saturationDetector", "pluginRef"), "saturation")
        limit = self._ref(flow.usage_limit_policy_plugin_ref, (*FLOW, "usageLimitPolicyPluginRef"), "flow")
        declared = self._instances.by_name.values()
        admitter = next((each for each in declared if isinstance(each.parameters, ref.ProbabilisticAdmitter)), None)
        if not self._flow_gate:
            if given is not None:
                note(FLOW, "not used: the feature gate flowControl is off, requests are scheduled at once")
            if detector is not None:
                note(("saturationDetector",), UNSHED)
            if admitter is not None:
                note(admitter.place, f"{ADMITTER}: it sheds requests only with the feature gate flowControl")
            return None
        note(FLOW, OURS)
        if flow.default_negative_priority_band is not None and negative.says() != default.says():
            note(negative.place, NO_TEMPLATE)
        ttl = self._ttl(flow.default_request_ttl, _TTL, "defaultRequestTTL")
        usual = ttl if flow.default_request_ttl else _TTL
        total = QueueLimit(requests=flow.max_requests or None, bytes=flow.max_bytes or None)
        settings = FlowSettings(
            ttl=ttl,
            no_endpoint_ttl=self._ttl(flow.no_endpoint_request_ttl, usual, "noEndpointRequestTTL"),
            limits=QueueLimits(total=total, band=_limit(default.band)),
            eviction=self._eviction(flow.enable_eviction),
            early_shedding=self._shedding(admitter, saturation),
        )
        return FlowSpec(
            settings=settings,
            fairness=self._spec("fairness", default.fairness),
            ordering=self._spec("ordering", default.ordering),
            saturation=self._spec("saturation", saturation),
            ceiling=self._spec("ceiling", limit),
            bands=self._bands(default, bands),
        )

    def _band(self, key: Place, given: Band | None) -> NamedBand:
        place, band = (*FLOW, *key), given or Band()
        fairness = self._ref(band.fairness_policy_ref, (*place, "fairnessPolicyRef"), "flow")
        return NamedBand(
            place, band, fairness, self._ref(band.ordering_policy_ref, (*place, "orderingPolicyRef"), "flow")
        )

    def _bands(self, default: NamedBand, listed: Sequence[NamedBand]) -> tuple[BandSpec, ...]:
        bands = dict[int, BandSpec]()
        for named in listed:
            priority = named.band.priority
            if priority in bands:
                self._report.add((*named.place, "priority"), f"the band of priority {priority} is there already")
            bands[priority] = BandSpec(
                settings=BandSettings(priority=priority, limits=_limit(named.band)),
                fairness=self._spec("fairness", named.fairness) or self._general("fairness", default.fairness, named),
                ordering=self._spec("ordering", named.ordering) or self._general("ordering", default.ordering, named),
            )
        return tuple(bands.values())

    def _general(self, kind: Kind, default: Instance | None, band: NamedBand) -> PluginSpec | None:
        """The plugin of a band that names none: the general default, if `default`, the plugin of `defaultPriorityBand`,
        would otherwise apply. `None` = the plugin of all bands, which then is the general default."""
        if default is None:
            return None
        cls: Any = StartTimeFairness if kind == "fairness" else LeastWork
        path = self._report.path((*band.place, kind))
        return PluginSpec(kind=kind, type=cls.type, name=cls.type, given=cls.Params(), path=path)

    def _eviction(self, on: bool) -> Evicting | None:
        if not on:
            return None
        eviction = Evicting()
        self._report.note((*FLOW, "enableEviction"), EVICTS.format(round(eviction.after * 1e3)))
        return eviction

    def _shedding(self, admitter: Instance | None, saturation: Instance | None) -> Shedding | None:
        if admitter is None:
            return None
        given: ref.ProbabilisticAdmitter = admitter.parameters
        detector = saturation.parameters if saturation is not None else None
        if (
            not isinstance(detector, ref.UtilizationDetector)
            or detector.queue_depth_threshold != given.queue_depth_threshold
            or detector.kv_cache_util_threshold != given.kv_cache_util_threshold
        ):
            self._report.note(admitter.place, f"{ADMITTER}: {OTHER_LEVEL}")
        return Shedding(power=given.power, scale=given.k)

    def _ttl(self, said: float | None, default: float, field: str) -> float:
        """A time to live in seconds, at most `LONGEST_WAIT`; 0 in the document = `LONGEST_WAIT`, absent = `default`."""
        if said is None:
            return default
        if not 0.0 < said <= LONGEST_WAIT:
            self._report.note((*FLOW, field), LONGEST)
        return min(said or LONGEST_WAIT, LONGEST_WAIT)

    def _spec(self, kind: Kind, instance: Instance | None) -> PluginSpec | None:
        if instance is None:
            return None
        role, type = _TYPES.get(instance.type, (None, instance.type))
        if role != kind:
            words = f"'{shorten(instance.name)}' ({instance.type}) is referred to as {kind} of flow control"
            hint = f"types of that kind: {', '.join(name for name, (its, _) in _TYPES.items() if its == kind)}"
            self._report.add(instance.place, words, hint)
            return None
        return PluginSpec(
            kind=kind,
            type=type,
            name=instance.name,
            given=narrowed(instance.parameters, RegisteredPlugin(kind, type).params),
            path=self._report.path(instance.place),
            lines=instance.lines,
            stands_for=instance.type,
        )

    # ---- endpoints ----

    def _data_layer(self) -> EndpointSource | None:
        layer = self._parts.data_layer
        if layer is None:
            return None
        layer_place: Place = ("dataLayer",)
        for i, source in enumerate(layer.sources or ()):
            place: Place = (*layer_place, "sources", i)
            named = [self._ref(source.plugin_ref, (*place, "pluginRef"), "source")]
            for j, extractor in enumerate(source.extractors or ()):
                named.append(self._ref(extractor, (*place, "extractors", j, "pluginRef"), "extractor"))
            self._listed += [instance for instance in named if instance is not None]
        if layer.peer_discovery is not None or layer.cross_replica_syncer_plugin_ref:
            key = "peerDiscovery" if layer.peer_discovery is not None else "crossReplicaSyncerPluginRef"
            self._report.add((*layer_place, key), "state is not shared between replicas", "leave it out")
        if layer.cross_replica is not None:
            cross = (*layer_place, "crossReplica")
            if layer.cross_replica.syncer_plugin_ref:
                self._report.add((*cross, "syncerPluginRef"), "state is not shared between replicas", "leave it out")
            else:
                self._report.note(cross, "no effect without a syncer")
        if not layer.inject_defaults and not any(each.type == "metrics-data-source" for each in self._listed):
            self._report.note((*layer_place, "injectDefaults"), "metrics of endpoints are read all the same")
        if layer.discovery is None:
            return None
        return self._discovery(layer)

    def _discovery(self, layer: DataLayer) -> EndpointSource | None:
        assert layer.discovery is not None
        discovery_place: Place = ("dataLayer", "discovery")
        name, place = layer.discovery.plugin_ref or "", (*discovery_place, "pluginRef")
        if layer.discovery.endpoints is not None:
            name, place = layer.discovery.endpoints.plugin_ref, (*discovery_place, "endpoints", "pluginRef")
        if not name:
            self._report.add(discovery_place, "field 'pluginRef' is missing")
            return None
        instance = self._ref(name, place, "discovery")
        if instance is None or not isinstance(instance.parameters, FileDiscovery):
            return None
        path = instance.parameters.path
        return EndpointSource(file=str(self._base / path) if self._base else path, watch=instance.parameters.watch_file)
