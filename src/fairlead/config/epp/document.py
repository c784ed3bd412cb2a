"""The shape of an `EndpointPickerConfig`. Unknown fields are errors, as in the reference."""

from typing import Annotated, Any

from msgspec import Meta, field

from fairlead.config.schema import Name, Section
from fairlead.config.units import SIZE, Seconds

KIND = "EndpointPickerConfig"
API_VERSIONS = ("llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1", "llm-d.ai/v1")
#: Feature gates and whether they are on by default.
GATES = {"flowControl": False, "haPopulateNonLeaderDatastore": True}

#: Bytes or requests; 0 = no limit.
Limit = Annotated[int, Meta(ge=0, extra={"unit": "size"}, extra_json_schema=SIZE)]


class Ref(Section, frozen=True, kw_only=True):
    plugin_ref: Name


class WeightedRef(Section, frozen=True, kw_only=True):
    plugin_ref: Name
    #: Scorers only; 1 when absent.
    weight: float | None = None


class Plugin(Section, frozen=True, kw_only=True):
    type: Name
    #: The type when absent; unique.
    name: str | None = None
    parameters: dict[str, Any] | None = None


class SchedulingProfile(Section, frozen=True, kw_only=True):
    name: Name
    plugins: tuple[WeightedRef, ...] | None = None


class DataSource(Section, frozen=True, kw_only=True):
    plugin_ref: Name
    extractors: tuple[Ref, ...] | None = None


class Discovery(Section, frozen=True, kw_only=True):
    """`pluginRef`, or in newer files `endpoints.pluginRef`; absent = Kubernetes."""

    plugin_ref: Name | None = None
    endpoints: Ref | None = None


class DataLayer(Section, frozen=True, kw_only=True):
    inject_defaults: bool = True
    sources: tuple[DataSource, ...] | None = None
    discovery: Discovery | None = None
    peer_discovery: Ref | None = None
    cross_replica_syncer_plugin_ref: str = ""
    cross_replica_sync_interval: Seconds = 0.2


class Band(Section, frozen=True, kw_only=True):
    priority: int = 0
    max_bytes: Limit = 0
    max_requests: Limit = 0
    fairness_policy_ref: str = ""
    ordering_policy_ref: str = ""


class FlowControl(Section, frozen=True, kw_only=True):
    max_bytes: Limit = 0
    max_requests: Limit = 0
    default_request_ttl: Seconds | None = field(default=None, name="defaultRequestTTL")
    no_endpoint_request_ttl: Seconds | None = field(default=None, name="noEndpointRequestTTL")
    default_priority_band: Band | None = None
    default_negative_priority_band: Band | None = None
    priority_bands: tuple[Band, ...] | None = None
    usage_limit_policy_plugin_ref: str = ""
    saturation_detector: Ref | None = None
    enable_eviction: bool = False


class RequestHandler(Section, frozen=True, kw_only=True):
    parsers: tuple[Ref, ...] | None = None


class Document(Section, frozen=True, kw_only=True):
    api_version: str
    kind: str
    feature_gates: tuple[str, ...] | None = None
    plugins: tuple[Plugin, ...] | None = None
    scheduling_profiles: tuple[SchedulingProfile, ...] | None = None
    data_layer: DataLayer | None = None
    flow_control: FlowControl | None = None
    request_handler: RequestHandler | None = None
    #: Deprecated: now `flowControl.saturationDetector`, `requestHandler.parsers`.
    saturation_detector: Ref | None = None
    parser: Ref | None = None
