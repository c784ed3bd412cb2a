"""No plugin can break a decision: what it gives wrongly is left out and reported."""

from math import inf, nan
from random import Random

import numpy as np
import pytest
from profiles import REQUEST, Demoting, Fixed, adds_up, choose, column, fleet_of, mask, profile

from fairlead.core.errors import PluginError
from fairlead.core.policy import Clamped, Context, Cycle, Scorer

BROKEN = [
    RuntimeError("oops"),
    "nonsense",
    np.array([1.0, 0.0, 1.0]),
    np.array([1, 0, 1]),
    np.array([True]),
    np.array([True, False]),
    np.array(True),
    [True, False, True],
    np.array([[True, False, True]]),
]


@pytest.mark.parametrize("answer", BROKEN, ids=repr)
@pytest.mark.parametrize("hard", [True, False])
def test_a_broken_filter_is_left_out_and_reported(answer: object, hard: bool) -> None:
    errors: list[PluginError] = []
    good = (Fixed(column(0.0, 1.0, 0.0), "good"), 1.0)
    plan = profile([Fixed(answer, "broken", hard), Fixed(mask(1, 1, 0), "works", hard)], [good], errors=errors)
    pick = choose(plan, fleet_of(3))
    assert (pick.slot, pick.overloaded) == (1, False)
    assert pick.trace is not None
    assert [name for name, _ in pick.trace.filters] == ["works"]
    assert [error.plugin for error in errors] == ["broken"]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    "answer",
    [RuntimeError("oops"), "nonsense", column(1.0, 2.0), object(), column(9.0), np.ones((3, 3))],
    ids=["raises", "text", "too-short", "object", "one-number", "matrix"],
)
def test_a_broken_scorer_is_left_out_and_reported(answer: object, order: int) -> None:
    errors: list[PluginError] = []
    scorers: list[tuple[Scorer, float]] = [
        (Fixed(column(0.1, 0.3, 0.2), "good"), 1.0),
        (Fixed(answer, "broken"), 100.0),
        (Clamped(Fixed(answer, "foreign")), 100.0),
    ]
    pick = choose(profile([], scorers[::order], errors=errors), fleet_of(3))
    assert pick.slot == 1
    adds_up(pick)
    assert [error.plugin for error in errors] == ["broken", "foreign"][::order]


@pytest.mark.parametrize("answer", [RuntimeError("oops"), "nonsense", column(1.0, 2.0), np.ones((3, 3))], ids=repr)
def test_a_broken_demotion_is_left_out_and_reported(answer: object) -> None:
    errors: list[PluginError] = []
    plan = profile([Demoting(answer, "broken")], [(Fixed(column(0.1, 0.3, 0.2)), 1.0)], errors=errors)
    pick = choose(plan, fleet_of(3))
    assert pick.slot == 1
    adds_up(pick)
    assert [error.plugin for error in errors] == ["broken"]


@pytest.mark.parametrize("answer", [RuntimeError("oops"), 99, -1, 2, None, 1.5], ids=repr)
def test_a_broken_picker_is_reported_and_the_best_taken(answer: object) -> None:
    errors: list[PluginError] = []
    scorers: list[tuple[Scorer, float]] = [(Fixed(column(0.1, 0.3, 0.9)), 1.0)]
    plan = profile([Fixed(mask(1, 1, 0))], scorers, Fixed(answer, "broken"), errors)
    assert choose(plan, fleet_of(3)).slot == 1
    assert [error.plugin for error in errors] == ["broken"]


def test_a_negative_slot_is_no_slot() -> None:
    errors: list[PluginError] = []
    assert choose(profile([], [], Fixed(-1, "broken"), errors), fleet_of(3)).slot == 0
    assert [error.plugin for error in errors] == ["broken"]


def test_not_a_number_never_wins() -> None:
    errors: list[PluginError] = []
    scorers: list[tuple[Scorer, float]] = [(Fixed(column(nan, 0.3, 0.9)), 1.0)]
    assert choose(profile([Fixed(mask(1, 1, 0))], scorers, errors=errors), fleet_of(3)).slot == 1
    assert [error.plugin for error in errors] == ["max-score"]
    clamped: list[tuple[Scorer, float]] = [(Clamped(Fixed(column(nan, 0.3, 0.9))), 1.0)]
    assert choose(profile([Fixed(mask(1, 1, 0))], clamped), fleet_of(3)).slot == 1


def test_clamped_keeps_scores_in_range() -> None:
    scorer = Clamped(Fixed(column(-5.0, 0.5, 7.0, nan, inf, -inf), "foreign"))
    scores = scorer.score(REQUEST, fleet_of(6), Cycle(Context(0.0, Random(1))))
    assert scores is not None
    assert scores.tolist() == [0.0, 0.5, 1.0, 0.0, 1.0, 0.0]
    assert scorer.name == "foreign"
    silent = Clamped(Fixed(None))
    assert silent.score(REQUEST, fleet_of(1), Cycle(Context(0.0, Random(1)))) is None


def test_without_a_reporter_errors_are_swallowed() -> None:
    plan = profile([Fixed(RuntimeError("oops"))], [(Fixed(RuntimeError("oops")), 1.0)])
    assert choose(plan, fleet_of(2)).slot in (0, 1)
