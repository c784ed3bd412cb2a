"""A metric that Fairlead does not know becomes a score by configuration alone."""

import pytest

from fairlead.apis.engine_metrics import compile_engine
from fairlead.apis.prometheus import PageReader
from fairlead.compat.load import load, problems
from fairlead.config.checks import engine_table
from fairlead.config.plugins import build_policy
from fairlead.core.fleet import Fleet
from fairlead.plugins.filters.load import MetricLimit, MetricLimitParams
from fairlead.plugins.scorers.metric import Metric, MetricParams
from fairlead.testing import assert_routed, cycle, fleet, request

CONFIG = """
endpoints: ['10.0.0.1:1']
metrics: {engines: {vllm: {extra: {heat: 'gpu_temperature{gpu=0}'}}}}
scorers: [{type: metric, metric: heat, better: low, range: [20, 90]}]
selection: {picker: max-score}
"""
PAGE = 'vllm:num_requests_waiting 0\nvllm:num_requests_running 0\ngpu_temperature{{gpu="0"}} {heat}\n'


def heated(*values: float | None) -> Fleet:
    pool = fleet(*(f"e{i}" for i in range(len(values))))
    for i, value in enumerate(values):
        if value is not None:
            pool.sampled(f"e{i}", 0.0, 0.0, sample(value))
    return pool


def sample(heat: float):  # type: ignore[no-untyped-def]
    """What a scraper with this configuration makes of a page."""
    specs = compile_engine(engine_table(load(CONFIG).metrics)["vllm"])
    return PageReader(specs).read(PAGE.format(heat=heat).encode()).sample


def scores(pool: Fleet, **parameters: object) -> list[float]:
    found = Metric(MetricParams(metric="heat", **parameters)).score(request(), pool, cycle())  # type: ignore[arg-type]
    assert found is not None
    return [float(value) for value in found.round(3)]


def test_from_page_to_decision_by_configuration_only() -> None:
    policy = build_policy(load(CONFIG))
    assert_routed(policy, request("hi"), heated(80, 35, 60), "e1")
    other = build_policy(load(CONFIG.replace("better: low", "better: high")))
    assert_routed(other, request("hi"), heated(80, 35, 60), "e0")


def test_fixed_and_adaptive_ranges() -> None:
    pool = heated(20, 55, 90, 100)
    assert scores(pool, better="low", range=(20, 90)) == [1.0, 0.5, 0.0, 0.0]
    assert scores(pool, better="high", range=(20, 90)) == [0.0, 0.5, 1.0, 1.0]
    assert scores(heated(40, 50, 60), better="low") == [1.0, 0.5, 0.0]
    assert scores(heated(40, 50, 60), better="high") == [0.0, 0.5, 1.0]
    assert scores(heated(40, 40), better="high") == [1.0, 1.0]


def test_endpoints_that_do_not_report_it() -> None:
    assert scores(heated(50, None), better="low", range=(0, 100)) == [0.5, 0.0]
    assert scores(heated(50, None), better="low", range=(0, 100), missing=0.4) == [0.5, 0.4]
    assert scores(heated(None, None), better="low") == [0.0, 0.0]


def test_the_limit() -> None:
    def kept(pool: Fleet, **parameters: object) -> list[bool]:
        plugin = MetricLimit(MetricLimitParams(metric="heat", **parameters))  # type: ignore[arg-type]
        mask = plugin.keep(request(), pool, cycle())
        return [True] * len(pool.table) if mask is None else [bool(value) for value in mask]

    pool = heated(50, 90, None)
    assert kept(pool, operator="LessThan", value=90) == [True, False, True]
    assert kept(pool, operator="LessThanOrEqual", value=90) == [True, True, True]
    assert kept(pool, operator="GreaterThan", value=50) == [False, True, True]
    assert kept(pool, operator="GreaterThanOrEqual", value=50, keep_missing=False) == [True, True, False]
    assert kept(pool, operator="Equal", value=50) == [True, False, True]
    assert kept(pool, operator="NotEqual", value=50, keep_missing=False) == [False, True, False]


def test_built_in_columns_have_names_too() -> None:
    pool = fleet("e0", "e1", samples={"e0": {"waiting": 3, "running": 1}, "e1": {"waiting": 0, "running": 1}})
    found = Metric(MetricParams(metric="queue", better="low")).score(request(), pool, cycle())
    assert found is not None and found.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("scorer", "line", "message"),
    [
        ("{type: metric, metric: heatt, better: low}", 4, "unknown metric 'heatt'"),
        ("{type: metric, metric: heat}", 4, "'better' is missing"),
        ("{type: metric, metric: heat, better: low, range: [9, 3]}", 4, "the second number must be the larger"),
    ],
)
def test_mistakes(scorer: str, line: int, message: str) -> None:
    text = CONFIG.replace("{type: metric, metric: heat, better: low, range: [20, 90]}", scorer)
    (problem,) = problems(text)
    assert (problem.line, message in problem.message) == (line, True), problem
