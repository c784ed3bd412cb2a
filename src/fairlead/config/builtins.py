"""The built-in plugins: their table, their aliases, and the defaults that apply if the file does not set them."""

from collections import UserDict
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Literal

Kind = Literal[
    "filter", "scorer", "picker", "policy", "metric-source", "parser", "fairness", "ordering", "saturation", "ceiling"
]
#: The policy that gives a request two endpoints: one computes the prompt, the other answers.
SPLITTING = "prefill-decode"
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


def a_kind(kind: Kind) -> str:
    """The kind with its article."""
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


class Builtins(UserDict[str, Any]):
    """Classes by type, from `module:Class` below `fairlead.plugins`. A class is imported when it is needed, because a
    configuration names only a few of them."""

    def __getitem__(self, name: str) -> Any:
        module, _, cls = self.data[name].partition(":")
        return vars(import_module(f"fairlead.plugins.{module}"))[cls]


_PLACES: Mapping[Kind, Mapping[str, str]] = {
    "filter": {
        "role": "filters.ability:Role",
        "subset": "filters.ability:Subset",
        "model-compatibility": "filters.ability:ModelCompatibility",
        "health": "filters.availability:Health",
        "queue-depth": "filters.load:QueueDepth",
        "memory-pressure": "filters.load:MemoryPressure",
        "label-selector": "filters.ability:LabelSelector",
        "by-label": "filters.ability:ByLabel",
        "context-length": "filters.ability:ContextLength",
        "prefix-affinity": "filters.availability:PrefixAffinity",
        "slo-tier": "filters.availability:SloTier",
        "utilization": "filters.availability:Utilization",
        "concurrency": "filters.load:Concurrency",
        "metric-limit": "filters.load:MetricLimit",
    },
    "scorer": {
        "prefix-aware": "scorers.prefix:PrefixAware",
        "load-aware": "scorers.load:LoadAware",
        "kv-utilization": "scorers.load:KvUtilization",
        "inflight-tokens": "scorers.load:InflightTokens",
        "lora-aware": "scorers.lora:LoraAware",
        "session-affinity": "scorers.session_affinity:SessionAffinity",
        "queue": "scorers.load:Queue",
        "running-requests": "scorers.load:RunningRequests",
        "queue-threshold": "scorers.load:QueueThreshold",
        "active-requests": "scorers.load:ActiveRequests",
        "lora-affinity": "scorers.lora:LoraAffinity",
        "no-hit-lru": "scorers.prefix:NoHitLru",
        "prefix-length": "scorers.prefix:PrefixLength",
        "context-length": "scorers.metric:ContextLengthScorer",
        "slo-headroom": "scorers.latency:SloHeadroom",
        "predicted-latency": "scorers.latency:PredictedLatency",
        "metric": "scorers.metric:Metric",
    },
    "picker": {
        "max-score": "pickers:MaxScore",
        "top-k": "pickers:TopK",
        "weighted-random": "pickers:WeightedRandom",
        "round-robin": "pickers:RoundRobin",
        "random": "pickers:Uniform",
    },
    "policy": {
        "cost-model": "policies.cost_model:CostModel",
        "least-requests": "policies.by_load:LeastRequests",
        "power-of-two": "policies.by_load:PowerOfTwo",
        "lpwl": "policies.by_load:Lpwl",
        "lmetric": "policies.by_load:Lmetric",
        "weights-322": "policies.by_prefix:Weights322",
        "sticky-until-saturated": "policies.by_prefix:StickyUntilSaturated",
        "remaining-work": "policies.by_load:RemainingWork",
        "sglang-cache-aware": "policies.by_prefix:SglangCacheAware",
        "aibrix-prefix-cache": "policies.by_prefix:AibrixPrefixCache",
        "consistent-hashing-bounded": "policies.by_prefix:ConsistentHashingBounded",
        "dynamo-linear": "policies.by_load:DynamoLinear",
        "dynamic-weights": "policies.by_prefix:DynamicWeights",
        SPLITTING: "policies.prefill_decode:PrefillDecode",
    },
    "metric-source": {},
    "parser": {},
    "fairness": {
        "start-time-fair": "flow_control:StartTimeFairness",
        "round-robin": "flow_control:RoundRobinFairness",
        "global-strict": "flow_control:GlobalStrict",
    },
    "ordering": {
        "least-work": "flow_control:LeastWork",
        "fcfs": "flow_control:Fcfs",
        "edf": "flow_control:EarliestDeadline",
    },
    "saturation": {
        "utilization-detector": "flow_control:UtilizationDetector",
        "concurrency-detector": "flow_control:ConcurrencyDetector",
    },
    "ceiling": {
        "static-usage-limit-policy": "flow_control:StaticCeiling",
        "priority-holdback-policy": "flow_control:HoldbackCeiling",
        "soft-reflective-ceiling-policy": "flow_control:ReflectiveCeiling",
    },
}
BUILTINS: Mapping[Kind, Mapping[str, Any]] = {kind: Builtins(places) for kind, places in _PLACES.items()}

#: Other names of built-ins with the same meaning, and the parameters that they imply. Names of other pickers with a
#: different formula (`lora-affinity-scorer`, `load-aware-scorer`) are left out on purpose.
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
    "policy": {"default": ("cost-model", {})},
    "metric-source": {},
    "parser": {},
    "fairness": {
        "global-strict-fairness-policy": ("global-strict", {}),
        "round-robin-fairness-policy": ("round-robin", {}),
        # Fairness policies of earlier versions.
        "deficit-round-robin": ("start-time-fair", {}),
        "least-attained-service": ("start-time-fair", {}),
    },
    "ordering": {
        "fcfs-ordering-policy": ("fcfs", {}),
        "edf-ordering-policy": ("edf", {}),
        "slo-deadline-ordering-policy": ("edf", {}),
    },
    "saturation": {},
    "ceiling": {},
}


# ---- defaults: the only place to tune weights; they have the structure of the file ----

Entry = Mapping[str, Any]

#: Placed before every configured filter list, unless the list has the same type or `builtinFilters` is false.
ABILITY_FILTERS: tuple[Entry, ...] = (
    {"type": "role"},
    {"type": "subset"},
    {"type": "model-compatibility"},
    {"type": "health"},
)

#: The policy if the file names neither a policy nor scorers; see docs/policies.md.
DEFAULT_POLICY = "cost-model"

FILTERS: tuple[Entry, ...] = (
    # 80 % of vLLM's default max_num_seqs of 256.
    # No memory-pressure filter: under load, every engine's cache is nearly full. A filter that then removes the
    # endpoint that holds the prefix makes others compute (and store) it again, which fills their caches too. On the
    # demo's workload, it costs a fourteenth of the throughput and multiplies the p95 of TTFT by ten. `kv-utilization`
    # adds a weight instead.
    {"type": "queue-depth", "maxQueueLength": 200},
)

SCORERS: tuple[Entry, ...] = (
    {"type": "prefix-aware", "weight": 100, "hashBlockSize": 64},
    {"type": "load-aware", "weight": 50, "queueWeightFactor": 0.7, "activeRequestsWeight": 0.3},
    {"type": "kv-utilization", "weight": 100},
    {"type": "inflight-tokens", "weight": 100},
    {"type": "lora-aware", "weight": 100},
    {"type": "session-affinity", "weight": 20},
)

SELECTION: Entry = {"picker": "max-score"}

#: For configurations with their own scorers that do not set `selection`.
CUSTOM_SELECTION: Entry = {"topK": 3}

#: Shorthands: `policy: round-robin`.
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "default": {"filters": FILTERS, "scorers": SCORERS, "selection": SELECTION},
    "round-robin": {"filters": (), "scorers": (), "selection": {"picker": "round-robin"}},
    "random": {"filters": (), "scorers": (), "selection": {"picker": "random"}},
}

#: Prompt bytes per token, used to convert a block size in tokens to bytes.
BYTES_PER_TOKEN = 4
#: Block size in tokens if no scorer sets one.
HASH_BLOCK_SIZE = 64
