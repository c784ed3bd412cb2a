"""predicted-latency: the fleet's forecasts as a score."""

import pytest

from fairlead.compat.load import load
from fairlead.config.plugins import build_policy
from fairlead.core.cost import cost
from fairlead.core.fleet import Fleet
from fairlead.plugins.scorers.latency import PredictedLatency, PredictedLatencyParams
from fairlead.testing import assert_routed, busy, check_scorer, cycle, fleet, request

SHORT_FORM = """
endpoints: ['10.0.0.1:1']
scorers:
- type: predicted-latency
  weight: 30
  parameters: {targetMetric: ttft, percentile: 0.5}
selection: {topK: 1}
"""


def pool() -> Fleet:
    known = fleet("e0", "e1", samples={"e0": {"waiting": 0, "running": 100}, "e1": {"waiting": 0, "running": 0}})
    busy(known, "e0", [request(prompt_tokens=50_000)])
    return known


@pytest.mark.parametrize("metric", ["ttft", "tpot"])
@pytest.mark.parametrize("percentile", [0.1, 0.5, 0.9])
def test_the_fastest_scores_one(metric: str, percentile: float) -> None:
    params = PredictedLatencyParams(target_metric=metric, percentile=percentile)  # type: ignore[arg-type]
    found = PredictedLatency(params).score(request(prompt_tokens=1000), pool(), cycle())
    assert found is not None
    assert found[1] == 1.0 and 0 < found[0] < 0.9


def test_the_documented_form_loads_and_routes() -> None:
    assert_routed(build_policy(load(SHORT_FORM)), request("hello"), pool(), "e1")


def test_a_higher_percentile_expects_more() -> None:
    known = pool()
    terms = cost(1000.0, None, known, 0.0)
    low, high = (known.predictor.ttft_quantile(terms, 1000.0, p) for p in (0.2, 0.8))
    assert (low < high).all()
    with pytest.raises(ValueError, match="percentile"):
        PredictedLatencyParams(percentile=0.99)


def test_its_own_scores_are_in_range() -> None:
    check_scorer(PredictedLatency(PredictedLatencyParams()))
    check_scorer(PredictedLatency(PredictedLatencyParams(target_metric="tpot")))
