"""Several schedulers before one pool: they decide as one where they tell each other, and nothing stays behind."""

import importlib
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from fairlead.lab.simulator.result import Summary, summarise
from fairlead.lab.simulator.run import config_from, policy_text, simulate
from fairlead.lab.simulator.scenarios import agents, headline
from fairlead.lab.simulator.world import Scenario, World


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "bench")
    return importlib.import_module("_replicated")


def ran(bench: Any, made: Scenario, **exchange: float) -> tuple[Any, Summary]:
    config, _ = config_from(policy_text("default"))
    simulation = bench.ReplicatedSimulation(made, config, bench.Exchange(**exchange))
    assert simulation.run()
    return simulation, summarise(simulation)


@pytest.fixture(scope="module")
def busy() -> Scenario:
    return agents(sessions=8, rate=1.0)


def test_one_of_one_decides_as_ever(bench: Any, busy: Scenario) -> None:
    _, summary = ran(bench, busy, schedulers=1)
    assert summary.decision_hash == simulate(busy, policy_text("default")).decision_hash


def test_four_that_tell_each_other_find_what_one_finds(bench: Any, busy: Scenario) -> None:
    _, one = ran(bench, busy, schedulers=1)
    _, shared = ran(bench, busy, schedulers=4, lag_ms=10.0)
    _, independent = ran(bench, busy, schedulers=4, shared=False)
    assert one.done == shared.done == independent.done
    assert shared.prefix_hit_rate > 0.97 * one.prefix_hit_rate > 1.1 * independent.prefix_hit_rate


@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_after_the_last_end_no_scheduler_believes_in_any_load(bench: Any, busy: Scenario, loss: float) -> None:
    simulation, _ = ran(bench, busy, schedulers=3, lag_ms=30.0, loss=loss)
    assert (simulation.snapshots > 6) == (loss > 0.0)
    kernel = simulation.kernel
    kernel.run(lambda: True, kernel.now + 20.0)  # what was lost is asked for
    for pipeline in simulation.pipelines:
        pipeline.validate()
        assert not len(pipeline.fleet.ledger)
        assert pipeline.peers.gaps() == []


def test_several_are_not_simulated_with_kv_events(bench: Any) -> None:
    made = structs.replace(headline(1.0, seconds=1.0), world=World(kv_lag_ms=10.0))
    with pytest.raises(ValueError, match="kv_lag_ms"):
        bench.ReplicatedSimulation(made, config_from("policy: default")[0], bench.Exchange())
