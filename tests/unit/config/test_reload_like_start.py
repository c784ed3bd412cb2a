"""After a reload the scheduler is as if it had started with that file, whatever it had before."""

from collections.abc import Sequence
from itertools import product
from random import Random
from typing import Any

import pytest

from fairlead.compat.load import load
from fairlead.config.building import build_pipeline
from fairlead.config.reload import meaning, plan_reload
from fairlead.config.schema import Config
from fairlead.core import events as ev
from fairlead.core.canary import Canary
from fairlead.core.instructions import AdoptConfiguration
from fairlead.core.policy import Policy
from fairlead.core.profile import Profile
from fairlead.core.remote import RemotePolicy
from fairlead.core.scheduler import Pipeline
from fairlead.testing import SimClock, builders

TEXTS = (
    "",
    "policy: lpwl",
    "policy: prefill-decode",
    "policy: {type: cost-model, parameters: {decode: 0}}",
    "scorers: [{type: queue, weight: 1}]",
    "canary: {policy: lpwl, percent: 5}",
    "canary: {policy: lpwl, percent: 50}",
    "canary: {policy: lpwl, percent: 0}",
    "canary: {policy: prefill-decode, percent: 5}",
    "canary: {scheduler: {address: 'h:1'}, percent: 5}",
    "scheduler: {address: 'h:1'}",
    "scheduler: {address: 'h:2', budget: 9ms}",
    "policy: lpwl\ncanary: {policy: default, percent: 5}",
    "policy: prefill-decode\ncanary: {policy: default, percent: 5}",
    "shadows: {policies: [{policy: lpwl}]}",
    "shadows: {policies: [{policy: lpwl}, {name: b, scheduler: {address: 'h:3'}}], sample: 0.5}",
    "flowControl: {}",
    "flowControl: {enabled: false}",
    "policy: lpwl\nflowControl: {}",
    "ledger: {leaseTtl: 90s}\nfilters: [{type: role}]",
)
CONFIGS = [load(f"endpoints: [10.0.0.1:80]\n{text}") for text in TEXTS]


def described(policy: Policy) -> Any:
    """A policy in plain values."""
    if isinstance(policy, Canary):
        share = sum(map(policy.takes, (builders.request("", session=f"s{i}") for i in range(200))))
        return "canary", described(policy.primary), described(policy.canary), share
    if isinstance(policy, RemotePolicy):
        return "remote", policy.name, policy.budget, policy.breaker.rules, described(policy.fallback)
    if isinstance(policy, Profile):
        plugins = [plugin.name for plugin in policy.filters], [(scorer.name, w) for scorer, w in policy.scorers]
        return type(policy), policy.name, plugins, policy.picker.name
    return type(policy), policy.name


def state(pipeline: Pipeline) -> dict[str, Any]:
    flow, parking, waits, asks = pipeline.flow_controller, pipeline.parking, None, None
    if flow is not None:
        waits = flow.policy, flow.flow.draining, type(flow.flow.gate), flow.flow.queues.limits
    if parking is not None:
        asks = {name: described(remote) for name, remote in parking.remotes.items()}
    return {
        "policy": described(pipeline.policy),
        "flow control": waits,
        "schedulers": asks,
        "shadows": pipeline.shadows is not None,
        "lease": pipeline.fleet.ledger.ttl,
    }


def reloaded(begun: Config, later: Sequence[Config]) -> tuple[Config, Pipeline, list[str]]:
    """A scheduler that followed its file; its configuration; and what it refused of the last one."""
    pipeline, running = build_pipeline(begun, SimClock(), Random(1)), begun
    paths: list[str] = []
    for new in later:
        changes, refused = plan_reload(running, new, begun)
        running, paths = changes.config, [problem.path for problem in refused]
        assert [type(each) for each in pipeline.handle(ev.Reconfigured(running))] == [AdoptConfiguration]
    return running, pipeline, paths


@pytest.mark.parametrize("between", [None, 5])
def test_a_reload_ends_as_a_start_does(between: int | None) -> None:
    middle = [] if between is None else [CONFIGS[between]]
    fresh = [state(build_pipeline(config, SimClock(), Random(1))) for config in CONFIGS]
    for (first, begun), (last, config) in product(enumerate(CONFIGS), repeat=2):
        running, pipeline, refused = reloaded(begun, [*middle, config])
        change = f"{TEXTS[first]!r} to {TEXTS[last]!r}"
        if refused:
            assert refused == ["$.flowControl"], change
            assert running.flow_control is not None and running.flow_control.settings.enabled, change
        else:
            assert state(pipeline) == fresh[last], change
            assert [*map(meaning, dict(running).values())] == [*map(meaning, dict(config).values())], change
