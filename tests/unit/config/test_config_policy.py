"""Policies of their own: built from a name or from a mapping, with or without the configured filters."""

from collections.abc import Sequence
from typing import Any

import pytest

from fairlead.compat.load import load, problems
from fairlead.config import builtins
from fairlead.config.plugins import build_policy
from fairlead.core.fleet import Fleet
from fairlead.core.policy import Context, Filter, Picked
from fairlead.core.profile import Profile
from fairlead.core.request import Request
from fairlead.plugins.params import Params
from fairlead.plugins.policies.cost_model import CostModel
from fairlead.testing import assert_routed, fleet, request

ONE = "endpoints: ['127.0.0.1:8000']\n"


class Last:
    """Always the last slot."""

    type = "last"

    class Params(Params):
        from_end: int = 1

    def __init__(self, params: Params, name: str = type) -> None:
        self.name = name
        self._params = params

    def choose(self, request: Request, fleet: Fleet, context: Context) -> Picked:
        return Picked(len(fleet.table) - self._params.from_end)


class Filtering(Last):
    type = "filtering"
    takes_filters = True

    def __init__(self, params: Any, name: str = type, *, filters: Sequence[Filter]) -> None:
        super().__init__(params, name)
        self.filters = filters


@pytest.fixture(autouse=True)
def policies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(builtins.BUILTINS, "policy", {"last": Last, "filtering": Filtering, "cost-model": CostModel})  # type: ignore[arg-type]


def test_by_name() -> None:
    config = load(f"policy: last\n{ONE}")
    assert (config.policy.name, config.policy.picker, config.policy.filters) == ("last", None, ())
    policy = build_policy(config)
    assert isinstance(policy, Last)
    assert_routed(policy, request(), fleet(), "e2")


@pytest.mark.parametrize("parameters", ["fromEnd: 2", "parameters: {fromEnd: 2}"])
def test_with_parameters_and_a_name(parameters: str) -> None:
    config = load(f"policy: {{type: last, name: mine, {parameters}}}\n{ONE}")
    assert config.policy.name == "mine"
    assert_routed(build_policy(config), request(), fleet(), "e1")


def test_a_shorthand_may_stand_in_a_mapping() -> None:
    config = load(f"policy: {{type: round-robin}}\n{ONE}")
    assert (config.policy.name, config.policy.plugin) == ("round-robin", None)
    assert isinstance(build_policy(config), Profile)


@pytest.mark.parametrize("parameters", ["interference: 1", "parameters: {interference: 1}"])
def test_the_default_takes_parameters(parameters: str) -> None:
    config = load(f"policy: {{type: default, {parameters}}}\nfilters: [{{type: queue-depth}}]\n{ONE}")
    plain = load(f"policy: default\nfilters: [{{type: queue-depth}}]\n{ONE}")
    assert config.policy.name == plain.policy.name == "default"
    assert [spec.name for spec in config.policy.plugins()] == [spec.name for spec in plain.policy.plugins()]
    policy = build_policy(config)
    assert isinstance(policy, CostModel) and policy.weights.interference == 1.0
    assert load(f"policy: {{type: default, name: mine, {parameters}}}\n{ONE}").policy.name == "mine"


def test_filters_are_handed_to_a_policy_that_takes_them() -> None:
    policy = build_policy(load(f"policy: filtering\nfilters: [{{type: queue-depth}}]\n{ONE}"))
    assert isinstance(policy, Filtering)
    assert [one.name for one in policy.filters] == ["role", "subset", "model-compatibility", "health", "queue-depth"]
    bare = build_policy(load(f"policy: filtering\nbuiltinFilters: false\n{ONE}"))
    assert isinstance(bare, Filtering) and bare.filters == []


@pytest.mark.parametrize(
    ("text", "path", "message", "hint"),
    [
        ("policy: lst", "$.policy", "unknown policy 'lst'", "'last'"),
        ("policy: {type: lst}", "$.policy.type", "unknown policy 'lst'", "'last'"),
        ("policy: {type: last, fromEn: 1}", "$.policy.fromEn", "unknown field", "'fromEnd'"),
        ("policy: {}", "$.policy", "'type' is missing", ""),
        ("policy: last\nscorers: []", "$.policy", "brings its own scorers", "leave out"),
        ("policy: last\nfilters: []", "$.policy", "brings its own filters", "leave out"),
        ("policy: filtering\nselection: {topK: 1}", "$.policy", "brings its own selection", ""),
        ("policy: {type: default, interferenc: 1}", "$.policy.interferenc", "unknown field", "'interference'"),
        ("policy: {type: default, name: a}\nscorers: []", "$.policy", "'default' brings its own scorers", "leave out"),
        ("policy: {type: random, seed: 1}", "$.policy", "'random' takes no name and no parameters", "policy: random"),
        ("policy: queue-depth", "$.policy", "unknown policy", "'queue-depth' is a filter"),
        ("scorers: [{type: last}]", "$.scorers[0].type", "unknown scorer type", "'last' is a policy"),
    ],
)
def test_mistakes(text: str, path: str, message: str, hint: str) -> None:
    (problem,) = problems(f"{ONE}{text}")
    assert (problem.path, problem.line) == (path, 2)
    assert message in problem.message
    assert hint in problem.hint


@pytest.mark.parametrize(
    ("text", "any_role"),
    [
        ("policy: default", False),
        ("scorers: [{type: queue}]", False),
        ("builtinFilters: false\nscorers: [{type: queue}]", True),
        ("builtinFilters: false\nfilters: [{type: role, stage: prefill}]", True),
        ("builtinFilters: false\nfilters: [{type: role}]", False),
        ("builtinFilters: false\nfilters: [{type: by-label, label: llm-d.ai/role, validValues: [decode]}]", False),
    ],
)
def test_whether_a_policy_goes_by_the_roles_of_endpoints(text: str, any_role: bool) -> None:
    assert load(text, need_endpoints=False).policy.any_role == any_role
