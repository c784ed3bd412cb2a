"""The kit for plugin authors finds what is wrong, and builds what it says."""

from collections.abc import Callable
from itertools import cycle as cycled
from typing import Any

import numpy as np
import pytest

from fairlead.core.columns import BoolColumn, FloatColumn
from fairlead.core.fleet import Fleet
from fairlead.core.policy import Context, Cycle, Picked, Refused, Stage
from fairlead.core.profile import Profile
from fairlead.core.request import Request
from fairlead.plugins.params import NoParams
from fairlead.plugins.pickers import MaxScore, MaxScoreParams, Uniform
from fairlead.testing import (
    SimClock,
    assert_refused,
    assert_routed,
    busy,
    check_filter,
    check_picker,
    check_policy,
    check_scorer,
    choose,
    cycle,
    endpoint,
    fleet,
    holds,
    request,
)


class Plugin:
    """A filter, scorer and picker with an answer of one's own."""

    def __init__(self, answer: Callable[..., Any], name: str = "mine", stage: Any = Stage.LOAD) -> None:
        self.name = name
        self.stage = stage
        self.answer = answer

    def keep(self, request: Request, fleet: Fleet, cycle: Cycle) -> BoolColumn | None:
        return self.answer(fleet, cycle)  # type: ignore[no-any-return]

    def score(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | None:
        return self.answer(fleet, cycle)  # type: ignore[no-any-return]

    def pick(self, request: Request, fleet: Fleet, totals: FloatColumn, cycle: Cycle) -> int:
        return self.answer(totals)  # type: ignore[no-any-return]


def spoil(fleet: Fleet, cycle: Cycle) -> FloatColumn:
    fleet.table.queue += 1
    return np.zeros(len(fleet.table))


SOMETIMES = cycled([None, True])
GLOBAL = np.random.default_rng(1)

BAD_SCORERS: list[tuple[Callable[..., Any], str]] = [
    (lambda fleet, cycle: np.zeros(3), r"float64 with shape \(3,\), expected .* with shape \(1,\)"),
    (lambda fleet, cycle: [0.0] * len(fleet.table), r"returned \[0.0\] \(list\), expected None or a numpy array"),
    (lambda fleet, cycle: np.zeros(len(fleet.table), dtype=np.float32), "returned an array of float32"),
    (lambda fleet, cycle: "high", r"returned 'high' \(str\), .*, one for each slot: for example np\.full"),
    (lambda fleet, cycle: np.array(["high"] * len(fleet.table)), "returned an array of <U4"),
    (lambda fleet, cycle: np.array([None] * len(fleet.table)), "returned an array of object"),
    (lambda fleet, cycle: next(SOMETIMES) and "high", r"returned 'high' \(str\)"),
    (lambda fleet, cycle: np.full(len(fleet.table), 1.5), "scores from 1.5 to 1.5, expected 0 to 1"),
    (lambda fleet, cycle: np.full(len(fleet.table), np.nan), "NaN"),
    (lambda fleet, cycle: GLOBAL.random(len(fleet.table)), "answered differently"),
    (spoil, "changed table.queue"),
]


@pytest.mark.parametrize(("answer", "complaint"), BAD_SCORERS)
def test_scorers_that_break_the_contract(answer: Callable[..., Any], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_scorer(Plugin(answer))


@pytest.mark.parametrize(
    ("plugin", "complaint"),
    [
        (Plugin(lambda fleet, cycle: np.zeros(len(fleet.table))), "array of float64 .* expected .* array of bool"),
        (Plugin(lambda fleet, cycle: np.ones(2, dtype=bool)), "shape"),
        (Plugin(lambda fleet, cycle: "yes"), r"returned 'yes' \(str\), .* np\.full\(len\(fleet\.table\), True\)"),
        (Plugin(lambda fleet, cycle: None, stage=None), "stage is None"),
        (Plugin(lambda fleet, cycle: None, name=""), "name is ''"),
    ],
)
def test_filters_that_break_the_contract(plugin: Plugin, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_filter(plugin)


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (lambda totals: -1, "picked slot -1"),
        (lambda totals: 0, "filtered out"),
        (lambda totals: 1000, "slot 1000"),
        (lambda totals: "e0", r"pick returned 'e0' \(str\), expected a slot"),
        (lambda totals: None, "pick returned None, expected a slot"),
        (lambda totals: np.flatnonzero(totals == totals.max()), r"returned an array of int64 with shape \(1,\)"),
        (lambda totals: 0.0, r"returned 0.0 \(float\)"),
    ],
)
def test_pickers_that_break_the_contract(answer: Callable[..., Any], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_picker(Plugin(answer))


class Chooser:
    name = "chooser"

    def __init__(self, answer: Callable[[Fleet], Any]) -> None:
        self.answer = answer

    def choose(self, request: Request, fleet: Fleet, context: Context) -> Any:
        return self.answer(fleet)


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (lambda fleet: [Picked(0)], "list, expected Picked or Refused"),
        (lambda fleet: Refused(""), "without a reason"),
        (lambda fleet: Picked(-1), "slot -1"),
        (lambda fleet: Picked(7), "slot 7"),
        (lambda fleet: Picked(0), "has no endpoint|slot 0 of 0"),
    ],
)
def test_policies_that_break_the_contract(answer: Callable[[Fleet], Any], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_policy(Chooser(answer))


@pytest.mark.parametrize("error", [RuntimeError("no"), SystemExit(3)], ids=repr)
def test_a_policy_whose_plugin_always_fails_breaks_the_contract(error: BaseException) -> None:
    def fails(fleet: Fleet, cycle: Cycle) -> Any:
        raise error

    with pytest.raises(AssertionError, match=rf"plugin mine: {type(error).__name__}: {error}"):
        check_policy(Profile("p", [], [(Plugin(fails), 1.0)], MaxScore(MaxScoreParams())))


def test_good_ones_pass() -> None:
    check_scorer(Plugin(lambda fleet, cycle: None))
    check_filter(Plugin(lambda fleet, cycle: fleet.table.alive.copy()))
    check_picker(Plugin(lambda totals: int(totals.argmax())))
    check_policy(Profile("p", [], [], MaxScore(MaxScoreParams())))


def test_where_requests_go() -> None:
    best = Profile(
        "p", [], [(Plugin(lambda fleet, cycle: np.arange(len(fleet.table)) / 3), 1.0)], MaxScore(MaxScoreParams())
    )
    assert_routed(best, request("hi"), fleet(), "e2")
    with pytest.raises(AssertionError, match="went to e2, not to e0"):
        assert_routed(best, request("hi"), fleet(), "e0")
    anybody = Profile("p", [], [], Uniform(NoParams()))
    assert_routed(anybody, request("hi"), fleet(), {"e0", "e1", "e2"})
    with pytest.raises(AssertionError, match="never went to e2"):
        assert_routed(best_of_two(), request("hi"), fleet(), {"e0", "e1", "e2"})
    with pytest.raises(AssertionError, match="went to"):
        assert_refused(anybody, request("hi"), fleet())
    nobody = Profile(
        "p", [Plugin(lambda fleet, cycle: ~fleet.table.alive, stage=Stage.ABILITY)], [], Uniform(NoParams())
    )
    assert_refused(nobody, request("hi"), fleet(), "rejected-no-endpoints")
    assert isinstance(choose(nobody, request("hi"), fleet()), Refused)


def best_of_two() -> Profile:
    two = Plugin(lambda fleet, cycle: np.array([True, True, False]))
    return Profile("p", [two], [], Uniform(NoParams()))


def test_builders() -> None:
    assert endpoint("e300").address == "10.0.1.44:8000"
    assert endpoint("x", "[::1]:9", {"a": "b"}).labels == {"a": "b"}
    asked = request("hello " * 100, model="m", session="s")
    assert (asked.model, asked.session, asked.prompt_tokens) == ("m", "s", 150)
    assert asked.prefix.hashes
    assert request().id != request().id
    pool = fleet("e0", "e1", samples={"e1": {"waiting": 3}})
    assert pool.table.queue.tolist() == [0.0, 3.0]
    holds(pool, "e0", asked)
    share = pool.match(asked)
    assert share is not None and 0.8 < share[0] <= 1.0 and share[1] == 0.0
    busy(pool, "e0", [request(), request()])
    assert pool.table.inflight.tolist() == [2.0, 0.0]
    pool.validate()
    assert cycle(5.0).now == 5.0
    clock = SimClock(3.0)
    assert clock.time() == 3.0
    timer = clock.call_at(4.0, print)
    assert not timer.cancelled
    timer.cancel()
    assert timer.cancelled
    for call in (lambda: holds(pool, "e9", asked), lambda: busy(pool, "e9", []), lambda: fleet(samples={"e9": {}})):
        with pytest.raises(ValueError, match="no endpoint 'e9'"):
            call()
