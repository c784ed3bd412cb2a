"""Counterparts of the reference's filters, scorers, pickers, profile handlers and deciders."""

from collections.abc import Callable
from typing import Any

from fairlead.config.epp import parameters as ref
from fairlead.config.epp.entry import Around, Entry, Table, Use
from fairlead.plugins.filters.by_label import ByLabelParams
from fairlead.plugins.filters.concurrency import ConcurrencyParams
from fairlead.plugins.filters.context_length import ContextLengthParams
from fairlead.plugins.filters.label_selector import LabelSelectorParams
from fairlead.plugins.filters.metric_limit import MetricLimitParams
from fairlead.plugins.filters.prefix_affinity import PrefixAffinityParams
from fairlead.plugins.filters.role import RoleParams
from fairlead.plugins.filters.slo_tier import SloTierParams
from fairlead.plugins.filters.utilization import UtilizationParams
from fairlead.plugins.params import NoParams
from fairlead.plugins.pickers.max_score import MaxScoreParams
from fairlead.plugins.scorers.active_requests import ActiveRequestsParams
from fairlead.plugins.scorers.context_length import ContextLengthScorerParams
from fairlead.plugins.scorers.inflight_tokens import InflightTokensParams
from fairlead.plugins.scorers.metric import MetricParams
from fairlead.plugins.scorers.no_hit_lru import NoHitLruParams
from fairlead.plugins.scorers.prefix_aware import PrefixAwareParams
from fairlead.plugins.scorers.prefix_length import PrefixLengthParams
from fairlead.plugins.scorers.queue_threshold import QueueThresholdParams
from fairlead.plugins.scorers.slo_headroom import SloHeadroomParams
from fairlead.route.headers import SESSION_HEADERS


def _use(kind: Any, type: str, make: Callable[[Any], Any] | None = None) -> Callable[[Any, Around], list[Use]]:
    """One plugin in the stead of one."""
    return lambda params, around: [Use(kind, type, make(params) if make else NoParams())]


def _role(stage: Any) -> Entry:
    return Entry(role="profile", counterpart="role", use=_use("filter", "role", lambda p: RoleParams(stage=stage)))


def _by_label(params: ref.ByLabel, around: Around) -> list[Use]:
    selector = LabelSelectorParams(match_labels=params.match_labels, match_expressions=params.match_expressions)
    uses = [] if selector == LabelSelectorParams() else [Use("filter", "label-selector", selector)]
    if params.label:
        values = ByLabelParams(
            label=params.label, valid_values=params.valid_values, allows_no_label=params.allows_no_label
        )
        uses.append(Use("filter", "by-label", values))
    return uses


def _context_length(params: ref.ContextLength, around: Around) -> list[Use]:
    scorer = Use("scorer", "context-length", ContextLengthScorerParams(label=params.label))
    filtering = Use("filter", "context-length", ContextLengthParams(label=params.label))
    return [filtering, scorer] if params.enable_filtering else [scorer]


def _prefix_cache(params: ref.PrefixCacheScorer, around: Around) -> list[Use]:
    if not params.match_length_weight:
        return [Use("scorer", "prefix-aware", PrefixAwareParams(hash_block_size=min(around.block, 1024)))]
    both = PrefixLengthParams(
        match_length_weight=params.match_length_weight, match_length_scale_tokens=params.match_length_scale_tokens
    )
    return [Use("scorer", "prefix-length", both)]


def _attribute_filter(params: ref.AttributeFilter, around: Around) -> list[Use]:
    threshold = params.algorithm.threshold
    limit = MetricLimitParams(
        metric=params.attribute,
        operator=threshold.operator,
        value=threshold.value,
        keep_missing=params.on_missing == "Pass",
    )
    return [Use("filter", "metric-limit", limit)]


def _attribute_scorer(params: ref.AttributeScorer, around: Around) -> list[Use]:
    fixed = params.algorithm.normalization.fixed_range
    better: Any = "low" if params.algorithm.type == "linear_lower_is_better" else "high"
    ends = (fixed.min, fixed.max) if fixed else None
    return [Use("scorer", "metric", MetricParams(metric=params.attribute_key, better=better, range=ends))]


def _more_endpoints(params: ref.Picker) -> str:
    if params.max_num_of_endpoints == 1:
        return ""
    return "one endpoint is named per request; when it fails, the gateway's own retry policy decides"


def _session_note(params: ref.SessionAffinity) -> str:
    known = ", ".join(SESSION_HEADERS)
    return (
        f"a session's endpoint is computed from its id, nothing is stored or sent back; "
        f"the id is read from one of the headers {known}"
    )


_PREDICTED = "no prediction service is asked: the latency model in this process predicts, and learns as it runs"
_PD = (
    "prefill/decode pairs are not formed: every request goes whole to an endpoint of the decode profile, which "
    "prefills itself"
)
_LEVELS = "host, rack and zone are not known here; pin pods with label-selector-filter"

FILTERS: Table = {
    "label-selector-filter": Entry(
        role="profile",
        counterpart="label-selector",
        params=LabelSelectorParams,
        use=_use("filter", "label-selector", lambda p: p),
    ),
    "by-label-selector": Entry(
        role="profile", status="deprecated", counterpart="label-selector", params=ref.ByLabel, use=_by_label
    ),
    "by-label": Entry(role="profile", status="deprecated", counterpart="by-label", params=ref.ByLabel, use=_by_label),
    "decode-filter": _role("decode"),
    "prefill-filter": _role("prefill"),
    "encode-filter": _role("encode"),
    "prefix-cache-affinity-filter": Entry(
        role="profile",
        counterpart="prefix-affinity",
        params=ref.PrefixAffinityFilter,
        use=_use(
            "filter",
            "prefix-affinity",
            lambda p: PrefixAffinityParams(
                affinity_threshold=p.affinity_threshold,
                exploration_probability=p.exploration_probability,
                max_ttft_penalty_ms=p.max_ttft_penalty_ms,
                ttft_source=p.ttft_source,
                peak_prefill_throughput=p.peak_prefill_throughput,
            ),
        ),
    ),
    "slo-headroom-tier-filter": Entry(
        role="profile",
        counterpart="slo-tier",
        params=ref.SloTier,
        use=_use("filter", "slo-tier", lambda p: SloTierParams(epsilon_explore_neg=p.epsilon_explore_neg)),
        note=_PREDICTED,
    ),
    "context-length-aware": Entry(
        role="profile", counterpart="context-length", params=ref.ContextLength, use=_context_length
    ),
    "utilization-detector": Entry(
        role="profile",
        also="saturation",
        counterpart="utilization",
        params=ref.UtilizationDetector,
        use=_use(
            "filter",
            "utilization",
            lambda p: UtilizationParams(
                queue_depth_threshold=p.queue_depth_threshold,
                kv_cache_util_threshold=p.kv_cache_util_threshold,
                headroom=p.headroom,
            ),
        ),
    ),
    "concurrency-detector": Entry(
        role="profile",
        also="saturation",
        counterpart="concurrency",
        params=ref.ConcurrencyDetector,
        use=_use(
            "filter",
            "concurrency",
            lambda p: ConcurrencyParams(
                max_concurrency=p.max_concurrency,
                max_token_concurrency=p.max_token_concurrency,
                concurrency_mode=p.concurrency_mode,
                headroom=p.headroom,
            ),
        ),
        note="as a filter it fails open here: when all endpoints are full, one of them is taken in turn",
    ),
    "endpoint-attribute-filter": Entry(
        role="profile",
        status="alpha",
        counterpart="metric-limit",
        params=ref.AttributeFilter,
        use=_attribute_filter,
        note=lambda p: "" if p.fallback_on_empty else "when no endpoint passes, one is taken in turn instead of a 429",
    ),
    "session-affinity-filter": Entry(
        role="profile", status="alpha", refused="use session-affinity-scorer with a high weight"
    ),
    "multicluster-session-affinity-filter": Entry(
        role="profile", status="alpha", refused="list endpoints, not clusters"
    ),
    "topology-affinity-filter": Entry(role="profile", status="alpha", refused=_LEVELS),
    "utilization-filter": Entry(
        role="profile", status="alpha", refused="use utilization-detector as a filter, or our metric-limit"
    ),
    "disaggregatedset-rollout-screener": Entry(
        role="profile", status="alpha", refused="select the revision with label-selector-filter"
    ),
    "header-based-testing-filter": Entry(role="profile", status="alpha", refused="set headers.trust: [test-selection]"),
    "destination-endpoint-served-verifier": Entry(
        role="control", status="alpha", refused="it is a test hook; leave it out"
    ),
}

SCORERS: Table = {
    "queue-scorer": Entry(role="profile", counterpart="queue", use=_use("scorer", "queue")),
    "running-requests-size-scorer": Entry(
        role="profile", counterpart="running-requests", use=_use("scorer", "running-requests")
    ),
    "kv-cache-utilization-scorer": Entry(
        role="profile", counterpart="kv-utilization", use=_use("scorer", "kv-utilization")
    ),
    "lora-affinity-scorer": Entry(role="profile", counterpart="lora-affinity", use=_use("scorer", "lora-affinity")),
    "load-aware-scorer": Entry(
        role="profile",
        counterpart="queue-threshold",
        params=ref.LoadAware,
        use=_use("scorer", "queue-threshold", lambda p: QueueThresholdParams(threshold=p.threshold)),
    ),
    "token-load-scorer": Entry(
        role="profile",
        counterpart="inflight-tokens",
        params=ref.TokenLoad,
        use=_use(
            "scorer", "inflight-tokens", lambda p: InflightTokensParams(threshold_tokens=p.queue_threshold_tokens)
        ),
    ),
    "active-request-scorer": Entry(
        role="profile",
        counterpart="active-requests",
        params=ref.ActiveRequest,
        use=_use(
            "scorer",
            "active-requests",
            lambda p: ActiveRequestsParams(idle_threshold=p.idle_threshold, max_busy_score=p.max_busy_score),
        ),
        note=lambda p: "" if p.request_timeout is None else "requestTimeout has no effect; see ledger.leaseTtl",
    ),
    "prefix-cache-scorer": Entry(
        role="profile", counterpart="prefix-aware, prefix-length", params=ref.PrefixCacheScorer, use=_prefix_cache
    ),
    "no-hit-lru-scorer": Entry(
        role="profile",
        counterpart="no-hit-lru",
        params=ref.NoHitLru,
        use=_use("scorer", "no-hit-lru", lambda p: NoHitLruParams(lru_size=p.lru_size)),
    ),
    "latency-scorer": Entry(
        role="profile",
        counterpart="slo-headroom",
        params=ref.LatencyScorer,
        use=_use(
            "scorer",
            "slo-headroom",
            lambda p: SloHeadroomParams(
                ttft_weight=p.ttft_weight,
                tpot_weight=p.tpot_weight,
                headroom_selection_strategy=p.headroom_selection_strategy,
                composite_kv_weight=p.composite_kv_weight,
                composite_queue_weight=p.composite_queue_weight,
                composite_prefix_weight=p.composite_prefix_weight,
            ),
        ),
        note=_PREDICTED,
    ),
    "mm-embeddings-cache-scorer": Entry(
        role="profile",
        counterpart="prefix-aware",
        params=ref.MmScorer,
        use=lambda params, around: [
            Use("scorer", "prefix-aware", PrefixAwareParams(hash_block_size=min(around.block, 1024)))
        ],
        note="media are part of the prefix that is matched; the same image behind another text is not found",
    ),
    "precise-prefix-cache-scorer": Entry(
        role="profile",
        status="deprecated",
        counterpart="prefix-aware",
        params=ref.PrecisePrefix,
        use=lambda params, around: [
            Use("scorer", "prefix-aware", PrefixAwareParams(hash_block_size=min(around.block, 1024)))
        ],
        note="prefix knowledge is learned from the scheduler's own decisions; KV events are not taken from here",
    ),
    "session-affinity-scorer": Entry(
        role="profile",
        status="alpha",
        counterpart="session-affinity",
        params=ref.SessionAffinity,
        use=_use("scorer", "session-affinity"),
        note=_session_note,
    ),
    "endpoint-attribute-scorer": Entry(
        role="profile", status="alpha", counterpart="metric", params=ref.AttributeScorer, use=_attribute_scorer
    ),
    "header-label-affinity-scorer": Entry(
        role="profile", status="alpha", refused="select by label with label-selector-filter, or write a scorer"
    ),
    "topology-affinity-scorer": Entry(role="profile", status="alpha", refused=_LEVELS),
    "multicluster-queue-scorer": Entry(role="profile", status="alpha", refused="use queue-scorer"),
    "multicluster-kv-cache-utilization-scorer": Entry(
        role="profile", status="alpha", refused="use kv-cache-utilization-scorer"
    ),
    "multicluster-prefix-cache-scorer": Entry(role="profile", status="alpha", refused="use prefix-cache-scorer"),
}

PICKERS: Table = {
    "max-score-picker": Entry(
        role="profile",
        counterpart="max-score",
        params=ref.Picker,
        use=_use("picker", "max-score", lambda p: MaxScoreParams()),
        note=_more_endpoints,
    ),
    "random-picker": Entry(
        role="profile", counterpart="random", params=ref.Picker, use=_use("picker", "random"), note=_more_endpoints
    ),
    "weighted-random-picker": Entry(
        role="profile",
        counterpart="weighted-random",
        params=ref.Picker,
        use=_use("picker", "weighted-random"),
        note=_more_endpoints,
    ),
}

HANDLERS: Table = {
    "single-profile-handler": Entry(role="handler", counterpart="the one profile"),
    "disagg-profile-handler": Entry(
        role="handler", counterpart="the decode profile", params=ref.DisaggHandler, note=_PD
    ),
    "pd-profile-handler": Entry(
        role="handler", status="deprecated", counterpart="the decode profile", params=ref.PdHandler, note=_PD
    ),
    "data-parallel-profile-handler": Entry(
        role="handler",
        params=ref.DataParallelHandler,
        refused="list every rank as an endpoint of its own (address:port); the gateway then dials it directly",
    ),
    "header-profile-handler": Entry(
        role="handler", status="alpha", refused="give every profile a scheduler of its own, or use one profile"
    ),
    "disagg-headers-handler": Entry(role="control", status="deprecated", counterpart="built in", note=_PD),
    "prefill-header-handler": Entry(role="control", status="deprecated", counterpart="built in", note=_PD),
    "always-disagg-pd-decider": Entry(role="decider", counterpart="accepted", note=_PD),
    "always-disagg-multimodal-decider": Entry(role="decider", counterpart="accepted", note=_PD),
    "prefix-based-pd-decider": Entry(role="decider", counterpart="accepted", params=ref.PrefixDecider, note=_PD),
}
