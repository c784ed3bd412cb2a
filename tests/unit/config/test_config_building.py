"""What a changed configuration keeps, what it replaces, and that one which cannot be built changes nothing."""

from random import Random
from typing import Any

import pytest

from fairlead.compat.load import load
from fairlead.config.building import CANARY, PRIMARY, SchedulingBuilder, build_pipeline, schedulers
from fairlead.config.schema import Config
from fairlead.core.canary import Canary
from fairlead.core.events import EndpointUp, Reconfigured, RemoteUp, RequestArrived
from fairlead.core.instructions import AdoptConfiguration, AskRemote, RefuseConfiguration, Route
from fairlead.core.scheduler import Pipeline
from fairlead.plugins.pickers import RoundRobin
from fairlead.plugins.policies.cost_model import CostModel
from fairlead.testing import SimClock, builders

REMOTE = "scheduler: {address: '127.0.0.1:7', budget: 10ms}\n"
SHADOW = "shadows: {policies: [{policy: least-requests}]}\n"


def config(text: str) -> Config:
    return load(text or "policy: default\n", need_endpoints=False)


def running(text: str) -> Pipeline:
    pipeline = build_pipeline(config(text), SimClock(), Random(1))
    pipeline.handle(EndpointUp(builders.endpoint("e0")))
    return pipeline


def reload(pipeline: Pipeline, text: str) -> Any:
    (answer,) = pipeline.handle(Reconfigured(config(text)))
    return answer


def test_what_did_not_change_stays_the_same_object() -> None:
    build = SchedulingBuilder()
    first = build(config("policy: round-robin\nflowControl: {}\n" + REMOTE + SHADOW))
    second = build(config("policy: round-robin\nflowControl: {}\nledger: {leaseTtl: 5s}\n" + REMOTE + SHADOW))
    assert (first.lease_ttl, second.lease_ttl) == (900.0, 5.0)
    assert second.base is first.base and second.able is first.able
    assert second.policy is first.policy is first.remotes[PRIMARY]
    assert second.shadows is first.shadows and second.on_trial is first.on_trial
    assert list(first.on_trial) == ["least-requests"]
    assert second.flow is first.flow is not None
    third = build(config("policy: least-requests\n" + REMOTE + SHADOW))
    assert third.base is not first.base
    assert third.on_trial is not first.on_trial, "shadows are compared with another policy now"


def test_a_scheduler_keeps_its_connection_and_counts_behind_another_policy() -> None:
    build = SchedulingBuilder()
    before = build(config(REMOTE)).remotes[PRIMARY]
    before.connected = True
    before.stats.asked = 7
    after = build(config("policy: round-robin\n" + REMOTE)).remotes[PRIMARY]
    assert (after.connected, after.stats.asked, after.breaker) == (True, 7, before.breaker)
    assert (before.fallback.name, after.fallback.name) == ("cost-model", "round-robin")
    other = build(config("policy: round-robin\n" + REMOTE.replace(":7", ":8"))).remotes[PRIMARY]
    assert (other.connected, other.stats.asked) == (False, 0)


def test_what_decided_before_can_be_asked_again() -> None:
    build = SchedulingBuilder()
    text = "policy: {type: default, parameters: {interference: 0}}\ncanary: {policy: least-requests, percent: 9}"
    build(config(text))
    build(config("policy: round-robin"))
    names = "cost-model", "canary:least-requests", "round-robin", "never-configured"
    assert [build.fresh(name).name for name in names] == ["cost-model", "least-requests", *["round-robin"] * 2]
    past: Any = build.fresh("cost-model")
    assert past.weights.interference == 0.0
    assert build.fresh("cost-model") is not past
    for number in range(20):
        build(config(f"policy: round-robin\nledger: {{leaseTtl: {number + 1}s}}"))
    assert build.fresh("cost-model").name == "cost-model", "only those with other names push it out"


def test_a_canary_goes_on_counting_until_something_of_it_changes() -> None:
    build = SchedulingBuilder()
    text = "canary: {policy: round-robin, percent: 50}\n"
    first = build(config(text)).policy
    assert isinstance(first, Canary)
    assert build(config(text + "ledger: {leaseTtl: 5s}\n")).policy is first
    more = build(config(text.replace("50", "60"))).policy
    assert isinstance(more, Canary) and more is not first
    assert more.canary is first.canary, "the policy itself has not changed"
    assert not isinstance(build(config("")).policy, Canary)


def test_who_decides_in_another_process() -> None:
    far = "canary: {scheduler: {address: 'unix:/run/x'}, percent: 1}\n"
    assert list(schedulers(config(REMOTE + far))) == [PRIMARY, CANARY]
    assert list(schedulers(config(far.replace("1}", "0}")))) == []


def test_a_reload_is_answered_by_what_is_in_force() -> None:
    pipeline = running("policy: default\n")
    before = pipeline.policy
    answer = reload(pipeline, "policy: default\nledger: {leaseTtl: 5s}\n")
    assert isinstance(answer, AdoptConfiguration)
    assert answer.scheduling.policy is pipeline.policy is before
    assert pipeline.fleet.ledger.ttl == 5.0
    answer = reload(pipeline, "policy: round-robin\n")
    assert pipeline.policy is answer.scheduling.policy is not before
    assert pipeline.policy.name == "round-robin"
    pipeline.validate()


def test_a_scheduler_that_a_reload_brings_is_asked() -> None:
    pipeline = running("policy: default\n")
    reload(pipeline, REMOTE)
    pipeline.handle(RemoteUp(PRIMARY))
    found = pipeline.handle(RequestArrived(builders.request("hello")))
    assert [one.remote for one in found if isinstance(one, AskRemote)] == [PRIMARY]
    reload(pipeline, "policy: default\n")
    found = pipeline.handle(RequestArrived(builders.request("hello")))
    assert [type(one) for one in found if isinstance(one, AskRemote | Route)] == [Route]
    pipeline.validate()


def test_flow_control_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = running("flowControl: {}\n")
    reload(pipeline, "policy: round-robin\nflowControl: {}\n")
    assert pipeline.flow_controller is not None and pipeline.flow_controller.policy == "round-robin"


def test_what_cannot_be_built_changes_nothing_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = running("policy: default\n" + SHADOW)
    before = pipeline.policy, pipeline.shadows
    new = config("policy: round-robin\nledger: {leaseTtl: 5s}\n")

    def refuse(self: Any, *arguments: Any, **more: Any) -> None:
        raise RuntimeError("not today")

    with monkeypatch.context() as broken:
        broken.setattr(RoundRobin, "__init__", refuse)
        (answer,) = pipeline.handle(Reconfigured(new))
    assert isinstance(answer, RefuseConfiguration)
    assert answer.document is new
    assert "not today" in answer.problem
    assert (pipeline.policy, pipeline.shadows) == before
    assert pipeline.fleet.ledger.ttl == 900.0
    assert isinstance(pipeline.handle(Reconfigured(new))[0], AdoptConfiguration), "it is tried again with the next one"


def test_a_pipeline_that_was_given_nothing_to_build_with_refuses() -> None:
    made = running("policy: default\n")
    plain = Pipeline(SimClock(), Random(1), made.fleet, made.policy, made.tokens)
    assert isinstance(reload(plain, "policy: round-robin\n"), RefuseConfiguration)
    assert plain.policy is made.policy


def test_a_canary_of_the_same_type_has_a_name_of_its_own() -> None:
    build = SchedulingBuilder()
    same = "policy: cost-model\ncanary: {percent: 9, policy: {type: cost-model, %sparameters: {interference: 7}}}"
    build(config(same % ""))
    made: list[Any] = [build.fresh(name) for name in ("cost-model", "canary:cost-model")]
    assert [policy.weights.interference for policy in made] == [CostModel().weights.interference, 7.0]
    build(config(same % "name: careful, "))
    careful: Any = build.fresh("canary:careful")
    assert careful.weights.interference == 7.0


def test_a_canary_follows_into_flow_control_and_out_of_it() -> None:
    build = SchedulingBuilder()
    shared = build(config("canary: {policy: lpwl, percent: 9}"))
    assert shared.waiting is not shared.able
    alone = build(config(""))
    assert alone.waiting is alone.able is shared.able
    far = build(config("canary: {scheduler: {address: 'unix:/run/x'}, percent: 1}"))
    assert far.waiting is far.able, "it is asked where late binding has chosen"
