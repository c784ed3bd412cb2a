"""Prefill and decode apart: what each server does, what the client sees, and what goes wrong on the way."""

import pytest
from msgspec import structs

from fairlead.core.fleet import Fleet
from fairlead.core.policy import Context, Picked
from fairlead.core.request import Request
from fairlead.lab.simulator.result import summarise
from fairlead.lab.simulator.run import simulate
from fairlead.lab.simulator.scenarios import parted
from fairlead.lab.simulator.simulation import START, Simulation
from fairlead.lab.simulator.world import WARM_UP, Fault, Handover, World, replicas
from fairlead.lab.workload.record import arranged


class Pair:
    """Prefill at slot 0, answer at slot 1."""

    name = "pair"

    def choose(self, request: Request, fleet: Fleet, context: Context) -> Picked:
        return Picked(1, prefill_slot=0)


def ran(scenario, policy=None, **options):
    simulation = Simulation(scenario, policy or Pair(), **options)
    simulation.run()
    return simulation


def test_one_computes_and_the_other_answers(scenario, workload):
    made = scenario(workload(count=1, tokens=6400, out=5), handover=Handover(fixed_ms=20.0, gb_per_s=10.0))
    (job,) = ran(made, validate=True).jobs
    alone = ran(made, _Alone()).jobs[0]
    assert (job.status, job.server, job.prefill_server, job.output_tokens) == ("done", 1, 0, 5)
    moved_ms = 20.0 + 6400 * 262_144 / 10e9 * 1e3
    engine = made.replicas[0].engine
    again_ms = engine.latency.step_s(1, 6399.5, 0, 0) * 1e3
    # Two requests more on the way (sidecar to prefill server and back), one more step, and the transfer.
    assert job.ttft_ms == pytest.approx(alone.ttft_ms + moved_ms + again_ms + 3 * 0.5, abs=0.01)


def test_a_model_with_less_kv_is_handed_over_sooner(scenario, workload):
    assert replicas(1, "llama-8b-l40s")[0].kv_bytes == 131_072
    made = scenario(workload(count=1, tokens=6400, out=5), handover=Handover(gb_per_s=10.0))
    light = tuple(structs.replace(replica, kv_bytes=131_072) for replica in made.replicas)
    (heavier,), (lighter,) = ran(made).jobs, ran(structs.replace(made, replicas=light)).jobs
    assert heavier.ttft_ms - lighter.ttft_ms == pytest.approx(6400 * 131_072 / 10e9 * 1e3)


class _Alone:
    name = "alone"

    def choose(self, request: Request, fleet: Fleet, context: Context) -> Picked:
        return Picked(1)


def test_prefill_servers_decode_nothing_and_decode_servers_compute_nothing(scenario, workload):
    simulation = ran(scenario(workload(count=6, gap=0.05, tokens=3200, out=40)), validate=True)
    prefill, decode = (server.engine.stats for server in simulation.servers)
    assert (prefill.generation_tokens, decode.generation_tokens) == (6, 6 * 40)
    assert prefill.prompt_tokens_cached == 0
    # All but the last token of each prompt were handed over.
    assert decode.prompt_tokens_cached == 6 * 3199
    assert simulation.pipeline.requests.get(1) is None
    assert simulation.pipeline.fleet.table.inflight.sum() == 0


def test_blocks_that_the_decoder_holds_are_not_moved_again(scenario, workload):
    made = scenario(workload(count=2, gap=5.0, tokens=6400, shared=90), handover=Handover(gb_per_s=1.0))
    first, second = ran(made).jobs
    assert first.ttft_ms - second.ttft_ms > 90 * 64 * 262_144 / 1e9 * 1e3
    assert (first.cached_tokens, second.cached_tokens) == (0, 90 * 64)


def test_an_answer_for_which_there_is_no_room_is_computed_again_by_its_server(scenario, workload):
    """A preempted request has lost what was handed over."""
    made = scenario(workload(count=6, gap=0.01, tokens=640, out=400))
    small = tuple(
        structs.replace(r, engine=structs.replace(r.engine, num_blocks=50, max_model_len=1100)) for r in made.replicas
    )
    simulation = ran(structs.replace(made, replicas=small), validate=True)
    assert {job.status for job in simulation.jobs} == {"done"}
    assert sum(job.preemptions for job in simulation.jobs) > 0


@pytest.mark.parametrize(("replica", "at_s"), [(0, 0.05), (1, 0.05)])
def test_a_crash_on_the_way_fails_the_request_once(scenario, workload, replica, at_s):
    made = scenario(workload(count=1, tokens=6400, out=400), faults=[Fault(kind="down", replica=replica, at_s=at_s)])
    simulation = ran(made, validate=True)
    (job,) = simulation.jobs
    assert job.status == "failed"
    assert simulation.pipeline.fleet.table.inflight.sum() == 0


@pytest.mark.parametrize("after_ms", [50.0, 320.0, 500.0])
def test_a_client_that_leaves_frees_the_server_that_works_for_it(scenario, workload, after_ms):
    one = workload(count=1, tokens=6400, out=4000)
    made = scenario(arranged("w", [structs.replace(one.records[0], cancel_after_ms=after_ms)]))
    simulation = ran(made, validate=True)
    assert simulation.jobs[0].status == "cancelled"
    simulation.kernel.run(lambda: True, START + WARM_UP + 60.0)
    assert [server.engine.running() + server.engine.queued() for server in simulation.servers] == [0, 0]
    assert simulation.pipeline.fleet.table.inflight.sum() == 0


def test_runs_of_pairs_are_reproducible_and_the_policy_splits_where_it_gains(scenario, workload):
    made = parted(scenario(workload(count=40, gap=0.03, tokens=6400, out=200), servers=4), 2)
    world = World(usage_share=1.0)
    found = [simulate(structs.replace(made, world=world), "policy: prefill-decode") for _ in range(2)]
    assert found[0] == found[1]
    simulation = ran(made, _policy("policy: prefill-decode"))
    split = sum(job.prefill_server >= 0 for job in simulation.jobs)
    assert 0 < split <= 40
    assert all(job.server >= 2 for job in simulation.jobs)
    plain = summarise(ran(made, _policy("policy: default")))
    assert summarise(simulation).ttft_mean_ms < plain.ttft_mean_ms


def _policy(text):
    from fairlead.lab.simulator.run import policy_from

    return policy_from(text)


def test_a_pool_needs_both_parts(scenario, workload):
    for count in (0, 2):
        with pytest.raises(ValueError, match="leave none"):
            parted(scenario(workload()), count)
