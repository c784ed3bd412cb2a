"""The rules of others: each keeps the policy contract and decides by its own formula."""

import sys
from collections import Counter
from random import Random
from typing import Any

import pytest
from msgspec import structs

from fairlead.compat.load import load
from fairlead.config.builtins import BUILTINS
from fairlead.config.plugins import build_policy
from fairlead.core.endpoint import Sample
from fairlead.core.fleet import Fleet
from fairlead.core.policy import Context, Cycle, notified
from fairlead.core.request import Request
from fairlead.plugins.filters.ability import Role, RoleParams
from fairlead.plugins.policies.by_load import (
    DynamoLinear,
    DynamoLinearParams,
    LeastRequests,
    Lmetric,
    Lpwl,
    PowerOfTwo,
    RemainingWork,
)
from fairlead.plugins.policies.by_prefix import (
    HIGH,
    LOW,
    MIDDLE,
    AibrixParams,
    AibrixPrefixCache,
    ConsistentHashingBounded,
    DynamicWeights,
    SglangCacheAware,
    StickyParams,
    StickyUntilSaturated,
    Weights322,
)
from fairlead.testing import assert_refused, assert_routed, busy, check_policy, endpoint, fleet, holds, request

SHARED = "a beginning that many prompts share, long enough for a few blocks " * 60


def spread(policy: Any, known: Fleet, asked: Request, times: int = 60) -> Counter[str]:
    rng = Random(5)
    return Counter(known.table.ids[policy.choose(asked, known, Context(0.0, rng)).slot] for _ in range(times))


@pytest.mark.parametrize("name", sorted(BUILTINS["policy"]))
def test_every_policy_keeps_the_contract_and_the_ability_filters(name: str) -> None:
    policy = build_policy(load(f"policy: {name}\nendpoints: ['10.0.0.1:1']\n"))
    check_policy(policy)
    known = fleet(endpoint("e0", labels={"llm-d.ai/role": "encode"}), endpoint("e1"))
    assert_routed(policy, request("hello"), known, "e1")
    assert_refused(policy, request("hello", subset=frozenset()), known)


@pytest.mark.parametrize("name", sorted(BUILTINS["policy"]))
def test_parameters_are_plain_attributes_when_requests_come(name: str) -> None:
    policy = build_policy(load(f"policy: {name}\nendpoints: ['10.0.0.1:1']\n"))
    known, asked, files = fleet("e0", "e1"), request("hello"), set[str]()
    sys.setprofile(lambda frame, event, argument: files.add(frame.f_code.co_filename))
    try:
        policy.choose(asked, known, Context(0.0, Random(1)))
    finally:
        sys.setprofile(None)
    assert any("plugins" in file for file in files)
    assert not [file for file in files if "pydantic" in file]


@pytest.mark.parametrize("name", sorted(BUILTINS["policy"]))
def test_same_seed_same_choices(name: str) -> None:
    def run() -> list[int]:
        policy = build_policy(load(f"policy: {name}\nendpoints: ['10.0.0.1:1']\n"))
        known, rng, slots = fleet("e0", "e1", "e2", "e3"), Random(3), []
        for number in range(40):
            asked = Request(id=number, arrived=0.0, prompt_tokens=500 + 37 * number)
            slots.append(policy.choose(asked, known, Context(0.0, rng)).slot)
            known.charge(asked, slots[-1], 0.0, 0, 10.0)
        return slots

    first = run()
    assert first == run()
    assert len(set(first)) > 1


def test_least_requests_counts_waiting_and_running() -> None:
    known = fleet("e0", "e1", "e2", samples={"e0": {"waiting": 3, "running": 0}, "e1": {"waiting": 0, "running": 2}})
    assert set(spread(LeastRequests(), known, request("x"))) == {"e2"}


def test_power_of_two_takes_the_better_of_its_two() -> None:
    known = fleet("e0", "e1", "e2")
    busy(known, "e2", [request("x"), request("y")])
    assert set(spread(PowerOfTwo(), known, request("x"))) == {"e0", "e1"}
    only = fleet("e0", endpoint("e1", labels={"llm-d.ai/role": "prefill"}))
    assert set(spread(PowerOfTwo(filters=[Role(RoleParams())]), only, request("x"))) == {"e0"}


def test_lpwl_weighs_pending_tokens_against_cached_ones() -> None:
    known, asked = fleet("e0", "e1"), request(SHARED)
    holds(known, "e0", asked)
    assert set(spread(Lpwl(), known, asked)) == {"e0"}
    busy(known, "e0", [request(prompt_tokens=2000)])
    assert set(spread(Lpwl(), known, asked)) == {"e1"}


def test_lmetric_multiplies_work_and_batch() -> None:
    known = fleet("e0", "e1", samples={"e0": {"running": 9}, "e1": {"running": 4}})
    assert set(spread(Lmetric(), known, request(prompt_tokens=1000))) == {"e1"}
    busy(known, "e1", [request(prompt_tokens=900)])
    assert set(spread(Lmetric(), known, request(prompt_tokens=1000))) == {"e0"}


def test_weights_322() -> None:
    known, asked = fleet("e0", "e1", samples={"e0": {"kv_usage": 0.9}, "e1": {"kv_usage": 0.1}}), request(SHARED)
    assert set(spread(Weights322(), known, asked)) == {"e1"}
    holds(known, "e0", asked)
    assert set(spread(Weights322(), known, asked)) == {"e0"}
    busy(known, "e0", [request(prompt_tokens=9)])
    assert set(spread(Weights322(), known, asked)) == {"e1"}


def test_sticky_until_saturated() -> None:
    known, asked = fleet("e0", "e1"), request(SHARED)
    holds(known, "e0", asked)
    busy(known, "e0", [request(prompt_tokens=200_000)])
    assert set(spread(StickyUntilSaturated(), known, asked)) == {"e0"}
    busy(known, "e0", [request(prompt_tokens=100_000)])
    assert set(spread(StickyUntilSaturated(), known, asked)) == {"e1"}


def test_sglang_follows_the_match_unless_loads_differ_too_much() -> None:
    known, asked = fleet("e0", "e1"), request(SHARED)
    holds(known, "e0", asked)
    busy(known, "e0", [request(prompt_tokens=10) for _ in range(64)])
    assert set(spread(SglangCacheAware(), known, asked)) == {"e0"}
    busy(known, "e0", [request(prompt_tokens=10)])
    assert set(spread(SglangCacheAware(), known, asked)) == {"e1"}


def test_sglang_sends_what_nobody_has_to_the_shortest_queue() -> None:
    known, asked = fleet("e0", "e1"), request(SHARED)
    holds(known, "e0", request(SHARED[: len(SHARED) // 5]))
    busy(known, "e0", [request(prompt_tokens=10)])
    assert set(spread(SglangCacheAware(), known, asked)) == {"e1"}


def test_aibrix_takes_the_longest_match_that_is_not_too_busy() -> None:
    known, asked = fleet("e0", "e1", "e2", "e3"), request(SHARED)
    holds(known, "e0", asked)
    holds(known, "e1", request(SHARED[: len(SHARED) // 2]))
    busy(known, "e0", [request(prompt_tokens=10) for _ in range(16)])
    assert set(spread(AibrixPrefixCache(), known, asked)) == {"e0"}
    # At most one standard deviation above the mean: the shorter match. Far apart: whoever has the fewest.
    assert set(spread(AibrixPrefixCache(AibrixParams(deviations=1)), known, asked)) == {"e1"}
    busy(known, "e0", [request(prompt_tokens=10)])
    assert set(spread(AibrixPrefixCache(), known, asked)) == {"e1", "e2", "e3"}
    assert set(spread(AibrixPrefixCache(), known, request("nobody has it"))) == {"e1", "e2", "e3"}


def test_sticky_until_saturated_with_other_settings() -> None:
    known, asked = fleet("e0", "e1"), request(SHARED)
    holds(known, "e0", asked)
    busy(known, "e0", [request(prompt_tokens=100_000)])
    assert set(spread(StickyUntilSaturated(StickyParams(max_ttft_penalty_ms=5000.0)), known, asked)) == {"e1"}
    quick = StickyParams(max_ttft_penalty_ms=5000.0, peak_prefill_throughput=40_000.0)
    assert set(spread(StickyUntilSaturated(quick), known, asked)) == {"e0"}
    busy(known, "e1", [request(prompt_tokens=10), request(prompt_tokens=10)])
    assert set(spread(StickyUntilSaturated(StickyParams(load="requests")), known, request("other"))) == {"e0"}


def test_remaining_work_keeps_long_prefills_on_servers_of_their_own() -> None:
    known, asked = fleet("e0", "e1", "e2", "e3"), request(SHARED)
    assert set(spread(RemainingWork(), known, request(prompt_tokens=8192))) == {"e0", "e1", "e2"}
    assert set(spread(RemainingWork(), known, request(prompt_tokens=8193))) == {"e3"}
    busy(known, "e0", [request(prompt_tokens=500)])
    assert set(spread(RemainingWork(), known, request(prompt_tokens=800))) == {"e1", "e2"}
    holds(known, "e3", asked)
    assert set(spread(RemainingWork(), known, asked)) == {"e3"}
    assert set(spread(RemainingWork(), fleet("e0"), asked)) == {"e0"}


def test_consistent_hashing_keeps_beginnings_together_within_the_bound() -> None:
    known = fleet(*(f"e{i}" for i in range(6)))
    prompts = [request(f"{i} " + SHARED) for i in range(40)]
    homes = [set(spread(ConsistentHashingBounded(), known, asked, 3)) for asked in prompts]
    assert all(len(home) == 1 for home in homes)
    assert len(set.union(*homes)) == 6
    home = next(iter(homes[0]))
    busy(known, home, [request(prompt_tokens=10) for _ in range(4)])
    assert home not in spread(ConsistentHashingBounded(), known, prompts[0])


def test_consistent_hashing_moves_only_what_was_there() -> None:
    names = [f"e{i}" for i in range(6)]
    full, less = fleet(*names), fleet(*names[:-1])
    moved = 0
    for i in range(60):
        asked = request("x", session=f"s{i}")
        before, after = (next(iter(spread(ConsistentHashingBounded(), known, asked, 1))) for known in (full, less))
        assert before in ("e5", after)
        moved += before != after
    assert 0 < moved < 25


def test_dynamo_adds_prefill_and_decode_blocks() -> None:
    known, asked = fleet("e0", "e1"), request(SHARED)
    holds(known, "e0", asked)
    assert set(spread(DynamoLinear(), known, asked)) == {"e0"}
    busy(known, "e0", [request(prompt_tokens=2000)])
    assert set(spread(DynamoLinear(), known, asked)) == {"e1"}
    agentic = DynamoLinearParams(overlap_credit=2, prefill_load_scale=4, active_request_weight=64)
    assert set(spread(DynamoLinear(agentic), known, request("other"))) == {"e1"}
    known = fleet("e0", "e1", samples={"e0": {"running": 1}})
    busy(known, "e0", [request(prompt_tokens=16)])
    assert set(spread(DynamoLinear(agentic), known, request(SHARED))) == {"e1"}


def test_dynamo_counts_blocks_in_use_once() -> None:
    def sent(policy: DynamoLinear, known: Fleet, text: str, times: int) -> list[str]:
        rng, names = Random(3), []
        for number in range(times):
            asked = structs.replace(request(text + f" and question {number} " * 20), id=number + 1)
            slot = notified(policy.choose(asked, known, Context(0.0, rng)), asked, known).slot
            known.first_token(known.charge(asked, slot, 0.0, 0, 10.0), 0.1)
            names.append(known.table.ids[slot])
        return names

    known, policy = fleet("e0", "e1"), DynamoLinear()
    holds(known, "e0", request(SHARED))
    # Four prompts that begin alike hold their beginning once, so that it is worth staying.
    assert set(sent(policy, known, SHARED, 4)) == {"e0"}
    other = request(prompt_tokens=160)
    busy_blocks, idle_blocks = policy.cost(other, known, Cycle(Context(0.0, Random(1))))
    held = (busy_blocks - idle_blocks) * 16
    assert len(SHARED) / 5 < held < 0.5 * known.table.kv_tokens[0]
    for lease in list(known.ledger):
        known.ledger.release(lease)
    assert len({*policy.cost(other, known, Cycle(Context(0.0, Random(1))))}) == 1


def test_dynamic_weights_follow_the_hit_rate() -> None:
    known, policy, asked = fleet("e0"), DynamicWeights(), request(SHARED)

    def weights() -> tuple[float, ...]:
        return tuple(weight for _, weight, _ in policy._weighted)

    spread(policy, known, request(prompt_tokens=100), 1)
    assert weights() == MIDDLE
    spread(policy, known, request(prompt_tokens=100), 2)
    assert weights() == LOW
    holds(known, "e0", asked)
    spread(policy, known, asked, 400)
    assert policy.hit_rate > 0.7
    assert weights() == HIGH


def test_samples_reach_policies_that_only_know_load() -> None:
    known = fleet("e0", "e1")
    known.sampled("e0", 0.0, 0.0, Sample(waiting=5, running=5))
    assert set(spread(LeastRequests(), known, request("x"))) == {"e1"}
