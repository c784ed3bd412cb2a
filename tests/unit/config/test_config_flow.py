"""`flowControl` → limits, times, plugins, and who may be refused at once."""

from math import inf
from pathlib import Path

import pytest
from leases import lease_of

from fairlead.compat.load import examine, load, problems
from fairlead.compat.show import effective
from fairlead.config.building import able_by, build_flow_controller
from fairlead.config.builtins import BUILTINS
from fairlead.config.plugins import build_policy
from fairlead.config.reload import plan_reload
from fairlead.config.yaml import parse
from fairlead.core.endpoint import Endpoint
from fairlead.core.fleet import Fleet
from fairlead.core.flow import Limit
from fairlead.core.gates import LedgerGate
from fairlead.core.policy import Refused
from fairlead.core.request import Request
from fairlead.testing import fleet

ONE = "endpoints: ['127.0.0.1:8000']\n"


def flow_controller(text: str):
    config = load(text + ONE)
    return build_flow_controller(config, build_policy(config))


def request(number: int = 1, **fields) -> Request:
    return Request(id=number, arrived=0.0, prompt_tokens=1000, stream=True, **fields)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "flowControl:\n",
        "policy: default\n",
        "policy: cost-model\n",
        "canary: {policy: round-robin, percent: 5}\n",
        "canary: {policy: prefill-decode, percent: 0}\n",
    ],
)
def test_on_by_default_and_nothing_is_refused_because_of_it(text: str) -> None:
    queues = flow_controller(text).flow.queues
    assert (queues.limits.total, queues.limits.of_band(0)) == (Limit(inf, inf), Limit(inf, inf))


@pytest.mark.parametrize(
    "text",
    [
        "flowControl: {enabled: false, ttl: 3s}\n",
        "policy: round-robin\n",
        "policy: prefill-decode\n",
        "scorers: [{type: queue}]\n",
        "gateway: none\n",
        "scheduler: {address: 10.0.0.9:9000}\n",
        "canary: {policy: prefill-decode, percent: 5}\n",
        "canary: {policy: {type: prefill-decode}, percent: 5}\n",
        "canary: {scheduler: {address: 10.0.0.9:9000}, percent: 5}\n",
    ],
)
def test_off_if_said_so_or_where_the_default_does_not_decide_alone(text: str) -> None:
    assert flow_controller(text) is None


def test_that_a_canary_which_splits_does_not_decide_for_those_that_wait_is_said() -> None:
    text = "flowControl: {}\ncanary: {policy: prefill-decode, percent: 5}\n" + ONE
    said = [note for note in load(text).notes if "not split" in note.message]
    assert [note.path for note in said] == ["$.canary.policy"]


def test_a_reload_turns_it_off() -> None:
    changes, refused = plan_reload(load(ONE), load("flowControl: {enabled: false}\n" + ONE))
    assert (changes.paths, refused) == (("$.flowControl",), [])


def test_a_mapping_with_nothing_in_it_turns_it_on() -> None:
    found = flow_controller("flowControl: {}\n")
    assert found.policy == "cost-model"
    assert isinstance(found.flow.gate, LedgerGate)
    band = found.flow.queues._band(0)
    assert (band.fairness.name, band.ordering.name) == ("start-time-fair", "least-work")
    assert found.flow.queues.limits.band == Limit(5000, 1e9)
    assert found.flow.queues.limits.total == Limit(inf, inf)


def test_limits_and_times() -> None:
    limits = "limits: {total: {requests: 1, bytes: 1MiB}, flow: {bytes: 5}}"
    found = flow_controller(f"flowControl: {{ttl: 2s, noEndpointTtl: 1s, {limits}}}\n")
    assert found.flow.queues.limits.total == Limit(1, 1 << 20)
    assert found.flow.queues.limits.flow == Limit(inf, 5)
    fleet = Fleet()
    waits, _ = found.flow.arrived(request(), fleet, 10.0)
    assert waits.deadline == 12.0
    found.flow.dispatch(fleet, 10.0)
    assert found.flow.next_deadline() == 11.0, "the pool is empty"
    assert isinstance(found.flow.arrived(request(2), fleet, 10.0), Refused)


def test_a_client_may_not_wait_for_longer_than_a_gateway_does() -> None:
    found = flow_controller("flowControl: {noEndpointTtl: 590}\n")
    waits, _ = found.flow.arrived(request(ttl_s=1e6), Fleet(), 10.0)
    assert waits.deadline == 600.0


@pytest.mark.parametrize("kind", ["fairness", "ordering"])
def test_every_built_in_plugin_can_be_named(kind: str) -> None:
    for name in BUILTINS[kind]:  # type: ignore[index]
        found = flow_controller(f"flowControl: {{{kind}: {{type: {name}}}}}\n")
        bands = [found.flow.queues._band(priority) for priority in (0, 1)]
        assert [getattr(band, kind).name for band in bands] == [name, name]
        assert bands[0].fairness is not bands[1].fairness


def test_detectors_close_the_whole_pool() -> None:
    found = flow_controller("flowControl: {saturation: {type: concurrency-detector, maxConcurrency: 2}}\n")
    fleet = Fleet()
    for i in range(2):
        fleet.up(Endpoint(f"e{i}", f"10.0.0.{i}:80"))
    for i in range(1, 5):
        assert found.flow.gate.open(fleet, 1.0) is None
        fleet.charge(request(i), i % 2, 1.0, 0, 10)
    assert not found.flow.gate.open(fleet, 1.0).any()
    assert (
        flow_controller("flowControl: {saturation: {type: utilization-detector}}\n").flow.gate.open(fleet, 1.0) is None
    )


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("flowControl: 3", "$.flowControl"),
        ("flowControl: {tll: 3}", "$.flowControl.tll"),
        ("flowControl: {ttl: 20m}", "$.flowControl.ttl"),
        ("flowControl: {limits: {band: {requests: 0}}}", "$.flowControl.limits.band.requests"),
        ("flowControl: {fairness: {type: fcfs}}", "$.flowControl.fairness.type"),
        ("flowControl: {ordering: {type: least-work, ageing: 0}}", "$.flowControl.ordering.ageing"),
        ("flowControl: {}\npolicy: prefill-decode", "$.flowControl"),
    ],
)
def test_problems_have_their_place(text: str, path: str) -> None:
    assert [problem.path for problem in problems(f"{text}\n{ONE}")] == [path]


def test_a_request_that_nobody_can_serve_does_not_wait() -> None:
    found = flow_controller("flowControl: {}\n")
    fleet = Fleet()
    fleet.up(Endpoint("e0", "10.0.0.1:80"))
    for i in range(1, 9):
        fleet.charge(request(i), 0, 1.0, 0, 10)
    assert found.flow.arrived(request(20, subset=frozenset({"10.9.9.9:1"})), fleet, 1.0) is None
    assert isinstance(found.flow.arrived(request(21, subset=frozenset({"10.0.0.1"})), fleet, 1.0), tuple)
    assert len(found) == 1


def test_another_policy_brings_its_rules_to_those_that_wait() -> None:
    found = flow_controller("flowControl: {}\n")
    fleet = Fleet()
    for i in range(2):
        fleet.up(Endpoint(f"e{i}", f"10.0.0.{i}:80", labels={"zone": "ab"[i]}))
    for i in range(1, 17):
        fleet.charge(request(i), i % 2, 1.0, 0, 10)
    found.flow.arrived(request(20), fleet, 1.0)
    only_b = "filters: [{type: by-label, label: zone, validValues: [b]}]\nscorers: []\n"
    config = load(only_b + ONE)
    policy = build_policy(config)
    found.follow(policy.name, able_by(config, policy))
    for i in range(2, 17, 2):
        fleet.ledger.release(lease_of(fleet, i))
    assert found.flow.dispatch(fleet, 2.0) is None
    for i in range(1, 17, 2):
        fleet.ledger.release(lease_of(fleet, i))
    bound = found.flow.dispatch(fleet, 3.0)
    assert bound is not None
    assert bound.slot == 1


def test_a_change_needs_a_restart_and_says_so() -> None:
    changes, (refused,) = plan_reload(load(ONE), load(f"flowControl: {{}}\n{ONE}"))
    assert (changes.paths, refused.path) == ((), "$.flowControl")
    assert "queues were created with it" in refused.message
    text = f"flowControl: {{ordering: {{type: fcfs}}}}\n{ONE}"
    assert plan_reload(load(text), load(f"\n# moved\n{text}")) == plan_reload(load(text), load(text))


def test_what_is_in_force_is_shown(tmp_path: Path) -> None:
    text = f"flowControl: {{ttl: 5s, ordering: {{type: fcfs}}}}\n{ONE}"
    shown = {value.path: (value.value, value.origin) for value in effective(load(text), parse(text).tree)}
    assert shown["$.flowControl.ttl"] == (5.0, "line 1")
    assert shown["$.flowControl.limits.band.requests"] == (5000, "default")
    assert shown["$.flowControl.ordering.type"] == ("fcfs", "line 1")
    file = tmp_path / "a.yaml"
    file.write_text(text)
    assert examine(file)[1].problems == []


BANDS = """
flowControl:
  ttl: 30s
  bands:
    - {priority: -10, ttl: 5s, limits: {requests: 7}, share: 0.1, fairness: {type: round-robin}, ordering: {type: fcfs}}
    - {priority: 10, limits: {bytes: 1M}}
  flows:
    - {fairnessId: small, ttl: 2s, limits: {requests: 1}}
    - {model: m, weight: 3}
  ceiling: {type: priority-holdback-policy, minCeiling: 0.5}
  earlyShedding: {power: 2}
  eviction: {}
"""


def test_bands_and_flows_have_their_own_rules():
    found = flow_controller(BANDS).flow
    limits = found.queues.limits
    assert limits.of_band(-10).requests == 7 and limits.of_band(10).bytes == 1e6 and limits.of_band(0).requests == 5000
    assert (
        limits.rule("m", "small").ttl == 2.0
        and limits.rule("m", "").weight == 3.0
        and limits.rule("", "").weight == 1.0
    )
    found.queues.put(Request(id=1, arrived=0.0, priority=-10), 0.0, 1.0, 1.0)
    found.queues.put(Request(id=2, arrived=0.0), 0.0, 1.0, 1.0)
    usual, low = found.queues.bands()
    assert (low.fairness.name, low.ordering.name) == ("round-robin", "fcfs")
    assert (usual.fairness.name, usual.ordering.name) == ("start-time-fair", "least-work")
    assert flow_controller(BANDS).evicts
    assert not flow_controller("flowControl: {}\n").evicts


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{bands: 3}", "expected a list"),
        ("{bands: [3]}", "expected a mapping"),
        ("{bands: [{ttl: 3s}]}", "'priority' is missing"),
        ("{bands: [{priority: 1}, {priority: 1}]}", "is there already"),
        (
            "{bands: [{priority: 1, share: 0.7}, {priority: 2, share: 0.7}]}",
            "$.flowControl.bands the shares of all bands must be at most 1 together, not 1.4",
        ),
        ("{bands: [{priority: 1, saturation: {type: x}}]}", "unknown field"),
        ("{flows: [{weight: 0.5}]}", ">= 1"),
        ("{ceiling: {type: priority-holdback-policy}}", "minCeiling"),
        ("{earlyShedding: {power: 0}}", "> 0"),
    ],
)
def test_what_is_wrong_with_bands_is_said(text, problem):
    found = problems(f"{ONE}flowControl: {text}\n")
    assert len(found) == 1
    assert problem in f"{found[0].path} {found[0].message}"


@pytest.mark.parametrize(
    ("settings", "noted"), [("noEndpointTtl: 5m", True), ("ttl: 5m, noEndpointTtl: 5m", False), ("ttl: 5s", False)]
)
def test_a_time_without_endpoints_beyond_that_to_live_is_noted(settings: str, noted: bool) -> None:
    notes = load(f"endpoints: [10.0.0.1:80]\nflowControl: {{{settings}}}\n").notes
    assert (
        any("$.flowControl.noEndpointTtl: requests wait for ttl at most, 60s" in str(note) for note in notes) == noted
    )


@pytest.mark.parametrize(
    ("beside", "noted"),
    [
        ("gateway: none", True),
        ("gateway: none\nflowControl: {}", False),
        ("", False),
    ],
)
def test_a_criticality_without_flow_control_is_noted(beside: str, noted: bool) -> None:
    models = "models: [{name: batch, criticality: Sheddable}, {name: usual}]"
    notes = [str(note) for note in load(f"{ONE}{models}\n{beside}").notes]
    assert any("batch is Sheddable, but without flow control" in note for note in notes) is noted
    assert not any("flow control" in str(note) for note in load(f"{ONE}models: [{{name: a}}]\n{beside}").notes)


def test_bands_are_held_back_before_higher_bands_had_a_request() -> None:
    text = """
flowControl:
  saturation: {type: concurrency-detector, maxConcurrency: 4}
  ceiling: {type: priority-holdback-policy, minCeiling: 0.5}
  bands: [{priority: 100}, {priority: -10}]
"""
    flow, pool = flow_controller(text).flow, fleet("e0")
    for number in (1, 2, 3):
        outcome = flow.arrived(request(number, priority=-10), pool, 0.0)
        assert (outcome is None) == (number < 3), "the other half is for higher bands"
        if outcome is None:
            pool.charge(request(number, priority=-10), 0, 0.0, 0, 10)
    assert flow.dispatch(pool, 0.0) is None
    flow.arrived(request(4, priority=100), pool, 0.0)
    bound = flow.dispatch(pool, 0.0)
    assert bound is not None and bound.waiting.request.id == 4
