"""The families of vLLM 0.32.0's metrics page that the engine can fill, in the order of the real page.

Names and help texts are the interface of the real server, as captured from it.
"""

from collections.abc import Callable

from msgspec import Struct

from fairlead.engine.stats import EngineStats, Histogram


class Gauge(Struct, frozen=True):
    name: str
    help: str
    #: Further labels, and the value for each set of them.
    series: tuple[tuple[dict[str, str], Callable[[EngineStats], float]], ...]


class Counter(Struct, frozen=True):
    """Exposed with `_total`, and a `_created` gauge beside it."""

    name: str
    help: str
    series: tuple[tuple[dict[str, str], Callable[[EngineStats], float]], ...]


class Distribution(Struct, frozen=True):
    name: str
    help: str
    read: Callable[[EngineStats], Histogram]


Family = Gauge | Counter | Distribution


def _zero(stats: EngineStats) -> float:
    return 0.0


def _one(stats: EngineStats) -> float:
    return 1.0


def _gauge(name: str, help_text: str, read: Callable[[EngineStats], float]) -> Gauge:
    return Gauge(f"vllm:{name}", help_text, (({}, read),))


def _counter(name: str, help_text: str, read: Callable[[EngineStats], float] = _zero) -> Counter:
    return Counter(f"vllm:{name}", help_text, (({}, read),))


def _by(
    label: str, *series: tuple[str, Callable[[EngineStats], float]]
) -> tuple[tuple[dict[str, str], Callable[[EngineStats], float]], ...]:
    return tuple(({label: value}, read) for value, read in series)


def _histogram(name: str, help_text: str, read: Callable[[EngineStats], Histogram]) -> Distribution:
    return Distribution(f"vllm:{name}", help_text, read)


_FLOPS = "Estimated number of floating point operations per GPU (for Model Flops Utilization calculations)."
_READ = "Estimated number of bytes read from memory per GPU (for Model Flops Utilization calculations)."
_WRITTEN = "Estimated number of bytes written to memory per GPU (for Model Flops Utilization calculations)."
_BY_REASON = (
    "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; 'deferred' ="
    " deferred by transient constraints (LoRA budget, KV transfer, blocked status). Sum of all reasons equals"
    " vllm:num_requests_waiting."
)
_SLEEP = (
    "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; weights_offloaded = 1"
    " means sleep level 1; discard_all = 1 means sleep level 2."
)
_EXTERNAL = "External prefix cache {} from KV connector cross-instance cache sharing, in terms of number of {} tokens."
_CACHED_BY_SOURCE = (
    "Prefix-cache hit tokens by the cache tier that supplied them: device (local HBM), host (offloaded to DRAM), disk,"
    " p2p (transferred from another vLLM instance) or external_unspecified. Counted at admission; sums to"
    " vllm:prefix_cache_hits + vllm:external_prefix_cache_hits."
)

GAUGES_AND_COUNTERS: tuple[Family, ...] = (
    _counter("estimated_flops_per_gpu", _FLOPS),
    _counter("estimated_read_bytes_per_gpu", _READ),
    _counter("estimated_write_bytes_per_gpu", _WRITTEN),
    _gauge("num_requests_running", "Number of requests in model execution batches.", lambda s: s.gauges.running),
    _gauge("num_requests_waiting", "Number of requests waiting to be processed.", lambda s: s.gauges.waiting),
    Gauge(
        "vllm:num_requests_waiting_by_reason",
        _BY_REASON,
        _by(
            "reason",
            ("capacity", lambda s: s.gauges.waiting - s.gauges.deferred),
            ("deferred", lambda s: s.gauges.deferred),
        ),
    ),
    Gauge(
        "vllm:engine_sleep_state",
        _SLEEP,
        _by("sleep_state", ("awake", _one), ("weights_offloaded", _zero), ("discard_all", _zero)),
    ),
    _gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", lambda s: s.gauges.kv_usage),
    _counter(
        "prefix_cache_queries",
        "Prefix cache queries, in terms of number of queried tokens.",
        lambda s: s.prefix_queries,
    ),
    _counter("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", lambda s: s.prefix_hits),
    _counter("external_prefix_cache_queries", _EXTERNAL.format("queries", "queried")),
    _counter("external_prefix_cache_hits", _EXTERNAL.format("hits", "cached")),
    _counter("mm_cache_queries", "Multi-modal cache queries, in terms of number of queried items."),
    _counter("mm_cache_hits", "Multi-modal cache hits, in terms of number of cached items."),
    _counter("num_preemptions", "Cumulative number of preemption from the engine.", lambda s: s.preemptions),
    _counter("prompt_tokens", "Number of prefill tokens processed.", lambda s: s.prompt_tokens),
    Counter(
        "vllm:prompt_tokens_by_source",
        "Number of prompt tokens by source.",
        _by(
            "source",
            ("local_compute", lambda s: s.prompt_tokens - s.prompt_tokens_cached),
            ("local_cache_hit", lambda s: s.prompt_tokens_cached),
            ("external_kv_transfer", _zero),
        ),
    ),
    _counter(
        "prompt_tokens_cached",
        "Number of cached prompt tokens (local + external).",
        lambda s: s.prompt_tokens_cached,
    ),
    Counter(
        "vllm:prompt_tokens_cached_by_source",
        _CACHED_BY_SOURCE,
        _by(
            "source",
            ("device", lambda s: s.prefix_hits),
            ("host", _zero),
            ("p2p", _zero),
            ("disk", _zero),
            ("external_unspecified", _zero),
        ),
    ),
    _counter("generation_tokens", "Number of generation tokens processed.", lambda s: s.generation_tokens),
    Counter(
        "vllm:request_success",
        "Count of successfully processed requests.",
        _by(
            "finished_reason",
            ("stop", lambda s: s.finished["stop"]),
            ("length", lambda s: s.finished["length"]),
            ("abort", _zero),
            ("error", _zero),
            ("repetition", _zero),
        ),
    ),
)

REJECTIONS = "vllm:admission_rejections"
REJECTIONS_HELP = "Number of admission attempts rejected by a queue limit, by reason."

HISTOGRAMS: tuple[Distribution, ...] = (
    _histogram("request_prompt_tokens", "Number of prefill tokens processed.", lambda s: s.request_prompt_tokens),
    _histogram(
        "request_generation_tokens", "Number of generation tokens processed.", lambda s: s.request_generation_tokens
    ),
    _histogram(
        "iteration_tokens_total", "Histogram of number of tokens per engine_step.", lambda s: s.iteration_tokens
    ),
    _histogram(
        "request_max_num_generation_tokens",
        "Histogram of maximum number of requested generation tokens.",
        lambda s: s.request_max_generation_tokens,
    ),
    _histogram("request_params_n", "Histogram of the n request parameter.", lambda s: s.request_n),
    _histogram(
        "request_params_max_tokens", "Histogram of the max_tokens request parameter.", lambda s: s.request_max_tokens
    ),
    _histogram("time_to_first_token_seconds", "Histogram of time to first token in seconds.", lambda s: s.ttft),
    _histogram("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", lambda s: s.itl),
    _histogram(
        "request_time_per_output_token_seconds",
        "Histogram of time_per_output_token_seconds per request.",
        lambda s: s.tpot,
    ),
    _histogram("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", lambda s: s.e2e),
    _histogram(
        "request_queue_time_seconds",
        "Histogram of time spent in WAITING phase for request.",
        lambda s: s.queue_time,
    ),
    _histogram(
        "request_inference_time_seconds",
        "Histogram of time spent in RUNNING phase for request.",
        lambda s: s.inference_time,
    ),
    _histogram(
        "request_prefill_time_seconds",
        "Histogram of time spent in PREFILL phase for request.",
        lambda s: s.prefill_time,
    ),
    _histogram(
        "request_decode_time_seconds",
        "Histogram of time spent in DECODE phase for request.",
        lambda s: s.decode_time,
    ),
    _histogram(
        "request_num_preemptions",
        "Histogram of the number of times a request was preempted.",
        lambda s: s.request_preemptions,
    ),
    _histogram(
        "request_prefill_kv_computed_tokens",
        "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
        lambda s: s.request_computed_tokens,
    ),
)

LORA_INFO = "vllm:lora_requests_info"
LORA_INFO_HELP = "Running stats on lora requests."
CACHE_CONFIG = "vllm:cache_config_info"
CACHE_CONFIG_HELP = "Information of the LLMEngine CacheConfig"

#: Labels of `vllm:cache_config_info` that no option of the stub changes.
CACHE_CONFIG_FIXED = {
    "_block_size_resolved": "True",
    "cache_dtype": "auto",
    "cache_hit_alignment_tokens": "None",
    "enable_mamba_shared_prefix_checkpoint": "False",
    "gpu_memory_utilization": "0.92",
    "hash_block_size": "None",
    "is_attention_free": "False",
    "kv_cache_dtype_skip_layers": "[]",
    "kv_cache_layout": "None",
    "kv_cache_memory_bytes": "None",
    "kv_offloading_backend": "native",
    "kv_offloading_size": "None",
    "kv_sharing_fast_prefill": "False",
    "mamba_block_size": "None",
    "mamba_cache_dtype": "auto",
    "mamba_cache_mode": "none",
    "mamba_page_size_padded": "None",
    "mamba_ssm_cache_dtype": "float32",
    "num_cpu_blocks": "None",
    "num_gpu_blocks_override": "None",
    "prefix_cache_retention_interval": "0",
    "prefix_caching_hash_algo": "sha256",
    "prefix_match_unit": "None",
    "replayssm_buffer_len": "16",
    "skip_page_size_padded": "None",
    "sliding_window": "None",
    "swa_bounded_replay": "True",
    "use_kda_recoverssm": "False",
    "use_replayssm": "False",
}
