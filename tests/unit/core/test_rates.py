"""Rates: speeds are learned from stretches of prefill, whatever a few of them look like."""

from random import Random

import pytest

from fairlead.core.cost import PRIOR
from fairlead.core.rates import SLOWEST, Rates


def learned(a: float, b: float, seed: int, *, noise: float = 0.1, odd: float = 0.0, count: int = 80) -> Rates:
    """Rates after `count` stretches at an endpoint with true factors a and b; a share `odd` of them took 5 times as
    long."""
    rng = Random(seed)
    rates = Rates()
    rates.reset(0)
    for _ in range(count):
        tokens = rng.lognormvariate(7.0, 1.0)
        work = PRIOR.prefill_ms(tokens, tokens)
        running = rng.randrange(60)
        decode = rates.step_ms(0, running, running * 3000.0)
        true = a * work + b / float(rates.step[0]) * decode * 1.5
        took = true * rng.lognormvariate(0.0, noise) * (5.0 if rng.random() < odd else 1.0)
        rates.observe(0, work, 1.5, decode, took)
        rates.validate()
    return rates


@pytest.mark.parametrize("factor", [0.1, 0.4, 1.0, 2.5, 12.0])
def test_one_factor_for_all_hardware_of_a_kind(factor: float) -> None:
    rates = learned(factor, factor, seed=1)
    assert rates.prefill[0] == pytest.approx(factor, rel=0.16)
    assert rates.step[0] == pytest.approx(factor, rel=0.25)


def test_prefill_and_steps_may_differ() -> None:
    rates = learned(2.0, 1.0, seed=2, noise=0.05, count=200)
    assert rates.prefill[0] > 1.4 * rates.step[0]


def test_a_few_that_took_far_too_long_change_little() -> None:
    assert learned(1.0, 1.0, seed=3, odd=0.1).prefill[0] == pytest.approx(1.0, rel=0.25)


def test_a_new_endpoint_is_taken_for_an_average_one() -> None:
    rates = learned(3.0, 3.0, seed=4, count=300)
    rates.reset(1)
    assert rates.prefill[1] == pytest.approx(3.0, rel=0.2)
    assert rates.prefill[1] != rates.prefill[0]
    rates.reset(0)
    assert rates.prefill[0] == rates.prefill[1]


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_who_was_never_asked_follows_those_who_were(factor: float) -> None:
    """Both came before anything was known. Among servers ten times faster than the prior the second must not look ten
    times slower than the first, or it would never get a request."""
    rates = Rates()
    rates.reset(0)
    rates.reset(1)
    for _ in range(30):
        rates.observe(0, 100.0, 1.0, rates.step_ms(0, 0.0, 0.0), factor * (100.0 + PRIOR.c0))
        rates.validate()
    assert rates.prefill[1] == pytest.approx(rates.prefill[0], rel=0.7)
    assert abs(rates.prefill[1] - factor) < 0.4 * abs(1.0 - factor)
    taught = float(rates.prefill[0])
    rates.observe(1, 100.0, 1.0, rates.step_ms(1, 0.0, 0.0), 100.0)
    assert rates.prefill[0] == taught, "who has taught something keeps its own"


@pytest.mark.parametrize(
    ("work", "took"),
    [(0.0, 0.0), (100.0, 0.0), (100.0, -5.0), (100.0, float("nan")), (float("inf"), 10.0), (1e12, 1.0)],
)
def test_what_cannot_be_is_ignored(work: float, took: float) -> None:
    rates = Rates()
    rates.reset(0)
    rates.observe(0, work, 1.0, 0.0, took)
    assert (rates.prefill[0], rates.step[0]) == (1.0, 1.0)


def test_factors_keep_their_bounds() -> None:
    rates = Rates()
    rates.reset(0)
    for _ in range(500):
        rates.observe(0, 1.0, 1.0, rates.step_ms(0, 0.0, 0.0), 9e8)
        rates.validate()
    assert rates.prefill[0] == SLOWEST
