"""Simulate a scenario: `simulate(scenario, policy)`.

from fairlead.sim.run import simulate, policy_from
from fairlead.sim.scenarios import headline, mooncake
summary = simulate(headline(rate=20), "policy: default")
print(summary.ttft_mean_ms, summary.e2e_mean_ms, summary.prefix_hit_rate, summary.shed)
"""

from collections.abc import Callable
from pathlib import Path

from fairlead.admit.desk import Desk
from fairlead.config.flow import build_desk
from fairlead.config.load import load
from fairlead.config.registry import build_policy
from fairlead.model.decision import DecisionRecord, OutcomeRecord
from fairlead.schedule.framework import Policy
from fairlead.sim.policy_file import configuration
from fairlead.sim.result import Summary, summarise
from fairlead.sim.simulation import Simulation
from fairlead.sim.world import Scenario


def policy_from(text: str | Path) -> Policy:
    """The policy of a configuration's text or file (only its scheduling part matters), e.g. `policy: round-robin`, or
    of what `policy_file.source_text` made of a Python file.

    Raises `ConfigError` or `PluginError`.
    """
    return scheduling_from(text)[0]


def scheduling_from(text: str | Path) -> tuple[Policy, Desk | None]:
    """The policy and, where `flowControl` is configured, the queue before it."""
    registry = None
    if isinstance(text, str):
        text, registry = configuration(text)
    config = load(text, need_endpoints=False, registry=registry)
    policy = build_policy(config, registry=registry)
    return policy, build_desk(config, policy)


def simulate(
    scenario: Scenario,
    policy: str | Policy = "policy: default",
    seed: int = 0,
    *,
    watch: Callable[[DecisionRecord | OutcomeRecord], None] | None = None,
    validate: bool = False,
) -> Summary:
    """Run a scenario to its end. `policy` is a configuration's text, or a policy that has not been used yet: policies
    remember. `watch` is called with each decision and outcome record. `validate` checks every invariant after every
    event, at about a hundred times the cost."""
    made, desk = scheduling_from(policy) if isinstance(policy, str) else (policy, None)
    simulation = Simulation(scenario, made, seed, watch=watch, validate=validate, desk=desk)
    simulation.run()
    return summarise(simulation)
