"""Whole runs: what the clients, the pipeline and the servers see of each other, and when."""

from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from msgspec import structs

from fairlead.compat.load import load
from fairlead.core import events as ev
from fairlead.core.cost import PRIOR
from fairlead.core.instructions import SetTimer
from fairlead.core.records import DecisionRecord, OutcomeRecord, StallRecord
from fairlead.lab.simulator.prompts import Prompts
from fairlead.lab.simulator.run import simulate
from fairlead.lab.simulator.scenarios import parted
from fairlead.lab.simulator.simulation import QUIET_S, START, Simulation
from fairlead.lab.simulator.world import WARM_UP, Fault, World, replicas, unknowing
from fairlead.lab.workload.conversation import Conversation, conversation
from fairlead.lab.workload.record import arranged

BEGIN = START + WARM_UP


def run(scenario, policy, **options):
    """A finished simulation, and every event that its pipeline was told, with its time."""
    simulation = Simulation(scenario, policy, **options)
    told = []
    handle = simulation.pipeline.handle

    def note(event):
        told.append((simulation.kernel.now, event))
        return handle(event)

    simulation.pipeline.handle = note
    simulation.run()
    return simulation, told


def of(told, kind):
    return [(at, event) for at, event in told if type(event) is kind]


def test_one_request_takes_what_the_engine_takes_and_the_ways_there_and_back(scenario, workload, always):
    world = World(network_ms=2.0, decision_ms=3.0, end_report_ms=40.0, usage_share=1.0)
    simulation, told = run(scenario(workload(1, tokens=640, out=5), world=world), always(), validate=True)
    (job,) = simulation.jobs
    latency = simulation.servers[0].replica.engine.latency
    prefill = latency.step_s(640, 640 * 320, 0, 0)
    decode = [latency.step_s(0, 0.0, 1, 640 + i) for i in range(4)]
    assert job.ttft_ms == pytest.approx(3.0 + 2.0 + prefill * 1e3 + 2.0)
    assert job.e2e_ms == pytest.approx(job.ttft_ms + sum(decode) * 1e3)
    assert job.tpot_ms == pytest.approx(sum(decode) * 1e3 / 4)
    assert (job.status, job.server, job.output_tokens) == ("done", 0, 5)
    ((arrived, _),) = of(told, ev.RequestArrived)
    ((first, _),) = of(told, ev.FirstTokenSeen)
    ((ended, end),) = of(told, ev.ResponseEnded)
    assert arrived == pytest.approx(BEGIN + 0.003)
    assert first == pytest.approx(BEGIN + job.ttft_ms / 1e3)
    assert ended == pytest.approx(BEGIN + job.e2e_ms / 1e3 + 0.040)
    assert (end.status, end.usage.prompt_tokens, end.usage.completion_tokens) == (200, 640, 5)
    assert len(simulation.pipeline.fleet.ledger) == 0


def test_scrapes_come_at_their_interval_and_are_old_when_they_come(scenario, workload, always):
    world = World(scrape_interval_ms=100.0, scrape_age_ms=30.0)
    simulation, told = run(scenario(workload(1, out=60), servers=1, world=world), always())
    samples = of(told, ev.MetricsSampled)
    assert all(at - event.started == pytest.approx(0.030) for at, event in samples)
    busy = [event for at, event in samples if event.sample.running]
    starts = [event.started for event in busy]
    assert all(b - a == pytest.approx(0.1) for a, b in pairwise(starts))
    assert {event.sample.block_size for event in busy} == {64}
    assert max(event.sample.kv_usage for event in busy) == pytest.approx(11 / 4218, rel=0.01)
    assert simulation.jobs[0].status == "done"


def test_a_scheduler_that_does_not_begin_with_the_truth(scenario, workload, always):
    made = scenario(workload(30, gap=0.5, out=40))
    assert unknowing(made, 0) == unknowing(made, 0) != unknowing(made, 1)
    world = unknowing(made, 0).world
    for value, truth in zip(structs.astuple(world.prior), structs.astuple(PRIOR), strict=True):
        assert 0.5 * truth <= value <= 1.5 * truth
    assert 0.5 * 4.2 <= world.bytes_per_token <= 1.5 * 4.2
    simulation, told = run(unknowing(made, 0), always())
    assert simulation.pipeline.fleet.predictor.rates.prior == world.prior != PRIOR
    assert {job.request.max_tokens for job in simulation.jobs} == {0}
    starts = [event.started for _, event in of(told, ev.MetricsSampled) if event.endpoint_id == "sim/server-0"]
    gaps = [later - earlier for earlier, later in pairwise(starts[2:])]
    assert 0.8 <= min(gaps) < 0.95 < 1.05 < max(gaps) <= 1.2


def test_an_idle_server_repeats_an_unchanged_page_once_a_second(scenario, workload, always):
    made = workload(2, gap=20.0)
    _, told = run(scenario(made, servers=1, world=World(scrape_interval_ms=100.0)), always())
    quiet = [at for at, _ in of(told, ev.MetricsSampled) if BEGIN + 2 < at < BEGIN + 19]
    assert 16 <= len(quiet) <= 18


@pytest.mark.parametrize("jitter", [0.0, 0.2])
def test_a_long_pause_of_the_workload_is_skipped(scenario, workload, always, jitter):
    first, second = workload(2).records
    records = [first, structs.replace(second, arrival_us=86_400_000_000)]
    world = World(scrape_jitter=jitter)
    simulation, told = run(scenario(arranged("pause", records), servers=1, world=world), always())
    assert [job.status for job in simulation.jobs] == ["done", "done"]
    began = [event.started - BEGIN for _, event in of(told, ev.MetricsSampled)]
    assert max(at for at in began if at < 1000.0) == pytest.approx(QUIET_S, abs=2.0)
    assert min(at for at in began if at > 1000.0) == pytest.approx(86_400.0 - QUIET_S, abs=2.0)
    assert max(b - a for a, b in pairwise(at for at in began if at > 1000.0)) < 1.5, "as before"


def test_shared_beginnings_are_hit_in_the_engine_and_known_to_the_scheduler(scenario, workload, always):
    decisions = []
    made = scenario(workload(3, tokens=1280, shared=10), servers=1)
    simulation, _ = run(made, always(), watch=lambda record: decisions.append(record))
    assert [job.cached_tokens for job in simulation.jobs] == [0, 640, 640]
    outcomes = [record for record in decisions if isinstance(record, OutcomeRecord)]
    assert [record.cached_tokens for record in outcomes] == [0, 640, 640]
    fleet = simulation.pipeline.fleet
    column = fleet.match(simulation.jobs[0].request)
    assert column is not None
    assert column[0] == pytest.approx(1.0, abs=0.06)


def test_prompts_without_ids_share_nothing(scenario, workload, always):
    made = workload(3)
    made = arranged("w", [structs.replace(r, hash_ids=(), block_size=0) for r in made.records])
    simulation, _ = run(scenario(made, servers=1), always())
    assert [job.cached_tokens for job in simulation.jobs] == [0, 0, 0]
    assert simulation.jobs[0].request.prefix.hashes == ()


def test_blocks_that_an_answer_filled_are_hit_by_the_next_turn(scenario, always):
    spec = Conversation(
        systems=1, system_tokens=64, turns=2, first_tokens=64, turn_tokens=64, output_tokens=192, gap_s=5, spread=0.0
    )
    made = conversation(spec, sessions=1)
    simulation, _ = run(scenario(made, servers=1), always())
    first, second = simulation.jobs
    assert second.arrived == pytest.approx(first.ended_at + 5.0)
    # 128 of prompt and 191 of the answer are in the cache: four whole blocks.
    assert second.cached_tokens == 256
    assert second.record.in_tokens == 128 + 192 + 64


@pytest.mark.parametrize("when_ms", [1.0, 20.0, 300.0])
def test_a_client_that_goes_takes_its_lease_and_its_place_with_it(scenario, workload, always, when_ms):
    made = workload(1, tokens=1280, out=100, cancel_after_ms=when_ms)
    world = World(decision_ms=5.0, usage_share=1.0)
    simulation, told = run(scenario(made, servers=1, world=world), always(), validate=True)
    (job,) = simulation.jobs
    assert job.status == "cancelled"
    assert len(simulation.pipeline.fleet.ledger) == 0
    unasked = ev.MetricsSampled | ev.EndpointUp | ev.TimerFired
    kinds = [type(event) for _, event in told if not isinstance(event, unasked)]
    if when_ms == 1.0:
        assert kinds == []
    elif when_ms == 20.0:
        assert kinds == [ev.RequestArrived, ev.StreamLost]
    else:
        assert kinds == [ev.RequestArrived, ev.FirstTokenSeen, ev.ResponseEnded]
    simulation.kernel.run(lambda: True, simulation.kernel.now + 1.0)
    engine = simulation.servers[0].engine
    assert (engine.running(), engine.queued(), engine.blocks.used) == (0, 0, 0)


def test_impatient_clients_are_counted_apart(scenario, workload, always):
    world = World(patience_s=0.05)
    simulation, _ = run(scenario(workload(3, tokens=6400), servers=1, world=world), always())
    assert [job.status for job in simulation.jobs] == ["cancelled"] * 3


def test_a_server_that_dies_breaks_its_requests_and_loses_its_cache(scenario, workload, least_pending):
    made = scenario(
        workload(12, gap=1.0, tokens=1280, out=60, shared=10),
        faults=(Fault(kind="down", replica=0, at_s=4.5, for_s=4.0),),
        world=World(detect_s=0.5),
    )
    simulation, told = run(made, least_pending(), validate=True)
    broken = [job for job in simulation.jobs if job.status == "failed"]
    assert broken
    assert {job.reason for job in broken} <= {"connection lost", "connection refused"}
    assert all(3.9 < job.arrived - BEGIN < 5.5 for job in broken)
    ((down, _),) = of(told, ev.EndpointDown)
    assert down == pytest.approx(BEGIN + 5.0)
    ups = [at for at, event in of(told, ev.EndpointUp) if event.endpoint.id == "sim/server-0"]
    assert ups == [START, pytest.approx(BEGIN + 9.0)]
    between = [job.server for job in simulation.jobs if down < job.arrived < BEGIN + 9.0]
    assert set(between) == {1}
    back = [job for job in simulation.jobs if job.arrived > BEGIN + 8.9 and job.server == 0]
    assert back[0].cached_tokens == 0
    assert of(told, ev.MetricsFailed)


def test_a_server_that_is_scaled_down_ends_what_it_has_and_comes_back_empty(scenario, workload, least_pending):
    made = scenario(
        workload(20, gap=1.0, tokens=1280, out=100, shared=10),
        faults=(Fault(kind="away", replica=0, at_s=4.05, for_s=6.0),),
    )
    simulation, _ = run(made, least_pending(), validate=True)
    assert {job.status for job in simulation.jobs} == {"done"}
    before = [job for job in simulation.jobs if job.server == 0 and job.arrived < BEGIN + 4.05]
    assert before[-1].ended_at > BEGIN + 4.05
    assert {job.server for job in simulation.jobs if BEGIN + 4.1 < job.arrived < BEGIN + 10.0} == {1}
    back = [job for job in simulation.jobs if job.arrived > BEGIN + 10.0 and job.server == 0]
    assert back[0].cached_tokens == 0 < back[1].cached_tokens


def test_ranks_behind_one_address_share_its_load_and_not_their_caches(scenario, workload, always):
    made = scenario(
        workload(8, gap=0.001, tokens=1280, out=100, shared=10, cancel_after_ms=600_000.0),
        replicas=[structs.replace(replica, ranks=4) for replica in replicas(1, block_size=64)],
    )
    simulation, told = run(made, always(), validate=True)
    assert {job.status for job in simulation.jobs} == {"done"}
    assert [job.cached_tokens for job in simulation.jobs] == [0] * 4 + [640] * 4
    samples = [event.sample for _, event in of(told, ev.MetricsSampled)]
    assert max(sample.running for sample in samples) == 8
    assert samples[0].num_blocks == 4 * made.replicas[0].engine.num_blocks
    alone = scenario(made.workload, servers=1)
    assert max(job.e2e_ms for job in run(alone, always())[0].jobs) > max(job.e2e_ms for job in simulation.jobs)


def test_what_a_client_leaves_at_one_of_several_ranks_is_aborted(scenario, workload, always):
    made = scenario(
        workload(4, gap=0.0, out=2000, cancel_after_ms=500.0),
        replicas=[structs.replace(replica, ranks=2) for replica in replicas(1, block_size=64)],
    )
    simulation, _ = run(made, always(), validate=True)
    assert {job.status for job in simulation.jobs} == {"cancelled"}
    simulation.kernel.run(lambda: True, simulation.kernel.now + 1.0)
    assert simulation.servers[0].idle


def test_adapters_that_are_loaded_on_demand_are_listed_once_they_were_asked_for(scenario, workload, always):
    made = scenario(
        workload(2, gap=40.0, lora="mine"),
        replicas=[
            structs.replace(replica, dynamic_adapters=True) for replica in replicas(2, block_size=64, max_loras=2)
        ],
    )
    _, told = run(made, always())
    listed = [(event.endpoint_id, event.adapters) for _, event in of(told, ev.AdaptersListed)]
    assert listed[:2] == [("sim/server-0", frozenset()), ("sim/server-1", frozenset())]
    assert listed[2:4] == [("sim/server-0", frozenset({"mine"})), ("sim/server-1", frozenset())]


def test_an_api_server_takes_one_request_after_another(scenario, workload, always):
    servers = [structs.replace(replicas(1, block_size=64)[0], api_ms=2.0, api_us_per_token=10.0)]
    made = workload(2, gap=0.0, out=1)
    plain, _ = run(scenario(made, servers=1), always())
    simulation, _ = run(scenario(made, replicas=servers), always())
    # 2 ms and 640 · 10 µs each.
    reached = [
        job.served.arrived - before.served.arrived for job, before in zip(simulation.jobs, plain.jobs, strict=True)
    ]
    assert reached == pytest.approx([0.0084, 0.0168])


def test_a_slow_server_takes_longer_from_then_on(scenario, workload, always):
    made = scenario(
        workload(4, gap=5.0, out=50), servers=1, faults=(Fault(kind="slow", replica=0, at_s=9.0, factor=3.0),)
    )
    simulation, _ = run(made, always())
    times = [job.tpot_ms for job in simulation.jobs]
    assert times[2] == pytest.approx(3 * times[1], rel=0.01)
    assert times[0] == pytest.approx(times[1])


def test_unlike_servers_take_unlike_times(scenario, workload, least_pending):
    made = scenario(workload(2, gap=0.0, out=50), replicas=replicas(2, block_size=64, speeds=(1.0, 0.4)))
    simulation, _ = run(made, least_pending())
    first, second = simulation.jobs
    assert second.tpot_ms == pytest.approx(2.5 * first.tpot_ms, rel=0.01)


@pytest.mark.parametrize("kind", ["freeze", "mute"])
def test_metrics_that_freeze_or_stop(scenario, workload, least_pending, kind):
    made = scenario(
        workload(40, gap=0.25, tokens=6400, out=100),
        faults=(Fault(kind=kind, replica=0, at_s=3.0, for_s=4.0),),
    )
    simulation, told = run(made, least_pending(), validate=True)
    inside = [(at, e) for at, e in told if BEGIN + 3.3 < at < BEGIN + 6.9]
    samples = [e.sample for _, e in inside if isinstance(e, ev.MetricsSampled) and e.endpoint_id == "sim/server-0"]
    if kind == "freeze":
        assert len(samples) > 10
        assert all(sample == samples[0] for sample in samples)
    else:
        assert samples == []
        assert len([1 for _, e in inside if isinstance(e, ev.MetricsFailed)]) > 10
    assert all(job.status == "done" for job in simulation.jobs)


def test_an_engine_that_hangs_goes_on_where_it_stood(scenario, workload, always):
    made = scenario(workload(1, out=100), servers=1, faults=(Fault(kind="hang", replica=0, at_s=0.5, for_s=7.0),))
    simulation, _ = run(made, always())
    calm, _ = run(scenario(workload(1, out=100), servers=1), always())
    assert simulation.jobs[0].e2e_ms == pytest.approx(calm.jobs[0].e2e_ms + 7000.0, abs=20.0)


def test_the_default_policy_spares_an_engine_that_hangs(scenario, workload):
    made = scenario(
        workload(200, gap=0.1, tokens=2000, out=60), faults=(Fault(kind="hang", replica=0, at_s=5.0, for_s=10.0),)
    )
    records = []
    simulate(made, "policy: default", watch=records.append)
    there = [r.at - BEGIN for r in records if isinstance(r, DecisionRecord) and r.endpoint == "sim/server-0"]
    assert sum(7.0 < at < 15.0 for at in there) <= 3
    assert sum(at > 15.0 for at in there) > 3, "it is used again"
    assert [r.level for r in records if isinstance(r, StallRecord)] == ["suspect", "out", "well"]


def test_a_fault_of_a_server_that_is_not_there_is_refused(scenario, workload, always):
    made = scenario(workload(1), faults=(Fault(kind="slow", replica=7, at_s=0.0),))
    with pytest.raises(ValueError, match="replica 7 of 2"):
        Simulation(made, always()).run()


def test_what_no_server_can_serve_has_failed(scenario, workload, always):
    simulation, told = run(scenario(workload(1, tokens=64 * 4000)), always())
    assert simulation.jobs[0].status == "failed"
    assert "context length" in simulation.jobs[0].reason
    ((_, end),) = of(told, ev.ResponseEnded)
    assert end.status == 400


@pytest.mark.parametrize(("policy", "prefill"), [("default", 0), ("prefill-decode", 2)])
def test_what_no_server_can_serve_needs_no_memory(scenario, workload, monkeypatch, policy, prefill):
    """The blocks of the prompt, one for each 64 tokens, are not made."""

    def fail(*given, **more):
        raise AssertionError("the prompt was made")

    monkeypatch.setattr(Prompts, "engine_request", fail)
    huge = [structs.replace(record, in_tokens=10**15) for record in workload(2).records]
    made = scenario(arranged("huge", huge), servers=4, world=World(kv_lag_ms=5.0))
    parameters = "{type: prefill-decode, parameters: {always: true}}" if prefill else policy
    simulation, _ = run(parted(made, prefill) if prefill else made, load(f"policy: {parameters}", need_endpoints=False))
    assert ["context length" in job.reason for job in simulation.jobs] == [True, True]


def test_without_endpoints_requests_are_shed_and_counted(scenario, workload, least_pending):
    made = scenario(
        workload(6, gap=2.0),
        servers=1,
        faults=(Fault(kind="down", replica=0, at_s=1.0),),
        world=World(detect_s=0.1),
    )
    simulation, _ = run(made, least_pending())
    assert [job.status for job in simulation.jobs] == ["done"] + ["shed"] * 5
    assert simulation.jobs[-1].reason == "rejected-no-endpoints"


def test_what_is_not_over_in_time_has_failed(scenario, workload, always):
    made = scenario(workload(2, gap=0.0, out=2000), servers=1, world=World(drain_s=3.0))
    simulation, _ = run(made, always())
    assert [job.status for job in simulation.jobs] == ["failed", "failed"]


def test_time_can_be_compressed(scenario, workload, always):
    simulation, _ = run(scenario(workload(5, gap=8.0), speedup=4.0), always())
    arrived = [job.arrived - BEGIN for job in simulation.jobs]
    assert arrived == pytest.approx([0.0, 2.0, 4.0, 6.0, 8.0])


def test_answers_that_are_not_streamed_show_nothing_before_their_end(scenario, workload, always):
    simulation, told = run(scenario(workload(1, out=50, stream=False), servers=1), always())
    ((seen, _),) = of(told, ev.FirstTokenSeen)
    assert seen == pytest.approx(simulation.jobs[0].ended_at)


def test_adapters_take_slots_and_are_shown(scenario, workload, always):
    made = workload(4, gap=0.0, out=40)
    records = [structs.replace(r, lora=f"adapter-{i % 2}") for i, r in enumerate(made.records)]
    servers = replicas(1, block_size=64, max_loras=1)
    simulation, told = run(scenario(arranged("w", records), replicas=servers), always(), validate=True)
    shown = [e.sample.adapters for _, e in of(told, ev.MetricsSampled) if e.sample.adapters]
    assert shown and all(len(adapters) == 1 for adapters in shown)
    assert {job.status for job in simulation.jobs} == {"done"}
    assert simulation.jobs[1].ttft_ms > simulation.jobs[2].ttft_ms


def test_an_adapter_that_all_have_loaded_is_served_by_all(scenario):
    """The page of a simulated server names it only while it runs there, as vLLM's does."""
    plain = conversation(Conversation(), rate=2.0, seconds=25.0, seed=3)
    lora = arranged("w", [structs.replace(record, lora="poet") for record in plain.records])
    config = load("policy: cost-model\n", need_endpoints=False)
    means = []
    for made in (plain, lora):
        simulation, told = run(scenario(made, replicas=replicas(3, max_loras=4)), config, seed=5)
        assert {job.status for job in simulation.jobs} == {"done"}
        assert max(Counter(job.server for job in simulation.jobs).values()) < 0.5 * len(simulation.jobs)
        means.append(sum(job.ttft_ms for job in simulation.jobs))
    shown = [event.sample.adapters for _, event in of(told, ev.MetricsSampled)]
    assert frozenset() in shown and frozenset({"poet"}) in shown
    assert means[1] < 1.05 * means[0]


def test_a_policy_that_fails_harms_nobody(scenario, workload):
    class Broken:
        name = "broken"

        def choose(self, request, fleet, context):
            raise RuntimeError("no")

    simulation, _ = run(scenario(workload(5)), Broken())
    assert all(job.status == "done" for job in simulation.jobs)
    assert len(simulation.plugin_errors) == 5


def test_decisions_are_recorded_one_per_request(scenario, workload, least_pending):
    seen = []
    run(scenario(workload(6)), least_pending(), watch=seen.append)
    decisions = [record for record in seen if isinstance(record, DecisionRecord)]
    assert [record.request.id for record in decisions] == [1, 2, 3, 4, 5, 6]
    assert sum(isinstance(record, OutcomeRecord) for record in seen) == 6


def test_a_storm_of_everything_keeps_every_invariant(scenario, workload, least_pending):
    rng = Random(4)
    made = workload(60, gap=0.08, tokens=3200, out=40, shared=20)
    records = [
        structs.replace(r, cancel_after_ms=rng.choice([0.0, 0.0, 30.0, 200.0, 900.0]), out_tokens=rng.randint(1, 80))
        for r in made.records
    ]
    small = replicas(3, block_size=64, kv_tokens=9600, max_model_len=9000)
    faults = (
        Fault(kind="down", replica=1, at_s=1.5, for_s=1.0),
        Fault(kind="slow", replica=2, at_s=1.0, for_s=2.0, factor=4.0),
        Fault(kind="mute", replica=0, at_s=2.0, for_s=1.0),
    )
    simulation, _ = run(
        scenario(arranged("w", records), replicas=small, faults=faults, world=World(detect_s=0.3)),
        least_pending(),
        validate=True,
    )
    assert all(job.status in ("done", "cancelled", "failed") for job in simulation.jobs)
    assert simulation.open == 0


def test_a_request_may_be_held_back_and_routed_at_a_later_event(scenario, workload, always):
    """Whoever binds late answers an arrival with nothing but a timer."""
    simulation = Simulation(scenario(workload(1, tokens=640), servers=1), always())
    handle = simulation.pipeline.handle
    held = []

    def late(event):
        if isinstance(event, ev.RequestArrived):
            held.append(handle(event))
            return [SetTimer("late", simulation.kernel.now + 0.25)]
        if isinstance(event, ev.TimerFired) and event.name == "late":
            return held.pop()
        return handle(event)

    plain, _ = run(scenario(workload(1, tokens=640), servers=1), always())
    simulation.pipeline.handle = late
    simulation.run()
    assert simulation.jobs[0].ttft_ms == pytest.approx(plain.jobs[0].ttft_ms + 250.0)
    assert simulation.jobs[0].status == "done"


def test_a_client_that_goes_while_its_request_is_held_is_never_served(scenario, workload, always):
    simulation = Simulation(scenario(workload(1, cancel_after_ms=100.0), servers=1), always())
    handle = simulation.pipeline.handle
    held = []

    def late(event):
        if isinstance(event, ev.RequestArrived):
            held.append(handle(event))
            return [SetTimer("late", simulation.kernel.now + 0.25)]
        return held.pop() if isinstance(event, ev.TimerFired) and event.name == "late" else handle(event)

    simulation.pipeline.handle = late
    simulation.run()
    simulation.kernel.run(lambda: True, simulation.kernel.now + 1.0)
    assert simulation.jobs[0].status == "cancelled"
    assert simulation.servers[0].engine.stats.prefix_queries == 0
