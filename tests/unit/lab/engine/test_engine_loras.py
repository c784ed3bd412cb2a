"""Adapter slots: who waits for one, and what the lists for the metric say."""

from fairlead.lab.engine.engine import Engine
from fairlead.lab.engine.request import EngineRequest


def test_a_request_of_another_adapter_waits_and_others_pass_it(make_spec, prompt, run):
    engine = Engine(make_spec(max_loras=2), 0.0)
    names = ["a", "b", "c", "a", "", "c"]
    requests = [EngineRequest(str(i), prompt(4, i), 6 + i, lora=lora) for i, lora in enumerate(names)]
    for request in requests:
        engine.add(request, 0.0)
    engine.step(engine.next_step_at())
    engine.step(engine.next_step_at())
    gauges = engine.stats.gauges
    assert gauges.running_loras == ("a", "b")
    assert gauges.waiting_loras == ("c",)
    assert (gauges.running, gauges.waiting, gauges.deferred) == (4, 2, 2)
    done = run(engine)
    assert len(done) == 6
    b = requests[1]
    assert all(b.finished_at <= requests[i].scheduled_at for i in (2, 5))
    assert (gauges.running_loras, gauges.waiting_loras) == ((), ())


def test_deferred_requests_get_in_when_their_adapter_becomes_active(make_spec, prompt, run):
    engine = Engine(make_spec(max_loras=1, max_num_seqs=2), 0.0)
    order = ["a", "b", "b", "a"]
    requests = [EngineRequest(str(i), prompt(4, i), 3, lora=lora) for i, lora in enumerate(order)]
    for request in requests:
        engine.add(request, 0.0)
    done = [request.id for request in run(engine)]
    assert done == ["0", "3", "1", "2"]


def test_an_aborted_request_gives_its_slot_back(make_spec, prompt, run):
    engine = Engine(make_spec(max_loras=1), 0.0)
    first = EngineRequest("first", prompt(4, 1), 100, lora="a")
    second = EngineRequest("second", prompt(4, 2), 3, lora="b")
    engine.add(first, 0.0)
    engine.add(second, 0.0)
    engine.step(engine.next_step_at())
    engine.step(engine.next_step_at())
    assert engine.stats.gauges.deferred == 1
    engine.abort(first, engine.now)
    assert run(engine) == [second]


def test_deferred_requests_can_be_aborted(make_spec, prompt, run):
    engine = Engine(make_spec(max_loras=1), 0.0)
    first = EngineRequest("first", prompt(4, 1), 5, lora="a")
    second = EngineRequest("second", prompt(4, 2), 3, lora="b")
    engine.add(first, 0.0)
    engine.add(second, 0.0)
    engine.step(engine.next_step_at())
    engine.step(engine.next_step_at())
    engine.abort(second, engine.now)
    assert run(engine) == [first]
    assert engine.queued() == 0


def test_an_adapter_that_is_not_in_memory_is_loaded_and_the_one_used_longest_ago_makes_room(make_spec, prompt, run):
    def took(order, **limits):
        engine = Engine(make_spec(lora_load_ms=50.0, **limits), 0.0)
        found = []
        for i, lora in enumerate(order):
            request = EngineRequest(str(i), prompt(4, i), 2, lora=lora)
            engine.add(request, engine.now)
            begun = engine.now
            run(engine)
            found.append(request.first_token_at - begun > 0.05)
        return found

    assert took(["a", "a", "", "b", "a", "c", "b"], max_loras=2) == [True, False, False, True, False, True, True]
    assert took(["a", "b", "c", "b", "a"], max_loras=1, max_cpu_loras=3) == [True, True, True, False, False]
