"""One seed, one run: nothing may depend on the process, the order of a set, or how often time was looked at."""

import os
import subprocess
import sys

import pytest

from fairlead.lab.simulator.build import ScenarioSpec, build
from fairlead.lab.simulator.run import simulate
from fairlead.lab.simulator.scenarios import ADVERSARIAL, HELD_OUT, SITUATIONS, headline, mooncake
from fairlead.lab.simulator.world import World

pytestmark = pytest.mark.simulation

_SCRIPT = """
import sys
from pathlib import Path
from fairlead.lab.simulator.run import simulate
from fairlead.lab.simulator.scenarios import mooncake
print(simulate(mooncake(Path(sys.argv[1]), 4.0), "policy: default", 3).decision_hash)
"""


def test_runs_of_one_seed_are_equal_to_the_last_digit(mooncake_head):
    first = simulate(mooncake(mooncake_head, 4.0), "policy: default", 3)
    assert simulate(mooncake(mooncake_head, 4.0), "policy: default", 3) == first
    others = {simulate(mooncake(mooncake_head, 4.0), "policy: random", seed).decision_hash for seed in range(4)}
    assert len(others) == 4


def test_another_process_with_another_hash_seed_decides_the_same(mooncake_head):
    """Python's own hash() is salted per process; a run must not feel it."""
    expected = simulate(mooncake(mooncake_head, 4.0), "policy: default", 3).decision_hash
    for salt in ("1", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": salt}
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT, str(mooncake_head)], env=environment, capture_output=True, check=True
        )
        assert done.stdout.decode().strip() == expected


def test_decisions_are_those_that_were_made_before(least_pending):
    """Pins the whole chain: workload, engine, kernel, pipeline, fleet. It changes only when one of them is meant to."""
    summary = simulate(headline(9.0, seconds=20.0), least_pending())
    assert (summary.decision_hash, summary.requests) == ("e744e4ebe009b25d", 168)


def test_a_policy_that_ignores_metrics_is_not_touched_by_scrapes(mooncake_head, least_pending):
    """Reading a server more often must not change what it does: gauges are shown, not made, by a scrape."""

    def figures(interval: float):
        made = mooncake(mooncake_head, 4.0)
        made.world = World(scrape_interval_ms=interval)
        return simulate(made, "policy: round-robin")

    assert figures(50.0) == figures(1000.0)


def test_checking_invariants_changes_nothing(mooncake_head):
    made = mooncake(mooncake_head, 8.0, head=40)
    assert simulate(made, validate=True) == simulate(made)


def test_every_scenario_of_what_happens_to_pools_runs_to_its_end():
    for name in (*ADVERSARIAL, *SITUATIONS, *HELD_OUT):
        spec = ScenarioSpec(name=name, source=name, head=60)
        made = build(spec)
        assert made.name == name
        summary = simulate(made, "policy: default")
        assert summary.requests == 60
        assert summary.done + summary.shed + summary.failed + summary.cancelled == 60
        assert summary.done > 40
        assert summary.plugin_errors == 0
