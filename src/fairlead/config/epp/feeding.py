"""Counterparts of the reference's data producers, request control, flow control, data layer and parsers."""

from typing import Any

from fairlead.config.epp import parameters as ref
from fairlead.config.epp.entry import Entry, Settings, Table
from fairlead.route.headers import SESSION_HEADERS
from fairlead.wire.engine_metrics import ENGINE_LABELS, ENGINES


def _tokens(params: ref.TokenProducer) -> str:
    if params.vllm is None and params.uds_tokenizer_config is None:
        return ""
    return "prompts are not sent to a tokenizer: tokens are estimated, and learned from what model servers report"


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
    if params.scheme != "http" or params.path != "/metrics" or params.port:
        return "give each endpoint its page: metricsUrl, or the labels metricsAddress and metricsPort"
    return ""


def _scrape(params: ref.MetricsSource, settings: Settings) -> None:
    if params.interval is not None:
        settings.set("metrics", "interval", params.interval)
        settings.set("metrics", "idleInterval", params.interval)
    if params.ca_cert_path:
        settings.set("metrics", "tls", {"caFile": params.ca_cert_path})


def _core_metrics(params: ref.CoreMetrics) -> str:
    if params.engine_label_key in ENGINE_LABELS:
        return ""
    return f"engineLabelKey: label endpoints with {ENGINE_LABELS[0]} instead"


def _engines(params: ref.CoreMetrics, settings: Settings) -> None:
    """A configured engine replaces ours of that name whole; a custom metric is a further gauge of every engine."""
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
        settings.set("metrics", "engines", engines)
    if params.default_engine != "vllm":
        settings.set("metrics", "defaultEngine", params.default_engine)


PRODUCERS: Table = {
    "token-producer": Entry(role="producer", counterpart="built in", params=ref.TokenProducer, note=_tokens),
    "tokenizer": Entry(
        role="producer", status="deprecated", counterpart="built in", params=ref.TokenProducer, note=_tokens
    ),
    "approx-prefix-cache-producer": Entry(
        role="producer", counterpart="built in; blockSizeTokens → hashBlockSize", params=ref.ApproxPrefix, note=_approx
    ),
    "precise-prefix-cache-producer": Entry(
        role="producer",
        also="extractor",
        counterpart="built in",
        params=ref.PrecisePrefix,
        note="prefix knowledge is learned from the scheduler's own decisions; KV events are not taken from here",
    ),
    "inflight-load-producer": Entry(
        role="producer",
        counterpart="built in: the ledger of leases",
        params=ref.InflightLoad,
        note=lambda p: "the ledger charges uncached prompt tokens" if p.add_estimated_output_tokens else "",
    ),
    "predicted-latency-producer": Entry(
        role="producer",
        counterpart="built in: latency model",
        params=ref.PredictedLatency,
        note="prediction and training services are not asked: the latency model in this process predicts, and learns",
    ),
    "mm-embeddings-cache-producer": Entry(
        role="producer",
        counterpart="built in: prefix index",
        params=ref.MmProducer,
        note="media are part of the prefix that is matched; there is no cache of items beside it",
    ),
    "session-id-producer": Entry(
        role="producer", counterpart="built in: session headers", params=ref.SessionIdProducer, refused=_session_id
    ),
    "burst-prefix-cache-producer": Entry(
        role="producer", status="alpha", refused="leave it out: a prefix counts from the decision on, also in a burst"
    ),
    "p2p-source-producer": Entry(
        role="producer", status="alpha", refused="leave it out: KV blocks are not moved between endpoints"
    ),
    "multicluster-approx-prefix-cache-producer": Entry(
        role="producer", status="alpha", refused="use approx-prefix-cache-producer"
    ),
    "agent-identity": Entry(
        role="control", status="alpha", refused="send the fairness id in x-llm-d-inference-fairness-id"
    ),
    "request-attribute-reporter": Entry(
        role="control",
        params=ref.Reporter,
        refused="leave it out: token counts are in the metrics and in the decision journal, not in gateway metadata",
    ),
}

_ADMIT = "requests are not shed by it; flow control has limits and times to live"
_EVICTED = "built in: flowControl.eviction; below priority 0, the lowest and newest first"


def _holdback(params: ref.Holdback) -> str:
    return "minCeiling is above maxCeiling: swap them" if params.min_ceiling > params.max_ceiling else ""


FLOW: Table = {
    "latency-slo-admitter": Entry(role="control", counterpart="none", note=_ADMIT),
    "probabilistic-admitter": Entry(
        role="control", counterpart="flowControl.earlyShedding", params=ref.ProbabilisticAdmitter
    ),
    "global-strict-fairness-policy": Entry(role="flow", counterpart="fairness global-strict"),
    "round-robin-fairness-policy": Entry(role="flow", counterpart="fairness round-robin"),
    "program-aware-fairness": Entry(
        role="flow",
        counterpart="fairness least-attained-service",
        params=ref.ProgramAwareFairness,
        note="service is uncached prompt tokens, and does not fade; waiting is not weighed",
    ),
    "fcfs-ordering-policy": Entry(role="flow", counterpart="ordering fcfs"),
    "edf-ordering-policy": Entry(role="flow", counterpart="ordering edf"),
    "slo-deadline-ordering-policy": Entry(role="flow", counterpart="ordering edf"),
    "static-usage-limit-policy": Entry(
        role="flow", counterpart="ceiling static-usage-limit-policy", params=ref.StaticLimit
    ),
    "priority-holdback-policy": Entry(
        role="flow",
        status="alpha",
        counterpart="ceiling priority-holdback-policy",
        params=ref.Holdback,
        refused=_holdback,
    ),
    "soft-reflective-ceiling-policy": Entry(
        role="flow", status="alpha", counterpart="ceiling soft-reflective-ceiling-policy"
    ),
    "sheddable-eviction-filter": Entry(role="flow", status="alpha", counterpart=_EVICTED),
    "priority-then-time-eviction-order-policy": Entry(role="flow", status="alpha", counterpart=_EVICTED),
}

DATA: Table = {
    "metrics-data-source": Entry(
        role="source",
        counterpart="section metrics",
        params=ref.MetricsSource,
        refused=_metrics_source,
        settings=_scrape,
    ),
    "core-metrics-extractor": Entry(
        role="extractor",
        counterpart="metrics.engines, metrics.defaultEngine",
        params=ref.CoreMetrics,
        refused=_core_metrics,
        settings=_engines,
    ),
    "models-data-source": Entry(
        role="source",
        counterpart="label model-id",
        params=ref.MetricsSource,
        note="/v1/models is not asked: label endpoints with model-id",
    ),
    "models-data-extractor": Entry(role="extractor", counterpart="label model-id"),
    "k8s-notification-source": Entry(
        role="source",
        counterpart="built in",
        params=ref.NotificationSource,
        note="objects are not handed to plugins; endpoints come from endpoints:",
    ),
    "endpoint-notification-source": Entry(role="source", counterpart="built in: every plugin sees the same endpoints"),
    "file-discovery": Entry(role="discovery", counterpart="endpoints.file", params=ref.FileDiscovery),
    "multicluster-file-discovery": Entry(role="discovery", status="alpha", refused="use file-discovery"),
    "multicluster-metrics-data-source": Entry(role="source", status="alpha", refused="use metrics-data-source"),
    "multicluster-metrics-extractor": Entry(role="extractor", status="alpha", refused="use core-metrics-extractor"),
    "dcgm-data-source": Entry(
        role="source", status="alpha", refused="name the gauge under metrics.engines.NAME.extra, if the page has it"
    ),
    "dcgm-extractor": Entry(
        role="extractor", status="alpha", refused="name the gauge under metrics.engines.NAME.extra, if the page has it"
    ),
    "topology-extractor": Entry(role="extractor", status="alpha", refused="leave it out: topology is not used"),
}

_UNREAD = "requests to its paths are passed on unread: scheduled by load, without prefix and model"

PARSERS: Table = {
    "openai-parser": Entry(role="parser", counterpart="built in"),
    "anthropic-parser": Entry(role="parser", counterpart="built in"),
    "vllmhttp-parser": Entry(role="parser", counterpart="built in"),
    "sglanghttp-parser": Entry(role="parser", counterpart="built in"),
    "vllmgrpc-parser": Entry(role="parser", counterpart="built in"),
    "vertexai-parser": Entry(role="parser", counterpart="passed on", note=_UNREAD),
    "passthrough-parser": Entry(role="parser", counterpart="built in"),
}
