"""The cost kernel: one request and many give the same numbers, one endpoint and all, and parts add up."""

from math import inf
from random import Random

import numpy as np
import pytest

from fairlead.core.columns import FloatColumn
from fairlead.core.cost import (
    CHANGED,
    DECODE,
    FEW,
    FULL,
    FULL_FROM,
    PRIOR,
    StepModel,
    Terms,
    Weights,
    best_offer,
    cost,
    cost_of_one,
    forecast,
    interference,
    memory_price,
    memory_wait,
    owed,
    parts,
    patience_price,
    per_rank,
    renew,
    weighed,
)
from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.fleet import Fleet
from fairlead.core.table import FLOATS

NOW = 1000.0
#: Highest values of the columns that the kernel reads.
RANGES = {
    "kv": 1.0, "queue": 300.0, "active": 300.0, "queued_tokens": 2e5, "queued_ms": 9e4, "kv_tokens": 1e6,
}  # fmt: skip


def world(rng: Random, slots: int = 6, prior: StepModel = PRIOR) -> Fleet:
    fleet = Fleet(prior=prior)
    for slot in range(slots):
        fleet.up(Endpoint(f"e{slot}", f"10.0.0.{slot}:8000"))
    table, predictor = fleet.table, fleet.predictor
    for name, most in RANGES.items():
        table.floats[FLOATS.index(name)] = [0.0 if rng.random() < 0.3 else most * rng.random() for _ in range(slots)]
    table.queued_ms[table.queued_tokens == 0.0] = 0.0
    # Where nobody sees first tokens, the next prompt may be expected to begin only later.
    table.prefill_since_ms[:] = [1e3 * NOW + 250.0 - 1150.0 * rng.random() for _ in range(slots)]
    table.per_capacity[:] = [rng.choice((0.0, 1e-6, 1e-5, 1e-4)) for _ in range(slots)]
    predictor.kappa[:] = [rng.uniform(0.5, 4.0) for _ in range(slots)]
    predictor.rates.prefill[:] = [rng.uniform(0.01, 9.0) for _ in range(slots)]
    predictor.rates.step[:] = [rng.uniform(0.01, 9.0) for _ in range(slots)]
    predictor.hold_ms, predictor.answer_steps = 2e4 * rng.random(), 1.0 + 1e3 * rng.random()
    table.long_until_ms[:] = [1e3 * NOW + rng.choice((-500.0, 0.0, 5e3 * rng.random(), 9e4)) for _ in range(slots)]
    table.long_until = float(table.long_until_ms.max())
    return fleet


def with_memory_waits(terms: Terms, fleet: Fleet) -> FloatColumn:
    """The model's TTFT by slot, as forecasts have it: with the wait for memory, and for those that wait for it."""
    table, hold_ms = fleet.table, fleet.predictor.hold_ms
    queue, active = per_rank(table.queue, table), per_rank(table.active, table)
    expected = terms.model_ttft + memory_wait(terms.used, table.kv, hold_ms)
    one_by_one = np.where(table.kv > FULL, queue * hold_ms / np.maximum(active, 1.0), 0.0)
    waited: FloatColumn = np.where(queue >= 1.0, np.maximum(expected, one_by_one), expected)
    return waited


@pytest.mark.parametrize("seed", range(20))
def test_one_request_many_requests_and_one_endpoint_agree(seed: int) -> None:
    rng = Random(seed)
    fleet, weights = world(rng), Weights(0.3, 0.02, 2.0)
    prompts = np.array([[float(rng.choice((0, 1, 700, 90_000)))] for _ in range(4)])
    cached = np.array([[rng.choice((0.0, rng.random())) for _ in range(6)] for _ in range(4)]) * prompts
    many = cost(prompts, cached, fleet, NOW)
    total = weighed(many, weights, fleet)
    for row in range(4):
        prompt = float(prompts[row, 0])
        single = cost(prompt, cached[row], fleet, NOW)
        assert weighed(single, weights, fleet) == pytest.approx(total[row], rel=1e-12)
        if not cached[row].any():
            assert cost(prompt, None, fleet, NOW).ttft == pytest.approx(single.ttft, rel=1e-12)
        expected = with_memory_waits(single, fleet)
        for slot in range(6):
            uncached = max(prompt - cached[row, slot], 1.0)
            here = forecast(slot, prompt, uncached, PRIOR.prefill_ms(prompt, uncached), fleet, NOW)
            assert here.model_ttft_ms == pytest.approx(expected[slot], rel=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_the_parts_add_up_to_the_weighed_cost(seed: int) -> None:
    rng = Random(seed)
    fleet, weights = world(rng), Weights(rng.random(), rng.random(), rng.random())
    terms = cost(3000.0, np.array([rng.random() * 3000.0 for _ in range(6)]), fleet, NOW)
    named = parts(terms, weights, fleet)
    assert [name for name, _ in named][:6] == ["prefill", "queue", "steps", "interference", "decode", "memory"]
    assert sum(np.broadcast_to(column, (6,)) for _, column in named) == pytest.approx(weighed(terms, weights, fleet))


def test_an_answer_may_pause_where_long_prompts_go_for_no_longer_than_it_takes() -> None:
    fleet = Fleet()
    for slot in range(3):
        fleet.up(Endpoint(f"e{slot}", f"10.0.0.{slot}:8000"))
    fleet.table.long_until_ms[1:] = [1e3 * NOW + 700.0, 1e3 * NOW + 60_000.0]
    before = cost_of_one(500.0, None, Weights(), fleet, NOW)
    assert "pauses" not in dict(parts(cost(500.0, None, fleet, NOW), Weights(), fleet))
    fleet.table.rewritten()
    terms = cost(500.0, None, fleet, NOW)
    expected = DECODE * np.array([0.0, 700.0, terms.step[2] * fleet.predictor.answer_steps])
    assert dict(parts(terms, Weights(), fleet))["pauses"] == pytest.approx(expected)
    assert cost_of_one(500.0, None, Weights(), fleet, NOW) - before == pytest.approx(expected)
    assert not np.any(cost(500.0, None, fleet, NOW + 61.0).pauses)


def test_memory_has_a_price_only_where_it_is_short() -> None:
    fleet = world(Random(1))
    fleet.table.per_capacity[:] = 1e-5
    fleet.table.queued_tokens[:] = 0.0
    fleet.table.kv[:] = FULL_FROM - 0.02
    assert memory_price(cost(1000.0, None, fleet, NOW), Weights(), fleet) is None
    fleet.table.kv[2] = FULL_FROM
    price = memory_price(cost(1000.0, None, fleet, NOW), Weights(), fleet)
    assert price is not None and (price > 0.0).tolist() == [False, False, True, False, False, False]


def test_a_prompt_without_tokens_costs_a_little() -> None:
    assert 0.0 < PRIOR.prefill_ms(0.0, 1.0) < PRIOR.prefill_ms(10.0, 10.0)
    assert (cost(0, None, world(Random(2)), NOW).prefill > 0.0).all()


@pytest.mark.parametrize("slots", [3, FEW + 1])
def test_a_wrong_prior_and_factors_that_make_up_for_it_cost_the_same(slots: int) -> None:
    wrong = StepModel(2.0 * PRIOR.c0, 4.0 * PRIOR.c_pf, 4.0 * PRIOR.c_attn, 8.0 * PRIOR.c_seq, 8.0 * PRIOR.c_kv)
    right, made_up_for = world(Random(3), slots), world(Random(3), slots, wrong)
    rates = made_up_for.predictor.rates
    for column, factor in ((rates.prefill, 4.0), (rates.step, 2.0), (rates.load, 8.0)):
        column /= factor
    table = made_up_for.table
    table.queued_ms *= 4.0  # the ledger's sums are at the prior's speed
    found = [cost_of_one(9000.0, None, Weights(), fleet, NOW) for fleet in (right, made_up_for)]
    assert found[1] == pytest.approx(found[0], rel=1e-12)


@pytest.mark.parametrize("seed", range(60))
def test_what_is_kept_ready_costs_the_same(seed: int) -> None:
    rng = Random(seed)
    fleet, weights = world(rng, rng.randrange(1, 2 * FEW)), Weights(rng.random(), rng.random(), rng.choice((0.0, 2.0)))
    if len(fleet.table) > 1 and rng.random() < 0.3:
        fleet.down("e0")
    slots, prompt = len(fleet.table), float(rng.choice((0, 1, 250, 8192, 90_000)))
    share = np.array([rng.choice((0.0, 1.0, rng.random())) for _ in range(slots)]) if rng.random() < 0.7 else None
    columns = weighed(cost(prompt, None if share is None else share * prompt, fleet, NOW), weights, fleet)
    renew(fleet.table.stale, fleet.table, fleet.predictor)
    assert cost_of_one(prompt, share, weights, fleet, NOW) == pytest.approx(columns, rel=1e-11)


def test_after_many_changes_decisions_compute_all_and_catch_up() -> None:
    fleet = world(Random(5), 3 * CHANGED)
    stale, costs = fleet.table.stale, []
    for left in (2 * CHANGED, CHANGED, 0, 0):
        costs.append(cost_of_one(9000.0, None, Weights(), fleet, NOW))
        assert len(stale) == left
    assert costs[0] == pytest.approx(costs[3], rel=1e-12)


def ranked(rng: Random, slots: int) -> Fleet:
    """Some addresses have several engines behind them, in every state that the kernel tells apart."""
    fleet = world(rng, slots)
    table = fleet.table
    table.ranks[:] = [rng.choice((0.0, 1.0, 2.0, 4.0, 8.0)) for _ in range(slots)]
    table.pending[:] = [rng.randrange(12) for _ in range(slots)]
    table.max_seqs[:] = [rng.choice((0.0, 64.0, 256.0)) for _ in range(slots)]
    table.growth_tokens[:] = [3e4 * rng.random() for _ in range(slots)]
    table.inflight[:] = [rng.randrange(1, 500) for _ in range(slots)]
    table.head_ms[:] = [rng.choice((inf, table.queued_ms[slot] * rng.random())) for slot in range(slots)]
    table.rewritten()
    return fleet


@pytest.mark.parametrize("seed", range(60))
def test_what_is_kept_ready_costs_the_same_where_engines_share_an_address(seed: int) -> None:
    rng = Random(seed)
    slots, weights = rng.randrange(1, 2 * FEW), Weights(rng.random(), rng.random(), rng.choice((0.0, 2.0)))
    fleet, prompt = ranked(rng, slots), float(rng.choice((1, 250, 8192, 90_000)))
    share = np.array([rng.choice((0.0, 1.0, rng.random())) for _ in range(slots)])
    terms = cost(prompt, share * prompt, fleet, NOW)
    renew(fleet.table.stale, fleet.table, fleet.predictor)
    assert cost_of_one(prompt, share, weights, fleet, NOW) == pytest.approx(weighed(terms, weights, fleet), rel=1e-12)
    expected = with_memory_waits(terms, fleet)
    for slot in range(slots):
        uncached = max(prompt - share[slot] * prompt, 1.0)
        here = forecast(slot, prompt, uncached, PRIOR.prefill_ms(prompt, uncached), fleet, NOW)
        assert here.model_ttft_ms == pytest.approx(expected[slot], rel=1e-12)


def alike(engines: int, share_an_address: bool) -> Fleet:
    """The same load on each engine: behind one address, or one of them alone."""
    fleet = Fleet()
    fleet.up(Endpoint("e", "10.0.0.1:8000"))
    size = 1 if not share_an_address else engines
    known = Sample(waiting=0.0, running=0.0, kv_usage=0.8, block_size=16, num_blocks=20_000 * size, ranks=size)
    fleet.sampled("e", NOW, NOW, known)
    table = fleet.table
    for name, each in (
        ("queue", 3.0),
        ("active", 40.0),
        ("pending", 3.0),
        ("queued_tokens", 9000.0),
        ("max_seqs", 42.0),
        ("queued_ms", 600.0),
        ("kv_tokens", 150_000.0),
        ("growth_tokens", 9000.0),
        ("inflight", 43.0),
    ):
        table.floats[FLOATS.index(name)] = each * size
    table.head_ms[:] = inf
    table.prefill_since_ms[:] = 1e3 * NOW - 100.0
    return fleet


def test_an_address_with_four_engines_costs_what_one_of_them_does() -> None:
    four, one = alike(4, True), alike(4, False)
    for fleet in (four, one):
        fleet.table.rewritten()
    terms = [cost(20_000.0, None, fleet, NOW) for fleet in (four, one)]
    for name in ("prefill", "queue", "steps", "slots", "used", "ttft"):
        assert getattr(terms[0], name) == pytest.approx(getattr(terms[1], name), rel=1e-12), name
    costs = [weighed(term, Weights(), fleet) for term, fleet in zip(terms, (four, one), strict=True)]
    assert costs[0] == pytest.approx(costs[1], rel=1e-12)


def test_one_more_meets_one_of_the_engines_that_compute_by_chance() -> None:
    fleet = alike(4, True)
    fleet.table.pending[:], fleet.table.head_ms[:] = 2.0, 1200.0
    fleet.table.rewritten()
    queue = [float(cost(100.0, None, fleet, at).queue[0]) for at in (NOW, NOW + 0.1)]
    assert queue == [pytest.approx(2400.0 / 4 / 2)] * 2


def crowd(waiting: float = 0.0) -> Fleet:
    """Seven servers that run many answers and compute no prompt, and one that computes prompts for nine seconds."""
    fleet = Fleet()
    for slot in range(8):
        fleet.up(Endpoint(f"e{slot}", f"10.0.0.{slot}:8000"))
    table = fleet.table
    table.active[:7], table.kv[:7], table.per_capacity[:] = 150.0, 0.9, 1 / 300_000
    table.queue[7], table.queued_tokens[7], table.queued_ms[7] = waiting, 108_928.0, 9000.0
    table.prefill_since_ms[7] = 1e3 * NOW
    table.rewritten()
    return fleet


def test_no_queue_is_too_long_for_a_linear_price_and_this_one_is() -> None:
    """A cold prompt of 10,880 tokens delays so many answers and takes so much memory elsewhere that nine seconds of its
    own time would weigh less."""
    fleet = crowd()
    costs = cost_of_one(10_880.0, None, Weights(), fleet, NOW)
    patience = dict(parts(cost(10_880.0, None, fleet, NOW), Weights(), fleet))["patience"]
    assert (costs - patience).argmin() == 7
    assert costs.argmin() < 7
    assert patience[:7].max() == 0.0


def test_nobody_is_driven_away_by_a_wait_that_is_the_same_everywhere() -> None:
    fleet = crowd()
    fleet.table.queued_tokens[:], fleet.table.queued_ms[:] = 108_928.0, 9000.0
    fleet.table.prefill_since_ms[:] = 1e3 * NOW
    ttft = cost(10_880.0, None, fleet, NOW).ttft
    assert patience_price(ttft, best_offer(ttft, fleet.table)) is None


def test_who_waits_there_runs_by_the_time_that_it_is_paused() -> None:
    named = [dict(parts(cost(500.0, None, fleet, NOW), Weights(), fleet)) for fleet in (crowd(), crowd(10.0))]
    before, after = (terms["interference"] for terms in named)
    assert before[7] == 0.0
    assert after[7] == pytest.approx(10.0 * 0.1 * cost(500.0, None, crowd(), NOW).prefill[7], rel=0.01)
    assert after[:7].tolist() == before[:7].tolist()


def test_a_long_prompt_delays_those_who_come_meanwhile_too() -> None:
    """Twenty times as long, it takes more than twenty times as much from the others."""
    fleet = crowd()
    short, long = (
        interference(cost(tokens, None, fleet, NOW), Weights(), fleet, fleet.table.active, None)
        for tokens in (5000.0, 100_000.0)
    )
    pauses = [cost(tokens, None, fleet, NOW).prefill[0] for tokens in (5000.0, 100_000.0)]
    assert long[0] / short[0] > 1.2 * pauses[1] / pauses[0]


def grown(there: tuple[float, ...]) -> Fleet:
    """Four endpoints with so many running requests."""
    fleet = Fleet()
    for slot in range(4):
        fleet.up(Endpoint(f"e{slot}", f"10.0.0.{slot}:8000"))
    fleet.table.active[:], fleet.table.kv_tokens[:] = there, 3000.0 * np.array(there)
    fleet.table.rewritten()
    return fleet


def test_a_new_endpoint_gets_copies_of_what_loaded_ones_have_cached() -> None:
    """A prompt of 6,000 tokens, of which all but 60 are cached everywhere else: computing them costs this request more
    than waiting there, but it is not the last one."""
    fleet, share = grown((60.0, 61.0, 62.0, 0.0)), np.array([0.99, 0.99, 0.99, 0.0])
    costs = cost_of_one(6000.0, share, Weights(), fleet, NOW)
    named = dict(parts(cost(6000.0, 6000.0 * share, fleet, NOW), Weights(), fleet))
    assert costs.argmin() == 3
    assert named["reuse"].tolist() == [0.0, 0.0, 0.0, pytest.approx(-0.75 * 0.99 * named["prefill"][3])]
    assert (costs - named["reuse"]).argmin() == 0


@pytest.mark.parametrize(
    ("there", "cached", "copies"),
    [
        ((40.0, 41.0, 42.0, 0.0), (90.0, 90.0, 90.0, 0.0), (0.0, 0.0, 0.0, 0.675)),
        ((40.0, 41.0, 42.0, 18.0), (90.0, 90.0, 90.0, 0.0), None),  # 22 fewer: 2.9 standard deviations
        ((40.0, 41.0, 42.0, 17.0), (90.0, 90.0, 90.0, 0.0), (0.0, 0.0, 0.0, 0.675)),
        ((40.0, 17.0, 42.0, 0.0), (90.0, 90.0, 90.0, 0.0), (0.0, 0.0, 0.0, 0.675)),  # by the idlest that has it
        ((40.0, 9.0, 42.0, 0.0), (90.0, 90.0, 90.0, 0.0), None),
        ((40.0, 12.0, 42.0, 0.0), (90.0, 40.0, 90.0, 0.0), (0.0, 0.75 * 50 / 60, 0.0, 0.675)),
        ((9.0, 9.0, 9.0, 0.0), (90.0, 90.0, 90.0, 0.0), None),
        ((40.0, 41.0, 42.0, 0.0), (90.0, 90.0, 90.0, 90.0), None),
        ((40.0, 41.0, 42.0, 0.0), (0.0, 0.0, 0.0, 0.0), None),
    ],
)
def test_later_requests_owe_a_copy_only_where_it_relieves_by_more_than_chance(
    there: tuple[float, ...], cached: tuple[float, ...], copies: tuple[float, ...] | None
) -> None:
    found = owed(100.0 - np.array(cached), np.array(there), np.zeros(4))
    assert (found is None) == (copies is None)
    if found is not None:
        assert found.tolist() == pytest.approx(list(copies or ()))


def test_one_copy_is_computed_at_a_time() -> None:
    uncached, there = np.array([10.0, 10.0, 100.0, 100.0]), np.array([40.0, 41.0, 0.0, 0.0])
    found = owed(uncached, there, np.array([0.0, 0.0, 6000.0, 0.0]))
    assert found is not None and found.tolist() == [0.0, 0.0, 0.0, pytest.approx(0.675)]
    assert owed(uncached, there, np.array([0.0, 0.0, 6000.0, 1.0])) is None
