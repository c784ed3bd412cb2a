"""The cost model: each term moves the choice, SLOs bound it, filters come first."""

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from fairlead.core.endpoint import Sample
from fairlead.core.fleet import Fleet
from fairlead.core.policy import Context
from fairlead.core.prefix import AS_FREE
from fairlead.core.request import Request
from fairlead.plugins.filters.ability import Role, RoleParams
from fairlead.plugins.filters.load import QueueDepth, QueueDepthParams
from fairlead.plugins.policies.cost_model import CostModel, CostModelParams
from fairlead.testing import assert_refused, assert_routed, busy, check_policy, endpoint, fleet, holds, request

LONG = "the beginning that all share " * 600
IDLE: dict[str, Any] = {"waiting": 0, "running": 0, "kv_usage": 0.0, "block_size": 16, "num_blocks": 17_000}


def pool(**changed: dict[str, float]) -> Fleet:
    return fleet("e0", "e1", "e2", samples={name: {**IDLE, **changed.get(name, {})} for name in ("e0", "e1", "e2")})


def spread(known: Fleet, asked: Request, policy: CostModel | None = None, times: int = 60) -> Counter[str]:
    policy = policy or CostModel()
    rng = Random(7)
    picks = [policy.choose(asked, known, Context(0.05, rng)).slot for _ in range(times)]
    return Counter(known.table.ids[slot] for slot in picks)


def answered(known: Fleet, name: str, asked: Sequence[Request], seconds: float) -> None:
    """Each request in turn gets its first token so long after it was sent, and ends at once."""
    slot = known.table.slot(name)
    assert slot is not None
    now = 10.0
    for one in asked:
        lease = known.charge(one, slot, now, 0, 1.0)
        now += seconds
        known.first_token(lease, now)
        known.ledger.release(lease)
        now += 1.0


def test_keeps_the_contract_of_policies() -> None:
    check_policy(CostModel())


def test_equal_endpoints_are_drawn_from() -> None:
    assert set(spread(pool(), request(prompt_tokens=1000))) == {"e0", "e1", "e2"}


def test_of_equals_the_one_with_the_most_free_cache_is_chosen() -> None:
    known, asked = pool(), request("something new " * 400)
    for name, prompts in ("e0", 9), ("e2", 3):
        holds(known, name, *(request(f"{name} {number} " + LONG * 2) for number in range(prompts)))
    assert known.table.free_cache.tolist() == pytest.approx([0.73, 1.0, 0.91], abs=0.01)
    assert set(spread(known, asked)) == {"e1"}
    busy(known, "e1", [request(prompt_tokens=100, stream=True)])
    assert set(spread(known, asked)) == {"e1"}, "it costs a little more"
    busy(known, "e1", [request(prompt_tokens=900, stream=True)])
    assert set(spread(known, asked)) == {"e2"}, "it costs much more"


def test_a_little_more_free_cache_does_not_decide() -> None:
    known = pool()
    free = known.table.free_cache
    free[:] = 0.5, 0.5 + 0.9 * AS_FREE, 0.5
    assert set(spread(known, request(prompt_tokens=1000))) == {"e0", "e1", "e2"}
    free[:] = 0.5, 0.5 + 1.1 * AS_FREE, 0.5
    assert set(spread(known, request(prompt_tokens=1000))) == {"e1"}


def test_full_caches_are_alike() -> None:
    known, asked = pool(), request("something new " * 400)
    for name in known.table.ids:
        holds(known, name, *(request(f"{name} {number} " + LONG) for number in range(80)))
    assert known.table.free_cache.tolist() == pytest.approx([0.0] * 3, abs=AS_FREE)
    assert set(spread(known, asked)) == {"e0", "e1", "e2"}
    busy(known, "e1", [request(prompt_tokens=100, stream=True)])
    assert set(spread(known, asked)) == {"e0", "e2"}, "then 10 % are too much"


def test_of_many_equals_a_few_are_looked_at() -> None:
    names = [f"e{at}" for at in range(100)]
    known = fleet(*names, samples=dict.fromkeys(names, IDLE))
    for name in names[:50]:
        holds(known, name, request(f"{name} " + LONG * 2))
    assert set(spread(known, request("something new " * 400), times=200)) <= set(names[50:])


def test_a_cached_beginning_draws_a_request_until_the_queue_there_costs_more() -> None:
    known, asked = pool(), request(LONG)
    holds(known, "e1", asked)
    assert set(spread(known, asked)) == {"e1"}
    busy(known, "e1", [request(prompt_tokens=3000, stream=True)])
    assert set(spread(known, asked)) == {"e1"}
    busy(known, "e1", [request(prompt_tokens=40_000, stream=True)])
    assert "e1" not in spread(known, asked)


def test_running_answers_keep_long_prompts_away() -> None:
    known = pool(e0={"running": 40.0}, e1={"running": 40.0})
    assert set(spread(known, request(prompt_tokens=20_000))) == {"e2"}
    alone = CostModel(CostModelParams(interference=0.0, decode=0.0))
    assert len(spread(known, request(prompt_tokens=20_000), alone)) == 3


def test_memory_has_a_price_only_where_it_is_short() -> None:
    asked = request(prompt_tokens=20_000)
    assert len(spread(pool(e0={"kv_usage": 0.5}), asked)) == 3
    known = pool(e0={"kv_usage": 0.99}, e1={"kv_usage": 0.99})
    assert set(spread(known, asked)) == {"e2"}
    assert len(spread(known, asked, CostModel(CostModelParams(memory=0.0)))) == 3


def test_unknown_capacity_is_no_shortage() -> None:
    known = fleet("e0", "e1", samples={"e0": {"kv_usage": 1.0}, "e1": {"kv_usage": 0.0}})
    assert set(spread(known, request(prompt_tokens=20_000))) == {"e0", "e1"}


def test_slow_hardware_is_found_out_and_gets_less() -> None:
    known = pool()
    for _ in range(30):
        for name, seconds in (("e0", 0.45), ("e1", 0.45), ("e2", 1.15)):
            answered(known, name, [request(prompt_tokens=8000, stream=True)], seconds)
    assert "e2" not in spread(known, request(prompt_tokens=8000))
    factors = known.predictor.rates.prefill
    assert factors[2] == pytest.approx(2.5 * factors[0], rel=0.15)


def test_an_interactive_request_takes_the_best_within_its_slo() -> None:
    known, asked = pool(), request(LONG, slo_ttft_ms=2000.0)
    holds(known, "e1", asked)
    assert_routed(CostModel(), asked, known, "e1")


def test_a_batch_request_takes_the_tightest_fit() -> None:
    known = pool()
    busy(known, "e1", [request(prompt_tokens=8000, stream=True)])
    busy(known, "e2", [request(prompt_tokens=80_000, stream=True)])
    wanted: dict[str, Any] = {"prompt_tokens": 1000, "slo_ttft_ms": 1500.0}
    assert_routed(CostModel(), request(**wanted, priority=-1), known, "e1")
    assert_routed(CostModel(), request(**wanted), known, "e0")


def test_a_batch_request_does_not_copy_a_prompt_to_fit_more_tightly() -> None:
    known = pool()
    asked = request(LONG, slo_ttft_ms=5000.0, priority=-1)
    holds(known, "e0", asked)
    busy(known, "e1", [request(prompt_tokens=8000, stream=True)])
    assert_routed(CostModel(), asked, known, "e0")


def test_an_slo_that_nobody_keeps_changes_nothing() -> None:
    known = pool()
    busy(known, "e0", [request(prompt_tokens=8000, stream=True)])
    busy(known, "e1", [request(prompt_tokens=8000, stream=True)])
    assert_routed(CostModel(), request(prompt_tokens=8000, slo_ttft_ms=1.0, priority=-1), known, "e2")


def test_an_slo_of_output_tokens_avoids_full_batches() -> None:
    known, asked = pool(e0={"running": 250.0}, e1={"running": 250.0}), request(LONG, slo_tpot_ms=15.0)
    holds(known, "e0", asked)
    assert_routed(CostModel(), asked, known, "e2")


def test_ability_filters_come_first() -> None:
    known = fleet(endpoint("e0", labels={"llm-d.ai/role": "prefill"}), endpoint("e1"))
    busy(known, "e1", [request(prompt_tokens=90_000)])
    assert_routed(CostModel(filters=[Role(RoleParams())]), request(prompt_tokens=10), known, "e1")
    only = fleet(endpoint("e0", labels={"llm-d.ai/role": "prefill"}))
    assert_refused(CostModel(filters=[Role(RoleParams())]), request(prompt_tokens=10), only)


def test_when_all_are_overloaded_the_least_costly_is_taken_and_it_is_said() -> None:
    known = pool(e0={"waiting": 9}, e1={"waiting": 9}, e2={"waiting": 9})
    busy(known, "e0", [request(prompt_tokens=9000)])
    busy(known, "e2", [request(prompt_tokens=9000)])
    policy = CostModel(filters=[QueueDepth(QueueDepthParams(max_queue_length=1))])
    picks = [policy.choose(request(prompt_tokens=100), known, Context(0.0, Random(i))) for i in range(5)]
    assert {known.table.ids[pick.slot] for pick in picks} == {"e1"}
    assert all(pick.overloaded for pick in picks)


def test_stale_endpoints_are_judged_by_what_was_sent() -> None:
    known = pool()
    busy(known, "e0", [request(prompt_tokens=30_000, stream=True)])
    for name in ("e0", "e1", "e2"):
        known.scrape_failed(name, 100.0)
    assert "e0" not in spread(known, request(prompt_tokens=1000))


def test_departed_endpoints_are_not_chosen() -> None:
    known = pool()
    known.down("e1")
    assert set(spread(known, request(prompt_tokens=500))) == {"e0", "e2"}
    known.up(endpoint("e7"))
    known.sampled("e7", 0.0, 0.0, Sample(**IDLE))
    assert "e7" in spread(known, request(prompt_tokens=500))


def test_overload_is_said_when_many_wait_everywhere() -> None:
    known = pool(e0={"waiting": 300}, e1={"waiting": 250}, e2={"waiting": 199})
    assert not CostModel().choose(request(prompt_tokens=10), known, Context(0.0, Random(1))).overloaded
    known.sampled("e2", 0.0, 0.0, Sample(**{**IDLE, "waiting": 200}))
    assert CostModel().choose(request(prompt_tokens=10), known, Context(0.0, Random(1))).overloaded
