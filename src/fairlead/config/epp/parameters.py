"""Parameters of the reference's plugins, with its defaults. Only what is accepted here; the catalogue says what each
one does."""

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from fairlead.config.schema import Name, Port, Section, Share
from fairlead.config.units import PositiveSeconds, Seconds
from fairlead.plugins.filters.label_selector import Requirement

Count = Annotated[int, Meta(ge=0)]
AnyMapping = dict[str, Any] | None


class ByLabel(Section, frozen=True, kw_only=True):
    """Either a label and its values, or a selector as in Kubernetes."""

    match_labels: dict[str, str] = field(default_factory=dict)
    match_expressions: tuple[Requirement, ...] = ()
    label: str = ""
    valid_values: tuple[str, ...] = ()
    allows_no_label: bool = False


class PrefixAffinityFilter(Section, frozen=True, kw_only=True):
    affinity_threshold: Share = 0.8
    exploration_probability: Share = 0.0
    max_ttft_penalty_ms: Annotated[float, Meta(ge=0)] = field(default=18_000.0, name="maxTTFTPenaltyMs")
    ttft_source: Literal["prefillThroughput", "latencyPredictor"] = "prefillThroughput"
    peak_prefill_throughput: Annotated[float, Meta(gt=0)] = 15_928.0
    prefix_match_info_producer_name: str = ""
    in_flight_load_producer_name: str = ""


class SloTier(Section, frozen=True, kw_only=True):
    epsilon_explore_neg: Share = 0.01


class ContextLength(Section, frozen=True, kw_only=True):
    label: Name = "llm-d.ai/context-length-range"
    enable_filtering: bool = False


class Threshold(Section, frozen=True, kw_only=True):
    operator: Literal["LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual", "Equal", "NotEqual"]
    value: float


class AttributeFilterAlgorithm(Section, frozen=True, kw_only=True):
    threshold: Threshold


class AttributeFilter(Section, frozen=True, kw_only=True):
    attribute: Name
    producer: str = ""
    on_missing: Literal["Pass", "Fail"] = "Pass"
    fallback_on_empty: bool = False
    algorithm: AttributeFilterAlgorithm


class FixedRange(Section, frozen=True, kw_only=True):
    min: float
    max: float


class Normalization(Section, frozen=True, kw_only=True):
    fixed_range: FixedRange | None = None
    adaptive_range: AnyMapping = None


class AttributeScorerAlgorithm(Section, frozen=True, kw_only=True):
    type: Literal["linear_lower_is_better", "linear_higher_is_better"]
    normalization: Normalization = Normalization()


class AttributeScorer(Section, frozen=True, kw_only=True):
    attribute_key: Name
    producer: str = ""
    algorithm: AttributeScorerAlgorithm


class UtilizationDetector(Section, frozen=True, kw_only=True):
    queue_depth_threshold: Annotated[float, Meta(gt=0)] = 5
    kv_cache_util_threshold: Annotated[float, Meta(gt=0, le=1)] = 0.8
    metrics_staleness_threshold: PositiveSeconds = 0.2
    headroom: Annotated[float, Meta(ge=0)] = 0.0


class ConcurrencyDetector(Section, frozen=True, kw_only=True):
    max_concurrency: Annotated[float, Meta(gt=0)] = 100
    max_token_concurrency: Annotated[float, Meta(gt=0)] = 1_000_000
    concurrency_mode: Literal["requests", "tokens", "hybrid"] = "requests"
    headroom: Annotated[float, Meta(ge=0)] = 0.0
    in_flight_load_producer_name: str = ""


class LoadAware(Section, frozen=True, kw_only=True):
    threshold: Annotated[int, Meta(ge=1)] = 128


class TokenLoad(Section, frozen=True, kw_only=True):
    queue_threshold_tokens: Annotated[float, Meta(gt=0)] = 4_194_304
    in_flight_load_producer_name: str = ""


class ActiveRequest(Section, frozen=True, kw_only=True):
    idle_threshold: Count = 0
    max_busy_score: Share = 1.0
    #: Deprecated: leases expire by `ledger.leaseTtl`.
    request_timeout: Seconds | None = None


class PrefixCacheScorer(Section, frozen=True, kw_only=True):
    prefix_match_info_producer_name: str = ""
    match_length_weight: Share = 0.0
    match_length_scale_tokens: Annotated[int, Meta(ge=1)] = 8192


class NoHitLru(Section, frozen=True, kw_only=True):
    lru_size: Annotated[int, Meta(ge=1)] = 1024
    prefix_match_info_producer_name: str = ""


class EncodedEndpointHeader(Section, frozen=True, kw_only=True):
    header: Name = "x-session-token"


class SessionIdConfig(Section, frozen=True, kw_only=True):
    sources: list[Any] | None = None
    eviction_ttl_seconds: Count = 300
    eviction_sweep_seconds: Count = 10


class SessionAffinity(Section, frozen=True, kw_only=True):
    strategy: Literal["encoded_endpoint_header", "session_id"] = "encoded_endpoint_header"
    encoded_endpoint_header_config: EncodedEndpointHeader | None = None
    session_id_config: SessionIdConfig | None = None
    profile_name: str = ""


class LatencyScorer(Section, frozen=True, kw_only=True):
    ttft_weight: Share = 0.8
    tpot_weight: Share = 0.2
    headroom_selection_strategy: Literal["least", "most"] = "least"
    composite_kv_weight: Annotated[float, Meta(ge=0)] = field(default=1.0, name="compositeKVWeight")
    composite_queue_weight: Annotated[float, Meta(ge=0)] = 1.0
    composite_prefix_weight: Annotated[float, Meta(ge=0)] = 1.0


class MmScorer(Section, frozen=True, kw_only=True):
    producer_name: str = ""


class Picker(Section, frozen=True, kw_only=True):
    max_num_of_endpoints: Annotated[int, Meta(ge=1)] = 1


class DisaggHandler(Section, frozen=True, kw_only=True):
    stage_order: Literal["decode-first", "prefill-first"] = "decode-first"
    #: Stage to profile, stage to decider.
    profiles: dict[str, str] | None = None
    deciders: dict[str, str] | None = None


class PdHandler(Section, frozen=True, kw_only=True):
    decode_profile: Name = "decode"
    prefill_profile: Name = "prefill"
    primary_port: Port = 0
    decider_plugin_name: str = ""
    prefix_plugin_name: str = ""
    hash_block_size: Count = 0
    threshold: Count = 0


class DataParallelHandler(Section, frozen=True, kw_only=True):
    primary_port: Port = 8000


class PrefixDecider(Section, frozen=True, kw_only=True):
    non_cached_tokens: Count = 0
    prompt_tokens: Count = 0


class TokenProducer(Section, frozen=True, kw_only=True):
    model_name: str = ""
    estimate: AnyMapping = None
    vllm: AnyMapping = None
    uds_tokenizer_config: AnyMapping = None


class ApproxPrefix(Section, frozen=True, kw_only=True):
    auto_tune: bool = True
    block_size_tokens: Annotated[int, Meta(ge=1)] = 16
    max_prefix_tokens_to_match: Count = 131_072
    max_prefix_blocks_to_match: Count = 2048
    lru_capacity_per_server: Count = 31_250


class TokenProcessor(Section, frozen=True, kw_only=True):
    block_size: Annotated[int, Meta(ge=1)] | None = None
    block_size_tokens: Annotated[int, Meta(ge=1)] | None = None
    hash_seed: str = ""
    hash_algorithm: Literal["cbor-fnv", "xxh64"] | None = None


class PrecisePrefix(Section, frozen=True, kw_only=True):
    token_processor_config: TokenProcessor = TokenProcessor()
    indexer_config: AnyMapping = None
    kv_events_config: AnyMapping = None
    speculative_indexing: bool = False
    speculative_ttl: Seconds = field(default=2.0, name="speculativeTTL")


class InflightLoad(Section, frozen=True, kw_only=True):
    add_estimated_output_tokens: bool = False
    output_ratio: Annotated[float, Meta(ge=0)] = 1.5
    max_estimated_output_tokens: Count = 0
    prefix_match_info_producer_name: str = ""
    sync_cross_replica_state: bool = True


class PredictedLatency(Section, frozen=True, kw_only=True):
    slo_buffer_factor: Annotated[float, Meta(gt=0)] = 1.0
    context_ttl: Seconds = field(default=300.0, name="contextTTL")
    streaming_mode: bool = False
    endpoint_role_label: str = ""
    predict_in_produce: bool = True
    use_encoder_cache_features: bool = False


class MmProducer(Section, frozen=True, kw_only=True):
    cache_size_in_mb_per_server: Count = field(default=4096, name="cacheSizeInMBPerServer")


class SessionIdProducer(Section, frozen=True, kw_only=True):
    header_name: str = ""
    cookie_name: str = ""


class ProbabilisticAdmitter(Section, frozen=True, kw_only=True):
    queue_depth_threshold: Annotated[float, Meta(gt=0)] = 5
    kv_cache_util_threshold: Annotated[float, Meta(gt=0)] = 0.8
    power: Annotated[float, Meta(gt=0, le=100)] = 5
    k: Annotated[float, Meta(gt=0, le=1e9)] = 300


class Reporter(Section, frozen=True, kw_only=True):
    attributes: list[Any] | None = None


class ProgramAwareFairness(Section, frozen=True, kw_only=True):
    strategy: Literal["las"] = "las"
    eviction_ttl_seconds: Count = 3600
    eviction_sweep_seconds: Count = 300
    las_weight_service: float = 0.8
    las_weight_head_wait: float = 0.2
    las_half_life_seconds: float = 60


class StaticLimit(Section, frozen=True, kw_only=True):
    threshold: Annotated[float, Meta(gt=0, le=100)] = 1.0


class Holdback(Section, frozen=True, kw_only=True):
    min_ceiling: Annotated[float, Meta(gt=0, le=100)]
    max_ceiling: Annotated[float, Meta(gt=0, le=100)] = 1.0
    shape: Literal["linear"] = "linear"
    domain: Literal["rank", "value"] = "rank"


class MetricsSource(Section, frozen=True, kw_only=True):
    scheme: Literal["http", "https"] = "http"
    path: str = "/metrics"
    port: Port = 0
    insecure_skip_verify: bool = True
    ca_cert_path: str = ""
    client_cert_path: str = ""
    client_key_path: str = ""
    interval: PositiveSeconds | None = None


class EngineConfig(Section, frozen=True, kw_only=True):
    name: Name
    queued_requests_spec: str = ""
    running_requests_spec: str = ""
    kv_usage_spec: str = ""
    lora_spec: str = ""
    cache_info_spec: str = ""


class CustomMetric(Section, frozen=True, kw_only=True):
    attribute_key: Name
    metric_spec: Name


class CoreMetrics(Section, frozen=True, kw_only=True):
    engine_label_key: Name = "llm-d.ai/engine-type"
    default_engine: Name = "vllm"
    engine_configs: tuple[EngineConfig, ...] = ()
    custom_metrics: tuple[CustomMetric, ...] = ()


class NotificationSource(Section, frozen=True, kw_only=True):
    group: str = ""
    version: str = ""
    kind: str = ""


class FileDiscovery(Section, frozen=True, kw_only=True):
    path: Name
    watch_file: bool = False
