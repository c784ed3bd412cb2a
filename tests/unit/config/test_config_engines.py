import pytest

from fairlead.apis.engine_metrics import ENGINES, compile_engine
from fairlead.compat.load import load
from fairlead.config.checks import engine_table, with_page
from fairlead.core.endpoint import Endpoint


def table(engines: str):  # type: ignore[no-untyped-def]
    return engine_table(load(f"metrics: {{engines: {engines}}}", need_endpoints=False).metrics)


def test_nothing_configured_is_the_built_in_table() -> None:
    assert table("{}") == dict(ENGINES)


def test_given_fields_replace_and_others_stay() -> None:
    vllm = table("{vllm: {waiting: mine, kvUsage: [a, 'b{x=y}'], extra: {temp: t}}}")["vllm"]
    assert vllm.waiting == ("mine",)
    assert vllm.kv_usage == ("a", "b{x=y}")
    assert vllm.extra == {"temp": "t"}
    assert vllm.running == ENGINES["vllm"].running
    compile_engine(vllm)


def test_an_empty_list_means_not_reported() -> None:
    assert table("{vllm: {lora: []}}")["vllm"].lora == ()


def test_an_engine_of_ones_own() -> None:
    engines = table("{mine: {waiting: w, cacheInfo: c, blockSizeLabel: page}}")
    assert set(engines) == {*ENGINES, "mine"}
    assert (engines["mine"].waiting, engines["mine"].running, engines["mine"].block_size_label) == (("w",), (), "page")


def test_own_engine_as_default() -> None:
    text = "metrics: {defaultEngine: mine, engines: {mine: {waiting: w}}}"
    assert load(text, need_endpoints=False).metrics.default_engine == "mine"


TRTLLM = {"llm-d.ai/engine-type": "trtllm-serve"}


@pytest.mark.parametrize(
    ("metrics", "labels", "url"),
    [
        ("{}", {}, "http://[::1]:80/metrics"),
        ("{scheme: https, path: /m, port: 9}", {}, "https://[::1]:9/m"),
        ("{port: 9}", {"metricsPort": "8002"}, "http://[::1]:8002/metrics"),
        ("{port: 9}", {"metricsPort": "none"}, "http://[::1]:9/metrics"),
        ("{port: 9}", {"metricsPort": "80020"}, "http://[::1]:9/metrics"),
        ("{port: 9}", {"metricsPort": "0080020"}, "http://[::1]:9/metrics"),
        ("{}", {"metricsAddress": "10.0.0.2", "metricsPort": "9"}, "http://10.0.0.2:9/metrics"),
        ("{scheme: https, path: /m}", {"metricsPort": "9"}, "https://[::1]:9/m"),
        ("{}", TRTLLM, "http://[::1]:80/prometheus/metrics"),
        ("{}", {**TRTLLM, "metricsPort": "9"}, "http://[::1]:9/prometheus/metrics"),
        ("{defaultEngine: trtllm-serve}", {"llm-d.ai/engine-type": "x"}, "http://[::1]:80/prometheus/metrics"),
        ("{defaultEngine: trtllm-serve}", {}, "http://[::1]:80/prometheus/metrics"),
        ("{path: /m}", TRTLLM, "http://[::1]:80/m"),
    ],
)
def test_where_the_page_of_an_endpoint_is_that_does_not_say_so(metrics: str, labels: dict[str, str], url: str) -> None:
    settings = load(f"metrics: {metrics}", need_endpoints=False).metrics
    assert with_page(Endpoint("a", "[::1]:80", labels), settings).scrape_url == url
    assert with_page(Endpoint("a", "[::1]:80", labels, "http://own/"), settings).scrape_url == "http://own/"


def test_a_usual_page_is_not_named() -> None:
    endpoint = Endpoint("a", "1.2.3.4:80", {"x": "y"})
    assert with_page(endpoint, load("{}", need_endpoints=False).metrics) is endpoint
