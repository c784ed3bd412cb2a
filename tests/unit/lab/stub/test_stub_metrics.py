"""The metrics page against the page of a real server: the same families, types, help texts, labels and bounds."""

import asyncio
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fairlead.lab.engine.spec import EngineSpec, LatencyModel
from fairlead.lab.engine.stats import Histogram
from fairlead.lab.stub.config import StubConfig
from fairlead.lab.stub.exposition import HistogramLines, labels, number
from fairlead.lab.stub.pool import StubPool
from fairlead.lab.stub.replica import LoraInfo

_REAL = (Path(__file__).parents[3] / "data" / "vllm-0.32" / "metrics.txt").read_text()
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

#: Label values that are those of this server and no other.
_OWN_VALUES = ("implementation", "major", "minor", "patchlevel", "version")


async def _served_page(http, **changes: object) -> str:
    """After one finished request with an adapter, as the captured page."""
    spec = EngineSpec(
        latency=LatencyModel(1.0), num_blocks=1024, block_size=64, max_model_len=2048, max_num_seqs=4, max_loras=2
    )
    config = StubConfig(engine=spec, model="tiny", loras=("a", "b"), **changes)
    async with StubPool(config) as pool:
        address = pool.addresses[0]
        asked = {"model": "a", "prompt": "x" * 300, "max_tokens": 3}
        assert (await http.post(address, "/v1/completions", asked))[0] == 200
        return (await http.get(address, "/metrics"))[1].decode()


def _shape(page: str) -> list[str]:
    """Lines without their values; the label sets of cache_config_info and lora_requests_info by name only."""
    lines = []
    for line in page.splitlines():
        if line.startswith("#"):
            lines.append(line.rstrip())
            continue
        text, _, value = line.rpartition(" ")
        float(value)
        name, brace, rest = text.partition("{")
        if name in ("vllm:cache_config_info", "vllm:lora_requests_info", "python_info"):
            rest = ",".join(found[0] for found in _LABEL.findall(rest))
        lines.append(f"{name}{brace}{rest}")
    return list(dict.fromkeys(lines))


async def test_lines_are_those_of_the_real_page_in_its_order(http):
    page = await _served_page(http)
    assert _shape(page) == _shape(_REAL)


async def test_the_page_is_as_long_as_a_real_one(http):
    assert 45_000 < len(await _served_page(http)) < 60_000


async def test_another_parser_reads_what_the_engine_counted(http):
    page = await _served_page(http)
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    own = (("engine", "0"), ("model_name", "tiny"))
    assert samples["vllm:generation_tokens_total", *own] == 3
    assert samples["vllm:prompt_tokens_total", *own] == 75
    assert samples["vllm:prefix_cache_queries_total", *own] == 75
    assert samples["vllm:time_to_first_token_seconds_count", *own] == 1
    assert samples["vllm:inter_token_latency_seconds_bucket", own[0], ("le", "0.01"), own[1]] == 2
    assert samples["vllm:request_success_total", own[0], ("finished_reason", "length"), own[1]] == 1
    request = (("handler", "/v1/completions"), ("method", "POST"), ("status", "2xx"))
    assert samples["http_requests_total", *request] == 1
    buckets = [v for k, v in samples.items() if k[0] == "vllm:e2e_request_latency_seconds_bucket"]
    assert buckets == sorted(buckets) and buckets[-1] == 1


async def test_cache_config_says_what_the_engine_has(http):
    page = await _served_page(http)
    line = next(line for line in page.splitlines() if line.startswith("vllm:cache_config_info"))
    values = dict(_LABEL.findall(line))
    real = next(line for line in _REAL.splitlines() if line.startswith("vllm:cache_config_info"))
    expected = dict(_LABEL.findall(real))
    differing = {name for name in values if values[name] != expected[name]}
    assert differing == {"kv_cache_memory_bytes"}


async def test_gauges_of_a_busy_server(http):
    spec = EngineSpec(latency=LatencyModel(300.0), num_blocks=101, max_model_len=1600, max_num_seqs=2)
    async with StubPool(StubConfig(engine=spec, model="tiny")) as pool:
        address = pool.addresses[0]
        body = {"prompt": "x" * 1600, "max_tokens": 900, "stream": True}
        writers = [(await http.open(address, "/v1/completions", body))[1] for _ in range(5)]
        gauges = pool.replica(0).engine.stats.gauges
        await http.until(lambda: gauges.running == 2, "two requests run")
        page = (await http.get(address, "/metrics"))[1].decode()
        own = '{engine="0",model_name="tiny"'
        assert f"vllm:num_requests_running{own}}} 2.0\n" in page
        assert f"vllm:num_requests_waiting{own}}} 3.0\n" in page
        assert f'vllm:num_requests_waiting_by_reason{own},reason="capacity"}} 3.0\n' in page
        usage = re.search(r"vllm:kv_cache_usage_perc\{.*\} (\S+)\n", page)
        # The second one found all but the last block of the first one's prompt.
        assert usage is not None and 0.25 <= float(usage[1]) <= 0.29
        for writer in writers:
            writer.close()


async def test_a_restarted_engine_counts_from_zero_again(http, quick):
    address = quick.addresses[0]
    asked = {"prompt": "x", "max_tokens": 3}
    for _ in range(2):
        await http.post(address, "/v1/completions", asked)
        before = (await http.get(address, "/metrics"))[1].decode()
        quick.set_faults(0, engine_dead=True)
        quick.set_faults(0, engine_dead=False)
        assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"} 3.0\n' in before
        assert 'vllm:iteration_tokens_total_count{engine="0",model_name="tiny"} 3.0\n' in before


async def test_made_up_paths_and_methods_are_no_new_labels(http, quick):
    address = quick.addresses[0]
    for name, method in (("a", "PROPFIND"), ("b", "MKCOL"), ("c", "REPORT")):
        await http.get(address, f"/{name}")
        await http.post(address, "/v1/models", None, method)
    page = (await http.get(address, "/metrics"))[1].decode()
    series = [line for line in page.splitlines() if line.startswith("http_requests_total{")]
    assert series == [
        'http_requests_total{handler="none",method="GET",status="4xx"} 3.0',
        'http_requests_total{handler="/v1/models",method="OTHER",status="4xx"} 3.0',
    ]


def test_old_adapter_lists_stay_and_the_newest_has_the_latest_time():
    info = LoraInfo(2)
    info.note(("a", "b"), 1.0)
    info.note((), 2.0)
    info.note(("a", "b"), 3.0)
    assert info.series() == [("a,b", 3.0), ("", 2.0)]
    for i in range(3000):
        info.note((str(i),), float(i))
    assert len(info.series()) == 1000


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.0"),
        (272, "272.0"),
        (0.25, "0.25"),
        (999999, "999999.0"),
        (1000000, "1e+06"),
        (2190135296, "2.190135296e+09"),
        (1.7951476742270114e9, "1.7951476742270114e+09"),
        (6.66570752e08, "6.66570752e+08"),
        (5e-7, "5e-07"),
        (-3, "-3.0"),
    ],
)
def test_numbers_are_written_as_the_python_client_writes_them(value, text):
    from prometheus_client.utils import floatToGoString

    assert number(value) == text == floatToGoString(value)


def test_a_new_histogram_with_the_count_of_the_old_one_is_written_anew():
    current = Histogram((1.0, 2.0))
    lines = HistogramLines("h", {}, lambda: current)
    current.observe(0.5)
    assert (
        lines.text()
        == 'h_bucket{le="1.0"} 1.0\nh_bucket{le="2.0"} 1.0\nh_bucket{le="+Inf"} 1.0\nh_count 1.0\nh_sum 0.5\n'
    )
    current = Histogram((1.0, 2.0))
    current.observe(1.5)
    assert 'h_bucket{le="1.0"} 0.0\n' in lines.text()
    current.observe(9.0, times=3)
    assert lines.text().endswith('h_bucket{le="+Inf"} 4.0\nh_count 4.0\nh_sum 28.5\n')


def test_labels_are_escaped():
    assert labels({"b": 'x"y\\z\n', "a": "1"}) == r'{a="1",b="x\"y\\z\n"}'
    assert labels({}) == ""


async def test_adapters_that_run_are_listed_twice_and_queued_ones_never(http):
    spec = EngineSpec(latency=LatencyModel(100.0), num_blocks=200, max_model_len=1000, max_loras=1)
    async with StubPool(StubConfig(engine=spec, model="tiny", loras=("a", "b"))) as pool:
        address = pool.addresses[0]
        writers = []
        for model in ("a", "b"):
            asked = {"model": model, "prompt": "x", "max_tokens": 900, "stream": True}
            writers.append((await http.open(address, "/v1/completions", asked))[1])
        gauges = pool.replica(0).engine.stats.gauges
        await http.until(lambda: gauges.deferred == 1, "the second one waits for the slot")
        page = (await http.get(address, "/metrics"))[1].decode()
        lines = [line for line in page.splitlines() if line.startswith("vllm:lora_requests_info")]
        newest = max(lines, key=lambda line: float(line.rpartition(" ")[2]))
        expected = 'vllm:lora_requests_info{max_lora="1",running_lora_adapters="a",waiting_lora_adapters="a"} '
        assert newest.startswith(expected)
        for writer in writers:
            writer.close()
        await asyncio.sleep(0)
