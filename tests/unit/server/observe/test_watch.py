"""Metrics, journal and hooks behind one observer."""

import re
from math import ceil
from types import SimpleNamespace

import msgspec
import pytest

from fairlead.core.apis import CHAT, EMBEDDINGS
from fairlead.core.demand import Objective, PeersLoad
from fairlead.core.endpoint import ROLE_LABEL, Endpoint, Sample
from fairlead.core.fleet import Fleet
from fairlead.core.records import DecisionRecord, OutcomeRecord
from fairlead.core.request import Request
from fairlead.plugins.policies.prefill_decode import PrefillDecodeParams
from fairlead.server.observe.watch import Watch

REQUEST = Request(id=1, arrived=0.0, api="chat", model="m", prompt_tokens=10)


def make(now=0.0):
    fleet = Fleet()
    fleet.up(Endpoint("default/a", "10.0.0.1:80"))
    return Watch(fleet, lambda: now, served=lambda: ["m"]), fleet


def decided(request_id=1, **fields):
    fields = {"endpoint": "default/a", "address": "10.0.0.1:80"} | fields
    return DecisionRecord(request=Request(id=request_id, arrived=0.0, model="m"), at=0.0, policy="p", **fields)


def value(watch, name):
    lines = b"".join(watch.exposition()).decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_whoever_looks_sees_every_decision():
    routed = []
    watch = Watch(Fleet(), lambda: 1.0, on_routed=routed.append, served=lambda: ["m"])
    for i in range(3):
        watch.on_decision(decided(i), 1e-4)
    assert routed == ["default/a"] * 3
    Watch(Fleet(), lambda: 1.0, on_routed=routed.append, awake={"default/a"}).on_decision(decided(), 1e-4)
    assert len(routed) == 3, "awake already"
    assert [d["request_id"] for d in watch.decisions(2)] == [2, 1]
    assert value(watch, "llm_d_epp_request_total{") == 3


def test_models_of_endpoints_keep_their_names():
    watch, fleet = make()
    fleet.up(Endpoint("default/b", "10.0.0.2:80", {"model-id": "labelled"}))
    fleet.sampled("default/a", 0.0, 0.0, Sample(adapters=frozenset({"adapter"})))
    for model in ("unknown", "m", "labelled", "adapter"):
        record = decided()
        watch.on_decision(msgspec.structs.replace(record, request=Request(id=1, arrived=0.0, model=model)), 1e-4)
    page = b"".join(watch.exposition()).decode()
    assert {*re.findall(r'model_name="(\w+)"', page)} == {"m", "labelled", "adapter", "other"}


def test_what_goes_wrong_elsewhere_is_logged(caplog):
    watch, _ = make()
    with caplog.at_level("INFO", "fairlead"):
        watch.on_page("default/a", ("no waiting", "no running"))
        watch.on_page("default/a", ())
    assert [(record.levelname, record.message.partition(":")[0]) for record in caplog.records] == [
        ("WARNING", "a metrics page is missing series"),
        ("INFO", "a metrics page is complete again"),
    ]
    assert "metrics.engines" in caplog.records[0].message


def test_a_refusal_says_whose_request_it_was(caplog):
    watch, _ = make()
    watch.naming(lambda number: f"d-{number}")
    request = Request(id=7, arrived=0.0, model="m", fairness_id="team", external_id="from-client", priority=-1)
    record = DecisionRecord(request=request, at=0.0, policy="p", outcome="rejected-saturated", status=429)
    watch.on_decision(record, 1e-4)
    assert vars(caplog.records[0])["fields"] == {
        "reason": "rejected-saturated",
        "status": 429,
        "priority": -1,
        "decision": "d-7",
        "tenant": "team",
        "model": "m",
        "request_id": "from-client",
    }
    gone = msgspec.structs.replace(record, outcome="rejected-context-cancelled", status=503)
    with caplog.at_level("INFO", "fairlead"):
        watch.on_decision(gone, 1e-4)
        watch.on_decision(gone, 1e-4)
        watch.look()
        assert len(caplog.records) == 2, "the next line comes later"
        watch.look(at_end=True)
    assert [record.levelname for record in caplog.records[1:]] == ["INFO", "INFO"]
    assert "gateways closed streams of waiting requests" in caplog.records[-1].getMessage()
    assert vars(caplog.records[-1])["fields"] == {"requests": 1, "last": "d-7"}


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
    assert sum(child.value for child in watch.metrics.families.requests.children.values()) > 200 - 64


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


def test_what_another_worker_counts_of_the_access_log_is_not_counted_here(caplog):
    watch = Watch(Fleet(), lambda: 0.0, counts_log=False)
    with caplog.at_level("WARNING", "fairlead"):
        watch.on_fallback("10.0.0.1:80", 200)
        watch.on_upload_ended("10.0.0.1", 100, "paused")
    assert value(watch, "fairlead_fallback_requests_total{") == 0
    assert value(watch, 'fairlead_uploads_ended_total{reason="paused"}') == 0
    assert not caplog.records


def test_fallback_traffic_is_told_in_few_lines_that_count(caplog):
    now = [100.0]
    watch = Watch(Fleet(), lambda: now[0])
    with caplog.at_level("WARNING", "fairlead"):
        for i in range(3000):
            now[0] = 100.0 + i * 0.01
            watch.on_fallback(f"10.0.0.{i % 9}:80", 200)
            watch.look()
        now[0] += 15.0
        watch.look()  # no further request tells of the last ones
        watch.look()
    assert [record.fields["requests"] for record in caplog.records] == [1, 1500, 1499]


def test_clients_that_leave_the_queue_are_told_in_few_lines_that_count(caplog):
    now = [100.0]
    watch = Watch(Fleet(), lambda: now[0])
    left = decided(endpoint="", address="", outcome="rejected-context-cancelled", status=503)
    with caplog.at_level("INFO", "fairlead"):
        for _ in range(749):
            watch.on_decision(left, 1e-4)
        now[0] += 15.0
        watch.look()
    assert [record.fields["requests"] for record in caplog.records] == [1, 748]


def test_endpoints_show_what_was_scraped_and_how_old_it_is():
    watch, fleet = make(now=10.0)
    (unknown,) = watch.endpoints()
    assert (unknown.fresh, unknown.age_s, unknown.waiting) == (False, None, None)
    fleet.sampled("default/a", 9.0, 9.5, Sample(waiting=3, running=2, kv_usage=0.5, adapters=frozenset({"x"})))
    (known,) = watch.endpoints()
    assert (known.fresh, known.age_s, known.waiting, known.adapters) == (True, 0.5, 3, ["x"])


def test_every_scheduler_asks_for_what_the_load_of_all_needs():
    def desired(own, peers, alone=False):
        clock = [0.0]
        watch = Watch(Fleet(), lambda: clock[0])
        load = PeersLoad()
        watch.watch_peers(load, lambda: alone)
        for step in range(20):
            clock[0] = 5.0 * step
            watch.metrics.routed, watch.metrics.prompt_tokens = own * step, own * step * 4000
            load.requests, load.tokens = peers * step, peers * step * 4000
            number = watch.desired_endpoints()
        return number

    assert desired(1000, 0) == desired(300, 700) == desired(0, 1000) > desired(300, 0)
    assert desired(300, 700, alone=True) is None, "how much the others route is not known"


@pytest.mark.parametrize(("wanted", "desired"), [(0, None), (1, 1), (2, 2)])
def test_a_scheduler_that_is_alone_asks_for_what_waits_here(wanted, desired):
    watch, _ = make()
    watch.watch_peers(PeersLoad(), lambda: True)
    watch.watch_queue(SimpleNamespace(flow=[1] * wanted, wanted=lambda present, now: wanted))
    assert watch.desired_endpoints() == desired


def test_pods_with_several_ports_are_desired_as_pods() -> None:
    fleet = Fleet()
    for rank in range(4):
        fleet.up(Endpoint(f"default/vllm-0-rank-{rank}", f"10.0.0.1:{8000 + rank}", rank=rank))
    clock = [0.0]
    watch = Watch(fleet, lambda: clock[0])
    assert watch.desired_replicas() is None
    for step in range(20):
        clock[0] = 5.0 * step
        watch.metrics.routed, watch.metrics.prompt_tokens = 100 * step, 400_000 * step
        endpoints = watch.desired_endpoints()
    assert endpoints is not None and endpoints > 4
    assert watch.desired_replicas() == value(watch, "fairlead_desired_replicas") == ceil(endpoints / 4)


@pytest.mark.parametrize(("tpot_ms", "said"), [(50.0, 0), (15.0, 1)])
def test_an_objective_that_no_number_of_replicas_keeps_is_logged_once(caplog, tpot_ms, said):
    clock = [0.0]
    watch = Watch(Fleet(), lambda: clock[0], objective=Objective(tpot_ms=tpot_ms))
    for step in range(20):
        clock[0] = 5.0 * step
        watch.metrics.routed, watch.metrics.prompt_tokens = 100 * step, 400_000 * step
        watch.desired_endpoints()
    told = [record for record in caplog.records if "autoscaling.tpot is hardly within reach" in record.getMessage()]
    assert len(told) == said
    for record in told:
        fields = vars(record)["fields"]
        assert fields["allowed_ms"] < fields["step_ms"] and fields["allowed_ms"] < fields["tpot_ms"]


def test_the_load_is_measured_anew_when_a_peer_comes_or_is_lost_and_after_the_link_was_down():
    clock, alone = [0.0], [False]
    watch, load = Watch(Fleet(), lambda: clock[0]), PeersLoad()
    watch.watch_peers(load, lambda: alone[0])

    def seen(looks):
        numbers = []
        for _ in range(looks):
            clock[0] += 5.0
            load.requests, load.tokens = load.requests + 1000, load.tokens + 4_000_000
            numbers.append(watch.desired_endpoints())
        return numbers

    usual = seen(20)[-1]
    load.breaks += 1
    load.requests += 1_000_000
    assert [number or 0 for number in seen(12)] == [0] * 6 + [usual] * 6
    alone[0] = True
    assert not any(seen(2))
    alone[0] = False
    load.requests += 1_000_000  # what the others routed meanwhile
    assert [number or 0 for number in seen(12)] == [0] * 6 + [usual] * 6


def test_a_standby_does_not_know_the_load_and_a_new_leader_measures_only_its_own() -> None:
    def numbers(leads_from: int) -> list[int | None]:
        clock = [0.0]
        watch = Watch(Fleet(), lambda: clock[0])
        leads = watch.kube.leader.child("serving/epp")
        seen = []
        for step in range(120):
            clock[0] = 5.0 * step
            leads.set(step > leads_from)
            if step > leads_from:
                watch.metrics.routed, watch.metrics.prompt_tokens = 1000 * step, 4_000_000 * step
            seen.append(watch.desired_endpoints())
        return seen

    always, later = numbers(-1), numbers(60)
    assert later[:67] == [None] * 67, "a standby, then half a minute of measuring"
    assert {*later[67:]} == {always[-1]}, "the same load needs as much as before, at once and later"


class Roles:
    """A pool of a policy that splits prompts of 1,000 tokens or more, after some minutes of equal traffic."""

    def __init__(self, *roles: str) -> None:
        self.clock, fleet = [0.0], Fleet()
        for index, role in enumerate(roles):
            fleet.up(Endpoint(f"e{index}", f"10.0.0.{index}:80", {ROLE_LABEL: role} if role else {}))
        self.fleet, self.watch = fleet, Watch(fleet, lambda: self.clock[0])
        self.watch.watch_prompts(PrefillDecodeParams(non_cached_tokens=1000).may_split)

    def serve(self, prompt: int, hit: int = 0, prefill: str = "", steps: int = 20, api: str = CHAT) -> "Roles":
        request = Request(id=1, arrived=0.0, model="m", prompt_tokens=prompt, api=api)
        fields = {"endpoint": "e1", "prefill": prefill, "hit_tokens": hit}
        for _ in range(steps):
            self.clock[0] += 5.0
            for _ in range(200):
                self.watch.on_decision(DecisionRecord(request=request, at=0.0, policy="p", **fields), 1e-4)
            self.numbers()
        return self

    def numbers(self) -> dict[str, float]:
        lines = b"".join(self.watch.exposition()).decode().splitlines()
        own = [line.split() for line in lines if line.startswith("fairlead_desired_replicas")]
        return {name.removeprefix("fairlead_desired_replicas"): float(number) for name, number in own}


BY_ROLE = ['{role="prefill"}', '{role="decode"}']


@pytest.mark.parametrize("prefill", ["e0", ""], ids=["split", "computed where the answer is"])
def test_prompts_are_load_of_prefill_servers_wherever_they_are_computed(prefill):
    pools = [Roles("prefill", "decode").serve(10_000, hit, prefill) for hit in (8000, 0)]
    few, many = (pool.numbers() for pool in pools)
    assert [*few] == [*many] == BY_ROLE
    assert many[BY_ROLE[0]] > 3 * few[BY_ROLE[0]] > 3
    assert many[BY_ROLE[1]] == few[BY_ROLE[1]]


def test_prompts_that_the_policy_never_splits_are_load_of_decode_servers():
    few, many = (Roles("prefill", "decode").serve(6000, hit=hit).numbers() for hit in (5001, 5000))
    assert few[BY_ROLE[0]] == 0
    assert many[BY_ROLE[0]] > 1
    assert few[BY_ROLE[1]] > many[BY_ROLE[1]]
    assert Roles("prefill", "decode").serve(6000, api=EMBEDDINGS).numbers()[BY_ROLE[0]] == 0


@pytest.mark.parametrize("roles", [("", ""), ("both", "both")])
def test_a_pool_whose_servers_do_both_has_one_number(roles):
    assert [*Roles(*roles).serve(4000).numbers()] == [""]


@pytest.mark.parametrize("roles", [("decode", "decode"), ("prefill", "prefill"), ("", "prefill")])
def test_a_scheduler_that_starts_while_one_kind_has_no_server_has_both_numbers(roles):
    assert [*Roles(*roles).serve(4000).numbers()] == BY_ROLE


def test_the_numbers_stay_apart_while_one_kind_has_no_server_and_only_with_such_a_policy():
    pool = Roles("prefill", "decode").serve(4000)
    pool.fleet.down("e0")
    assert [*pool.serve(4000).numbers()] == BY_ROLE
    assert (pool.watch.present_replicas("prefill"), pool.watch.present_replicas("decode")) == (0, 1)
    pool.watch.watch_prompts(None)
    assert pool.watch.roles == []
    assert [*pool.serve(4000).numbers()] == [""]


def test_no_role_has_a_number_on_a_standby_or_before_the_load_is_known():
    pool = Roles("prefill", "decode").serve(4000, steps=2)
    assert pool.numbers() == {}
    assert [*pool.serve(4000).numbers()] == BY_ROLE
    pool.watch.kube.leader.child("serving/epp").set(0)
    assert pool.serve(4000).numbers() == {}


def test_a_gateway_that_breaks_the_protocol_is_named_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    watch, _ = make()
    watch.on_protocol_error("unexpected message BODY in state waiting")
    (line,) = caplog.records
    assert line.levelname == "WARNING" and "unexpected message BODY" in str(line.__dict__)
    assert b"\nfairlead_protocol_errors_total 1\n" in b"".join(watch.exposition())
