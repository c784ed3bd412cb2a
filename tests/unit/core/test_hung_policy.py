"""A policy that did not return is not asked again for a while: each call holds up all requests."""

from random import Random
from typing import Any

import numpy as np
import pytest

from fairlead.core import events as ev
from fairlead.core.binding import Pairs, WaitingRules
from fairlead.core.columns import FloatColumn
from fairlead.core.cost import cost
from fairlead.core.endpoint import Endpoint
from fairlead.core.errors import REST_S, NeverReturned, PluginError
from fairlead.core.fleet import Fleet
from fairlead.core.flow import Waiting
from fairlead.core.instructions import Route
from fairlead.core.policy import Context, Cycle, Picked, Picker, Stage, clamped
from fairlead.core.profile import Profile
from fairlead.core.request import Request
from fairlead.core.scheduler import Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.core.view import FleetView
from fairlead.plugins.guarding import (
    GuardedCeiling,
    GuardedFilter,
    GuardedOrdering,
    GuardedPicker,
    GuardedSaturation,
    Measuring,
    Parsing,
)
from fairlead.plugins.pickers import MaxScore, MaxScoreParams
from fairlead.plugins.policies.cost_model import CostModel, CostModelParams
from fairlead.plugins.policies.ranked import Ranked
from fairlead.testing import SimClock, fleet


class Hangs:
    """`error` is how its calls end."""

    name = "hangs"

    def __init__(self, error: BaseException) -> None:
        self.calls, self._error = 0, error

    def choose(self, request: Any, fleet: Any, context: Any) -> Picked:
        self.calls += 1
        raise self._error


def caused() -> Exception:
    error = ValueError("what it made of that")
    error.__context__ = NeverReturned()
    return error


@pytest.mark.parametrize("error", [NeverReturned(), caused()], ids=["as it is", "another"])
def test_a_policy_that_did_not_return_twice_rests(error: BaseException) -> None:
    clock, fleet, errors, policy = SimClock(), Fleet(), list[PluginError](), Hangs(error)
    pipeline = Pipeline(clock, Random(1), fleet, policy, TokenEstimator(), errors.append)
    pipeline.handle(ev.EndpointUp(Endpoint("e0", "10.0.0.1:80")))
    for number, calls in enumerate((1, 2, 2, 3, 3)):
        route = pipeline.handle(ev.RequestArrived(Request(id=number, arrived=clock.time())))[0]
        assert isinstance(route, Route) and policy.calls == len(errors) == calls
        clock.advance(REST_S / 2)
    assert ["it decides nothing for 60 s" in str(error) for error in errors] == [False, True, True]


class HangsInCosts(Ranked):
    type = "theirs"
    calls = 0

    def cost(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn:
        self.calls += 1
        raise NeverReturned


def test_a_policy_whose_costs_did_not_return_twice_rests() -> None:
    clock, errors, policy = SimClock(), list[PluginError](), HangsInCosts()
    pipeline = Pipeline(clock, Random(1), Fleet(), policy, TokenEstimator(), errors.append)
    pipeline.handle(ev.EndpointUp(Endpoint("e0", "10.0.0.1:80")))
    for number, calls in enumerate((1, 2, 2)):
        pipeline.handle(ev.RequestArrived(Request(id=number, arrived=clock.time())))
        assert policy.calls == len(errors) == calls
    assert "it decides nothing for 60 s" in str(errors[1])


def test_a_policy_that_did_not_return_long_ago_is_asked_again() -> None:
    clock, policy = SimClock(), Hangs(NeverReturned())
    pipeline = Pipeline(clock, Random(1), Fleet(), policy, TokenEstimator())
    for number in range(3):
        pipeline.handle(ev.RequestArrived(Request(id=number, arrived=clock.time())))
        clock.advance(REST_S)
    assert policy.calls == 3


def test_a_policy_that_raises_is_asked_again() -> None:
    policy = Hangs(ValueError("oops"))
    pipeline = Pipeline(SimClock(), Random(1), Fleet(), policy, TokenEstimator())
    for number in range(2):
        pipeline.handle(ev.RequestArrived(Request(id=number, arrived=0.0)))
    assert policy.calls == 2


class HangingPart:
    """A filter, scorer or picker."""

    name, stage = "part", Stage.LOAD

    def __init__(self) -> None:
        self.calls = 0

    def keep(self, *given: Any) -> Any:
        self.calls += 1
        raise NeverReturned

    score = pick = keep


@pytest.mark.parametrize("kind", ["filter", "scorer", "picker"])
def test_a_part_of_a_profile_that_did_not_return_twice_rests(kind: str) -> None:
    part, errors, known = HangingPart(), list[PluginError](), fleet()
    filters, scorers, picker = [GuardedFilter(part)], [(clamped(part), 1.0)], GuardedPicker(part)
    best: Picker = MaxScore(MaxScoreParams())
    profile = Profile(
        "p",
        filters if kind == "filter" else [],
        scorers if kind == "scorer" else [],
        picker if kind == "picker" else best,
        on_plugin_error=errors.append,
    )
    for number, calls in enumerate((1, 2, 2, 3, 3)):
        now = number * REST_S / 2
        assert isinstance(profile.choose(Request(id=number, arrived=now), known, Context(now, Random(1))), Picked)
        assert part.calls == len(errors) == calls
    assert ["it is left out for 60 s" in str(error) for error in errors] == [False, True, True]


class HangingAsAnother(HangingPart):
    """As an ordering, saturation, ceiling, source or parser."""

    name, provides, paths = "hangs", ("heat",), ("/v1/rank",)
    key = level = allowed = measure = parse = HangingPart.keep


@pytest.mark.parametrize("kind", ["ordering", "saturation", "source", "parser"])
def test_plugins_of_other_kinds_rest_too(kind: str) -> None:
    part, errors, now = HangingAsAnother(), list[PluginError](), 0.0
    ordering, saturation = GuardedOrdering(part, errors.append), GuardedSaturation(part, errors.append)
    source, parser = Measuring([part], errors.append, lambda: now), Parsing([part], errors.append, lambda: now)
    for number, calls in enumerate((1, 2, 2, 3, 3)):
        now = number * REST_S / 2
        answer = {
            "ordering": lambda: ordering.key(Waiting(Request(id=1, arrived=now), now, now + 60.0, 1.0, 1)),  # noqa: B023
            "saturation": lambda: saturation.level(Fleet(), now),  # noqa: B023
            "source": lambda: source(Endpoint("e0", "10.0.0.1:80"), b""),
            "parser": lambda: parser("/v1/rank", b"{}").unread,
        }[kind]()
        assert answer == {"ordering": now, "saturation": 0.0, "source": {}, "parser": "path"}[kind]
        assert part.calls == len(errors) == calls
    assert ["it is left out for 60 s" in str(error) for error in errors] == [False, True, True]


def test_a_ceiling_that_did_not_return_twice_is_not_asked_again() -> None:
    part, errors = HangingAsAnother(), list[PluginError]()
    ceiling = GuardedCeiling(part, errors.append)
    assert [ceiling.allowed(0.5, [1, 0]) for _ in range(4)] == [[True, True]] * 4
    assert part.calls == len(errors) == 2 and "until a restart" in str(errors[1])


class HangingCosts(CostModel):
    calls = 0

    def costs(self, *given: Any) -> FloatColumn:
        self.calls += 1
        raise NeverReturned


def test_late_binding_does_not_ask_it_either() -> None:
    fleet, errors, policy = Fleet(), list[PluginError](), HangingCosts(CostModelParams())
    fleet.up(Endpoint("e0", "10.0.0.1:80"))
    rules = WaitingRules(policy, policy, errors.append)
    for now, calls in ((0.0, 1), (1.0, 2), (REST_S, 2), (REST_S + 1.0, 3)):
        prompts, shares = np.array([[10.0]]), np.zeros((1, 1))
        terms, able = cost(prompts, shares, fleet, now, None), np.ones((1, 1), dtype=np.bool_)
        rules.costs(Pairs([Request(id=1, arrived=0.0)], able, shares, terms), fleet, now)
        assert policy.calls == len(errors) == calls
