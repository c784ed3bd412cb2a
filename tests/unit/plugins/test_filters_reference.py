"""Filters that follow those of the reference picker."""

import numpy as np
import pytest

from fairlead.core.fleet import Fleet
from fairlead.core.policy import PREFIX_SHARE, Filter
from fairlead.core.profile import Profile
from fairlead.core.request import Request
from fairlead.plugins.filters.ability import (
    ByLabel,
    ByLabelParams,
    ContextLength,
    ContextLengthParams,
    Role,
    RoleParams,
)
from fairlead.plugins.filters.availability import (
    PrefixAffinity,
    PrefixAffinityParams,
    SloTier,
    SloTierParams,
    Utilization,
    UtilizationParams,
)
from fairlead.plugins.filters.load import Concurrency, ConcurrencyParams
from fairlead.plugins.params import NoParams
from fairlead.plugins.pickers import MaxScore, MaxScoreParams, Uniform
from fairlead.plugins.scorers.load import Queue
from fairlead.testing import assert_routed, busy, choose, cycle, endpoint, fleet, holds, request


def kept(plugin: Filter, pool: Fleet, asked: Request | None = None, seed: int = 0) -> list[str]:
    mask = plugin.keep(asked or request(), pool, cycle(seed=seed))
    return [name for slot, name in enumerate(pool.table.ids) if mask is None or mask[slot]]


def test_by_label() -> None:
    pool = fleet(endpoint("e0", labels={"zone": "a"}), endpoint("e1", labels={"zone": "b"}), endpoint("e2"))
    assert kept(ByLabel(ByLabelParams(label="zone", valid_values=("a",))), pool) == ["e0"]
    assert kept(ByLabel(ByLabelParams(label="zone", valid_values=("a",), allows_no_label=True)), pool) == ["e0", "e2"]
    assert kept(ByLabel(ByLabelParams(label="zone")), pool) == []


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(0, ["e0", "e2"]), (8192, ["e0", "e2"]), (8193, ["e2"]), (32768, ["e1", "e2"]), (131073, ["e2"])],
)
def test_context_length_keeps_ranges_that_include_the_prompt(tokens: int, expected: list[str]) -> None:
    label = "llm-d.ai/context-length-range"
    pool = fleet(
        endpoint("e0", labels={label: "0-8192"}), endpoint("e1", labels={label: "32768-131072"}), endpoint("e2")
    )
    assert kept(ContextLength(ContextLengthParams()), pool, request(prompt_tokens=tokens)) == expected


def test_prefix_affinity_stays_until_the_wait_is_too_long() -> None:
    asked = request("a conversation " * 300)
    pool = fleet("e0", "e1", "e2")
    holds(pool, "e1", asked)
    plugin = PrefixAffinity(PrefixAffinityParams(peak_prefill_throughput=1000, max_ttft_penalty_ms=2000))
    assert kept(plugin, pool, asked) == ["e1"]
    busy(pool, "e1", [request(prompt_tokens=2000)])
    assert kept(plugin, pool, asked) == ["e1"], "2000 ms is not more than 2000 ms"
    busy(pool, "e1", [request(prompt_tokens=100)])
    assert kept(plugin, pool, asked) == ["e0", "e1", "e2"]
    busy(pool, "e0", [request(prompt_tokens=2000)])
    busy(pool, "e2", [request(prompt_tokens=2000)])
    assert kept(plugin, pool, asked) == ["e1"], "the others would answer as late"


def test_prefix_affinity_keeps_all_when_nobody_holds_enough_and_explores() -> None:
    pool, half = fleet("e0", "e1"), request("x" * 4096)
    holds(pool, "e0", request("x" * 2048))
    share = pool.match(half)
    assert share is not None and 0.3 < share[0] < 0.8
    assert kept(PrefixAffinity(PrefixAffinityParams()), pool, half) == ["e0", "e1"]
    assert kept(PrefixAffinity(PrefixAffinityParams(affinity_threshold=0.3)), pool, half) == ["e0"]
    always = PrefixAffinityParams(affinity_threshold=0.3, exploration_probability=1.0)
    assert kept(PrefixAffinity(always), pool, half) == ["e0", "e1"]


def test_slo_tier() -> None:
    pool = fleet("e0", "e1", "e2")
    busy(pool, "e1", [request(prompt_tokens=400_000)])
    plugin = SloTier(SloTierParams(epsilon_explore_neg=0))
    asked = request(prompt_tokens=100, slo_ttft_ms=2000.0)
    assert kept(plugin, pool, asked) == ["e0", "e2"]
    assert kept(plugin, pool, request(prompt_tokens=100)) == ["e0", "e1", "e2"], "no SLO"
    assert kept(plugin, pool, request(prompt_tokens=9000, slo_ttft_ms=0.1)) == ["e0", "e1", "e2"], "all miss it"
    assert kept(SloTier(SloTierParams(epsilon_explore_neg=1)), pool, asked) == ["e1"]


def test_prefix_affinity_may_ask_the_predictor() -> None:
    asked = request("a conversation " * 300)
    pool = fleet("e0", "e1")
    holds(pool, "e1", asked)
    plugin = PrefixAffinity(PrefixAffinityParams(ttft_source="latencyPredictor", max_ttft_penalty_ms=2000))
    assert kept(plugin, pool, asked) == ["e1"]
    busy(pool, "e1", [request(prompt_tokens=400_000)])
    assert kept(plugin, pool, asked) == ["e0", "e1"]


def test_utilization() -> None:
    samples = {
        "e0": {"waiting": 4, "running": 1, "kv_usage": 0.5},
        "e1": {"waiting": 5, "running": 1, "kv_usage": 0.5},
        "e2": {"waiting": 0, "running": 1, "kv_usage": 0.8},
    }
    assert kept(Utilization(UtilizationParams()), fleet(samples=samples)) == ["e0"]
    assert kept(Utilization(UtilizationParams(headroom=0.1)), fleet(samples=samples)) == ["e0", "e1", "e2"]


def test_concurrency() -> None:
    pool = fleet("e0", "e1")
    busy(pool, "e0", [request(prompt_tokens=10) for _ in range(3)])
    busy(pool, "e1", [request(prompt_tokens=1000)])
    by_mode = {
        mode: kept(
            Concurrency(ConcurrencyParams(max_concurrency=3, max_token_concurrency=1000, concurrency_mode=mode)), pool
        )
        for mode in ("requests", "tokens", "hybrid")
    }
    assert by_mode == {"requests": ["e1"], "tokens": ["e0"], "hybrid": []}
    assert kept(Concurrency(ConcurrencyParams(max_concurrency=3, headroom=0.5)), pool) == ["e0", "e1"]


def test_those_that_prefer_look_only_at_what_other_filters_left() -> None:
    """A home that cannot serve is none, and an idle endpoint of another role is no better place."""
    asked = request("a conversation " * 300, slo_ttft_ms=2000.0)
    pool = fleet(*(endpoint(f"e{i}", labels={"llm-d.ai/role": "prefill" if i == 2 else "decode"}) for i in range(3)))
    holds(pool, "e2", asked)
    for preferring in (PrefixAffinity(PrefixAffinityParams()), SloTier(SloTierParams(epsilon_explore_neg=0))):
        profile = Profile("p", [Role(RoleParams()), preferring], [], Uniform(NoParams()))
        assert_routed(profile, asked, pool, {"e0", "e1"})
    holds(pool, "e1", asked)
    for name in ("e0", "e1"):
        busy(pool, name, [request(prompt_tokens=400_000)])
    sticky = Profile("p", [Role(RoleParams()), PrefixAffinity(PrefixAffinityParams())], [], Uniform(NoParams()))
    assert_routed(sticky, asked, pool, "e1")


def test_when_all_are_past_their_set_point_the_scorers_decide() -> None:
    full = {"waiting": 50, "running": 200, "kv_usage": 0.9}
    pool = fleet("e0", "e1", samples={"e0": full, "e1": {**full, "waiting": 20}})
    profile = Profile(
        "p", [Utilization(UtilizationParams())], [(Queue(NoParams()), 1.0)], MaxScore(MaxScoreParams(near_tie=0))
    )
    assert_routed(profile, request(), pool, "e1")
    assert not choose(profile, request(), pool).overloaded


def test_prefix_affinity_with_a_penalty_of_0_always_stays() -> None:
    asked = request("a conversation " * 300)
    pool = fleet("e0", "e1")
    holds(pool, "e1", asked)
    busy(pool, "e1", [request(prompt_tokens=100_000)])
    assert kept(PrefixAffinity(PrefixAffinityParams(max_ttft_penalty_ms=0)), pool, asked) == ["e1"]


def test_prefix_affinity_close_to_1_is_met_by_all_whole_blocks() -> None:
    plugin = PrefixAffinity(PrefixAffinityParams(affinity_threshold=0.99))
    for length in range(2000, 60_000, 777):
        asked = request("abcdefgh" * (length // 8))
        pool = fleet("e0", "e1", "e2")
        holds(pool, "e1", asked)
        holds(pool, "e2", request("abcdefgh" * (length * 7 // 64)))
        assert kept(plugin, pool, asked) == ["e1"], length


@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_prefix_affinity_close_to_1_is_met_by_all_whole_blocks_of_the_engine(block_size: int) -> None:
    """With KV events, shares are of tokens in the engine's blocks, and an engine computes at least one token."""
    plugin = PrefixAffinity(PrefixAffinityParams(affinity_threshold=0.99))
    sample = {"block_size": block_size, "num_blocks": 10_000}
    pool = fleet("e0", "e1", "e2", samples=dict.fromkeys(("e0", "e1", "e2"), sample))
    for tokens in range(1000, 9000, 77):
        blocks = (tokens - 1) // block_size
        asked = request("abcd" * tokens, prompt_tokens=tokens, blocks=object())
        at = cycle()
        at.once(PREFIX_SHARE, lambda: np.array([0.0, blocks, blocks - 1]) * block_size / tokens)  # noqa: B023
        mask = plugin.keep(asked, pool, at)
        assert mask is not None and mask[1] and not mask[0], tokens
