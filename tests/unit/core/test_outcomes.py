"""Plugins that learn from outcomes hear of each once, whoever chose, and cannot break anything."""

from random import Random
from typing import Any

import pytest

from fairlead.compat.load import load
from fairlead.config.building import build_pipeline, given
from fairlead.core import events as ev
from fairlead.core.canary import Canary
from fairlead.core.endpoint import Endpoint
from fairlead.core.errors import REST_S, NeverReturned, PluginError
from fairlead.core.fleet import Fleet
from fairlead.core.outcomes import OutcomeObservers
from fairlead.core.policy import Policy, Stage, clamped
from fairlead.core.profile import Profile
from fairlead.core.records import OutcomeRecord
from fairlead.core.remote import RemotePolicy
from fairlead.core.request import Request, Usage
from fairlead.core.scheduler import Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.plugins.guarding import GuardedFilter, GuardedPicker
from fairlead.plugins.pickers import MaxScore, MaxScoreParams
from fairlead.plugins.policies.by_load import LeastRequests
from fairlead.plugins.policies.prefill_decode import PrefillDecode
from fairlead.testing import SimClock


class Learns(LeastRequests):
    """As a policy; its calls end with `error`, if there is one."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__(name="learns")
        self.heard: list[OutcomeRecord] = []
        self._error = error

    def ended(self, outcome: OutcomeRecord) -> None:
        self.heard.append(outcome)
        if self._error is not None:
            raise self._error


class LearnsAsPart:
    """As a filter, scorer or picker."""

    name, stage = "part", Stage.LOAD

    def __init__(self) -> None:
        self.heard: list[OutcomeRecord] = []

    def keep(self, *given: Any) -> None:
        return None

    def score(self, *given: Any) -> None:
        return None

    def pick(self, *given: Any) -> int:
        return 0

    def ended(self, outcome: OutcomeRecord) -> None:
        self.heard.append(outcome)


CONFIG = load("policy: default", need_endpoints=False)


def pipeline(policy: Policy, errors: list[PluginError] | None = None) -> Pipeline:
    """A pipeline whose configurations are policies."""
    report = None if errors is None else errors.append
    made = Pipeline(
        SimClock(), Random(1), Fleet(), policy, TokenEstimator(), report, build=lambda later: given(later)(CONFIG)
    )
    for name in ("e0", "e1"):
        made.handle(ev.EndpointUp(Endpoint(name, f"10.0.0.{name[1]}:80")))
    return made


def answer(made: Pipeline, number: int, status: int = 200) -> str:
    """Send a request and answer it. Return the endpoint."""
    made.handle(ev.RequestArrived(Request(id=number, arrived=0.0, stream=True, prompt_tokens=100)))
    entry = made.requests.get(number)
    assert entry is not None and entry.lease is not None
    endpoint = entry.lease.endpoint_id
    made.handle(ev.FirstTokenSeen(number))
    usage = Usage(prompt_tokens=100, completion_tokens=11, cached_tokens=64)
    made.handle(ev.ResponseEnded(request_id=number, status=status, usage=usage, ttft_ms=50.0, duration_ms=250.0))
    return endpoint


def test_a_policy_hears_of_each_request_once() -> None:
    policy = Learns()
    made = pipeline(policy)
    endpoints = [answer(made, 1), answer(made, 2, status=503)]
    made.handle(ev.RequestArrived(Request(id=3, arrived=0.0)))
    made.handle(ev.StreamLost(3))
    made.handle(ev.StreamLost(3))
    first, second, third = policy.heard
    assert [first.endpoint, second.endpoint] == endpoints
    assert (first.request.id, first.status, first.ttft_ms, first.duration_ms, first.tpot_ms) == (
        1,
        200,
        50.0,
        250.0,
        20.0,
    )
    assert (first.prompt_tokens, first.completion_tokens, first.cached_tokens) == (100, 11, 64)
    assert (second.status, second.failed, second.ttft_ms) == (503, True, -1.0)
    assert (third.request.id, third.cause, third.cached_tokens) == (3, "stream-lost", -1)


@pytest.mark.parametrize("kind", ["filter", "scorer", "picker"])
def test_parts_of_a_profile_hear_of_them(kind: str) -> None:
    part, best = LearnsAsPart(), MaxScore(MaxScoreParams())
    profile = Profile(
        "p",
        [GuardedFilter(part)] if kind == "filter" else [],
        [(clamped(part), 1.0)] if kind == "scorer" else [],
        GuardedPicker(part) if kind == "picker" else best,
    )
    answer(pipeline(profile), 1)
    assert [outcome.request.id for outcome in part.heard] == [1]


def test_the_filters_of_a_policy_that_splits_requests_hear_of_them() -> None:
    part = LearnsAsPart()
    answer(pipeline(PrefillDecode(filters=[GuardedFilter(part)])), 1)
    assert [outcome.request.id for outcome in part.heard] == [1]


def test_policies_behind_another_hear_of_all() -> None:
    primary, canary, fallback = Learns(), Learns(), Learns()
    answer(pipeline(Canary(primary, canary, 50.0)), 1)
    answer(pipeline(RemotePolicy("remote", fallback, lambda request, fleet, now: None)), 1)
    assert [len(each.heard) for each in (primary, canary, fallback)] == [1, 1, 1]


def test_after_a_reload_only_the_new_policy_hears_of_them() -> None:
    before, after = Learns(), Learns()
    made = pipeline(before)
    made.handle(ev.RequestArrived(Request(id=1, arrived=0.0)))
    made.handle(ev.Reconfigured(after))
    made.handle(ev.StreamLost(1))
    answer(made, 2)
    assert ([outcome.request.id for outcome in after.heard], before.heard) == ([1, 2], [])
    made.handle(ev.Reconfigured(LeastRequests()))
    answer(made, 3)
    assert len(after.heard) == 2


@pytest.mark.parametrize("text", ["policy: default", "policy: prefill-decode", "scorers: [{type: no-hit-lru}]"])
def test_nobody_is_told_without_such_a_plugin(text: str) -> None:
    made = build_pipeline(load(text, need_endpoints=False), SimClock(), Random(1))
    assert not OutcomeObservers(made.policy, None)


def test_one_that_raises_is_reported_and_one_that_hangs_rests() -> None:
    errors: list[PluginError] = []
    answer(pipeline(Learns(ValueError("oops")), errors), 1)
    assert [str(error).partition(" (")[0] for error in errors] == ["plugin learns: ValueError: oops"]
    errors.clear()
    made = pipeline(policy := Learns(NeverReturned()), errors)
    for number in range(4):
        answer(made, number)
    assert len(policy.heard) == len(errors) == 2
    assert f"it is left out for {REST_S:.0f} s" in str(errors[1])


class ChosenHangs(LeastRequests):
    calls = 0

    def chosen(self, *given: Any) -> None:
        self.calls += 1
        raise NeverReturned


def test_a_policy_whose_memory_of_picks_hangs_rests_too() -> None:
    errors: list[PluginError] = []
    made = pipeline(policy := ChosenHangs())
    policy.report_to(errors.append)
    for number in range(4):
        answer(made, number)
    assert policy.calls == len(errors) == 2
