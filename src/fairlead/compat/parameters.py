"""Parameters of the reference's plugins that Fairlead accepts, with the reference's defaults. The catalogue describes
their effect. Models inherit the parameters that are the same as those of Fairlead's plugins."""

from typing import Annotated, Any, Literal

from pydantic import Field

from fairlead.config.schema import Name, Port, Section
from fairlead.plugins.filters.ability import LabelSelectorParams
from fairlead.plugins.filters.availability import PrefixAffinityParams, UtilizationParams
from fairlead.plugins.filters.load import ConcurrencyParams
from fairlead.plugins.params import PositiveSeconds, Seconds
from fairlead.plugins.scorers.latency import SloHeadroomParams
from fairlead.plugins.scorers.load import ActiveRequestsParams
from fairlead.plugins.scorers.prefix import NoHitLruParams, PrefixLengthParams

Count = Annotated[int, Field(ge=0)]
AnyMapping = dict[str, Any] | None


class ByLabel(LabelSelectorParams):
    """Either a label and its values, or a selector as in Kubernetes."""

    label: str = ""
    valid_values: tuple[str, ...] = ()
    allows_no_label: bool = False


class PrefixAffinityFilter(PrefixAffinityParams):
    prefix_match_info_producer_name: str = ""
    in_flight_load_producer_name: str = ""


class ContextLength(Section):
    label: Name = "llm-d.ai/context-length-range"
    enable_filtering: bool = False


class Threshold(Section):
    operator: Literal["LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual", "Equal", "NotEqual"]
    value: float


class AttributeFilterAlgorithm(Section):
    type: Literal["threshold"]
    threshold: Threshold


class AttributeFilter(Section):
    attribute: Name
    producer: str = ""
    on_missing: Literal["Pass", "Fail"] = "Pass"
    fallback_on_empty: bool = False
    algorithm: AttributeFilterAlgorithm


class FixedRange(Section):
    min: float
    max: float


class Normalization(Section):
    fixed_range: FixedRange | None = None
    adaptive_range: AnyMapping = None


class AttributeScorerAlgorithm(Section):
    type: Literal["linear_lower_is_better", "linear_higher_is_better"]
    normalization: Normalization = Field(default_factory=Normalization)


class AttributeScorer(Section):
    attribute_key: Name
    producer: str = ""
    algorithm: AttributeScorerAlgorithm


class UtilizationDetector(UtilizationParams):
    metrics_staleness_threshold: PositiveSeconds = 0.2


class ConcurrencyDetector(ConcurrencyParams):
    in_flight_load_producer_name: str = ""


class TokenLoad(Section):
    queue_threshold_tokens: float = Field(default=4_194_304, gt=0)
    in_flight_load_producer_name: str = ""


class ActiveRequest(ActiveRequestsParams):
    request_timeout: Seconds | None = Field(default=None, description="Deprecated: leases expire by `ledger.leaseTtl`.")


class PrefixCacheScorer(PrefixLengthParams):
    prefix_match_info_producer_name: str = ""


class NoHitLru(NoHitLruParams):
    prefix_match_info_producer_name: str = ""


class EncodedEndpointHeader(Section):
    header: Name = "x-session-token"


class SessionIdConfig(Section):
    sources: list[Any] | None = None
    eviction_ttl_seconds: Count = 300
    eviction_sweep_seconds: Count = 10


class SessionAffinity(Section):
    strategy: Literal["encoded_endpoint_header", "session_id"] = "encoded_endpoint_header"
    encoded_endpoint_header_config: EncodedEndpointHeader | None = None
    session_id_config: SessionIdConfig | None = None
    profile_name: str = ""


class LatencyScorer(SloHeadroomParams):
    without_slo: Literal["latency"] = Field(default="latency", exclude=True)


class MmScorer(Section):
    producer_name: str = ""


class Picker(Section):
    max_num_of_endpoints: int = Field(default=1, description="0 and less count as 1.")


class DisaggHandler(Section):
    stage_order: Literal["decode-first", "prefill-first"] = "decode-first"
    profiles: dict[str, str] | None = Field(default=None, description="Stage to profile, stage to decider.")
    deciders: dict[str, str] | None = None
    decode_profile: str = Field(default="", description="Deprecated, as the next two: `profiles` and `deciders`.")
    prefill_profile: str = ""
    decider_plugin_name: str = ""


class PdHandler(Section):
    decode_profile: Name = "decode"
    prefill_profile: Name = "prefill"
    primary_port: Port = 0
    decider_plugin_name: str = Field(default="", description="Absent = `prefix-based-pd-decider`, if it is declared.")
    prefix_plugin_name: str = ""
    hash_block_size: Count = 0
    threshold: Count | None = Field(default=None, description="Of older versions: 0 splits every request.")


class PrefixDecider(Section):
    non_cached_tokens: Count = 0
    prompt_tokens: Count = 0


class TokenProducer(Section):
    model_name: str = ""
    estimate: AnyMapping = None
    vllm: AnyMapping = None
    uds_tokenizer_config: AnyMapping = None


class ApproxPrefix(Section):
    auto_tune: bool = True
    block_size_tokens: int = Field(default=16, ge=1)
    max_prefix_tokens_to_match: Count = 131_072
    max_prefix_blocks_to_match: Count = 2048
    lru_capacity_per_server: Count = 31_250


class TokenProcessor(Section):
    block_size: Annotated[int, Field(ge=1)] | None = None
    block_size_tokens: Annotated[int, Field(ge=1)] | None = None
    hash_seed: str = ""
    hash_algorithm: Literal["cbor-fnv", "xxh64"] | None = None


class PrecisePrefix(Section):
    token_processor_config: TokenProcessor = Field(default_factory=TokenProcessor)
    indexer_config: AnyMapping = None
    kv_events_config: AnyMapping = None
    speculative_indexing: bool = False
    speculative_ttl: Seconds = Field(default=2.0, alias="speculativeTTL")


class InflightLoad(Section):
    add_estimated_output_tokens: bool = False
    output_ratio: float = Field(default=1.5, ge=0)
    max_estimated_output_tokens: Count = 0
    prefix_match_info_producer_name: str = ""
    sync_cross_replica_state: bool = True


class PredictedLatency(Section):
    slo_buffer_factor: float = Field(default=1.0, gt=0)
    context_ttl: Seconds = Field(default=300.0, alias="contextTTL")
    streaming_mode: bool = False
    endpoint_role_label: str = ""
    predict_in_produce: bool = True
    use_encoder_cache_features: bool = False


class MmProducer(Section):
    cache_size_in_mb_per_server: Count = Field(default=4096, alias="cacheSizeInMBPerServer")


class SessionIdProducer(Section):
    header_name: str = ""
    cookie_name: str = ""


class ProbabilisticAdmitter(Section):
    queue_depth_threshold: float = Field(default=5, gt=0)
    kv_cache_util_threshold: float = Field(default=0.8, gt=0)
    power: float = Field(default=5, gt=0, le=100)
    k: float = Field(default=300, gt=0, le=1e9)


class ProgramAwareFairness(Section):
    strategy: Literal["las"] = "las"
    eviction_ttl_seconds: Count = 3600
    eviction_sweep_seconds: Count = 300
    las_weight_service: float = 0.8
    las_weight_head_wait: float = 0.2
    las_half_life_seconds: float = 60


class MetricsSource(Section):
    scheme: Literal["http", "https"] = "http"
    path: str = "/metrics"
    port: Port = 0
    insecure_skip_verify: bool = True
    ca_cert_path: str = ""
    client_cert_path: str = ""
    client_key_path: str = ""
    interval: PositiveSeconds | None = None


class EngineConfig(Section):
    name: Name
    queued_requests_spec: str = ""
    running_requests_spec: str = ""
    kv_usage_spec: str = ""
    lora_spec: str = ""
    cache_info_spec: str = ""


class CustomMetric(Section):
    attribute_key: Name
    metric_spec: Name


class CoreMetrics(Section):
    engine_label_key: Name = "llm-d.ai/engine-type"
    default_engine: Name = "vllm"
    engine_configs: tuple[EngineConfig, ...] = ()
    custom_metrics: tuple[CustomMetric, ...] = ()


class NotificationSource(Section):
    group: str = ""
    version: str = ""
    kind: str = ""


class FileDiscovery(Section):
    path: Name
    watch_file: bool = False
