"""Scorers that follow formulas of the reference picker."""

import numpy as np
import pytest

from fairlead.core.fleet import Fleet
from fairlead.core.policy import CANDIDATES, Scorer
from fairlead.core.request import Request
from fairlead.plugins.columns import tpot_ms
from fairlead.plugins.params import NoParams
from fairlead.plugins.scorers.latency import SloHeadroom, SloHeadroomParams
from fairlead.plugins.scorers.load import (
    ActiveRequests,
    ActiveRequestsParams,
    Queue,
    QueueThreshold,
    QueueThresholdParams,
    RunningRequests,
)
from fairlead.plugins.scorers.lora import LoraAffinity
from fairlead.plugins.scorers.metric import ContextLengthScorer, ContextLengthScorerParams
from fairlead.plugins.scorers.prefix import NoHitLru, NoHitLruParams, PrefixLength, PrefixLengthParams
from fairlead.testing import busy, cycle, endpoint, fleet, holds, request

NONE = NoParams()


def scores(
    scorer: Scorer, pool: Fleet, asked: Request | None = None, candidates: list[int] | None = None
) -> list[float]:
    scratch = cycle()
    if candidates is not None:
        mask = np.isin(np.arange(len(pool.table)), candidates)
        scratch.once(CANDIDATES, lambda: mask)
    found = scorer.score(asked or request(), pool, scratch)
    assert found is not None
    return [float(value) for value in found.round(4)]


def waiting(*counts: int) -> Fleet:
    names = [f"e{i}" for i in range(len(counts))]
    samples = {name: {"waiting": n, "running": 2 * n} for name, n in zip(names, counts, strict=True)}
    return fleet(*names, samples=samples)


@pytest.mark.parametrize("scorer", [Queue(NONE), RunningRequests(NONE)], ids=lambda scorer: scorer.name)
def test_lowest_to_highest(scorer: Scorer) -> None:
    assert scores(scorer, waiting(0, 5, 20)) == [1.0, 0.75, 0.0]
    assert scores(scorer, waiting(7, 7, 7)) == [1.0, 1.0, 1.0]
    assert scores(scorer, waiting(0, 5, 20), candidates=[0, 1])[:2] == [1.0, 0.0]


def test_queue_threshold() -> None:
    scorer = QueueThreshold(QueueThresholdParams(threshold=128))
    assert scores(scorer, waiting(0, 64, 128, 500)) == [0.5, 0.25, 0.0, 0.0]


def test_active_requests() -> None:
    pool = fleet("e0", "e1", "e2")
    for name, count in (("e1", 2), ("e2", 4)):
        busy(pool, name, [request() for _ in range(count)])
    assert scores(ActiveRequests(ActiveRequestsParams()), pool) == [1.0, 0.5, 0.0]
    assert scores(ActiveRequests(ActiveRequestsParams(idle_threshold=2, max_busy_score=0.6)), pool) == [1.0, 1.0, 0.0]
    assert scores(ActiveRequests(ActiveRequestsParams(max_busy_score=0.6)), pool) == [1.0, 0.3, 0.0]
    idle = ActiveRequests(ActiveRequestsParams()).score(request(), fleet(), cycle())
    assert idle is None


def test_lora_affinity_has_four_tiers() -> None:
    samples = {
        "e0": {"adapters": frozenset({"sql"}), "max_adapters": 1},
        "e1": {"adapters": frozenset(), "max_adapters": 1},
        "e2": {"adapters": frozenset({"x"}), "waiting_adapters": frozenset({"sql"}), "max_adapters": 1},
        "e3": {"adapters": frozenset({"x"}), "max_adapters": 1},
    }
    pool = fleet(*samples, samples=samples)
    assert scores(LoraAffinity(NONE), pool, request("hi", model="sql")) == [1.0, 0.8, 0.6, 0.0]
    assert LoraAffinity(NONE).score(request("hi"), pool, cycle()) is None
    pool.up(endpoint("e9", labels={"model-id": "sql"}))
    assert LoraAffinity(NONE).score(request("hi", model="sql"), pool, cycle()) is None


def test_cold_prompts_go_round_by_least_recent_use() -> None:
    scorer = NoHitLru(NoHitLruParams())
    pool = fleet("e0", "e1", "e2")
    assert scores(scorer, pool) == [1.0, 0.5, 0.0]
    for slot, expected in ((1, [1.0, 0.0, 0.5]), (0, [0.0, 0.5, 1.0]), (2, [0.5, 1.0, 0.0])):
        scorer.chosen(request("cold"), slot, pool, cycle())
        assert scores(scorer, pool) == expected


def test_a_known_prompt_is_none_of_its_business() -> None:
    scorer = NoHitLru(NoHitLruParams())
    pool, asked = fleet("e0", "e1"), request("warm " * 200)
    holds(pool, "e0", asked)
    assert scores(scorer, pool, asked) == [0.5, 0.5]
    scorer.chosen(asked, 0, pool, cycle())
    assert scores(scorer, pool) == [1.0, 0.0], "a warm request is no cold use"


def test_what_is_remembered_is_bounded_and_departed_endpoints_do_not_count() -> None:
    scorer = NoHitLru(NoHitLruParams(lru_size=2))
    pool = fleet("e0", "e1", "e2")
    for slot in (0, 1, 2):
        scorer.chosen(request(), slot, pool, cycle())
    assert scores(scorer, pool) == [1.0, 0.5, 0.0], "e0 is forgotten, hence as good as never used"
    pool.down("e1")
    assert scores(scorer, pool)[::2] == [1.0, 0.0]


def test_prefix_length_rewards_long_matches() -> None:
    pool, asked = fleet("e0", "e1"), request("x" * 8192)
    holds(pool, "e0", asked)
    assert asked.prompt_tokens == 2048
    whole = scores(
        PrefixLength(PrefixLengthParams(match_length_weight=0.5, match_length_scale_tokens=4096)), pool, asked
    )
    assert whole == [pytest.approx(0.5 * 0.25 + 0.5), 0.0]
    assert scores(PrefixLength(PrefixLengthParams()), pool, asked) == [1.0, 0.0]
    assert PrefixLength(PrefixLengthParams()).score(request("y" * 999), pool, cycle()) is None


def test_context_length() -> None:
    label = "llm-d.ai/context-length-range"
    pool = fleet(
        endpoint("e0", labels={label: "0-8192"}), endpoint("e1", labels={label: "0-131072"}),
        endpoint("e2", labels={label: "32768-131072"}), endpoint("e3"), endpoint("e4", labels={label: "much"}),
    )  # fmt: skip
    found = scores(ContextLengthScorer(ContextLengthScorerParams()), pool, request(prompt_tokens=4096))
    narrow = 0.3 + 0.7 * (0.7 / (1 + 0.8192) + 0.3 * 0.5)
    wide = 0.3 + 0.7 * (0.7 / (1 + 13.1072) + 0.3 * (131072 - 4096) / 131072)
    outside = 0.3 / (1 + (32768 - 4096) / 1000)
    assert found == pytest.approx([narrow, wide, outside, 0.5, 0.5], abs=1e-4)
    assert ContextLengthScorer(ContextLengthScorerParams()).score(request(), fleet(), cycle()) is None


def queued(*tokens: int) -> Fleet:
    """Endpoints that compute so many prompt tokens right now."""
    pool = fleet(*(f"e{i}" for i in range(len(tokens))))
    for slot, count in enumerate(tokens):
        if count:
            busy(pool, f"e{slot}", [request(prompt_tokens=count)])
    return pool


def test_slo_headroom_packs_or_spreads_and_shuns_those_that_miss() -> None:
    pool, asked = queued(0, 4000, 400_000), request(prompt_tokens=100, slo_ttft_ms=2000.0)
    assert scores(SloHeadroom(SloHeadroomParams()), pool, asked) == [0.01, 1.0, 0.0]
    most = SloHeadroomParams(headroom_selection_strategy="most")
    assert scores(SloHeadroom(most), pool, asked) == [1.0, 0.01, 0.0]


def test_slo_headroom_takes_the_smallest_deficit_when_all_miss() -> None:
    found = scores(
        SloHeadroom(SloHeadroomParams()), queued(0, 4000, 400_000), request(prompt_tokens=9000, slo_ttft_ms=1.0)
    )
    assert found[0] == 1.0 and 0.9 < found[1] < 1.0 and found[2] == 0.0


def test_slo_headroom_of_later_tokens() -> None:
    samples = {"e0": {"waiting": 0, "running": 200}, "e1": {"waiting": 0, "running": 1}}
    pool, scorer = fleet(*samples, samples=samples), SloHeadroom(SloHeadroomParams())
    slow, quick = (float(value) for value in tpot_ms(request(), pool, cycle()))
    assert slow > quick
    assert scores(scorer, pool, request(slo_tpot_ms=(slow + quick) / 2)) == [0.0, 1.0]
    assert scores(scorer, pool, request(slo_tpot_ms=2 * slow)) == [1.0, 0.01], "the fuller one still fits"


def test_slo_headroom_without_an_slo_is_a_mean_of_load_and_prefix() -> None:
    pool = fleet("e0", "e1", samples={"e0": {"kv_usage": 0.5, "running": 1, "waiting": 0}, "e1": {"waiting": 4}})
    asked = request("p" * 4000)
    holds(pool, "e1", asked)
    assert scores(SloHeadroom(SloHeadroomParams()), pool, asked) == pytest.approx([0.5, 2 / 3], abs=0.02)
    only = SloHeadroomParams(composite_kv_weight=0, composite_queue_weight=0, composite_prefix_weight=0)
    assert SloHeadroom(only).score(asked, pool, cycle()) is None


def test_slo_headroom_without_an_slo_can_prefer_the_lowest_latency() -> None:
    pool = queued(0, 4000, 400_000)
    found = scores(SloHeadroom(SloHeadroomParams(without_slo="latency")), pool, request(prompt_tokens=9000))
    assert found[0] == 1.0 and found[0] > found[1] > found[2] and found[2] == pytest.approx(0.01)
    neither = SloHeadroomParams(without_slo="latency", ttft_weight=0, tpot_weight=0)
    assert SloHeadroom(neither).score(request(prompt_tokens=9000), pool, cycle()) is None
