"""Metrics, journal and hooks behind one observer."""

from fairlead.fleet.fleet import Fleet
from fairlead.model.decision import DecisionRecord, OutcomeRecord
from fairlead.model.endpoint import Endpoint, Sample
from fairlead.model.request import Request
from fairlead.observe.watch import Watch

REQUEST = Request(id=1, arrived=0.0, api="chat", model="m", prompt_tokens=10)


def make(now=0.0):
    fleet = Fleet()
    fleet.up(Endpoint("default/a", "10.0.0.1:80"))
    return Watch(fleet, lambda: now), fleet


def decided(request_id=1, **fields):
    fields = {"endpoint": "default/a", "address": "10.0.0.1:80"} | fields
    return DecisionRecord(request=Request(id=request_id, arrived=0.0, model="m"), at=0.0, policy="p", **fields)


def value(watch, name):
    lines = b"".join(watch.exposition()).decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_whoever_looks_sees_every_decision():
    watch, _ = make()
    routed = []
    watch.on_routed = routed.append
    for i in range(3):
        watch.on_decision(decided(i), 1e-4)
    assert routed == ["default/a"] * 3
    assert [d["request_id"] for d in watch.decisions(2)] == [2, 1]
    assert value(watch, "llm_d_epp_request_total{") == 3


def test_decisions_are_counted_before_their_outcomes():
    watch, _ = make()
    watch.on_decision(decided(7), 1e-4)
    watch.on_outcome(OutcomeRecord(request=Request(id=7, arrived=0.0), at=1.0, endpoint="default/a", status=200))
    (entry,) = watch.decisions(1)
    assert entry["result"]["status"] == 200


def test_waiting_decisions_are_bounded():
    watch, _ = make()
    for i in range(200):
        watch.on_decision(decided(i), 1e-4)
    assert len(watch._uncounted) < 64


def test_overload_raises_the_scale_up_signal_and_refusals_count_as_errors():
    watch, _ = make()
    watch.on_decision(decided(overloaded=True), 1e-4)
    watch.on_decision(decided(2, endpoint="", address="", outcome="rejected-no-endpoints", status=503), 1e-4)
    assert value(watch, "fairlead_scale_up_wanted") == 1
    assert value(watch, "llm_d_epp_request_error_total{") == 1


def test_fallback_traffic_is_counted_per_endpoint():
    watch, _ = make()
    watch.on_fallback("10.0.0.1:80", 200)
    assert value(watch, 'fairlead_fallback_requests_total{endpoint="10.0.0.1:80"}') == 1


def test_endpoints_show_what_was_scraped_and_how_old_it_is():
    watch, fleet = make(now=10.0)
    (unknown,) = watch.endpoints()
    assert (unknown.fresh, unknown.age_s, unknown.waiting) == (False, None, None)
    fleet.sampled("default/a", 9.0, 9.5, Sample(waiting=3, running=2, kv_usage=0.5, adapters=frozenset({"x"})))
    (known,) = watch.endpoints()
    assert (known.fresh, known.age_s, known.waiting, known.adapters) == (True, 0.5, 3, ["x"])
