"""The metrics pages of engines other than vLLM: the families that a scheduler reads, under each engine's names.

Names and labels follow the sources listed in tests/data/metrics/ORIGIN.md. Histograms and help texts are left out.
"""

from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter

from fairlead.lab.stub.exposition import Part, fixed, page, sample
from fairlead.lab.stub.replica import Replica

#: Attributes of a replica that the pages show.
_WAITING, _RUNNING = "engine.stats.gauges.waiting", "engine.stats.gauges.running"
_KV_USAGE = "engine.stats.gauges.kv_usage"
_BLOCK_SIZE, _BLOCKS = "spec.block_size", "spec.num_blocks"
_PROMPT, _CACHED = "engine.stats.prompt_tokens", "engine.stats.prompt_tokens_cached"
_GENERATED = "engine.stats.generation_tokens"

_RANKS = {"engine_type": "unified", "model_name": "", "moe_ep_rank": "0", "pp_rank": "0", "tp_rank": "0"}
_TRT = {"engine_type": "trtllm", "model_name": ""}
_TRITON = {"model": "", "version": "1"}
_LMDEPLOY = {"engine": "0", "model_name": ""}

#: Family, labels and attribute of each series. An empty label is filled with the served model's name.
SERIES: Mapping[str, tuple[tuple[str, Mapping[str, str], str], ...]] = {
    "sglang": (
        ("sglang:num_running_reqs", _RANKS, _RUNNING),
        ("sglang:num_queue_reqs", _RANKS, _WAITING),
        ("sglang:token_usage", _RANKS, _KV_USAGE),
        ("sglang:page_size", _RANKS, _BLOCK_SIZE),
        ("sglang:num_pages", _RANKS, _BLOCKS),
        ("sglang:prompt_tokens_total", {"model_name": ""}, _PROMPT),
        ("sglang:generation_tokens_total", {"model_name": ""}, _GENERATED),
        ("sglang:cached_tokens_total", {"cache_source": "device", "model_name": ""}, _CACHED),
    ),
    "trtllm-serve": (
        ("trtllm_prompt_tokens_total", _TRT, _PROMPT),
        ("trtllm_generation_tokens_total", _TRT, _GENERATED),
        ("trtllm_kv_cache_utilization", _TRT, _KV_USAGE),
        ("trtllm_num_requests_running", _TRT, _RUNNING),
        ("trtllm_num_requests_waiting", _TRT, _WAITING),
        ("trtllm_kv_cache_max_blocks", _TRT, _BLOCKS),
        ("trtllm_kv_cache_tokens_per_block", _TRT, _BLOCK_SIZE),
        ("trtllm_prompt_cached_tokens_total", _TRT, _CACHED),
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
    """Makes the page of one replica, as `MetricsPage.render` does for vLLM."""
    model = replica.config.served_model
    parts: list[Part] = []
    before = ""
    for name, labels, attribute in SERIES[replica.config.engine_type]:
        if name != before:
            kind = "counter" if name.endswith("_total") else "gauge"
            parts.append(fixed(f"# TYPE {name} {kind}\n"))
        before = name
        named = {label: value or model for label, value in labels.items()}
        parts.append(sample(name, named, partial(attrgetter(attribute), replica)))
    return partial(page, parts)
