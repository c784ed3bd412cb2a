"""The shape of an `EndpointPickerConfig`. Unknown fields are errors, as in the reference."""

from typing import Annotated, Any

from pydantic import Field

from fairlead.config.schema import Name, Section
from fairlead.plugins.params import SIZE, Seconds

API_VERSIONS = ("llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1", "llm-d.ai/v1")
#: Feature gates, and whether each is on by default.
GATES = {"flowControl": False, "haPopulateNonLeaderDatastore": True}
#: Gates of older versions, which are on for good.
PAST_GATES = ("dataLayer", "prepareDataPlugins")

#: Bytes or requests; 0 = no limit.
Limit = Annotated[int, Field(ge=0), SIZE]


class Ref(Section):
    plugin_ref: Name


class WeightedRef(Section):
    plugin_ref: Name
    weight: float | None = Field(default=None, description="Scorers only; 1 when absent.")


class Plugin(Section):
    type: Name
    name: str | None = Field(default=None, description="The type when absent; unique.")
    parameters: dict[str, Any] | None = None


class SchedulingProfile(Section):
    name: Name
    plugins: tuple[WeightedRef, ...] | None = None


class DataSource(Section):
    plugin_ref: Name
    extractors: tuple[Ref, ...] | None = None


class Discovery(Section):
    """`pluginRef`, or in newer files `endpoints.pluginRef`; absent = Kubernetes."""

    plugin_ref: Name | None = None
    endpoints: Ref | None = None


class CrossReplica(Section):
    """As in `llm-d.ai/v1`; the older fields begin with `crossReplica`."""

    syncer_plugin_ref: str = ""
    sync_interval: Seconds | None = None
    publish_timeout: Seconds | None = None


class DataLayer(Section):
    inject_defaults: bool = True
    sources: tuple[DataSource, ...] | None = None
    discovery: Discovery | None = None
    peer_discovery: Ref | None = None
    cross_replica: CrossReplica | None = None
    cross_replica_syncer_plugin_ref: str = ""
    cross_replica_sync_interval: Seconds = 0.2


class Band(Section):
    priority: int = 0
    max_bytes: Limit = 0
    max_requests: Limit = 0
    fairness_policy_ref: str = ""
    ordering_policy_ref: str = ""


class FlowControl(Section):
    max_bytes: Limit = 0
    max_requests: Limit = 0
    default_request_ttl: Seconds | None = Field(default=None, alias="defaultRequestTTL")
    no_endpoint_request_ttl: Seconds | None = Field(default=None, alias="noEndpointRequestTTL")
    default_priority_band: Band | None = None
    default_negative_priority_band: Band | None = None
    priority_bands: tuple[Band, ...] | None = None
    usage_limit_policy_plugin_ref: str = ""
    saturation_detector: Ref | None = None
    enable_eviction: bool = False


class RequestHandler(Section):
    parsers: tuple[Ref, ...] | None = None


class Parts(Section):
    """The fields of a document except `apiVersion` and `kind`."""

    feature_gates: tuple[str, ...] | None = None
    plugins: tuple[Plugin, ...] | None = None
    scheduling_profiles: tuple[SchedulingProfile, ...] | None = None
    data_layer: DataLayer | None = None
    flow_control: FlowControl | None = None
    request_handler: RequestHandler | None = None
    saturation_detector: Ref | None = Field(
        default=None, description="Deprecated: now `flowControl.saturationDetector`, `requestHandler.parsers`."
    )
    parser: Ref | None = None


class Document(Parts):
    api_version: str
    kind: str
