"""The tutorial's policy works as printed, and docs/policies.md explains every policy."""

import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fairlead.config.builtins import BUILTINS, POLICIES
from fairlead.core.explain import explain
from fairlead.core.policy import Context
from fairlead.core.snapshot import Snapshots
from fairlead.lab.simulator.build import ScenarioSpec, build
from fairlead.lab.simulator.run import policy_from, policy_text, simulate
from fairlead.testing import check_policy, fleet, request

DOCS = Path(__file__).parents[4] / "docs"


def code_of(file: str) -> str:
    text = (DOCS / "policy-tutorial.md").read_text()
    code = re.search(rf"^```python run file={re.escape(file)}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert code is not None
    return code[1]


@pytest.fixture
def policy_of(tmp_path: Path) -> Callable[[str], Any]:
    """Makes the policy of a file of the tutorial, all files of which are beside it."""
    for file in ("shortest_wait.py", "learns_speed.py", "in_parts.py"):
        (tmp_path / file).write_text(code_of(file))
    return lambda file: policy_from(policy_text(str(tmp_path / file)))


def test_the_tutorial_policy_works(policy_of: Callable[[str], Any]) -> None:
    policy = policy_of("shortest_wait.py")
    check_policy(policy)
    known = fleet("e0", "e1", samples={"e0": {"running": 3}, "e1": {"running": 0}})
    assert policy.choose(request("hello"), known, Context(0.0, Random(1))).slot == 1
    assert len(code_of("shortest_wait.py").splitlines()) < 40


@pytest.mark.simulation
def test_the_tutorial_policy_that_learns_is_better_where_servers_differ(policy_of: Callable[[str], Any]) -> None:
    spec = ScenarioSpec(name="agents", source="agents", head=300, speedup=0.5, speeds=(1.0, 1.0, 0.4))
    summaries = {}
    for deaf in (False, True):
        policy = policy_of("learns_speed.py")
        check_policy(policy)
        if deaf:
            policy.ended = lambda outcome: None
        scenario = build(spec)
        summaries[deaf] = simulate(scenario, policy)
        slow = {f"sim/server-{index}" for index, server in enumerate(scenario.replicas) if server.speed < 1.0}
        learned = {name in slow: per_token for name, per_token in policy.learned.items()}
        assert deaf == (not learned)
        if learned:
            assert {*policy.learned} > slow and learned[True] > 1.5 * learned[False]
    assert summaries[False].ttft_mean_ms < 0.9 * summaries[True].ttft_mean_ms
    assert summaries[False].e2e_mean_ms < 0.95 * summaries[True].e2e_mean_ms


def test_the_tutorials_parts_of_a_cost_are_explained(policy_of: Callable[[str], Any]) -> None:
    known = fleet("e0", "e1", samples={"e0": {"running": 3}, "e1": {"running": 0}})
    asked, policy = request("hello"), policy_of("in_parts.py")
    before = Snapshots()(known, 0.0)
    pick = policy.choose(asked, known, Context(0.0, Random(1)))
    pick.trace.snapshot = before
    found = explain(lambda: policy_of("in_parts.py"), asked, pick.trace, "e1")
    assert found.reproduced and [*found.candidates[0].terms] == ["first token", "running"]
    for candidate in found.candidates:
        assert sum(candidate.terms.values()) == pytest.approx(candidate.total)
    assert found.candidates[1].terms["running"] == -60.0


def test_every_policy_is_explained() -> None:
    text = (DOCS / "policies.md").read_text()
    missing = [name for name in [*BUILTINS["policy"], *POLICIES] if name != "default" and f"`{name}`" not in text]
    assert missing == []
