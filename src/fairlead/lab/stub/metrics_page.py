"""The /metrics page of a replica: that of vLLM 0.32.0, in the order of the real page, or that of another engine.

A page is cheap because nearly all of it is fixed text: line prefixes are made once, and a histogram is formatted again
only after it changed. vLLM's names and help texts are captured from the real server.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import Any, Literal

from msgspec import Struct

from fairlead.lab.engine.spec import EngineSpec
from fairlead.lab.engine.stats import EngineStats
from fairlead.lab.stub.exposition import HistogramLines, Part, created, fixed, header, labels, number, page, sample
from fairlead.lab.stub.replica import Replica

#: An attribute of the engine's stats, or a function that computes a number from them.
Source = str | Callable[[EngineStats], float]


class Family(Struct, frozen=True):
    """A metric of vLLM's page. A counter has `_total` in its name. All but gauges have a gauge `_created` as well."""

    name: str
    help: str
    kind: Literal["gauge", "counter", "histogram"]
    #: Additional labels, and the number or histogram for each set of labels.
    series: tuple[tuple[dict[str, str], Callable[[Replica], Any]], ...]
    #: Labels of all series.
    common: tuple[str, ...] = ("engine", "model_name")


def _zero(stats: EngineStats) -> float:
    return 0.0


def _reader(source: Source) -> Callable[[Replica], Any]:
    # A restart replaces the engine object, so it is looked up each time.
    return attrgetter(f"engine.stats.{source}") if isinstance(source, str) else lambda r: source(r.engine.stats)


def _gauge(name: str, help_text: str, source: Source) -> Family:
    return Family(f"vllm:{name}", help_text, "gauge", (({}, _reader(source)),))


def _counter(name: str, help_text: str, source: Source = _zero) -> Family:
    return Family(f"vllm:{name}", help_text, "counter", (({}, _reader(source)),))


def _by(name: str, help_text: str, kind: Literal["gauge", "counter"], label: str, **series: Source) -> Family:
    """A family with one series for each value of a label."""
    readers = tuple(({label: value}, _reader(source)) for value, source in series.items())
    return Family(f"vllm:{name}", help_text, kind, readers)


def _histogram(name: str, help_text: str, attribute: str) -> Family:
    return Family(f"vllm:{name}", help_text, "histogram", (({}, _reader(attribute)),))


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

FAMILIES: tuple[Family, ...] = (
    _counter("estimated_flops_per_gpu", _FLOPS),
    _counter("estimated_read_bytes_per_gpu", _READ),
    _counter("estimated_write_bytes_per_gpu", _WRITTEN),
    _gauge("num_requests_running", "Number of requests in model execution batches.", "gauges.running"),
    _gauge("num_requests_waiting", "Number of requests waiting to be processed.", "gauges.waiting"),
    _by(
        "num_requests_waiting_by_reason",
        _BY_REASON,
        "gauge",
        "reason",
        capacity=lambda s: s.gauges.waiting - s.gauges.deferred,
        deferred="gauges.deferred",
    ),
    _by(
        "engine_sleep_state",
        _SLEEP,
        "gauge",
        "sleep_state",
        awake="gauges.awake",
        weights_offloaded=_zero,
        discard_all=_zero,
    ),
    _gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", "gauges.kv_usage"),
    _counter("prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.", "prefix_queries"),
    _counter("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", "prefix_hits"),
    _counter("external_prefix_cache_queries", _EXTERNAL.format("queries", "queried")),
    _counter("external_prefix_cache_hits", _EXTERNAL.format("hits", "cached")),
    _counter("mm_cache_queries", "Multi-modal cache queries, in terms of number of queried items."),
    _counter("mm_cache_hits", "Multi-modal cache hits, in terms of number of cached items."),
    _counter("num_preemptions", "Cumulative number of preemption from the engine.", "preemptions"),
    _counter("prompt_tokens", "Number of prefill tokens processed.", "prompt_tokens"),
    _by(
        "prompt_tokens_by_source",
        "Number of prompt tokens by source.",
        "counter",
        "source",
        local_compute=lambda s: s.prompt_tokens - s.prompt_tokens_cached,
        local_cache_hit="prompt_tokens_cached",
        external_kv_transfer=_zero,
    ),
    _counter("prompt_tokens_cached", "Number of cached prompt tokens (local + external).", "prompt_tokens_cached"),
    _by(
        "prompt_tokens_cached_by_source",
        _CACHED_BY_SOURCE,
        "counter",
        "source",
        device="prefix_hits",
        host=_zero,
        p2p=_zero,
        disk=_zero,
        external_unspecified=_zero,
    ),
    _counter("generation_tokens", "Number of generation tokens processed.", "generation_tokens"),
    _by(
        "request_success",
        "Count of successfully processed requests.",
        "counter",
        "finished_reason",
        stop=lambda s: s.finished["stop"],
        length=lambda s: s.finished["length"],
        abort=_zero,
        error=_zero,
        repetition=_zero,
    ),
    Family(
        "vllm:admission_rejections",
        "Number of admission attempts rejected by a queue limit, by reason.",
        "counter",
        (
            ({"reason": "max_num_queued_reqs"}, attrgetter("rejections")),
            ({"reason": "max_num_queued_tokens"}, _reader(_zero)),
        ),
        common=("model_name",),
    ),
    _histogram("request_prompt_tokens", "Number of prefill tokens processed.", "request_prompt_tokens"),
    _histogram("request_generation_tokens", "Number of generation tokens processed.", "request_generation_tokens"),
    _histogram("iteration_tokens_total", "Histogram of number of tokens per engine_step.", "iteration_tokens"),
    _histogram(
        "request_max_num_generation_tokens",
        "Histogram of maximum number of requested generation tokens.",
        "request_max_generation_tokens",
    ),
    _histogram("request_params_n", "Histogram of the n request parameter.", "request_n"),
    _histogram("request_params_max_tokens", "Histogram of the max_tokens request parameter.", "request_max_tokens"),
    _histogram("time_to_first_token_seconds", "Histogram of time to first token in seconds.", "ttft"),
    _histogram("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", "itl"),
    _histogram(
        "request_time_per_output_token_seconds", "Histogram of time_per_output_token_seconds per request.", "tpot"
    ),
    _histogram("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", "e2e"),
    _histogram("request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", "queue_time"),
    _histogram(
        "request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request.", "inference_time"
    ),
    _histogram("request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", "prefill_time"),
    _histogram("request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", "decode_time"),
    _histogram(
        "request_num_preemptions", "Histogram of the number of times a request was preempted.", "request_preemptions"
    ),
    _histogram(
        "request_prefill_kv_computed_tokens",
        "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
        "request_computed_tokens",
    ),
)

#: Labels of `vllm:cache_config_info` that no option of the stub changes.
CACHE_CONFIG_FIXED = {
    **dict.fromkeys(
        ("cache_hit_alignment_tokens", "hash_block_size", "kv_cache_layout", "kv_cache_memory_bytes",
         "kv_offloading_size", "mamba_block_size", "mamba_page_size_padded", "num_cpu_blocks",
         "num_gpu_blocks_override", "prefix_match_unit", "skip_page_size_padded", "sliding_window"),
        "None",
    ),
    **dict.fromkeys(("enable_mamba_shared_prefix_checkpoint", "is_attention_free", "kv_sharing_fast_prefill",
     "use_kda_recoverssm", "use_replayssm"), "False"),
    **dict.fromkeys(("_block_size_resolved", "swa_bounded_replay"), "True"),
    "cache_dtype": "auto", "gpu_memory_utilization": "0.92", "kv_cache_dtype_skip_layers": "[]",
    "kv_offloading_backend": "native", "mamba_cache_dtype": "auto", "mamba_cache_mode": "none",
    "mamba_ssm_cache_dtype": "float32", "prefix_cache_retention_interval": "0",
    "prefix_caching_hash_algo": "sha256", "replayssm_buffer_len": "16"
}  # fmt: skip


def vllm_page(replica: Replica, before: list[Part], after: list[Part]) -> Callable[[], bytes]:
    """A function that makes the page of one replica: all parts in their order. `before` and `after` are the parts
    around the engine's own families."""
    parts, made = [*before], number(time.time())
    for family in FAMILIES:
        parts += _family_parts(family, replica, made)
    if replica.spec.max_loras:
        parts.append(partial(_lora_lines, replica))
    parts.append(fixed(_cache_config(replica.spec)))
    return partial(page, [*parts, *after])


def _family_parts(family: Family, replica: Replica, made: str) -> Iterator[Part]:
    """`made`: when the counts began."""
    known = {"engine": "0", "model_name": replica.config.served_model}
    common = {name: known[name] for name in family.common}
    name = f"{family.name}_total" if family.kind == "counter" else family.name
    yield fixed(header(name, family.kind, family.help))
    for extra, read in family.series:
        now = partial(read, replica)
        is_histogram = family.kind == "histogram"
        yield HistogramLines(name, common, now).text if is_histogram else sample(name, common | extra, now)
    if family.kind != "gauge":
        yield fixed(created(family.name, family.help, [labels(common | extra) for extra, _ in family.series], made))


def _lora_lines(replica: Replica) -> str:
    info, name = replica.lora_info, "vllm:lora_requests_info"
    lines = [header(name, "gauge", "Running stats on lora requests.")]
    for adapters, unix in info.series():
        values = {"max_lora": str(info.max_loras), "running_lora_adapters": adapters, "waiting_lora_adapters": adapters}
        lines.append(f"{name}{labels(values)} {number(unix)}\n")
    return "".join(lines)


def _cache_config(spec: EngineSpec) -> str:
    name = "vllm:cache_config_info"
    values = CACHE_CONFIG_FIXED | {
        "block_size": str(spec.block_size),
        "effective_attention_block_size": str(spec.block_size),
        "enable_prefix_caching": str(spec.prefix_caching),
        "engine": "0",
        "kv_cache_max_concurrency": str(spec.num_blocks * spec.block_size / spec.max_model_len),
        "kv_cache_size_tokens": str(spec.num_blocks * spec.block_size),
        "num_gpu_blocks": str(spec.num_blocks),
        "user_specified_block_size": "True",
    }
    return f"{header(name, 'gauge', 'Information of the LLMEngine CacheConfig')}{name}{labels(values)} 1.0\n"


# The metrics pages of other engines: the families that a scheduler reads, under each engine's names.
#
# Names and labels follow the sources listed in tests/data/metrics/ORIGIN.md. Histograms and help texts are left out.

#: Attributes of a replica that the pages show.
_WAITING, _RUNNING = "engine.stats.gauges.waiting", "engine.stats.gauges.running"
_KV_USAGE = "engine.stats.gauges.kv_usage"
_BLOCK_SIZE, _BLOCKS = "spec.block_size", "spec.num_blocks"
_PROMPT, _CACHED = "engine.stats.prompt_tokens", "engine.stats.prompt_tokens_cached"
_GENERATED = "engine.stats.generation_tokens"
#: Prompt and output tokens of ended requests only.
_ENDED_PROMPT, _ENDED_GENERATED = "engine.stats.request_prompt_tokens.sum", "engine.stats.request_generation_tokens.sum"


def _ended_cached(replica: Replica) -> float:
    stats = replica.engine.stats
    return stats.request_prompt_tokens.sum - stats.request_computed_tokens.sum


def _percent(replica: Replica) -> float:
    return round(replica.engine.stats.gauges.kv_usage, 2)


_RANKS = {"engine_type": "unified", "model_name": "", "moe_ep_rank": "0", "pp_rank": "0", "tp_rank": "0"}
_TRT = {"engine_type": "trtllm", "model_name": ""}
_TRITON = {"model": "", "version": "1"}
_LMDEPLOY = {"engine": "0", "model_name": ""}

#: Family, labels, and attribute or function of each series. An empty label is filled with the served model's name.
SERIES: Mapping[str, tuple[tuple[str, Mapping[str, str], str | Callable[[Replica], float]], ...]] = {
    "sglang": (
        ("sglang:num_running_reqs", _RANKS, _RUNNING),
        ("sglang:num_queue_reqs", _RANKS, _WAITING),
        ("sglang:token_usage", _RANKS, _percent),
        ("sglang:page_size", _RANKS, _BLOCK_SIZE),
        ("sglang:num_pages", _RANKS, _BLOCKS),
        ("sglang:prompt_tokens_total", {"model_name": ""}, _ENDED_PROMPT),
        ("sglang:generation_tokens_total", {"model_name": ""}, _ENDED_GENERATED),
        ("sglang:cached_tokens_total", {"cache_source": "device", "model_name": ""}, _ended_cached),
    ),
    "trtllm-serve": (
        ("trtllm_prompt_tokens_total", _TRT, _ENDED_PROMPT),
        ("trtllm_generation_tokens_total", _TRT, _ENDED_GENERATED),
        ("trtllm_kv_cache_utilization", _TRT, _KV_USAGE),
        ("trtllm_num_requests_running", _TRT, _RUNNING),
        ("trtllm_num_requests_waiting", _TRT, _WAITING),
        ("trtllm_kv_cache_max_blocks", _TRT, _BLOCKS),
        ("trtllm_kv_cache_tokens_per_block", _TRT, _BLOCK_SIZE),
        ("trtllm_prompt_cached_tokens_total", _TRT, _ended_cached),
    ),
    "triton-tensorrt-llm": (
        ("nv_trt_llm_request_metrics", _TRITON | {"request_type": "waiting"}, _WAITING),
        ("nv_trt_llm_request_metrics", _TRITON | {"request_type": "scheduled"}, _RUNNING),
        ("nv_trt_llm_kv_cache_block_metrics", _TRITON | {"kv_cache_block_type": "max"}, _BLOCKS),
        ("nv_trt_llm_kv_cache_block_metrics", _TRITON | {"kv_cache_block_type": "tokens_per"}, _BLOCK_SIZE),
        ("nv_trt_llm_kv_cache_block_metrics", _TRITON | {"kv_cache_block_type": "fraction"}, _KV_USAGE),
    ),
    "triton": (("nv_inference_pending_request_count", _TRITON, _WAITING),),
    "lmdeploy": (
        ("lmdeploy:num_requests_running", _LMDEPLOY, _RUNNING),
        ("lmdeploy:num_requests_waiting", _LMDEPLOY, _WAITING),
        ("lmdeploy:gpu_cache_usage_perc", _LMDEPLOY, _KV_USAGE),
        ("lmdeploy:prompt_tokens_total", _LMDEPLOY, _PROMPT),
        ("lmdeploy:generation_tokens_total", _LMDEPLOY, _GENERATED),
    ),
    "llamacpp": (
        ("llamacpp:tokens_predicted_total", {}, _GENERATED),
        ("llamacpp:prompt_tokens_cached_total", {}, _CACHED),
        ("llamacpp:requests_processing", {}, _RUNNING),
        ("llamacpp:requests_deferred", {}, _WAITING),
    ),
    "tgi": (("tgi_queue_size", {}, _WAITING), ("tgi_batch_current_size", {}, _RUNNING)),
}


def other_page(replica: Replica) -> Callable[[], bytes]:
    """As `vllm_page`, for another engine."""
    model = replica.config.served_model
    parts: list[Part] = []
    before = ""
    for name, own, source in SERIES[replica.config.engine_type]:
        if name != before:
            kind = "counter" if name.endswith("_total") else "gauge"
            parts.append(fixed(f"# TYPE {name} {kind}\n"))
        before = name
        named = {label: value or model for label, value in own.items()}
        read = attrgetter(source) if isinstance(source, str) else source
        parts.append(sample(name, named, partial(read, replica)))
    return partial(page, parts)
