"""Scorers of load: load-aware, kv-utilization, inflight-tokens."""

from random import Random

import numpy as np
import pytest
from leases import lease_of

from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.fleet import Fleet
from fairlead.core.policy import Context, Cycle, Scorer
from fairlead.core.prefix import ChainHasher
from fairlead.core.request import Request
from fairlead.plugins.params import NoParams
from fairlead.plugins.scorers.load import (
    InflightTokens,
    InflightTokensParams,
    KvUtilization,
    LoadAware,
    LoadAwareParams,
)

REQUEST = Request(id=99, arrived=0.0)


def fleet_with(*samples: Sample) -> Fleet:
    fleet = Fleet()
    for number, sample in enumerate(samples):
        fleet.up(Endpoint(f"e{number}", f"10.0.0.{number}:8000"))
        fleet.sampled(f"e{number}", 0.0, 0.0, sample)
    return fleet


def scores(plugin: Scorer, fleet: Fleet, request: Request = REQUEST) -> list[float]:
    column = plugin.score(request, fleet, Cycle(Context(0.0, Random(0))))
    assert column is not None
    assert column.dtype == np.float64
    assert column.shape == (len(fleet.table),)
    assert ((column >= 0) & (column <= 1)).all()
    return [float(score) for score in column]


WEIGHED = LoadAwareParams(queue_weight_factor=0.7, active_requests_weight=0.3)
#: The documented curve over load: 0, 10, 25, 40, 50 give 50, 40, 25, 10, 0 points of 50.
CURVE = [(0, 1.0), (10, 0.8), (25, 0.5), (40, 0.2), (50, 0.0), (51, 0.0), (1e9, 0.0)]


@pytest.mark.parametrize(("load", "expected"), CURVE)
def test_load_aware_curve(load: float, expected: float) -> None:
    both = fleet_with(Sample(waiting=load, running=load))
    assert scores(LoadAware(WEIGHED), both) == pytest.approx([expected])
    queue_alone = fleet_with(Sample(waiting=load, running=17.0))
    assert scores(LoadAware(LoadAwareParams()), queue_alone) == pytest.approx([expected])


@pytest.mark.parametrize(
    ("waiting", "running", "expected"),
    [(10, 0, 0.86), (0, 10, 0.94), (20, 30, 1 - (14 + 9) / 50), (0, 200, 0.0), (72, 0, 0.0)],
)
def test_load_aware_weighs_waiting_more_than_running(waiting: float, running: float, expected: float) -> None:
    fleet = fleet_with(Sample(waiting=waiting, running=running))
    for given in (WEIGHED, LoadAwareParams(queue_weight_factor=0.7), LoadAwareParams(active_requests_weight=0.3)):
        assert scores(LoadAware(given), fleet) == pytest.approx([expected])


def test_load_aware_sees_what_was_charged_since_the_scrape() -> None:
    fleet = fleet_with(Sample(waiting=0.0, running=0.0), Sample(waiting=0.0, running=0.0))
    for number in range(10):
        fleet.charge(Request(id=number, arrived=1.0), 0, 1.0, 0, 0.0)
    assert scores(LoadAware(LoadAwareParams()), fleet) == pytest.approx([0.8, 1.0])


def test_kv_utilization() -> None:
    fleet = fleet_with(*(Sample(waiting=0.0, running=1.0, kv_usage=kv) for kv in (0.0, 0.25, 1.0)))
    assert scores(KvUtilization(NoParams()), fleet) == [1.0, 0.75, 0.0]


def test_inflight_tokens_counts_uncached_prompts_before_their_first_token() -> None:
    fleet = fleet_with(Sample(), Sample(), Sample())
    fleet.charge(Request(id=1, arrived=0.0, prompt_tokens=300), 0, 0.0, 100, 0.0)
    fleet.charge(Request(id=2, arrived=0.0, prompt_tokens=900), 1, 0.0, 0, 0.0)
    fleet.charge(Request(id=3, arrived=0.0, prompt_tokens=500), 2, 0.0, 0, 0.0)
    fleet.ledger.first_token(lease_of(fleet, 3))
    plugin = InflightTokens(InflightTokensParams(threshold_tokens=1000))
    assert scores(plugin, fleet) == pytest.approx([0.8, 0.1, 1.0])
    own = Request(id=9, arrived=0.0, prompt_tokens=200)
    assert scores(plugin, fleet, own) == pytest.approx([0.6, 0.0, 0.8])


def test_inflight_tokens_subtracts_what_is_cached() -> None:
    fleet = fleet_with(Sample(), Sample())
    chain = ChainHasher().chain(b"m", b"x" * 4096)
    fleet.prefix.insert(1, chain)
    request = Request(id=9, arrived=0.0, prompt_tokens=400, prompt_bytes=8192, prefix=chain)
    plugin = InflightTokens(InflightTokensParams(threshold_tokens=1000))
    assert scores(plugin, fleet, request) == pytest.approx([0.6, 0.8])
    assert scores(InflightTokens(InflightTokensParams(threshold_tokens=100)), fleet, request) == [0.0, 0.0]


@pytest.mark.parametrize("plugin", [LoadAware(LoadAwareParams()), KvUtilization(NoParams())])
def test_scores_are_fresh_columns(plugin: Scorer) -> None:
    """A trace keeps them: what happens later must not show in it."""
    fleet = fleet_with(Sample(waiting=10.0, running=10.0, kv_usage=0.5))
    column = plugin.score(REQUEST, fleet, Cycle(Context(0.0, Random(0))))
    assert column is not None
    before = column.tolist()
    fleet.sampled("e0", 1.0, 1.0, Sample(waiting=30.0, running=30.0, kv_usage=0.9))
    assert column.tolist() == before
