"""Late binding asks the configured policy what pairs cost: its weights and its own costs decide who goes where."""

import numpy as np
import pytest

from fairlead.compat.load import load
from fairlead.config.building import able_by
from fairlead.config.plugins import build_policy
from fairlead.core.binding import Bound, PairBinder, WaitingRules
from fairlead.core.endpoint import Endpoint
from fairlead.core.errors import PluginError
from fairlead.core.explain import explain
from fairlead.core.fleet import Fleet
from fairlead.core.flow import Waiting
from fairlead.core.records import Waited
from fairlead.core.request import Request
from fairlead.core.snapshot import Snapshots
from fairlead.plugins.policies.by_load import LeastRequests
from fairlead.plugins.policies.cost_model import CostModel, CostModelParams
from fairlead.plugins.policies.ranked import Ranked

NOW = 100.0
ALL = np.array([True, True, True])


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    for i in range(3):
        fleet.up(Endpoint(f"e{i}", f"10.0.0.{i}:80"))
    return fleet


def waiting(number: int, tokens: int, waited: float = 0.0) -> Waiting:
    since = NOW - waited
    return Waiting(Request(id=number, arrived=since, prompt_tokens=tokens), since, 1e9, float(tokens), number)


def bound(policy, fleet: Fleet, *window: Waiting, errors: list[PluginError] | None = None) -> Bound:
    rules = WaitingRules(policy, policy, errors.append if errors is not None else None)
    binder = PairBinder(rules)
    for one in window:
        _, one.known = binder.look(one.request, fleet, NOW)
    found = binder.bind(window, fleet, ALL, NOW)
    assert isinstance(found, Bound)
    return found


def test_weights_change_which_pair_is_bound(fleet):
    fleet.table.active[:] = [8.0, 60.0, 60.0]
    fleet.predictor.rates.prefill[:] = [3.0, 1.0, 1.0]
    patient = waiting(1, 4000, waited=60.0)  # it has waited for the faster ones
    assert bound(CostModel(), fleet, patient).slot == 0, "pauses of 60 answers cost more than a slow prefill"
    alone = CostModel(CostModelParams(interference=0.0, decode=0.0))
    assert bound(alone, fleet, patient).slot == 1, "nobody else's time counts"


def test_who_takes_the_least_time_of_the_engine_goes_first(fleet):
    fleet.table.active[:] = 20.0
    long, short = waiting(1, 6000, waited=1.0), waiting(2, 100)
    assert bound(CostModel(), fleet, long, short).waiting is short
    assert bound(CostModel(), fleet, waiting(3, 6000, waited=10.0), short).waiting is not short


class Backwards(CostModel):
    """Milliseconds of its own: e2 is the best, e0 the worst."""

    def cost(self, request, fleet, cycle):
        return np.array([30.0, 20.0, 10.0]) * request.prompt_tokens


class Preferring(Ranked):
    """The same without terms."""

    type, milliseconds = "preferring", True

    def cost(self, request, fleet, cycle):
        return np.array([30.0, 20.0, 10.0]) * request.prompt_tokens


class Remembering(CostModel):
    def __init__(self):
        super().__init__()
        self.told = []

    def chosen(self, request, slot, fleet, cycle):
        self.told.append((request.id, slot, cycle.now))


class BiggestLabel(Ranked):
    """No milliseconds."""

    type = "biggest-label"

    def cost(self, request, fleet, cycle):
        return np.array([1e9, -5.0, 7.0])


def test_a_policy_of_ones_own_decides_for_waiting_requests(fleet):
    assert bound(CostModel(), fleet, waiting(1, 400)).slot == 0
    assert bound(Backwards(), fleet, waiting(1, 400), waiting(2, 100)).slot == 2
    assert bound(Backwards(), fleet, waiting(1, 400), waiting(2, 100)).waiting.request.id == 2


def test_costs_that_are_no_milliseconds_choose_the_endpoint(fleet):
    fleet.table.active[:] = [0.0, 9.0, 0.0]
    found = bound(BiggestLabel(), fleet, waiting(1, 4000), waiting(2, 100))
    assert (found.slot, found.waiting.request.id) == (1, 2), "its endpoint, and the request that costs the least time"
    fleet.table.active[:] = [3.0, 9.0, 1.0]
    assert bound(LeastRequests(), fleet, waiting(1, 100)).slot == 2


@pytest.mark.parametrize("answer", [np.zeros(2), np.full(3, np.nan), "nothing"])
def test_a_policy_that_fails_is_reported_and_the_kernel_decides(fleet, answer):
    class Broken(CostModel):
        def cost(self, request, fleet, cycle):
            if isinstance(answer, str):
                raise KeyError(answer)
            return answer

    errors: list[PluginError] = []
    fleet.table.active[:] = [50.0, 0.0, 50.0]
    assert bound(Broken(), fleet, waiting(1, 400), errors=errors).slot == 1
    assert len(errors) == 1


def test_a_configured_weight_reaches_late_binding(fleet):
    config = load("policy: {type: cost-model, parameters: {interference: 7}}\nendpoints: [{address: '10.0.0.1:80'}]\n")
    rules = able_by(config, build_policy(config))
    assert float(rules.weights.interference) == 7.0


def test_a_late_bound_decision_can_be_explained(fleet):
    fleet.table.active[:] = [40.0, 0.0, 40.0]
    one = waiting(1, 4000)
    found = bound(CostModel(), fleet, one)
    assert found.trace is not None
    found.trace.snapshot = Snapshots()(fleet, NOW)
    told = explain(CostModel, one.request, found.trace, "e1")
    assert told.reproduced and told.endpoint == "e1" and told.unit == "ms"
    assert told.candidates[0].chosen
    assert sum(told.candidates[0].terms.values()) == pytest.approx(told.candidates[0].total)


def test_the_wait_for_memory_is_part_of_the_explanation(fleet):
    """Of a policy with milliseconds of its own, which prefers e2."""
    table = fleet.table
    table.capacity_tokens[:], table.per_capacity[:] = 100_000.0, 1e-5
    table.kv[:], table.active[:] = [0.2, 0.2, 0.99], 50.0
    fleet.predictor.hold_ms = 1e9
    one = waiting(1, 4000)
    found = bound(Preferring(), fleet, one)
    assert found.slot == 1 and found.trace is not None
    found.trace.snapshot, found.trace.waited = Snapshots()(fleet, NOW), Waited(0.0, 0.0, 0, 1, 0, "memory")
    told = explain(Preferring, one.request, found.trace, "e1")
    assert told.reproduced and told.unit == "ms"
    assert [each.endpoint for each in told.candidates] == ["e1", "e0", "e2"]
    assert told.candidates[0].terms == {"cost": -80_000.0, "memory-wait": 0.0}
    assert told.candidates[2].terms["memory-wait"] < -80_000.0
    assert "at random" not in " ".join(told.why)


def test_plugins_that_remember_picks_are_told_of_waiting_requests(fleet):
    policy = Remembering()
    found = bound(policy, fleet, waiting(1, 400), waiting(2, 100))
    assert policy.told == [] and found.notify is not None
    found.notify(found.waiting.request, found.slot, fleet)
    assert policy.told == [(2, found.slot, NOW)]


def test_a_better_endpoint_that_was_not_open_is_named(fleet):
    fleet.table.active[:] = [0.0, 0.0, 3.0]
    binder = PairBinder(WaitingRules(CostModel(), CostModel()))
    window = [waiting(number, 20_000) for number in range(1, 9)]
    for one in window:
        _, one.known = binder.look(one.request, fleet, NOW)
    found = binder.bind(window, fleet, np.array([False, False, True]), NOW)
    assert isinstance(found, Bound) and found.trace is not None and found.slot == 2
    one = found.waiting
    found.trace.snapshot, found.trace.waited = Snapshots()(fleet, NOW), Waited(1500.0, 500.0, 1, 4, 3, "room")
    told = explain(CostModel, one.request, found.trace, "e2")
    assert told.reproduced
    assert " ms less: " in told.why[0] and told.why[0].endswith("It was not chosen because it was not open")
    assert told.why[1:] == (
        "2 of 3 endpoints were not open",
        "it waited 1,500.0 ms because no endpoint was open and 500.0 ms because no open endpoint had memory for its"
        " prompt",
        "other requests sent meanwhile: 1",
        "it was compared with 4 waiting requests; 3 of them were ahead of it",
    )
    assert [one.removed_by for one in told.candidates[1:]] == [("flow-control",)] * 2
