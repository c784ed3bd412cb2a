"""The /metrics page of a replica: vLLM 0.32.0's families, then what its HTTP server and process add.

A page costs little because nearly all of it is fixed text: lines are prefixes made once, and a histogram is written
again only after it changed.
"""

from collections.abc import Callable, Mapping

from fairlead.engine.stats import EngineStats, Histogram
from fairlead.stub import metric_families as families
from fairlead.stub.exposition import Fixed, HistogramLines, Made, Part, Read, Value, header, labels, number, page
from fairlead.stub.replica import Replica


class MetricsPage:
    """All parts, in the order of the real page. `before` and `after` surround the engine's own families."""

    def __init__(self, replica: Replica, before: list[Part], after: list[Part]) -> None:
        self._replica = replica
        self._labels = {"engine": "0", "model_name": replica.config.served_model}
        self._created = number(replica.unix())
        self._parts: list[Part] = [*before]
        for family in families.GAUGES_AND_COUNTERS:
            self._add(family)
        self._add_rejections()
        for histogram in families.HISTOGRAMS:
            self._add_histogram(histogram)
        if replica.spec.max_loras:
            self._parts.append(Made(self._lora_lines))
        self._parts.append(Fixed(self._cache_config()))
        self._parts += after

    def render(self) -> bytes:
        return page(self._parts)

    # The engine is replaced when it is restarted after its death, so values are looked up anew each time.

    def _reader(self, read: Callable[[EngineStats], float]) -> Read:
        return lambda: read(self._replica.engine.stats)

    def _histogram_reader(self, read: Callable[[EngineStats], Histogram]) -> Callable[[], Histogram]:
        return lambda: read(self._replica.engine.stats)

    def _add(self, family: families.Family) -> None:
        if isinstance(family, families.Distribution):
            self._add_histogram(family)
            return
        counts = isinstance(family, families.Counter)
        name = f"{family.name}_total" if counts else family.name
        self._parts.append(Fixed(header(name, "counter" if counts else "gauge", family.help)))
        for extra, read in family.series:
            self._parts.append(Value(name, self._labels | extra, self._reader(read)))
        if counts:
            self._add_created(family.name, family.help, [self._labels | extra for extra, _ in family.series])

    def _add_created(self, name: str, help_text: str, series: list[dict[str, str]]) -> None:
        lines = "".join(f"{name}_created{labels(values)} {self._created}\n" for values in series)
        self._parts.append(Fixed(header(f"{name}_created", "gauge", help_text) + lines))

    def _add_rejections(self) -> None:
        name, help_text = families.REJECTIONS, families.REJECTIONS_HELP
        model = {"model_name": self._labels["model_name"]}
        reasons: Mapping[str, Read] = {
            "max_num_queued_reqs": lambda: self._replica.rejections,
            "max_num_queued_tokens": lambda: 0,
        }
        self._parts.append(Fixed(header(f"{name}_total", "counter", help_text)))
        for reason, read in reasons.items():
            self._parts.append(Value(f"{name}_total", {**model, "reason": reason}, read))
        self._add_created(name, help_text, [{**model, "reason": reason} for reason in reasons])

    def _add_histogram(self, family: families.Distribution) -> None:
        bounds = family.read(self._replica.engine.stats).bounds
        self._parts.append(Fixed(header(family.name, "histogram", family.help)))
        self._parts.append(HistogramLines(family.name, self._labels, self._histogram_reader(family.read), bounds))
        self._add_created(family.name, family.help, [self._labels])

    def _lora_lines(self) -> str:
        info = self._replica.lora_info
        name = families.LORA_INFO
        lines = [header(name, "gauge", families.LORA_INFO_HELP)]
        for adapters, unix in info.series():
            values = {
                "max_lora": str(info.max_loras),
                "running_lora_adapters": adapters,
                "waiting_lora_adapters": adapters,
            }
            lines.append(f"{name}{labels(values)} {number(unix)}\n")
        return "".join(lines)

    def _cache_config(self) -> str:
        spec = self._replica.spec
        values = families.CACHE_CONFIG_FIXED | {
            "block_size": str(spec.block_size),
            "effective_attention_block_size": str(spec.block_size),
            "enable_prefix_caching": str(spec.prefix_caching),
            "engine": "0",
            "kv_cache_max_concurrency": str(spec.num_blocks * spec.block_size / spec.max_model_len),
            "kv_cache_size_tokens": str(spec.num_blocks * spec.block_size),
            "num_gpu_blocks": str(spec.num_blocks),
            "user_specified_block_size": "True",
        }
        name = families.CACHE_CONFIG
        return f"{header(name, 'gauge', families.CACHE_CONFIG_HELP)}{name}{labels(values)} 1.0\n"
