"""An `EndpointPickerConfig` → the policy and the settings that mean the same.

Rules
* What the reference would refuse is refused: unknown fields, gates and plugin types, references to nothing, two pickers
  in a profile, several profiles without a handler.
* A plugin is checked with its own parameters even where nothing refers to it; a note says what is different about it.
* Types that the reference does not have are looked up among our own plugins and installed ones.
* `subset` and `health` always run: the reference does both outside of its plugins.
"""

from pathlib import Path
from typing import Any

from msgspec import Struct, field, structs

from fairlead.config.check import INVALID, check
from fairlead.config.epp.document import (
    API_VERSIONS,
    GATES,
    KIND,
    Band,
    DataLayer,
    Document,
    FlowControl,
    Ref,
    RequestHandler,
    SchedulingProfile,
)
from fairlead.config.epp.entry import Settings
from fairlead.config.epp.flow import AT as FLOW
from fairlead.config.epp.flow import Named, NamedBand, flow_spec, without_flow
from fairlead.config.epp.instances import Instance, Instances
from fairlead.config.epp.parameters import FileDiscovery, ProbabilisticAdmitter
from fairlead.config.epp.profiles import Profiles
from fairlead.config.problems import Report, describe
from fairlead.config.registry import Registry
from fairlead.config.schema import EndpointSource, FlowSpec, PolicySpec
from fairlead.wire.problem import Place, shorten

FIELDS: tuple[str, ...] = Document.__struct_encode_fields__
_KINDS = {found.encode_name: found.type for found in structs.fields(Document)}


class Translation(Struct):
    policy: PolicySpec | None = None
    settings: Settings = field(default_factory=Settings)
    #: `None` = the document names no discovery of its own.
    endpoints: EndpointSource | None = None
    #: `None` = its flow control is off.
    flow: FlowSpec | None = None


def translate(root: dict[str, Any], report: Report, registry: Registry, base: Path | None) -> Translation:
    """Everything that is wrong goes to the report; then `policy` is `None`. `root` has no fields but `FIELDS`."""
    return _Translator(root, report, registry, base).translation()


class _Translator:
    def __init__(self, root: dict[str, Any], report: Report, registry: Registry, base: Path | None) -> None:
        self._root = root
        self._report = report
        self._base = base
        self._registry = registry
        self._instances = Instances(report, registry)
        self._flow_gate = GATES["flowControl"]

    def translation(self) -> Translation:
        before = len(self._report.problems)
        self._identity()
        self._gates()
        self._instances.read(self._root.get("plugins"), ("plugins",))
        policy = self._policy()
        detector = self._top_level_ref("saturationDetector", "saturation")
        control = self._flow(self._field("flowControl"), detector)
        handler: RequestHandler | None = self._field("requestHandler")
        for i, parser in enumerate((handler.parsers or ()) if handler else ()):
            self._ref(parser.plugin_ref, ("requestHandler", "parsers", i, "pluginRef"), "parser")
        self._top_level_ref("parser", "parser")
        endpoints = self._data_layer()
        failed = len(self._report.problems) > before
        return Translation(None if failed else policy, self._instances.settings, endpoints, control)

    def _field(self, key: str) -> Any:
        """A field of the document, checked; `None` when it is absent or wrong."""
        if self._root.get(key) is None:
            return None
        found = check(_KINDS[key], self._root[key], (key,), self._report)
        return None if found is INVALID else found

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
        for i, text in enumerate(self._field("featureGates") or ()):
            name, equals, value = text.partition("=")
            place: Place = ("featureGates", i)
            if name not in GATES:
                self._report.unknown(place, "feature gate", name, GATES)
            elif equals and value not in ("true", "false"):
                self._report.add(place, f"expected {name}=true or {name}=false, got {describe(text)}")
            elif name == "flowControl":
                self._flow_gate = value != "false"

    def _policy(self) -> PolicySpec | None:
        nodes = self._root.get("schedulingProfiles")
        if nodes is not None and not isinstance(nodes, list):
            self._report.add(("schedulingProfiles",), f"expected a list, got {describe(nodes)}")
            nodes = None
        found: list[tuple[int, SchedulingProfile]] = []
        for i, node in enumerate(nodes or ()):
            profile = check(SchedulingProfile, node, ("schedulingProfiles", i), self._report)
            if profile is INVALID:
                continue
            if profile.name in {other.name for _, other in found}:
                self._report.add(
                    ("schedulingProfiles", i, "name"), f"a profile named '{shorten(profile.name)}' is there already"
                )
            found.append((i, profile))
        return Profiles(found, bool(nodes), self._instances, self._report, self._registry).policy()

    def _ref(self, name: str, place: Place, role: str) -> Instance | None:
        return self._instances.ref(name, place, role)

    def _top_level_ref(self, key: str, role: str) -> Instance | None:
        ref: Ref | None = self._field(key)
        return None if ref is None else self._ref(ref.plugin_ref, (key, "pluginRef"), role)

    def _flow(self, given: FlowControl | None, detector: Instance | None) -> FlowSpec | None:
        """`None` while the gate is off, as in the reference. `detector`: from where it is deprecated."""
        flow = given or FlowControl()
        named = Named(self._band("defaultPriorityBand", flow.default_priority_band), saturation=detector)
        if flow.default_negative_priority_band is not None:
            named.negative = self._band("defaultNegativePriorityBand", flow.default_negative_priority_band)
        named.bands = [self._band(("priorityBands", i), band) for i, band in enumerate(flow.priority_bands or ())]
        if flow.saturation_detector:
            place: Place = (*FLOW, "saturationDetector", "pluginRef")
            named.saturation = self._ref(flow.saturation_detector.plugin_ref, place, "saturation")
        if flow.usage_limit_policy_plugin_ref:
            named.limit = self._ref(flow.usage_limit_policy_plugin_ref, (*FLOW, "usageLimitPolicyPluginRef"), "flow")
        declared = self._instances.by_name.values()
        named.admitter = next((one for one in declared if isinstance(one.parameters, ProbabilisticAdmitter)), None)
        if self._flow_gate:
            return flow_spec(flow, named, self._report)
        if given is not None:
            self._report.note(FLOW, "not used: the feature gate flowControl is off, requests are scheduled at once")
        if named.admitter is not None:
            without_flow(named.admitter, self._report)
        return None

    def _band(self, key: str | tuple[str, int], band: Band | None) -> NamedBand:
        named = NamedBand((*FLOW, key) if isinstance(key, str) else (*FLOW, *key), band or Band())
        if named.band.fairness_policy_ref:
            at = (*named.place, "fairnessPolicyRef")
            named.fairness = self._ref(named.band.fairness_policy_ref, at, "flow")
        if named.band.ordering_policy_ref:
            at = (*named.place, "orderingPolicyRef")
            named.ordering = self._ref(named.band.ordering_policy_ref, at, "flow")
        return named

    def _data_layer(self) -> EndpointSource | None:
        layer: DataLayer | None = self._field("dataLayer")
        if layer is None:
            return None
        at: Place = ("dataLayer",)
        for i, source in enumerate(layer.sources or ()):
            self._ref(source.plugin_ref, (*at, "sources", i, "pluginRef"), "source")
            for j, extractor in enumerate(source.extractors or ()):
                self._ref(extractor.plugin_ref, (*at, "sources", i, "extractors", j, "pluginRef"), "extractor")
        if layer.peer_discovery is not None or layer.cross_replica_syncer_plugin_ref:
            key = "peerDiscovery" if layer.peer_discovery is not None else "crossReplicaSyncerPluginRef"
            self._report.add((*at, key), "state is not shared between replicas", "leave it out")
        if layer.discovery is None:
            return None
        return self._discovery(layer)

    def _discovery(self, layer: DataLayer) -> EndpointSource | None:
        assert layer.discovery is not None
        at: Place = ("dataLayer", "discovery")
        name, place = layer.discovery.plugin_ref or "", (*at, "pluginRef")
        if layer.discovery.endpoints is not None:
            name, place = layer.discovery.endpoints.plugin_ref, (*at, "endpoints", "pluginRef")
        if not name:
            self._report.add(at, "field 'pluginRef' is missing")
            return None
        found = self._ref(name, place, "discovery")
        if found is None or not isinstance(found.parameters, FileDiscovery):
            return None
        path = found.parameters.path
        return EndpointSource(file=str(self._base / path) if self._base else path, watch=found.parameters.watch_file)
