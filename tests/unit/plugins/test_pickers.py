"""Pickers: what they may take, and how often."""

from collections import Counter
from math import inf
from random import Random

import numpy as np
import pytest

from fairlead.core.fleet import Fleet
from fairlead.core.policy import Context, Cycle, Picker
from fairlead.core.request import Request
from fairlead.plugins.params import NoParams
from fairlead.plugins.pickers import MaxScore, MaxScoreParams, RoundRobin, TopK, TopKParams, Uniform, WeightedRandom

REQUEST = Request(id=1, arrived=0.0)
FLEET = Fleet()
N = 4000


def shares(picker: Picker, totals: list[float], count: int = N) -> dict[int, float]:
    """How often each slot is picked, as a share."""
    cycle = Cycle(Context(0.0, Random(7)))
    column = np.array(totals)
    picked = [picker.pick(REQUEST, FLEET, column, cycle) for _ in range(count)]
    assert all(type(slot) is int for slot in picked)
    return {slot: number / count for slot, number in sorted(Counter(picked).items())}


def all_pickers() -> list[Picker]:
    return [
        MaxScore(MaxScoreParams()),
        TopK(TopKParams()),
        TopK(TopKParams(k=50)),
        WeightedRandom(NoParams()),
        RoundRobin(NoParams()),
        Uniform(NoParams()),
    ]


@pytest.mark.parametrize("picker", all_pickers(), ids=lambda p: p.name)
@pytest.mark.parametrize(
    "totals",
    [
        [-inf, 5.0, -inf, 3.0, 0.0, -inf],
        [-inf, 0.0, -inf, 0.0, 0.0, -inf],
        [-inf, -2.0, -inf, -2.0, -7.0, -inf],
        [-inf, 1e-300, -inf, 1e300, 1.0, -inf],
        [-inf, 1.0, -inf, 1.0, 1.0],
    ],
)
def test_filtered_slots_are_never_picked(picker: Picker, totals: list[float]) -> None:
    assert set(shares(picker, totals, 300)) <= {1, 3, 4}


@pytest.mark.parametrize("picker", all_pickers(), ids=lambda p: p.name)
def test_a_single_candidate_is_always_picked(picker: Picker) -> None:
    for totals in ([-inf, -inf, 3.0], [-inf, -inf, 0.0], [-inf, -inf, -1.0]):
        assert shares(picker, totals, 20) == {2: 1.0}


@pytest.mark.parametrize("picker", all_pickers()[2:], ids=lambda p: p.name)
def test_equal_totals_are_picked_equally(picker: Picker) -> None:
    for total in (0.0, 10.0):
        found = shares(picker, [total, total, -inf, total, total])
        assert found == pytest.approx({0: 0.25, 1: 0.25, 3: 0.25, 4: 0.25}, abs=0.03)


@pytest.mark.parametrize("picker", all_pickers(), ids=lambda p: p.name)
def test_the_same_seed_gives_the_same_picks(picker: Picker) -> None:
    def run() -> list[int]:
        cycle = Cycle(Context(0.0, Random(3)))
        return [picker.pick(REQUEST, FLEET, np.array([1.0, 1.0, 0.999, 1.0]), cycle) for _ in range(40)]

    assert run() == run()


@pytest.mark.parametrize(
    ("totals", "expected"),
    [
        ([1.0, 5.0, 3.0], {1: 1.0}),
        ([100.0, 99.6, 99.4], {0: 0.5, 1: 0.5}),
        ([0.0, 0.0, 0.0, -1.0], {0: 1 / 3, 1: 1 / 3, 2: 1 / 3}),
        ([-100.0, -100.4, -100.6], {0: 0.5, 1: 0.5}),
    ],
)
def test_max_score_takes_the_best_and_draws_among_near_ties(totals: list[float], expected: dict[int, float]) -> None:
    assert shares(MaxScore(MaxScoreParams()), totals) == pytest.approx(expected, abs=0.03)


def test_max_score_without_near_ties() -> None:
    picker = MaxScore(MaxScoreParams(near_tie=0))
    assert shares(picker, [100.0, 99.999, 100.0]) == pytest.approx({0: 0.5, 2: 0.5}, abs=0.03)


@pytest.mark.parametrize(
    ("k", "totals", "expected"),
    [
        (3, [9.0, 1.0, 8.0, 7.0, 2.0], {0: 1 / 3, 2: 1 / 3, 3: 1 / 3}),
        (1, [9.0, 1.0, 8.0], {0: 1.0}),
        (10, [9.0, -inf, 8.0], {0: 0.5, 2: 0.5}),
        (2, [9.0, 5.0, 5.0, 5.0, 1.0], {0: 1 / 2, 1: 1 / 6, 2: 1 / 6, 3: 1 / 6}),
        (2, [5.0, 5.0, 5.0, 5.0], {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25}),
    ],
)
def test_top_k_draws_evenly_among_the_k_best(k: int, totals: list[float], expected: dict[int, float]) -> None:
    assert shares(TopK(TopKParams(k=k)), totals) == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize(
    ("totals", "expected"),
    [
        ([1.0, 3.0, -inf, 4.0], {0: 1 / 8, 1: 3 / 8, 3: 4 / 8}),
        ([0.0, 5.0, 0.0], {1: 1.0}),
        ([-3.0, 5.0, 5.0], {1: 0.5, 2: 0.5}),
        ([-3.0, -1.0, -inf], {0: 0.5, 1: 0.5}),
    ],
)
def test_weighted_random_is_proportional(totals: list[float], expected: dict[int, float]) -> None:
    assert shares(WeightedRandom(NoParams()), totals) == pytest.approx(expected, abs=0.03)


def test_weighted_random_survives_a_product_that_rounds_up() -> None:
    class AlmostOne(Random):
        def random(self) -> float:
            return float(np.nextafter(1.0, 0.0))

    cycle = Cycle(Context(0.0, AlmostOne()))
    for totals in ([1.0, 3.0, 0.0], [0.1, 0.2, -inf], [1e-320, 5e-324, 0.0]):
        assert WeightedRandom(NoParams()).pick(REQUEST, FLEET, np.array(totals), cycle) == 1


def test_round_robin_takes_turns_among_the_candidates_of_the_moment() -> None:
    picker = RoundRobin(NoParams())
    cycle = Cycle(Context(0.0, Random(0)))

    def turns(totals: list[float], count: int) -> list[int]:
        return [picker.pick(REQUEST, FLEET, np.array(totals), cycle) for _ in range(count)]

    assert turns([1.0, 9.0, 0.0], 4) == [0, 1, 2, 0]
    assert turns([1.0, -inf, 1.0, 1.0], 4) == [2, 3, 0, 2]
    assert turns([1.0, 1.0], 1) == [0], "the slots behind are gone"
