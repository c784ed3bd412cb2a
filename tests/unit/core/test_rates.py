"""Rates: speeds are learned from stretches of prefill, of a class first, whatever a few of them look like."""

from random import Random

import pytest

from fairlead.core.cost import PRIOR
from fairlead.core.rates import LIMIT_HITS, LIMIT_TRUSTED, SLOWEST, Rates


class Engines:
    """Like engines of three true factors, and those that are slower by a factor of their own."""

    def __init__(
        self, rates: Rates, factors: tuple[float, float, float] = (1.0, 1.0, 1.0), noise: float = 0.1, seed: int = 0
    ) -> None:
        self.rates = rates
        self.factors = factors
        self.noise = noise
        self.slower: dict[int, float] = {}
        self.now = 0.0
        self._rng = Random(seed)

    def stretch(self, slot: int, odd: float = 1.0, wait: float = 0.1) -> None:
        """One stretch `wait` seconds after the one before; it takes `odd` times as long as it should."""
        rng, (a, b, c) = self._rng, self.factors
        tokens, running = rng.lognormvariate(7.0, 1.0), rng.randrange(60)
        work, load = PRIOR.prefill_ms(tokens, tokens), PRIOR.load_ms(running, running * 3000.0)
        took = (a * work + 1.5 * (b * PRIOR.c0 + c * load)) * rng.lognormvariate(0.0, self.noise)
        self.now += wait
        self.rates.observe(slot, work, 1.5, load, took * odd * self.slower.get(slot, 1.0), self.now)
        self.rates.validate()

    def decode(self, slot: int) -> None:
        """An answer of a hundred steps, beside few or many others."""
        rng, (_, b, c) = self._rng, self.factors
        running = rng.randrange(60)
        load = PRIOR.load_ms(running, running * 3000.0)
        took = 100.0 * (b * PRIOR.c0 + c * load) * rng.lognormvariate(0.0, self.noise)
        self.rates.observe(slot, 0.0, 100.0, load, took * self.slower.get(slot, 1.0), self.now)


def pool(count: int) -> Rates:
    rates = Rates()
    for slot in range(count):
        rates.reset(slot)
    return rates


@pytest.mark.parametrize("factor", [0.1, 0.4, 1.0, 2.5, 12.0])
def test_one_factor_for_all_hardware_of_a_kind(factor: float) -> None:
    engines = Engines(pool(1), (factor, factor, factor), seed=1)
    for _ in range(120):
        engines.stretch(0)
    assert engines.rates.prefill[0] == pytest.approx(factor, rel=0.1)
    assert engines.rates.step[0] == pytest.approx(factor, rel=0.25)


@pytest.mark.parametrize("true", [(6.0, 1.0, 1.0), (1.0, 5.0, 1.0), (6.0, 1.0, 40.0)])
def test_the_three_may_differ(true: tuple[float, float, float]) -> None:
    engines = Engines(pool(2), true, seed=2)
    for number in range(300):
        engines.stretch(number % 2)
        engines.decode(number % 2)
    rates = engines.rates
    assert (rates.prefill[0], rates.step[0]) == pytest.approx(true[:2], rel=0.3)
    assert rates.load[0] == pytest.approx(true[2], rel=0.6)


@pytest.mark.parametrize("waited", [0.0, 1.0])
def test_steps_before_the_first_one_are_not_taken_for_slow_prefill(waited: float) -> None:
    """Engines as the prior has them, with a step that was settled before the prompt came, or without. Where nearly all
    of each prompt is cached, that step is longer than the prompt's own work."""
    rates, rng = pool(1), Random(10)
    for number in range(600):
        tokens, running = rng.uniform(50.0, 300.0), rng.randrange(20, 40)
        work, load = PRIOR.prefill_ms(7000.0, tokens), PRIOR.load_ms(running, running * 7000.0)
        took = work + (1.5 + waited) * (PRIOR.c0 + load) + 1.5
        rates.observe(0, work, 1.5, load, took * rng.lognormvariate(0.0, 0.03), 0.1 * number, 1.0)
        if number % 30 == 0:
            rates.observe(0, 300.0, 500.0, load, 300.0 + 500.0 * (PRIOR.c0 + load), 0.1 * number)
    assert (rates.prefill[0], rates.step[0]) == pytest.approx((1.0, 1.0), rel=0.2)
    assert rates.load[0] == pytest.approx(1.0, rel=0.3)
    # Both were long ago when the first long prompt comes: it takes what the prior says.
    work = PRIOR.prefill_ms(30_000.0, 30_000.0)
    assert rates.prefill[0] * work == pytest.approx(work, rel=0.2)


def test_a_beginning_that_was_not_cached_after_all_is_no_slow_engine() -> None:
    """Cold prompts first; then all but 80 of 7,200 tokens are believed to be cached, and a thousand are computed."""
    engines = Engines(pool(1), seed=11)
    rates = engines.rates
    for _ in range(100):
        engines.stretch(0)
    for _ in range(200):
        took = PRIOR.prefill_ms(7200.0, 1080.0) + 1.5 * PRIOR.c0
        engines.now += 0.1
        rates.observe(0, PRIOR.prefill_ms(7200.0, 80.0), 1.5, 0.0, took, engines.now, cached=7120.0)
    assert rates.prefill[0] < 1.6


def test_a_few_that_took_far_too_long_change_little() -> None:
    engines = Engines(pool(1), seed=3)
    for number in range(100):
        engines.stretch(0, odd=5.0 if number % 10 == 9 else 1.0)
    assert engines.rates.prefill[0] == pytest.approx(1.0, rel=0.25)


@pytest.mark.parametrize("odd", [0.6, 1.5, 3.0])
def test_like_engines_get_like_rates_whatever_the_first_hundred_looked_like(odd: float) -> None:
    engines = Engines(pool(2), seed=4)
    for _ in range(100):
        engines.stretch(0, odd)  # only one of them is asked, and something else slows it down, or speeds it up
    for number in range(100):
        engines.stretch(number % 2)
    rates = engines.rates
    for column in (rates.prefill, rates.step, rates.load):
        assert column[0] == pytest.approx(column[1], rel=0.05)
    assert rates.prefill[0] == pytest.approx(1.0, rel=0.25)


@pytest.mark.parametrize("slower", [0.25, 2.0, 6.0])
def test_an_engine_that_is_another_is_known_soon(slower: float) -> None:
    engines = Engines(pool(8), seed=5)
    engines.slower[3] = slower
    for number in range(64):
        engines.stretch(number % 8)
    rates = engines.rates
    others = sorted(float(rates.prefill[slot]) for slot in range(8) if slot != 3)
    assert others[-1] < 1.12 * others[0]
    assert rates.prefill[3] / others[3] == pytest.approx(slower, rel=0.3)


def test_who_is_not_asked_is_taken_for_what_it_looks_like_again() -> None:
    engines = Engines(pool(2), seed=6)
    for number in range(60):
        engines.stretch(number % 2, odd=1.8 if number % 2 else 1.0)
    rates = engines.rates
    assert rates.prefill[1] > 1.4 * rates.prefill[0]
    for _ in range(600):
        engines.stretch(0, wait=0.5)
    assert rates.prefill[1] == pytest.approx(rates.prefill[0], rel=0.05)


def test_a_new_engine_is_what_it_looks_like() -> None:
    rates = Rates()
    for slot, look in enumerate(("a100", "a100", "l40s")):
        rates.reset(slot, look)
    engines = Engines(rates, seed=7)
    engines.slower[2] = 4.0
    for number in range(90):
        engines.stretch(number % 3)
    assert rates.prefill[2] > 3.0 * rates.prefill[0]
    rates.reset(3, "l40s")
    assert rates.prefill[3] == pytest.approx(4.0, rel=0.25)
    rates.reset(2, "a100")
    assert rates.prefill[2] == pytest.approx(1.0, rel=0.25)
    rates.reset(4, "h100")
    assert rates.prefill[0] < rates.prefill[4] < rates.prefill[3], "nobody looks like it: the pool's mean"
    rates.validate()


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_who_was_never_asked_follows_those_who_were(factor: float) -> None:
    """Both came before anything was known. Among servers ten times faster than the prior the second must not look ten
    times slower than the first, or it would never get a request."""
    engines = Engines(pool(2), (factor, factor, factor), seed=8)
    for _ in range(30):
        engines.stretch(0)
    assert engines.rates.prefill[1] == pytest.approx(engines.rates.prefill[0], rel=0.05)
    assert engines.rates.prefill[1] == pytest.approx(factor, rel=0.3)


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_class_that_was_never_asked_follows_the_pool(factor: float) -> None:
    """A label may say that it is another version, and nobody knows whether it is faster."""
    rates = Rates()
    for slot, look in enumerate(("v1", "v1", "v2")):
        rates.reset(slot, look)
    engines = Engines(rates, (factor, factor, factor), seed=8)
    for number in range(60):
        engines.stretch(number % 2)
    assert rates.prefill[2] == pytest.approx(factor, rel=0.3)
    engines.factors = (3 * factor, 3 * factor, 3 * factor)
    for _ in range(40):
        engines.stretch(2)
    assert rates.prefill[2] == pytest.approx(3 * factor, rel=0.3)
    assert rates.prefill[0] == pytest.approx(factor, rel=0.3)


@pytest.mark.parametrize(
    ("work", "took"),
    [(0.0, 0.0), (100.0, 0.0), (100.0, -5.0), (100.0, float("nan")), (float("inf"), 10.0), (1e12, 1.0)],
)
def test_what_cannot_be_is_ignored(work: float, took: float) -> None:
    rates = pool(1)
    rates.observe(0, work, 1.0, 0.0, took, 1.0)
    assert (rates.prefill[0], rates.step[0], rates.load[0]) == (1.0, 1.0, 1.0)


def test_factors_keep_their_bounds() -> None:
    rates = pool(1)
    for number in range(500):
        rates.observe(0, 1.0, 1.0, 1.0, 9e8, float(number % 7))
        rates.validate()
    assert rates.prefill[0] == SLOWEST


class TestLimits:
    """How many sequences an engine runs at once, from scrapes of (waiting, running)."""

    def test_four_run_and_others_wait_again_and_again(self) -> None:
        rates = pool(2)
        for waiting, running in ((0, 3), (1, 4), (2, 3), (1, 4)):
            rates.sampled(0, waiting, running)
        assert rates.limit(0) == 4.0
        assert rates.limit(1) == 4.0, "so it is with all that look alike"

    def test_more_run_than_the_limit(self) -> None:
        rates = pool(1)
        for _ in range(int(LIMIT_HITS) + 2):
            rates.sampled(0, 1.0, 4.0)
        assert rates.limit(0) == 4.0
        rates.sampled(0, 1.0, 5.0)
        assert rates.limit(0) == 5.0, "others wait: so the limit was only not reached before"
        rates.sampled(0, 0.0, 6.0)
        assert rates.limit(0) == 0.0

    def test_a_limit_that_nothing_shows_any_more_is_tested_by_one_more(self) -> None:
        rates = pool(2)
        for _ in range(4):
            rates.sampled(0, 1.0, 4.0)
        for _ in range(LIMIT_TRUSTED):
            assert rates.limit(0) == 4.0
            rates.sampled(0, 0.0, 4.0)
            rates.sampled(1, 0.0, 4.0)
        assert (rates.limit(0), rates.limit(1)) == (5.0, 4.0), "at one of the class is enough"
        rates.sampled(0, 1.0, 4.0)
        assert rates.limit(0) == 4.0, "one waits: it is the limit indeed"
        for _ in range(2 * LIMIT_TRUSTED):
            rates.sampled(0, 0.0, 3.0)
        assert rates.limit(0) == 4.0, "fewer run: nothing is held because of it"

    def test_scrapes_of_requests_that_wait_for_something_else_make_no_limit(self) -> None:
        rates = pool(1)
        for number in range(200):
            rates.sampled(0, 1.0, 4.0, number % 20 == 0)
            assert not rates.limit(0), "a few that look otherwise do not add up"

    def test_any_scrape_can_refute_a_limit(self) -> None:
        rates = pool(1)
        for _ in range(4):
            rates.sampled(0, 1.0, 4.0)
        assert rates.limit(0) == 4.0
        rates.sampled(0, 1.0, 6.0, False)
        assert rates.limit(0) == 0.0

    def test_numbers_that_go_up_and_down_are_no_limit(self) -> None:
        rates, rng = pool(1), Random(9)
        for _ in range(500):
            rates.sampled(0, rng.randrange(1, 9), rng.randrange(10, 60))
            assert not rates.limit(0)

    def test_answers_that_end_together_do_not_hide_the_limit(self) -> None:
        """Scrapes of vLLM with four sequences: after the end of three answers its page shows one running until the
        step with the next three prompts is over."""
        rates, before = pool(1), (0.0, 0.0)
        shown = (
            "9.4 9.4 11.1 11.1 11.1 8.4 11.4 10.1 10.1 10.1 10.1 10.1 11.4 11.3 10.1 10.1 7.4 7.4 7.3 6.1 6.1 6.1 6.4"
        )
        for number, each in enumerate(shown.split() * 3):
            waiting, running = map(float, each.split("."))
            rates.sampled(0, waiting, running, True, before)
            before = waiting, running
            assert rates.limit(0) == (4.0 if number else 0.0)

    def test_the_same_number_in_other_states_is_no_limit(self) -> None:
        rates, before = pool(1), (0.0, 0.0)
        rates.sampled(0, 1.0, 4.0)
        for number in range(100):
            waiting, running = 9.0 - number % 9, 4.0 if number % 5 == 4 else 1.0
            rates.sampled(0, waiting, running, True, before)
            before = waiting, running
            assert not rates.limit(0)

    def test_nobody_waits(self) -> None:
        rates = pool(1)
        for _ in range(50):
            rates.sampled(0, 0.0, 4.0)
            assert not rates.limit(0)


def test_an_endpoint_that_joins_its_class_leaves_the_others_as_they_are() -> None:
    stale = set[int]()
    rates = Rates(stale=stale)
    for slot in range(20):
        stale.clear()
        rates.reset(slot, "look")
        assert stale == {slot}
    rates.validate()
