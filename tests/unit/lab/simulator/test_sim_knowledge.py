"""KV events that come late: what the scheduler believes is held, and when."""

from statistics import fmean, geometric_mean

import pytest
from msgspec import structs

from fairlead.core.cost import PRIOR
from fairlead.core.records import OutcomeRecord
from fairlead.lab.simulator.build import ScenarioSpec, build
from fairlead.lab.simulator.run import policy_from
from fairlead.lab.simulator.scenarios import cut, lora
from fairlead.lab.simulator.server import LateEvents
from fairlead.lab.simulator.simulation import Simulation
from fairlead.lab.simulator.world import Fault, World, unknowing


def ran(scenario, lag_ms, **options):
    made = structs.replace(scenario, world=World(usage_share=1.0, kv_lag_ms=lag_ms))
    simulation = Simulation(made, policy_from("policy: default"), **options)
    simulation.run()
    return simulation


def believed(simulation, request):
    return simulation.pipeline.fleet.match(simulation.jobs[request].request)


def test_without_events_nothing_is_different(scenario, workload):
    made = scenario(workload(count=12, gap=0.1, shared=8))
    plain = Simulation(made, policy_from("policy: default"))
    plain.run()
    assert ran(made, -1.0).decision_hash == plain.decision_hash
    assert plain.pipeline.fleet.exact is None


@pytest.mark.parametrize("lag_ms", [0.0, 3000.0])
def test_blocks_are_known_so_much_later(scenario, workload, lag_ms):
    simulation = ran(scenario(workload(count=1, tokens=640, out=5)), lag_ms)
    known = simulation.pipeline.fleet.exact
    assert isinstance(known, LateEvents)
    # It counts as held from the decision on: its own events are still to come.
    assert believed(simulation, 0).max() == pytest.approx(1.0)
    assert (len(known._known[0]) + len(known._known[1]) > 0) == (lag_ms == 0)
    simulation.kernel.run(lambda: True, simulation.kernel.now + 10.0)
    assert sum(map(len, known._known)) == 10
    assert not any(known._sent)
    assert believed(simulation, 0).max() == pytest.approx(1.0)
    known.validate()


def test_what_a_server_evicts_is_forgotten(scenario, workload):
    made = scenario(workload(count=30, gap=1.0, tokens=6400, out=5), servers=1)
    small = tuple(
        structs.replace(r, engine=structs.replace(r.engine, num_blocks=300, max_model_len=8000)) for r in made.replicas
    )
    simulation = ran(structs.replace(made, replicas=small), 0.0, validate=True)
    simulation.kernel.run(lambda: True, simulation.kernel.now + 1.0)
    assert believed(simulation, 0) is None
    assert believed(simulation, 29)[0] == pytest.approx(1.0)
    engine = simulation.servers[0].engine
    assert len(simulation.pipeline.fleet.exact._known[0]) == engine.blocks.sealed()


def test_a_server_that_left_is_forgotten(scenario, workload):
    made = scenario(
        workload(count=2, gap=20.0, tokens=640), faults=[Fault(kind="down", replica=0, at_s=5.0, for_s=5.0)]
    )
    simulation = ran(structs.replace(made, replicas=made.replicas[:1]), 50.0, validate=True)
    assert [job.cached_tokens for job in simulation.jobs] == [0, 0]
    assert {job.status for job in simulation.jobs} == {"done"}


@pytest.mark.simulation
def test_what_is_learned_makes_up_for_a_wrong_beginning_after_200_requests():
    usual = lora(dynamic=False)
    usual = structs.replace(usual, workload=cut(usual.workload, 700))
    ratios, wrong = [], []
    for seed in range(3):
        ttft = []
        for made in (usual, unknowing(usual, seed)):
            simulation = Simulation(made, policy_from("policy: default"), seed)
            simulation.run()
            ttft.append(fmean(job.ttft_ms for job in simulation.jobs[200:] if job.status == "done"))
        ratios.append(ttft[1] / ttft[0])
        rates = simulation.pipeline.fleet.predictor.rates
        wrong.append(abs(rates.prior.c_pf / PRIOR.c_pf - 1.0))
        assert list(rates.prefill * rates.prior.c_pf) == pytest.approx([PRIOR.c_pf] * 3, rel=0.25)
    assert max(wrong) > 0.25
    assert 0.95 < geometric_mean(ratios) < 1.05


@pytest.mark.simulation
@pytest.mark.parametrize(("name", "lags"), [("agents", True), ("headline-stage-20", True), ("think-time", False)])
def test_engines_as_expected_are_found_to_be_so_where_little_is_computed(name, lags):
    made = build(ScenarioSpec(name=name, source=name, head=1400))
    servers = tuple(structs.replace(r, engine=structs.replace(r.engine, async_scheduling=lags)) for r in made.replicas)
    simulation = Simulation(structs.replace(made, replicas=servers), policy_from("policy: default"))
    simulation.run()
    assert 0.75 < simulation.pipeline.fleet.predictor.rates.prefill.mean() < 1.35


@pytest.mark.simulation
@pytest.mark.parametrize("name", ["paced-prefix", "shared-prefix-20"])
def test_bands_hold_what_they_say_without_noise_and_in_a_growing_queue(name):
    records = []
    simulation = Simulation(
        build(ScenarioSpec(name=name, source=name)), policy_from("policy: default"), watch=records.append
    )
    simulation.run()
    ends = [r for r in records if isinstance(r, OutcomeRecord) and r.forecast is not None][len(simulation.jobs) // 10 :]
    assert fmean(r.forecast.low_ms <= r.sent_ttft_ms <= r.forecast.high_ms for r in ends) > 0.83
