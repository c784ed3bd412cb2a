"""Every plugin of the reference (0.10, August 2026) by its type, and its counterpart here."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from msgspec import Struct, field

from fairlead.apis.engine_metrics import ENGINE_LABELS, ENGINES
from fairlead.compat import parameters as ref
from fairlead.compat.locate import ESTIMATED, LEARNED
from fairlead.config.builtins import Kind
from fairlead.core.headers import SESSION_HEADERS
from fairlead.plugins.filters.ability import ByLabelParams, ContextLengthParams, LabelSelectorParams, RoleParams
from fairlead.plugins.filters.availability import PrefixAffinityParams, SloTierParams, UtilizationParams
from fairlead.plugins.filters.load import ConcurrencyParams, MetricLimitParams
from fairlead.plugins.flow_control import HoldbackCeilingParams, StaticCeilingParams
from fairlead.plugins.params import NoParams, Params
from fairlead.plugins.pickers import MaxScoreParams
from fairlead.plugins.scorers.latency import SloHeadroomParams
from fairlead.plugins.scorers.load import ActiveRequestsParams, InflightTokensParams, QueueThresholdParams
from fairlead.plugins.scorers.metric import ContextLengthScorerParams, MetricParams
from fairlead.plugins.scorers.prefix import NoHitLruParams, PrefixAwareParams, PrefixLengthParams

Model = TypeVar("Model", bound=Params)

#: Where a plugin may be named: in a profile, or in the place with that name.
Role = Literal[
    "profile", "handler", "decider", "producer", "control", "flow", "saturation", "source", "extractor", "discovery",
    "parser",
]  # fmt: skip


class Use(Struct, frozen=True):
    """A Fairlead plugin that replaces a plugin of the reference, with its parameters."""

    kind: Kind
    type: str
    parameters: Any = field(default_factory=NoParams)


class Settings(Struct):
    """Parameters of one plugin of the reference that are fields of Fairlead's sections."""

    #: (section, field, value, dotted name of the parameter).
    values: list[tuple[str, str, Any, str]] = field(default_factory=list)
    #: Names of parameters that have no effect.
    unused: list[str] = field(default_factory=list)

    def set(self, section: str, key: str, value: Any, parameter: str = "") -> None:
        """`parameter`: its name, if it is not `key`."""
        self.values.append((section, key, value, parameter or key))


class Entry(Struct, frozen=True):
    """A plugin of the reference. `refused`: a document that names it is refused, with this advice; empty = accepted.
    `note`: what differs here.

    Deprecated and experimental plugins are accepted if that needs no extra code.
    """

    role: Role
    #: Fairlead's counterpart, as text for the reference page.
    counterpart: str = ""
    params: Any = NoParams
    #: A second role in which it may be named.
    also: Role | None = None
    status: Literal["beta", "alpha", "deprecated"] = "beta"
    #: Maps parameters, and the tokens of a prefix block, to plugins for a profile.
    use: Callable[[Any, int], list[Use]] | None = None
    note: str | Callable[[Any], str] = ""
    refused: str | Callable[[Any], str] = ""
    settings: Callable[[Any, Settings], None] | None = None

    def remark(self, parameters: Any) -> str:
        return self.note if isinstance(self.note, str) else self.note(parameters)

    def refusal(self, parameters: Any) -> str:
        return self.refused if isinstance(self.refused, str) else self.refused(parameters)


Table = Mapping[str, Entry]


def narrowed(params: Params, model: type[Model]) -> Model:
    """A `model` whose values are those of the fields that it has in common with `params`."""
    return model.model_validate({name: value for name, value in params if name in model.model_fields})


# ---- filters, scorers, pickers, profile handlers and deciders ----


def _same(kind: Kind, type: str, model: type[Params] = NoParams, params: Any = None, **more: Any) -> Entry:
    """An entry that one Fairlead plugin replaces, with the parameters that have the same names. `params`: the
    reference's model, if it has more parameters than `model`."""
    return Entry("profile", type, params or model, use=lambda p, block: [Use(kind, type, narrowed(p, model))], **more)


def _refused(role: Role, way_out: str) -> Entry:
    return Entry(role, status="alpha", refused=way_out)


def _role(stage: Any) -> Entry:
    def use(params: Any, block: int) -> list[Use]:
        return [Use("filter", "role", RoleParams(stage=stage))]

    return Entry("profile", "role", use=use)


def _by_label(params: ref.ByLabel, block: int) -> list[Use]:
    selector = narrowed(params, LabelSelectorParams)
    uses = [] if selector == LabelSelectorParams() else [Use("filter", "label-selector", selector)]
    if params.label:
        uses.append(Use("filter", "by-label", narrowed(params, ByLabelParams)))
    return uses


def _context_length(params: ref.ContextLength, block: int) -> list[Use]:
    scorer = Use("scorer", "context-length", ContextLengthScorerParams(label=params.label))
    filtering = Use("filter", "context-length", ContextLengthParams(label=params.label))
    return [filtering, scorer] if params.enable_filtering else [scorer]


def _prefix_cache(params: ref.PrefixCacheScorer, block: int) -> list[Use]:
    if not params.match_length_weight:
        return _prefix_aware(params, block)
    return [Use("scorer", "prefix-length", narrowed(params, PrefixLengthParams))]


def _prefix_aware(params: Any, block: int) -> list[Use]:
    return [Use("scorer", "prefix-aware", PrefixAwareParams(hash_block_size=min(block, 1024)))]


def _token_load(params: ref.TokenLoad, block: int) -> list[Use]:
    return [Use("scorer", "inflight-tokens", InflightTokensParams(threshold_tokens=params.queue_threshold_tokens))]


def _attribute_filter(params: ref.AttributeFilter, block: int) -> list[Use]:
    threshold = params.algorithm.threshold
    limit = MetricLimitParams(
        metric=params.attribute,
        operator=threshold.operator,
        value=threshold.value,
        keep_missing=params.on_missing == "Pass",
    )
    return [Use("filter", "metric-limit", limit)]


def _attribute_scorer(params: ref.AttributeScorer, block: int) -> list[Use]:
    fixed = params.algorithm.normalization.fixed_range
    better: Any = "low" if params.algorithm.type == "linear_lower_is_better" else "high"
    ends = (fixed.min, fixed.max) if fixed else None
    return [Use("scorer", "metric", MetricParams(metric=params.attribute_key, better=better, range=ends))]


def _highest(params: ref.Picker, block: int) -> list[Use]:
    return [Use("picker", "max-score", MaxScoreParams(near_tie=0.0))]


def _names_more(params: ref.Picker) -> str:
    if params.max_num_of_endpoints <= 1:
        return ""
    return "answers name several endpoints, separated by commas; a gateway that takes one address answers 503 to those"


def _more_endpoints(params: ref.Picker, settings: Settings) -> None:
    if params.max_num_of_endpoints > 1:
        settings.set("extProc", "maxEndpoints", params.max_num_of_endpoints, "maxNumOfEndpoints")


#: Ports of `kvEvents`, and their names in `podDiscoveryConfig`.
_PORTS = {"port": "socketPort", "replayPort": "replaySocketPort"}
#: Of the index of KV blocks, parameters that only show what it does.
_SHOWN = ("enableMetrics", "metricsLoggingInterval")


def _events(params: ref.PrecisePrefix, settings: Settings) -> None:
    """Set `kvEvents`: engines connect to `zmqEndpoint`, or are dialled at `socketPort`. One of both counts."""
    events, indexer = params.kv_events_config or {}, params.indexer_config or {}
    pods = events.get("podDiscoveryConfig") if events.get("discoverPods", True) else None
    pods = pods if isinstance(pods, dict) else {}
    unused = ["topicFilter"] if events.get("topicFilter", "kv@") != "kv@" else []
    unused += [name for name in ("podLabelSelector", "podNamespace") if pods.get(name)]
    if events.get("zmqEndpoint"):
        settings.set("kvEvents", "bind", events["zmqEndpoint"], "kvEventsConfig.zmqEndpoint")
        unused += [name for name in _PORTS.values() if name in pods]
    elif any(name in pods for name in _PORTS.values()):
        for key, name in _PORTS.items():
            if key == "port" or name in pods:
                settings.set("kvEvents", key, pods.get(name, 5557), f"kvEventsConfig.podDiscoveryConfig.{name}")
    index = indexer.get("kvBlockIndexConfig")
    unused += [name for name in indexer if name != "kvBlockIndexConfig"]
    unused += [name for name in (index if isinstance(index, dict) else ()) if name not in _SHOWN]
    settings.unused += unused + (["speculativeTTL"] if "speculative_ttl" in params.model_fields_set else [])


def _session_note(params: ref.SessionAffinity) -> str:
    known = ", ".join(SESSION_HEADERS)
    return (
        f"a session's endpoint is computed from its id, nothing is stored or sent back; "
        f"the id is read from one of the headers {known}"
    )


_STALE = "metricsStalenessThreshold has no effect: metrics.staleness says how old metrics may be"
_PREDICTED = "no prediction service: the latency model in this process predicts and learns"
_LEVELS = "zone and node are a cost here: set topology; or pin pods with label-selector-filter"

FILTERS: Table = {
    "label-selector-filter": _same("filter", "label-selector", LabelSelectorParams),
    "by-label-selector": Entry("profile", "label-selector", ref.ByLabel, status="deprecated", use=_by_label),
    "by-label": Entry("profile", "by-label", ref.ByLabel, status="deprecated", use=_by_label),
    "decode-filter": _role("decode"),
    "prefill-filter": _role("prefill"),
    "encode-filter": _role("encode"),
    "prefix-cache-affinity-filter": _same("filter", "prefix-affinity", PrefixAffinityParams, ref.PrefixAffinityFilter),
    "slo-headroom-tier-filter": _same("filter", "slo-tier", SloTierParams, note=_PREDICTED),
    "context-length-aware": Entry("profile", "context-length", ref.ContextLength, use=_context_length),
    "utilization-detector": _same(
        "filter",
        "utilization",
        UtilizationParams,
        ref.UtilizationDetector,
        also="saturation",
        note=lambda p: _STALE if "metrics_staleness_threshold" in p.model_fields_set else "",
    ),
    "concurrency-detector": _same(
        "filter",
        "concurrency",
        ConcurrencyParams,
        ref.ConcurrencyDetector,
        also="saturation",
        note="as a filter it fails open here: when all endpoints are full, they take turns",
    ),
    "endpoint-attribute-filter": Entry(
        "profile",
        "metric-limit",
        ref.AttributeFilter,
        status="alpha",
        use=_attribute_filter,
        note=lambda p: "" if p.fallback_on_empty else "when no endpoint passes, one is taken in turn instead of a 429",
    ),
    "session-affinity-filter": _refused("profile", "use session-affinity-scorer with a high weight"),
    "multicluster-session-affinity-filter": _refused("profile", "list endpoints, not clusters"),
    "topology-affinity-filter": _refused("profile", _LEVELS),
    "utilization-filter": _refused("profile", "use utilization-detector as a filter, or our metric-limit"),
    "disaggregatedset-rollout-screener": _refused("profile", "select the revision with label-selector-filter"),
    "header-based-testing-filter": _refused("profile", "set headers.trust: [test-selection]"),
    "destination-endpoint-served-verifier": _refused("control", "it is a test hook; leave it out"),
}

SCORERS: Table = {
    "queue-scorer": _same("scorer", "queue"),
    "running-requests-size-scorer": _same("scorer", "running-requests"),
    "kv-cache-utilization-scorer": _same("scorer", "kv-utilization"),
    "lora-affinity-scorer": _same("scorer", "lora-affinity"),
    "load-aware-scorer": _same("scorer", "queue-threshold", QueueThresholdParams),
    "token-load-scorer": Entry("profile", "inflight-tokens", ref.TokenLoad, use=_token_load),
    "active-request-scorer": _same(
        "scorer",
        "active-requests",
        ActiveRequestsParams,
        ref.ActiveRequest,
        note=lambda p: "" if p.request_timeout is None else "requestTimeout has no effect; see ledger.leaseTtl",
    ),
    "prefix-cache-scorer": Entry("profile", "prefix-aware, prefix-length", ref.PrefixCacheScorer, use=_prefix_cache),
    "no-hit-lru-scorer": _same("scorer", "no-hit-lru", NoHitLruParams, ref.NoHitLru),
    "latency-scorer": _same(
        "scorer",
        "slo-headroom",
        SloHeadroomParams,
        ref.LatencyScorer,
        note=f"{_PREDICTED}; there is always a prediction, so the composite weights have no effect",
    ),
    "mm-embeddings-cache-scorer": Entry(
        "profile",
        "prefix-aware",
        ref.MmScorer,
        use=_prefix_aware,
        note="media are part of the prefix that is matched; the same image behind another text is not found",
    ),
    "precise-prefix-cache-scorer": Entry(
        "profile",
        "prefix-aware",
        ref.PrecisePrefix,
        status="deprecated",
        also="extractor",
        use=_prefix_aware,
        note=LEARNED,
        settings=_events,
    ),
    "session-affinity-scorer": _same(
        "scorer", "session-affinity", params=ref.SessionAffinity, status="alpha", note=_session_note
    ),
    "endpoint-attribute-scorer": Entry("profile", "metric", ref.AttributeScorer, status="alpha", use=_attribute_scorer),
    "header-label-affinity-scorer": _refused(
        "profile", "select by label with label-selector-filter, or write a scorer"
    ),
    "topology-affinity-scorer": _refused("profile", _LEVELS),
    "multicluster-queue-scorer": _refused("profile", "use queue-scorer"),
    "multicluster-kv-cache-utilization-scorer": _refused("profile", "use kv-cache-utilization-scorer"),
    "multicluster-prefix-cache-scorer": _refused("profile", "use prefix-cache-scorer"),
}

PICKERS: Table = {
    "max-score-picker": Entry(
        "profile", "max-score", ref.Picker, use=_highest, note=_names_more, settings=_more_endpoints
    ),
    "random-picker": _same("picker", "random", params=ref.Picker, note=_names_more, settings=_more_endpoints),
    "weighted-random-picker": _same(
        "picker", "weighted-random", params=ref.Picker, note=_names_more, settings=_more_endpoints
    ),
}

HANDLERS: Table = {
    "single-profile-handler": Entry("handler", "the one profile"),
    "disagg-profile-handler": Entry("handler", "policy prefill-decode", ref.DisaggHandler),
    "pd-profile-handler": Entry("handler", "policy prefill-decode", ref.PdHandler, status="deprecated"),
    "data-parallel-profile-handler": Entry(
        "handler",
        refused="list every rank as an endpoint of its own (address:port); the gateway then dials it directly",
    ),
    "dp-rank-header-handler": _refused(
        "control", "leave it out, and list every rank as an endpoint of its own (address:port)"
    ),
    "header-profile-handler": _refused("handler", "give every profile a scheduler of its own, or use one profile"),
    "disagg-headers-handler": Entry("control", "built in", status="deprecated"),
    "prefill-header-handler": Entry("control", "built in", status="deprecated"),
    "always-disagg-pd-decider": Entry("decider", "always"),
    "always-disagg-multimodal-decider": Entry(
        "decider", "accepted", note="encoding is not handed to endpoints of its own: the decoding endpoint also encodes"
    ),
    "prefix-based-pd-decider": Entry("decider", "always, nonCachedTokens, promptTokens", ref.PrefixDecider),
}


# ---- data producers, request control, flow control, data layer and parsers ----


def _tokens(params: ref.TokenProducer) -> str:
    if params.vllm is None and params.uds_tokenizer_config is None:
        return "estimate has no effect: each image, video or sound counts as 1,000 tokens" if params.estimate else ""
    return ESTIMATED


def _approx(params: ref.ApproxPrefix) -> str:
    said = []
    if params.max_prefix_tokens_to_match != 131_072 or params.max_prefix_blocks_to_match != 2048:
        said.append("the whole prompt is matched (blocks grow with depth)")
    if params.lru_capacity_per_server != 31_250:
        said.append("what an endpoint holds is bounded by the KV capacity that it reports")
    return "; ".join(said)


def _session_id(params: ref.SessionIdProducer) -> str:
    known = f"send the session id in one of the headers {', '.join(SESSION_HEADERS)}"
    if params.header_name and params.cookie_name:
        return "give headerName or cookieName, not both"
    if params.cookie_name:
        return f"cookies are not read; {known}"
    return "" if not params.header_name or params.header_name.lower() in SESSION_HEADERS else known


def _metrics_source(params: ref.MetricsSource) -> str:
    if params.client_cert_path or params.client_key_path:
        return "client certificates are not sent; use metrics.tokenFile"
    return ""


def _scrape(params: ref.MetricsSource, settings: Settings) -> None:
    if params.interval is not None:
        settings.set("metrics", "interval", params.interval)
        settings.set("metrics", "idleInterval", params.interval, "interval")
    if params.ca_cert_path:
        settings.set("metrics", "tls", {"caFile": params.ca_cert_path}, "caCertPath")
    elif params.insecure_skip_verify and "insecure_skip_verify" in params.model_fields_set:
        settings.set("metrics", "tls", {"verify": False}, "insecureSkipVerify")
    for key, value in params.model_dump(include={"scheme", "path", "port"}, exclude_defaults=True).items():
        settings.set("metrics", key, value)


def _models(params: ref.MetricsSource, settings: Settings) -> None:
    if params.interval is not None:
        settings.set("metrics", "modelsInterval", params.interval, "interval")


def _core_metrics(params: ref.CoreMetrics) -> str:
    if params.engine_label_key in ENGINE_LABELS:
        return ""
    return f"engineLabelKey: label endpoints with {ENGINE_LABELS[0]} instead"


def _engines(params: ref.CoreMetrics, settings: Settings) -> None:
    """Set `metrics.engines`. A configured engine replaces the one of that name; a custom metric becomes an additional
    gauge of every engine."""
    engines: dict[str, dict[str, Any]] = {}
    for engine in params.engine_configs:
        specs = {
            "waiting": engine.queued_requests_spec,
            "running": engine.running_requests_spec,
            "kvUsage": engine.kv_usage_spec,
            "lora": engine.lora_spec,
            "cacheInfo": engine.cache_info_spec,
        }
        engines[engine.name] = {key: [spec] if spec else [] for key, spec in specs.items()}
    if params.custom_metrics:
        extra = {metric.attribute_key: metric.metric_spec for metric in params.custom_metrics}
        for name in {*ENGINES, *engines}:
            engines.setdefault(name, {})["extra"] = extra
    if engines:
        settings.set("metrics", "engines", engines, "engineConfigs")
    if params.default_engine != "vllm":
        settings.set("metrics", "defaultEngine", params.default_engine)


PRODUCERS: Table = {
    "token-producer": Entry("producer", "built in", ref.TokenProducer, note=_tokens),
    "tokenizer": Entry("producer", "built in", ref.TokenProducer, status="deprecated", note=_tokens),
    "approx-prefix-cache-producer": Entry(
        "producer", "built in; blockSizeTokens → hashBlockSize", ref.ApproxPrefix, also="extractor", note=_approx
    ),
    "precise-prefix-cache-producer": Entry(
        "producer",
        "built in",
        ref.PrecisePrefix,
        also="extractor",
        note=LEARNED,
        settings=_events,
    ),
    "inflight-load-producer": Entry(
        "producer",
        "built in: the ledger of leases",
        ref.InflightLoad,
        also="extractor",
        note=lambda p: "the ledger charges uncached prompt tokens" if p.add_estimated_output_tokens else "",
    ),
    "predicted-latency-producer": Entry(
        "producer",
        "built in: latency model",
        ref.PredictedLatency,
        note="no prediction or training services: the latency model in this process predicts and learns",
    ),
    "mm-embeddings-cache-producer": Entry(
        "producer",
        "built in: prefix index",
        ref.MmProducer,
        also="extractor",
        note="media are part of the prefix that is matched; there is no cache of items beside it",
    ),
    "session-id-producer": Entry("producer", "built in: session headers", ref.SessionIdProducer, refused=_session_id),
    "burst-prefix-cache-producer": _refused(
        "producer", "leave it out: a prefix counts from the decision on, in a burst too"
    ),
    "p2p-source-producer": _refused("producer", "leave it out: KV blocks are not moved between endpoints"),
    "multicluster-approx-prefix-cache-producer": _refused("producer", "use approx-prefix-cache-producer"),
    "agent-identity": _refused("control", "send the fairness id in x-llm-d-inference-fairness-id"),
    "request-attribute-reporter": Entry(
        "control",
        refused="leave it out: token counts are in the metrics and in the decision journal, not in gateway metadata",
    ),
}

_ADMIT = "it sheds no requests here; flow control has limits and times to live"
_EVICTED = "built in: flowControl.eviction; below priority 0, the lowest and newest first"


def _holdback(params: HoldbackCeilingParams) -> str:
    return "minCeiling is above maxCeiling: swap them" if params.min_ceiling > params.max_ceiling else ""


FLOW: Table = {
    "latency-slo-admitter": Entry("control", "none", note=_ADMIT),
    "probabilistic-admitter": Entry("control", "flowControl.earlyShedding", ref.ProbabilisticAdmitter),
    "global-strict-fairness-policy": Entry("flow", "fairness global-strict"),
    "round-robin-fairness-policy": Entry("flow", "fairness round-robin"),
    "program-aware-fairness": Entry(
        "flow",
        "fairness start-time-fair",
        ref.ProgramAwareFairness,
        note="service is milliseconds of work, and does not fade; waiting is not weighed",
    ),
    "fcfs-ordering-policy": Entry("flow", "ordering fcfs"),
    "edf-ordering-policy": Entry("flow", "ordering edf"),
    "slo-deadline-ordering-policy": Entry("flow", "ordering edf"),
    "static-usage-limit-policy": Entry("flow", "ceiling static-usage-limit-policy", StaticCeilingParams),
    "priority-holdback-policy": Entry(
        "flow", "ceiling priority-holdback-policy", HoldbackCeilingParams, status="alpha", refused=_holdback
    ),
    "soft-reflective-ceiling-policy": Entry("flow", "ceiling soft-reflective-ceiling-policy", status="alpha"),
    "sheddable-eviction-filter": Entry("flow", _EVICTED, status="alpha"),
    "priority-then-time-eviction-order-policy": Entry("flow", _EVICTED, status="alpha"),
}

DATA: Table = {
    "metrics-data-source": Entry(
        "source", "section metrics", ref.MetricsSource, refused=_metrics_source, settings=_scrape
    ),
    "core-metrics-extractor": Entry(
        "extractor", "metrics.engines, metrics.defaultEngine", ref.CoreMetrics, refused=_core_metrics, settings=_engines
    ),
    "models-data-source": Entry("source", "metrics.modelsInterval", ref.MetricsSource, settings=_models),
    "models-data-extractor": Entry("extractor", "metrics.modelsInterval"),
    "k8s-notification-source": Entry(
        "source",
        "built in",
        ref.NotificationSource,
        note="objects are not handed to plugins; endpoints come from endpoints:",
    ),
    "endpoint-notification-source": Entry("source", "built in: every plugin sees the same endpoints"),
    "file-discovery": Entry("discovery", "endpoints.file", ref.FileDiscovery),
    "multicluster-file-discovery": _refused("discovery", "use file-discovery"),
    "multicluster-metrics-data-source": _refused("source", "use metrics-data-source"),
    "multicluster-metrics-extractor": _refused("extractor", "use core-metrics-extractor"),
    "dcgm-data-source": _refused("source", "name the gauge under metrics.engines.NAME.extra, if the page has it"),
    "dcgm-extractor": _refused("extractor", "name the gauge under metrics.engines.NAME.extra, if the page has it"),
    "topology-extractor": _refused("extractor", "leave it out: topology is not used"),
}

_UNREAD = "requests to its paths are passed on unread: scheduled by load, without prefix and model"

PARSERS: Table = {
    "openai-parser": Entry("parser", "built in"),
    "anthropic-parser": Entry("parser", "built in"),
    "vllmhttp-parser": Entry("parser", "built in"),
    "sglanghttp-parser": Entry("parser", "built in"),
    "vllmgrpc-parser": Entry("parser", "built in"),
    "vertexai-parser": Entry("parser", "passed on", note=_UNREAD),
    "passthrough-parser": Entry("parser", "built in"),
}


# ---- all of them ----

CATALOGUE: Table = {**FILTERS, **SCORERS, **PICKERS, **HANDLERS, **PRODUCERS, **FLOW, **DATA, **PARSERS}
