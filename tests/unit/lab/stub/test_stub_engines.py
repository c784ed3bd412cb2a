"""Stub servers with the metrics page of another engine than vLLM."""

import pytest
import yaml

from fairlead.apis.engine_metrics import ENGINES, compile_engine
from fairlead.apis.prometheus import read_page
from fairlead.doctor.survey import survey
from fairlead.lab.stub.config import StubConfig
from fairlead.lab.stub.metrics_page import SERIES
from fairlead.lab.stub.pool import StubPool, endpoints_yaml

ASKED = {"model": "m", "prompt": "x" * 400, "max_tokens": 3}


def test_every_engine_has_a_page() -> None:
    assert set(SERIES) | {"vllm"} == set(ENGINES)
    with pytest.raises(ValueError, match=r"no metrics page of 'mystery'; known: vllm, sglang"):
        StubConfig(engine_type="mystery")


@pytest.mark.parametrize("engine", SERIES)
async def test_the_page_is_read_as_that_engines(http, engine: str) -> None:
    config = StubConfig(model="m", engine_type=engine, time_ratio=1000.0, block_size=64)
    async with StubPool(config) as pool:
        address = pool.addresses[0]
        for _ in range(2):
            assert (await http.post(address, "/v1/completions", ASKED))[0] == 200
        path = "/prometheus/metrics" if engine == "trtllm-serve" else "/metrics"
        reading = read_page((await http.get(address, path))[1], compile_engine(ENGINES[engine]))
        stats, spec = pool.replica(0).engine.stats, config.spec()
        (server,) = await survey([address])
        (entry,) = yaml.safe_load(endpoints_yaml(pool, config))["endpoints"]
    assert reading.problems == ()
    told = {
        "waiting": 0.0,
        "running": 0.0,
        "kv_usage": 0.0,
        "block_size": 64,
        "num_blocks": spec.num_blocks,
        "prefix_queries": stats.prompt_tokens,
        "prefix_hits": stats.prompt_tokens_cached,
        "generation_tokens": 6,
    }
    names = [name for name in told if getattr(ENGINES[engine], name)]
    assert {name: getattr(reading.sample, name) for name in names} == {name: told[name] for name in names}
    assert stats.prompt_tokens_cached > 0
    assert reading.sample.each_step == (engine == "lmdeploy")
    assert (server.engine, server.sample) == (engine, reading.sample)
    assert entry["labels"]["llm-d.ai/engine-type"] == engine
    url = f"http://{address}{path}" if engine == "trtllm-serve" else ""
    assert (server.metrics_url, entry.get("metricsUrl", "")) == (url, url)
