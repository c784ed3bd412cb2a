"""Policies by cost from anywhere: costs that are no numbers, and answers that cannot be carried out."""

import re
from collections.abc import Callable
from random import Random
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest

from fairlead.core.binding import Bound, PairBinder, Pairs, WaitingRules
from fairlead.core.errors import PluginError
from fairlead.core.events import EndpointUp, RequestArrived
from fairlead.core.fleet import Fleet
from fairlead.core.flow import Waiting
from fairlead.core.instructions import Route
from fairlead.core.policy import Context, Cycle, Picked, Refused, Stage
from fairlead.core.profile import estimate
from fairlead.core.request import Request
from fairlead.core.scheduler import Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.core.view import FleetView
from fairlead.plugins.policies.ranked import Ranked
from fairlead.testing import SimClock, check_policy, endpoint, fleet, request

INF, NAN = np.inf, np.nan


class Only:
    """Keeps the endpoints of these names."""

    name, stage = "only", Stage.ABILITY

    def __init__(self, *names: str) -> None:
        self._names = names

    def keep(self, request: Request, fleet: FleetView, cycle: Cycle) -> Any:
        return np.isin(fleet.table.ids, self._names)


class Busy:
    """Leaves no endpoint: all are overloaded."""

    name, stage = "busy", Stage.LOAD

    def keep(self, request: Request, fleet: FleetView, cycle: Cycle) -> Any:
        return np.zeros(len(fleet.table), dtype=np.bool_)


class Costs(Ranked):
    type = "costs"
    given: Callable[[], Any]

    def cost(self, request: Request, fleet: FleetView, cycle: Cycle) -> Any:
        return self.given()


def went(given: Callable[[], Any], *filters: Any) -> tuple[set[str], list[str]]:
    """Where requests go at these costs of three endpoints, and what was reported."""
    policy, errors = Costs(filters=filters), list[PluginError]()
    policy.given = given
    policy.report_to(errors.append)
    known = fleet("e0", "e1", "e2")
    picks = [policy.choose(request(), known, Context(0.0, Random(seed))) for seed in range(40)]
    return {known.table.ids[pick.slot] for pick in picks if isinstance(pick, Picked)}, [str(error) for error in errors]


@pytest.mark.parametrize("more", [(), (Busy(),)], ids=["calm", "overloaded"])
def test_costs_that_are_not_finite(more: tuple[Any, ...]) -> None:
    able = (Only("e1", "e2"), *more)
    assert went(lambda: np.array([1.0, INF, 5.0]), *able) == ({"e2"}, [])
    assert went(lambda: np.array([INF, INF, INF]), *able) == ({"e1", "e2"}, [])
    where, said = went(lambda: np.array([1.0, NAN, 5.0]), *able)
    assert where == {"e2"} and "NaN or -inf for 1 of 3 slots" in said[0]
    where, said = went(lambda: np.array([1.0, NAN, NAN]), *able)
    assert where == {"e1", "e2"} and len(said) == 40
    where, said = went(lambda: np.array([1.0, -INF, 5.0]), *able)
    assert where == {"e2"} and len(said) == 40


@pytest.mark.parametrize("more", [(), (Busy(),)], ids=["calm", "overloaded"])
@pytest.mark.parametrize("given", [lambda: np.zeros(2), lambda: 1 / 0], ids=["shape", "raises"])
def test_a_cost_that_fails_leaves_those_that_are_able(given: Callable[[], Any], more: tuple[Any, ...]) -> None:
    where, said = went(given, Only("e1", "e2"), *more)
    assert where == {"e1", "e2"} and "plugin costs" in said[0]


class Whole(Costs):
    """Gives the costs of all waiting requests at once."""

    def costs(self, *given: Any) -> Any:
        return [self.given()]


@pytest.mark.parametrize("kind", [Costs, Whole])
@pytest.mark.parametrize(
    ("given", "slot", "said"),
    [
        ([5.0, 4.0, INF], 1, ""),
        ([INF, INF, 5.0], 2, ""),
        ([INF, INF, INF], 0, ""),
        ([5.0, -INF, 4.0], 0, "costs that are NaN or -inf for 1 of 3"),
        ([5.0, NAN, 4.0], 0, "costs that are NaN or -inf for 1 of 3"),
        ([5.0, 4.0], 0, "costs of shape (1, 2), expected (1, 3)"),
    ],
)
@pytest.mark.parametrize("milliseconds", [True, False])
def test_a_waiting_request_goes_whatever_its_costs(
    kind: type[Costs], given: list[float], slot: int, said: str, milliseconds: bool
) -> None:
    policy, errors, known = kind(), list[PluginError](), fleet("e0", "e1", "e2")
    policy.given, policy.milliseconds = lambda: np.array(given), milliseconds
    binder = PairBinder(WaitingRules(policy, policy, errors.append))
    one = Waiting(request(prompt_tokens=400), 0.0, 1e9, 400.0, 1)
    _, one.known = binder.look(one.request, known, 0.0)
    found = binder.bind([one], known, np.ones(3, np.bool_), 0.0)
    assert isinstance(found, Bound) and found.slot == slot
    assert said in "".join(map(str, errors)) and bool(errors) == bool(said)


def exits() -> Any:
    raise SystemExit(3)


def routed(policy: Any) -> tuple[list[Route], list[str]]:
    """How a pipeline of three endpoints, which names two beside the chosen one, sends a request; and what failed."""
    errors: list[PluginError] = []
    if isinstance(policy, Ranked):
        policy.report_to(errors.append)
    pipeline = Pipeline(SimClock(), Random(1), Fleet(), policy, TokenEstimator(), errors.append, alternatives=2)
    for name in ("e0", "e1", "e2"):
        pipeline.handle(EndpointUp(endpoint(name)))
    routes = [made for made in pipeline.handle(RequestArrived(request())) if isinstance(made, Route)]
    pipeline.validate()
    return routes, [str(error) for error in errors]


@pytest.mark.parametrize("column", [np.array([2, 0, 1]), np.array([2, 0, 1], np.uint8), [2, 0, 1]], ids=repr)
def test_whole_numbers_and_lists_are_costs_too(column: Any) -> None:
    policy = Costs()
    policy.given = lambda: column
    ((route,), errors), order = routed(policy), [f"10.0.0.{number}:8000" for number in (1, 2, 0)]
    assert (route.destination.split(","), errors) == (order, [])
    terms: Any = None
    row = policy.costs([request()], np.zeros((1, 3)), terms, fleet("e0", "e1", "e2"), Context(0.0, Random(0)))
    assert row.tolist() == [[2.0, 0.0, 1.0]]


def test_a_policy_that_ends_the_process_has_failed_like_others() -> None:
    policy = Costs()
    policy.given = exits
    routes, (said,) = routed(policy)
    assert routes == [ANY] and re.fullmatch(r"plugin costs: SystemExit: 3 \(test_policies_ranked\.py, line \d+\)", said)
    binder = WaitingRules(policy, policy, print)
    known = fleet("e0", "e1", "e2")
    terms = estimate(request(), known, Cycle(Context(0.0, Random(0))))
    binder.costs(Pairs([request()], np.ones((1, 3), np.bool_), np.zeros((1, 3)), terms), known, 0.0)


def test_a_policy_by_cost_has_a_cost() -> None:
    class Costless(Ranked):
        type = "costless"

    with pytest.raises(TypeError, match="abstract method cost"):
        Costless()  # type: ignore[abstract]


class Chooser:
    name = "chooser"

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def choose(self, request: Request, fleet: FleetView, context: Context) -> Any:
        return self._answer


@pytest.mark.parametrize(
    "answer",
    [
        Picked(-1), Picked(7), Picked("e0"), None,  # type: ignore[arg-type]
        Picked(0, prefill_slot=9), Picked(0, fallback_slot=99), Picked(0, fallback_slot=-3),
        Picked(0, alternatives=(5,)),
        Picked(0, hit_share=NAN), Picked(0, best_share=INF),
        Refused("busy", status="429"), Refused(None), Refused("busy", None),  # type: ignore[arg-type]
        Refused("busy", status=200), Refused("busy", status=600),
    ],
    ids=repr,
)  # fmt: skip
def test_an_answer_that_cannot_be_carried_out_is_reported_and_replaced(answer: Any) -> None:
    routes, errors = routed(Chooser(answer))
    assert len(routes) == len(errors) == 1


def test_a_policy_that_writes_to_columns_has_failed_and_they_are_as_before() -> None:
    class Writes(Ranked):
        type = "writes"

        def cost(self, request: Request, fleet: FleetView, cycle: Cycle) -> Any:
            load = fleet.table.queue
            load += 1.0
            return load

    known, errors = fleet("e0", "e1"), list[PluginError]()
    pipeline = Pipeline(SimClock(), Random(1), known, Writes(), TokenEstimator(), errors.append)
    pipeline.handle(RequestArrived(request()))
    assert [str(error) for error in errors] == [
        "plugin writes: ValueError: wrote to queue of fleet.table, which are read only"
    ]
    pipeline.validate()
    assert known.table.queue.sum() == 1.0, "what was sent, and nothing else"
    with pytest.raises(AssertionError, match=r"wrote to queue of fleet\.table"):
        check_policy(Writes())


def test_a_policy_that_says_who_is_alive_has_failed() -> None:
    class Kills(Ranked):
        type = "kills"

        def cost(self, request: Request, fleet: FleetView, cycle: Cycle) -> Any:
            fleet.table.alive[:] = False
            return fleet.table.queue

    with pytest.raises(AssertionError, match="ValueError: assignment destination is read-only"):
        check_policy(Kills())


def test_a_cost_that_returns_nothing_says_so() -> None:
    policy = Costs()
    policy.given = lambda: None
    assert routed(policy) == ([ANY], ["plugin costs: TypeError: `cost` must return a number for each slot"])


def test_a_cost_with_another_signature_says_so() -> None:
    class Fewer(Costs):
        def cost(self, request: Any, fleet: Any) -> Any:  # type: ignore[override]
            return None

    _, (said,) = routed(Fewer())
    assert "takes 3 positional arguments but 4 were given" in said
