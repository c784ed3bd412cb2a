"""Several schedulers before one pool: they decide as one where they tell each other, and nothing stays behind."""

import pytest
from msgspec import structs

from fairlead.lab.simulator.replicated import Exchange, ReplicatedSimulation
from fairlead.lab.simulator.result import Summary, summarise
from fairlead.lab.simulator.run import config_from, policy_text, simulate
from fairlead.lab.simulator.scenarios import agents, headline
from fairlead.lab.simulator.world import Scenario, World


def ran(made: Scenario, **exchange: float) -> tuple[ReplicatedSimulation, Summary]:
    config, _ = config_from(policy_text("default"))
    simulation = ReplicatedSimulation(made, config, Exchange(**exchange))  # type: ignore[arg-type]
    assert simulation.run()
    return simulation, summarise(simulation)


@pytest.fixture(scope="module")
def busy() -> Scenario:
    return agents(sessions=14, rate=1.0)


def test_one_of_one_decides_as_ever(busy: Scenario) -> None:
    _, summary = ran(busy, schedulers=1)
    assert summary.decision_hash == simulate(busy, policy_text("default")).decision_hash


def test_four_that_tell_each_other_find_what_one_finds(busy: Scenario) -> None:
    _, one = ran(busy, schedulers=1)
    _, shared = ran(busy, schedulers=4, lag_ms=10.0)
    _, independent = ran(busy, schedulers=4, shared=False)
    assert one.done == shared.done == independent.done
    assert shared.prefix_hit_rate > 0.97 * one.prefix_hit_rate > 1.1 * independent.prefix_hit_rate


@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_after_the_last_end_no_scheduler_believes_in_any_load(busy: Scenario, loss: float) -> None:
    simulation, _ = ran(busy, schedulers=3, lag_ms=30.0, loss=loss)
    assert (simulation.snapshots > 6) == (loss > 0.0)
    kernel = simulation.kernel
    kernel.run(lambda: True, kernel.now + 20.0)  # what was lost is asked for
    for pipeline in simulation.pipelines:
        pipeline.validate()
        assert not len(pipeline.fleet.ledger)
        assert pipeline.peers.gaps() == []


def test_several_are_not_simulated_with_kv_events() -> None:
    made = structs.replace(headline(1.0, seconds=1.0), world=World(kv_lag_ms=10.0))
    with pytest.raises(ValueError, match="kv_lag_ms"):
        ReplicatedSimulation(made, config_from("policy: default")[0], Exchange())
