"""The table of built-in plugins, and other names for them."""

from collections.abc import Mapping
from typing import Any, Literal

from fairlead.plugins.ceilings import HoldbackCeiling, ReflectiveCeiling, StaticCeiling
from fairlead.plugins.fairness import DeficitFairness, GlobalStrict, LeastAttainedFairness, RoundRobinFairness
from fairlead.plugins.filters.by_label import ByLabel
from fairlead.plugins.filters.concurrency import Concurrency
from fairlead.plugins.filters.context_length import ContextLength
from fairlead.plugins.filters.health import Health
from fairlead.plugins.filters.label_selector import LabelSelector
from fairlead.plugins.filters.memory_pressure import MemoryPressure
from fairlead.plugins.filters.metric_limit import MetricLimit
from fairlead.plugins.filters.model_compatibility import ModelCompatibility
from fairlead.plugins.filters.prefix_affinity import PrefixAffinity
from fairlead.plugins.filters.queue_depth import QueueDepth
from fairlead.plugins.filters.role import Role
from fairlead.plugins.filters.slo_tier import SloTier
from fairlead.plugins.filters.subset import Subset
from fairlead.plugins.filters.utilization import Utilization
from fairlead.plugins.orderings import Deadline, FirstCome, LeastWorkOrdering
from fairlead.plugins.pickers.max_score import MaxScore
from fairlead.plugins.pickers.round_robin import RoundRobin, Uniform
from fairlead.plugins.pickers.top_k import TopK
from fairlead.plugins.pickers.weighted_random import WeightedRandom
from fairlead.plugins.policies.consistent_hashing import ConsistentHashingBounded
from fairlead.plugins.policies.cost_model import CostModel
from fairlead.plugins.policies.dynamic_weights import DynamicWeights
from fairlead.plugins.policies.dynamo import DynamoLinear
from fairlead.plugins.policies.least_requests import LeastRequests
from fairlead.plugins.policies.lmetric import Lmetric
from fairlead.plugins.policies.lpwl import Lpwl
from fairlead.plugins.policies.power_of_two import PowerOfTwo
from fairlead.plugins.policies.prefill_decode import PrefillDecode
from fairlead.plugins.policies.sglang import SglangCacheAware
from fairlead.plugins.policies.sticky import StickyUntilSaturated
from fairlead.plugins.policies.weights import Weights322
from fairlead.plugins.saturations import ConcurrencyDetector, UtilizationDetector
from fairlead.plugins.scorers.active_requests import ActiveRequests
from fairlead.plugins.scorers.context_length import ContextLengthScorer
from fairlead.plugins.scorers.inflight_tokens import InflightTokens
from fairlead.plugins.scorers.kv_utilization import KvUtilization
from fairlead.plugins.scorers.load_aware import LoadAware
from fairlead.plugins.scorers.lora_affinity import LoraAffinity
from fairlead.plugins.scorers.lora_aware import LoraAware
from fairlead.plugins.scorers.metric import Metric
from fairlead.plugins.scorers.no_hit_lru import NoHitLru
from fairlead.plugins.scorers.predicted_latency import PredictedLatency
from fairlead.plugins.scorers.prefix_aware import PrefixAware
from fairlead.plugins.scorers.prefix_length import PrefixLength
from fairlead.plugins.scorers.queue import Queue
from fairlead.plugins.scorers.queue_threshold import QueueThreshold
from fairlead.plugins.scorers.running_requests import RunningRequests
from fairlead.plugins.scorers.session_affinity import SessionAffinity
from fairlead.plugins.scorers.slo_headroom import SloHeadroom

Kind = Literal[
    "filter", "scorer", "picker", "policy", "metric-source", "parser", "fairness", "ordering", "saturation", "ceiling"
]
#: The method that makes a class a plugin of a kind.
METHODS: Mapping[Kind, str] = {
    "filter": "keep",
    "scorer": "score",
    "picker": "pick",
    "policy": "choose",
    "metric-source": "measure",
    "parser": "parse",
    "fairness": "turns",
    "ordering": "key",
    "saturation": "level",
    "ceiling": "allowed",
}


def _by_type(*classes: Any) -> dict[str, Any]:
    return {cls.type: cls for cls in classes}


BUILTINS: Mapping[Kind, Mapping[str, Any]] = {
    "filter": _by_type(
        Role,
        Subset,
        ModelCompatibility,
        Health,
        QueueDepth,
        MemoryPressure,
        LabelSelector,
        ByLabel,
        ContextLength,
        PrefixAffinity,
        SloTier,
        Utilization,
        Concurrency,
        MetricLimit,
    ),
    "scorer": _by_type(
        PrefixAware,
        LoadAware,
        KvUtilization,
        InflightTokens,
        LoraAware,
        SessionAffinity,
        Queue,
        RunningRequests,
        QueueThreshold,
        ActiveRequests,
        LoraAffinity,
        NoHitLru,
        PrefixLength,
        ContextLengthScorer,
        SloHeadroom,
        PredictedLatency,
        Metric,
    ),
    "picker": _by_type(MaxScore, TopK, WeightedRandom, RoundRobin, Uniform),
    "policy": _by_type(
        CostModel,
        LeastRequests,
        PowerOfTwo,
        Lpwl,
        Lmetric,
        Weights322,
        StickyUntilSaturated,
        SglangCacheAware,
        ConsistentHashingBounded,
        DynamoLinear,
        DynamicWeights,
        PrefillDecode,
    ),
    "metric-source": {},
    "parser": {},
    "fairness": _by_type(DeficitFairness, LeastAttainedFairness, RoundRobinFairness, GlobalStrict),
    "ordering": _by_type(LeastWorkOrdering, FirstCome, Deadline),
    "saturation": _by_type(UtilizationDetector, ConcurrencyDetector),
    "ceiling": _by_type(StaticCeiling, HoldbackCeiling, ReflectiveCeiling),
}

#: Other names of built-ins with the same meaning, and the parameters that they imply. Names of other pickers whose
#: formula differs (`lora-affinity-scorer`, `load-aware-scorer`) are left out on purpose.
ALIASES: Mapping[Kind, Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "filter": {
        "queue-depth-filter": ("queue-depth", {}),
        "memory-pressure-filter": ("memory-pressure", {}),
        "model-compatibility-filter": ("model-compatibility", {}),
        "health-filter": ("health", {}),
        "label-selector-filter": ("label-selector", {}),
        "by-label-selector": ("label-selector", {}),
        "decode-filter": ("role", {"stage": "decode"}),
        "prefill-filter": ("role", {"stage": "prefill"}),
        "encode-filter": ("role", {"stage": "encode"}),
    },
    "scorer": {
        "prefix-aware-scorer": ("prefix-aware", {}),
        "prefix-cache-scorer": ("prefix-aware", {}),
        "kv-utilization-scorer": ("kv-utilization", {}),
        "kv-cache-utilization": ("kv-utilization", {}),
        "kv-cache-utilization-scorer": ("kv-utilization", {}),
        "inflight-tokens-scorer": ("inflight-tokens", {}),
        "lora-aware-scorer": ("lora-aware", {}),
    },
    "picker": {
        "max": ("max-score", {}),
        "max-score-picker": ("max-score", {}),
        "top-k-picker": ("top-k", {}),
        "random-picker": ("random", {}),
        "weighted-random-picker": ("weighted-random", {}),
        "round-robin-picker": ("round-robin", {}),
    },
    "policy": {},
    "metric-source": {},
    "parser": {},
    "fairness": {
        "global-strict-fairness-policy": ("global-strict", {}),
        "round-robin-fairness-policy": ("round-robin", {}),
    },
    "ordering": {
        "fcfs-ordering-policy": ("fcfs", {}),
        "edf-ordering-policy": ("edf", {}),
        "slo-deadline-ordering-policy": ("edf", {}),
    },
    "saturation": {},
    "ceiling": {},
}
