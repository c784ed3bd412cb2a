"""Clock, prompts and server of the simulator, each for itself."""

import pytest
from msgspec import structs

from fairlead.core.clock import VirtualClock
from fairlead.core.tokens import TokenEstimator
from fairlead.lab.engine.presets import preset
from fairlead.lab.engine.request import EngineRequest
from fairlead.lab.simulator.build import ScenarioSpec, build
from fairlead.lab.simulator.prompts import Prompts
from fairlead.lab.simulator.run import config_from
from fairlead.lab.simulator.server import Server
from fairlead.lab.simulator.simulation import Simulation
from fairlead.lab.simulator.world import Replica, Scenario, World, replicas
from fairlead.lab.workload.describe import ideal_hits
from fairlead.lab.workload.record import Record, Workload


@pytest.mark.parametrize("block_size", [16, 0])
@pytest.mark.parametrize("name", ["agents", "cancel-storm"])
def test_no_cache_holds_more_than_the_ideal_and_a_boundless_one_almost_that(name, block_size):
    spec = ScenarioSpec(name=name, source=name, head=200, servers=1, kv_tokens=50_000_000, block_size=block_size)
    simulation = Simulation(build(spec), config_from("policy: round-robin")[0], 0)
    simulation.run()
    ideal = [*ideal_hits(simulation.scenario.workload)]
    held = [job.cached_tokens for job in simulation.jobs]
    assert all(hits <= most for hits, most in zip(held, ideal, strict=True))
    assert sum(held) > 0.985 * sum(ideal)


def test_timers_fire_in_order_of_time_and_then_of_setting():
    kernel = VirtualClock(5.0)
    seen = []
    kernel.call_at(7.0, seen.append, "b")
    kernel.call_at(6.0, seen.append, "a")
    kernel.call_at(7.0, seen.append, "c")
    gone = kernel.call_at(6.5, seen.append, "never")
    gone.cancel()
    assert not kernel.run(lambda: True, 7.0)
    assert seen == ["a", "b", "c"]
    assert kernel.time() == 7.0


def test_a_timer_in_the_past_fires_now():
    kernel = VirtualClock(5.0)
    at = []
    kernel.call_at(1.0, lambda: at.append(kernel.time()))
    kernel.run(lambda: True, 9.0)
    assert at == [5.0]


def test_a_run_ends_when_nothing_is_left_to_wait_for():
    kernel = VirtualClock()
    left = [3]

    def again():
        left[0] -= 1
        kernel.call_at(kernel.now + 1.0, again)

    kernel.call_at(1.0, again)
    assert kernel.run(lambda: left[0] > 0, 100.0)
    assert kernel.now == 3.0
    assert not kernel.run(lambda: True, 4.5)


def prompts(*records):
    return Prompts(Workload(name="w", records=list(records)), World(bytes_per_token=4.0))


def test_the_scheduler_sees_bytes_and_an_estimate_of_tokens():
    record = Record(id="a", in_tokens=1000, out_tokens=9, block_size=100, hash_ids=tuple(range(10)), session="s")
    tokens = TokenEstimator()
    request = prompts(record).request(6, record, 12.5, tokens)
    assert (request.id, request.arrived, request.prompt_bytes, request.session) == (7, 12.5, 4000, "s")
    assert request.prompt_tokens == tokens.estimate("", 4000) != 1000
    assert request.prefix.ends[-1] <= 4000
    assert len(request.prefix.hashes) == 10


def test_a_partly_filled_block_is_in_neither_form():
    record = Record(id="a", in_tokens=250, out_tokens=9, block_size=100, hash_ids=(1, 2, 3))
    made = prompts(record)
    assert len(made.request(0, record, 0.0, TokenEstimator()).prefix.hashes) == 2
    assert len(made.engine_request(0, record, 100).hashes) == 2


def test_adapters_do_not_share_blocks():
    plain = Record(id="a", in_tokens=200, out_tokens=9, block_size=100, hash_ids=(1, 2))
    adapted = Record(id="b", in_tokens=200, out_tokens=9, block_size=100, hash_ids=(1, 2), lora="x")
    made = prompts(plain, adapted)
    first, second = made.engine_request(0, plain, 100), made.engine_request(1, adapted, 100)
    assert not set(first.hashes) & set(second.hashes)
    tokens = TokenEstimator()
    assert made.request(0, plain, 0.0, tokens).prefix != made.request(1, adapted, 0.0, tokens).prefix
    assert made.request(1, adapted, 0.0, tokens).model == "x"


def test_what_no_id_names_is_unique():
    records = [Record(id=str(i), in_tokens=400, out_tokens=9, block_size=100, hash_ids=(1, 2)) for i in range(2)]
    made = prompts(*records)
    first, second = (made.engine_request(i, r, 100).hashes for i, r in enumerate(records))
    assert first[:2] == second[:2]
    assert len(first) == len(second) == 4
    assert not set(first[2:]) & set(second[2:])


def test_a_server_wakes_when_something_comes_of_a_request_and_not_before():
    kernel = VirtualClock(100.0)
    seen = []
    server = Server(0, replicas(1, block_size=64)[0], kernel, lambda result: seen.append(kernel.now))
    server.add(EngineRequest("0", bytes(4 * 640), 200))
    turns = []
    kernel.run(lambda: turns.append(1) or not server.engine.stats.e2e.count, 1000.0)
    assert len(seen) == 2
    assert server.engine.stats.iteration_tokens.count == 200
    assert len(turns) < 6
    assert server.engine.stats.e2e.sum == pytest.approx(kernel.now - 100.0)


def test_a_crash_forgets_everything_and_a_restart_begins_anew():
    kernel = VirtualClock(0.0)
    server = Server(0, replicas(1, block_size=64)[0], kernel, lambda result: None)
    server.add(EngineRequest("0", bytes(4 * 640), 200))
    kernel.run(lambda: True, 1.0)
    server.crash()
    assert server.sample() is None
    assert (server.engine.running(), server.engine.blocks.used) == (0, 0)
    server.restart()
    sample = server.sample()
    assert sample is not None
    assert (sample.running, sample.prefix_queries) == (0, 0)


def test_servers_on_one_machine_slow_each_other_down_while_both_compute():
    engine = structs.replace(replicas(1)[0].engine, contention=1.0)
    records = [Record(id=str(i), in_tokens=64, out_tokens=out) for i, out in enumerate((200, 100))]

    def ends(machine):
        pool = (Replica(engine=engine, machine=machine), Replica(engine=engine, machine=machine))
        made = Scenario(name="pair", workload=Workload(name="pair", records=records), replicas=pool)
        simulation = Simulation(made, config_from("policy: round-robin")[0], validate=True)
        simulation.run()
        assert {job.server for job in simulation.jobs} == {0, 1}
        return [job.e2e_ms for job in simulation.jobs]

    long, short = ends("")
    beside = ends("a")
    assert beside[1] == pytest.approx(2 * short, rel=0.02)
    assert beside[0] == pytest.approx(long + short, rel=0.02), "the machine is its own once the short one ended"


def test_a_request_takes_longer_to_reach_an_engine_whose_neighbour_computes():
    kernel = VirtualClock()
    text = "latency: {c0_ms: 10}\ncontention: 0.5\noverhead_ms: 8\ncontended_overhead_ms: 20\n"
    one, other = (Server(i, r, kernel, lambda result: None) for i, r in enumerate(replicas(2, preset(text))))
    one.neighbours, other.neighbours = [other], [one]
    assert one.overhead_s == pytest.approx(0.008)
    other.add(EngineRequest("0", b"", 5, prompt_tokens=10, hashes=[]))
    assert (one.overhead_s, other.overhead_s) == (pytest.approx(0.020), pytest.approx(0.008))
