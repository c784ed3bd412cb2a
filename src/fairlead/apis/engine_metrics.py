"""Which metrics each engine reports its load in: pure data, so that a configuration can replace or extend it.

A spec names series of one family: `name` or `name{label=value,other="v"}`. A series matches if it has all of the
named labels with exactly these values; it may have more. As in PromQL, `label=""` also matches series without that
label. Several specs for one field are the names that engine versions gave the same metric: the first one found on the
page counts.
"""

import re
from collections.abc import Container, Mapping

from msgspec import Struct, field
from msgspec.structs import asdict

from fairlead.core.errors import ConfigError

#: Endpoint labels that name the engine, the current one first (llm-d's core-metrics-extractor).
ENGINE_LABELS = ("llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type")
DEFAULT_ENGINE = "vllm"
#: The path of `trtllm-serve`'s metrics page. Its `/metrics` is JSON; all other engines have their page at `/metrics`.
TRTLLM_PATH = "/prometheus/metrics"


class EngineMetrics(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Specs for each field of `Sample`. An empty tuple means that the engine does not report the field."""

    #: Label that tells data-parallel engines of one page apart; empty = there is none.
    rank_label: str = ""
    #: Counters and memory move at each step. Otherwise they may stand still for as long as an answer takes.
    each_step: bool = False
    #: Summed over all matching series (one per data-parallel engine).
    waiting: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    #: A share 0..1. The highest matching series counts.
    kv_usage: tuple[str, ...] = ()
    #: Gauge whose value is a timestamp; labels `running_lora_adapters`, `waiting_lora_adapters`, `max_lora`.
    lora: tuple[str, ...] = ()
    #: Info gauge that carries block size and count as labels.
    cache_info: tuple[str, ...] = ()
    block_size_label: str = "block_size"
    num_blocks_label: str = "num_gpu_blocks"
    #: For engines that report block size (highest series) and block count (summed) as gauges of their own.
    block_size: tuple[str, ...] = ()
    num_blocks: tuple[str, ...] = ()
    #: Counters, in tokens, summed.
    prefix_queries: tuple[str, ...] = ()
    prefix_hits: tuple[str, ...] = ()
    generation_tokens: tuple[str, ...] = ()
    #: 1 while an engine takes requests, 0 while it sleeps. The highest matching series counts.
    awake: tuple[str, ...] = ()
    #: When the process started. The highest matching series counts.
    started: tuple[str, ...] = ("process_start_time_seconds",)
    #: Further gauges for `Sample.extra`: name to spec, summed.
    extra: Mapping[str, str] = field(default_factory=dict)


class Spec(Struct, frozen=True):
    """A parsed spec: a family and the labels that a series of it must have."""

    family: bytes
    labels: tuple[tuple[str, str], ...] = ()


_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_MATCHER = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*(?:"((?:[^"\\]|\\["\\n])*)"|([^\s,{}"=\\]+))\s*')
_ESCAPE = re.compile(r"\\(.)")


def parse_spec(text: str, path: str = "$") -> Spec:
    """Read `name` or `name{label=value,l2="v"}`. Raises a `ConfigError` that names `path`."""
    text = text.strip()
    name = _NAME.match(text)
    if name is None:
        raise ConfigError(f"expected a metric name, got {text!r}", path)
    labels = text[name.end() :].strip()
    if not labels:
        return Spec(name[0].encode())
    if labels[0] != "{" or labels[-1] != "}":
        raise ConfigError(f"expected `name` or `name{{label=value}}`, got {text!r}", path)
    return Spec(name[0].encode(), _matchers(labels[1:-1], text, path))


def _matchers(inner: str, text: str, path: str) -> tuple[tuple[str, str], ...]:
    matchers: dict[str, str] = {}
    position = 0
    while position < len(inner) and inner[position:].strip():
        match = _MATCHER.match(inner, position)
        if match is None or (match.end() < len(inner) and inner[match.end()] != ","):
            raise ConfigError(f"expected label=value at {inner[position:]!r} of {text!r}", path)
        label, quoted, bare = match.groups()
        if label in matchers:
            raise ConfigError(f"label {label!r} is named twice in {text!r}", path)
        matchers[label] = bare if quoted is None else _ESCAPE.sub(lambda m: "\n" if m[1] == "n" else m[1], quoted)
        position = match.end() + 1
    return tuple(matchers.items())


class EngineSpecs(Struct, frozen=True):
    """An `EngineMetrics` with its specs parsed; shared by all readers of one engine."""

    metrics: EngineMetrics
    #: The specs by field name; those of further gauges by `extra.NAME`.
    parsed: Mapping[str, tuple[Spec, ...]]


def compile_engine(metrics: EngineMetrics, path: str = "$") -> EngineSpecs:
    """Parse every spec. Raises a `ConfigError` with the path of the bad spec, e.g. `$.engines.vllm.waiting[0]`."""
    listed = {name: texts for name, texts in asdict(metrics).items() if isinstance(texts, tuple)}
    parsed = {
        name: tuple(parse_spec(text, f"{path}.{name}[{i}]") for i, text in enumerate(texts))
        for name, texts in listed.items()
    }
    extra = {f"extra.{name}": (parse_spec(text, f"{path}.extra.{name}"),) for name, text in metrics.extra.items()}
    return EngineSpecs(metrics, parsed | extra)


def named_engine(labels: Mapping[str, str]) -> str:
    """The engine that an endpoint's labels name, known or not; empty if they name none."""
    return next((labels[label] for label in ENGINE_LABELS if labels.get(label)), "")


def unknown_engine(labels: Mapping[str, str], known: Container[str]) -> str:
    """The engine that the labels name if it is not in `known`; otherwise empty."""
    engine = named_engine(labels)
    return "" if engine in known else engine


def engine_of(labels: Mapping[str, str], engines: Container[str], default: str = DEFAULT_ENGINE) -> str:
    """The engine that an endpoint's labels name; `default` if they name none, or an engine that is not in the table."""
    engine = named_engine(labels)
    return engine if engine in engines else default


_TRT = "nv_trt_llm_request_metrics"
_TRT_BLOCKS = "nv_trt_llm_kv_cache_block_metrics"

#: First the names seen on vLLM 0.32, then older names and names after relabeling.
ENGINES: Mapping[str, EngineMetrics] = {
    "vllm": EngineMetrics(
        rank_label="engine",
        each_step=True,
        waiting=("vllm:num_requests_waiting", "vllm_num_requests_waiting", "vllm_queue_depth"),
        running=("vllm:num_requests_running", "vllm_num_requests_running"),
        kv_usage=(
            "vllm:kv_cache_usage_perc",
            "vllm:gpu_cache_usage_perc",
            "vllm_kv_cache_usage_perc",
            "vllm_kv_cache_utilization",
        ),
        lora=("vllm:lora_requests_info", "vllm_lora_requests_info"),
        cache_info=("vllm:cache_config_info", "vllm_cache_config_info"),
        prefix_queries=("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
        prefix_hits=("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        generation_tokens=("vllm:generation_tokens_total",),
        awake=("vllm:engine_sleep_state{sleep_state=awake}",),
    ),
    # With priority scheduling, the total has an empty label `priority`, and there is one more series per priority. Each
    # pipeline stage reports the same queues, and each tensor-parallel rank the same page count (gauges since 0.5.11).
    # The memory in use is rounded to percent, and renewed at each prefill and every 40 steps.
    "sglang": EngineMetrics(
        rank_label="dp_rank",
        waiting=(
            'sglang:num_queue_reqs{priority="",pp_rank=0}',
            'sglang:num_queue_reqs{priority=""}',
            'sglang_num_queue_reqs{priority=""}',
        ),
        running=(
            'sglang:num_running_reqs{priority="",pp_rank=0}',
            'sglang:num_running_reqs{priority=""}',
            'sglang_num_running_reqs{priority=""}',
        ),
        kv_usage=("sglang:token_usage", "sglang_token_usage"),
        cache_info=("sglang:cache_config_info", "sglang_cache_config_info"),
        block_size_label="page_size",
        num_blocks_label="num_pages",
        block_size=("sglang:page_size", "sglang_page_size"),
        num_blocks=("sglang:num_pages{tp_rank=0,pp_rank=0}", "sglang_num_pages{tp_rank=0,pp_rank=0}"),
        prefix_queries=("sglang:prompt_tokens_total", "sglang_prompt_tokens_total"),
        prefix_hits=("sglang:cached_tokens_total", "sglang_cached_tokens_total"),
        generation_tokens=("sglang:generation_tokens_total", "sglang_generation_tokens_total"),
    ),
    # Tokens need `return_perf_metrics`, the rest `enable_iter_perf_stats`.
    "trtllm-serve": EngineMetrics(
        waiting=("trtllm_num_requests_waiting",),
        running=("trtllm_num_requests_running",),
        kv_usage=("trtllm_kv_cache_utilization",),
        block_size=("trtllm_kv_cache_tokens_per_block",),
        num_blocks=("trtllm_kv_cache_max_blocks",),
        prefix_queries=("trtllm_prompt_tokens_total",),
        prefix_hits=("trtllm_prompt_cached_tokens_total",),
        generation_tokens=("trtllm_generation_tokens_total",),
    ),
    "triton-tensorrt-llm": EngineMetrics(
        waiting=(_TRT + "{request_type=waiting}",),
        running=(_TRT + "{request_type=scheduled}",),
        kv_usage=(_TRT_BLOCKS + "{kv_cache_block_type=fraction}",),
        block_size=(_TRT_BLOCKS + "{kv_cache_block_type=tokens_per}",),
        num_blocks=(_TRT_BLOCKS + "{kv_cache_block_type=max}",),
    ),
    # `nv_inference_exec_count` is not read: it is a cumulative counter, not the number of running requests.
    "triton": EngineMetrics(waiting=("nv_inference_pending_request_count",)),
    "lmdeploy": EngineMetrics(
        each_step=True,
        waiting=("lmdeploy:num_requests_waiting",),
        running=("lmdeploy:num_requests_running",),
        kv_usage=("lmdeploy:gpu_cache_usage_perc",),
        generation_tokens=("lmdeploy:generation_tokens_total",),
    ),
    # These two count tokens when an answer ends. Neither reports KV usage.
    "llamacpp": EngineMetrics(waiting=("llamacpp:requests_deferred",), running=("llamacpp:requests_processing",)),
    "tgi": EngineMetrics(waiting=("tgi_queue_size",), running=("tgi_batch_current_size",)),
}
