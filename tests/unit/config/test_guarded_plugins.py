"""Plugins of other distributions cannot change what a decision reads: columns, totals, masks of other filters."""

from importlib.metadata import EntryPoint
from itertools import count
from random import Random
from typing import Any

import numpy as np
import pytest

from fairlead.compat.load import load
from fairlead.config.building import build_flow_controller, build_pipeline
from fairlead.config.plugins import build_policy
from fairlead.config.registry import GROUP, Registry
from fairlead.core.binding import Pairs, WaitingRules
from fairlead.core.cost import cost
from fairlead.core.endpoint import MODEL_LABEL, ROLE_LABEL, Sample
from fairlead.core.errors import NeverReturned, PluginError
from fairlead.core.events import RequestArrived
from fairlead.core.fleet import Fleet
from fairlead.core.instructions import Route
from fairlead.core.policy import Picked, Stage, prefix_share
from fairlead.core.profile import estimate
from fairlead.plugins.filters.ability import Role
from fairlead.plugins.policies.ranked import Ranked
from fairlead.testing import SimClock, choose, endpoint, fleet, request


class Plugin:
    def __init__(self, params: Any, name: str) -> None:
        self.name = name
        self.picks: list[int] = []


class WritingScorer(Plugin):
    type = "writing-scorer"

    def score(self, request: Any, fleet: Any, cycle: Any) -> Any:
        queue = fleet.table.queue
        queue += 1.0
        return 1.0 / (1.0 + queue)


class WritingFilter(Plugin):
    type = "writing-filter"
    stage = Stage.LOAD

    def keep(self, request: Any, fleet: Any, cycle: Any) -> Any:
        return fleet.table.alive

    def demote(self, request: Any, fleet: Any, cycle: Any) -> Any:
        fleet.table.active[:] = 9.0
        return np.ones(len(fleet.table))

    def chosen(self, request: Any, slot: int, fleet: Any, cycle: Any) -> None:
        fleet.table.kv[slot] = 1.0


class MaskingFilter(Plugin):
    type = "masking-filter"
    stage = Stage.LOAD

    def keep(self, request: Any, fleet: Any, cycle: Any) -> Any:
        left = cycle.left
        left &= fleet.table.active < 0.0
        return left


class WideningFilter(Plugin):
    type = "widening-filter"
    stage = Stage.LOAD

    def keep(self, request: Any, fleet: Any, cycle: Any) -> Any:
        left = cycle.left
        left[:] = True
        return left


class SharingScorer(Plugin):
    """Works on the share of the prefix in place."""

    type = "sharing-scorer"

    def score(self, request: Any, fleet: Any, cycle: Any) -> Any:
        share = prefix_share(request, fleet, cycle)
        share *= 0.0
        return share


class GaugeScorer(Plugin):
    type = "gauge-scorer"

    def score(self, request: Any, fleet: Any, cycle: Any) -> Any:
        heat = fleet.table.extra("heat")
        heat -= 1.0
        return heat


class OwnRole(Role):
    type = "own-role"


class SoftmaxPicker(Plugin):
    """Works on the totals in place and takes the worst."""

    type = "softmax-picker"

    def pick(self, request: Any, fleet: Any, totals: Any, cycle: Any) -> int:
        np.nan_to_num(totals, copy=False, neginf=-50.0)
        return int(totals.argmin())

    def chosen(self, request: Any, slot: int, fleet: Any, cycle: Any) -> None:
        self.picks.append(slot)
        fleet.table.kv[slot] = 1.0


class WritingRanked(Ranked):
    type = "writing-ranked"

    def cost(self, request: Any, fleet: Any, cycle: Any) -> Any:
        queue = fleet.table.queue
        queue += 1.0
        return queue


class EstimatingScorer(Plugin):
    """Works on the estimate in place."""

    type = "estimating-scorer"

    def score(self, request: Any, fleet: Any, cycle: Any) -> Any:
        kappa = estimate(request, fleet, cycle).kappa
        kappa *= 3.0
        return 1.0 / kappa


class SharingRanked(Ranked):
    type = "sharing-ranked"

    def cost(self, request: Any, fleet: Any, cycle: Any) -> Any:
        share = prefix_share(request, fleet, cycle)
        assert share is not None
        share -= 1.0
        return share


class TermsRanked(Ranked):
    type = "terms-ranked"

    def cost(self, request: Any, fleet: Any, cycle: Any) -> Any:
        raise AssertionError("late binding asks for `costs`")

    def costs(self, requests: Any, shares: Any, terms: Any, fleet: Any, context: Any) -> Any:
        ttft = terms.ttft
        ttft += 1e3
        return ttft


class HangingPolicy(Plugin):
    type = "hanging-policy"

    def choose(self, request: Any, fleet: Any, context: Any) -> Any:
        raise NeverReturned


class HangingRanked(Ranked):
    type = "hanging-ranked"

    def choose(self, request: Any, fleet: Any, context: Any) -> Any:
        raise NeverReturned

    def cost(self, request: Any, fleet: Any, cycle: Any) -> Any:
        raise AssertionError("`choose` does not ask for it")


PLUGINS = (
    HangingPolicy,
    HangingRanked,
    WritingScorer,
    WritingFilter,
    MaskingFilter,
    WideningFilter,
    SharingScorer,
    GaugeScorer,
    OwnRole,
    SoftmaxPicker,
    WritingRanked,
    EstimatingScorer,
    SharingRanked,
    TermsRanked,
)
REGISTRY = Registry(lambda: [EntryPoint(cls.type, f"{__name__}:{cls.__name__}", GROUP) for cls in PLUGINS])
GOOD = "filters: [{type: label-selector, parameters: {matchLabels: {tier: good}}}%s]\n"


def pool() -> Fleet:
    return fleet(*(endpoint(name, labels={"tier": tier}) for name, tier in (("a", "good"), ("b", ""), ("c", ""))))


def made(text: str) -> tuple[Any, list[PluginError]]:
    errors: list[PluginError] = []
    return build_policy(load(text, need_endpoints=False, registry=REGISTRY), errors.append, REGISTRY), errors


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("scorers: [{type: writing-scorer, weight: 1}]\n", ["writing-scorer"]),
        ("filters: [{type: writing-filter}]\nscorers: [{type: queue, weight: 1}]\n", ["writing-filter"] * 2),
    ],
)
def test_a_plugin_that_writes_to_columns_is_left_out_and_they_are_as_before(text: str, names: list[str]) -> None:
    policy, errors = made(text)
    known = pool()
    before = known.table.floats.copy()
    assert isinstance(choose(policy, request(), known), Picked)
    assert [error.plugin for error in errors] == names
    assert "of fleet.table, which are read only" in str(errors[0])
    assert np.array_equal(known.table.floats, before)


def test_a_picker_that_changes_the_totals_takes_nothing_that_was_filtered_out() -> None:
    policy, errors = made(GOOD % "" + "scorers: [{type: queue, weight: 1}]\nselection: {picker: softmax-picker}\n")
    known = pool()
    answer = choose(policy, request(), known)
    assert isinstance(answer, Picked) and answer.slot == 0 and answer.trace is not None
    assert "picked slot 1, which was filtered out" in str(errors[0])
    assert np.isneginf(answer.trace.total[1:]).all(), "the trace has what was rated"
    assert "wrote to kv of fleet.table" in str(errors[1]) and not known.table.kv.any()


def test_a_pick_is_a_living_endpoint_also_with_holes_in_the_table() -> None:
    errors: list[PluginError] = []
    text = "scorers: [{type: queue, weight: 1}]\nselection: {picker: softmax-picker}\nflowControl: {enabled: false}\n"
    config, known = load(text, need_endpoints=False, registry=REGISTRY), pool()
    pipeline = build_pipeline(
        config, SimClock(), Random(1), fleet=known, on_plugin_error=errors.append, registry=REGISTRY
    )
    known.down("b")
    (route, *_) = pipeline.handle(RequestArrived(request()))
    assert isinstance(route, Route) and route.endpoint.id != "b"
    assert "picked slot 1, which was filtered out" in str(errors[0])


def test_a_filter_that_writes_to_what_another_left_is_left_out() -> None:
    policy, errors = made(GOOD % ", {type: masking-filter}" + "scorers: [{type: queue, weight: 1}]\n")
    known = pool()
    for _ in range(2):
        answer = choose(policy, request(), known)
        assert isinstance(answer, Picked) and (answer.slot, answer.overloaded) == (0, False)
    assert [error.plugin for error in errors] == ["masking-filter"] * 2


@pytest.mark.parametrize("gone", ["", "b"])
def test_a_filter_cannot_bring_back_what_others_removed(gone: str) -> None:
    text = (
        GOOD % ", {type: label-selector, name: again, parameters: {matchLabels: {tier: good}}}, {type: widening-filter}"
    )
    policy, errors = made(text + "scorers: [{type: queue, weight: 1}]\n")
    known = pool()
    known.down(gone or "none")
    for slot in (1, 2):
        known.table.queue[0] = 9.0
        answer = choose(policy, request(), known)
        assert isinstance(answer, Picked) and answer.slot == 0, slot
    assert [error.plugin for error in errors] == ["widening-filter"] * 2


def test_the_share_of_the_prefix_is_for_all_scorers(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, errors = made(
        "scorers: [{type: sharing-scorer, weight: 1}, {type: prefix-aware, weight: 1}]\n"
        "selection: {picker: max-score}\n"
    )
    known = pool()
    monkeypatch.setattr(known, "match", lambda request: np.array([0.0, 0.9, 0.0]))
    answer = choose(policy, request(), known)
    assert isinstance(answer, Picked) and answer.slot == 1
    assert [error.plugin for error in errors] == ["sharing-scorer"]


def test_an_estimate_is_for_all_plugins_and_what_was_learned_stays() -> None:
    text = "scorers: [%s{type: predicted-latency, weight: 1}]\nselection: {picker: max-score}\n"
    answers, known = [], pool()
    before = known.predictor.kappa.copy()
    for more in ("", "{type: estimating-scorer, weight: 1}, "):
        policy, errors = made(text % more)
        answer = choose(policy, request(), known)
        assert isinstance(answer, Picked) and answer.trace is not None
        answers.append(answer.trace.total)
    assert [error.plugin for error in errors] == ["estimating-scorer"]
    assert np.array_equal(*answers) and np.array_equal(known.predictor.kappa, before)


def test_a_policy_does_not_change_the_share_that_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, errors = made("policy: sharing-ranked\n")
    known = pool()
    monkeypatch.setattr(known, "match", lambda request: np.array([0.0, 0.9, 0.0]))
    answer = choose(policy, request(), known)
    assert isinstance(answer, Picked) and answer.trace is not None
    assert answer.trace.held.tolist() == [0.0, 0.9, 0.0] and answer.best_share == 0.9
    assert "read-only" in str(errors[0])


def test_gauges_are_read_only() -> None:
    policy, errors = made("scorers: [{type: gauge-scorer, weight: 1}]\n")
    known = pool()
    for slot in range(3):
        known.table.sampled(slot, Sample(extra={"heat": 50.0}))
    assert isinstance(choose(policy, request(), known), Picked)
    assert [error.plugin for error in errors] == ["gauge-scorer"]
    assert known.table.extra("heat").tolist() == [50.0] * 3


def test_a_role_filter_of_another_distribution_is_one() -> None:
    text = "policy: {type: prefill-decode, parameters: {always: true}}\nfilters: [{type: own-role}]\n"
    policy, errors = made(text)
    known = fleet(endpoint("p", labels={ROLE_LABEL: "prefill"}), endpoint("d", labels={ROLE_LABEL: "decode"}))
    answer = choose(policy, request(prompt_tokens=8000), known)
    assert isinstance(answer, Picked) and (answer.slot, answer.prefill_slot) == (1, 0)
    assert not errors


@pytest.mark.parametrize(
    ("name", "said"), [("writing-ranked", "wrote to queue of fleet.table"), ("terms-ranked", "read-only")]
)
def test_costs_of_waiting_requests_do_not_change_columns(name: str, said: str) -> None:
    policy, errors = made(f"policy: {name}\n")
    known = pool()
    shares, able = np.zeros((1, 3)), np.ones((1, 3), dtype=np.bool_)
    terms = cost(np.array([[9.0]]), shares, known, 0.0)
    rules = WaitingRules(policy, policy, errors.append)
    before = terms.ttft.copy()
    costs = rules.costs(Pairs([request()], able, shares, terms), known, 0.0)
    assert np.isfinite(costs).all() and not known.table.queue.any() and np.array_equal(terms.ttft, before)
    assert said in str(errors[0])


@pytest.mark.parametrize("name", ["hanging-policy", "hanging-ranked"])
def test_a_policy_that_fails_has_requests_go_where_they_can_be_served(name: str) -> None:
    errors: list[PluginError] = []
    text = f"policy: {name}\nflowControl: {{enabled: false}}\n"
    pairs = zip("abcd", "xxyy", strict=True)
    known = fleet(*(endpoint(name, f"{name}:80", labels={MODEL_LABEL: model}) for name, model in pairs))
    pipeline = build_pipeline(
        load(text, need_endpoints=False, registry=REGISTRY),
        SimClock(),
        Random(1),
        fleet=known,
        on_plugin_error=errors.append,
        registry=REGISTRY,
    )
    numbers = count()

    def sent_to(model: str, subset: frozenset[str] | None = None) -> set[str]:
        asked = [request(id=next(numbers), model=model, subset=subset) for _ in range(20)]
        routes = [pipeline.handle(RequestArrived(each))[0] for each in asked]
        return {route.endpoint.id for route in routes if isinstance(route, Route)}

    assert sent_to("x") == {"a", "b"}
    assert sent_to("y", frozenset({"a:80", "d:80"})) == {"d"}
    assert sent_to("y", frozenset({"e:80"})) == {"a", "b", "c", "d"}, "none is left, so any is drawn"
    assert len(errors) == 2, "it rests"


def test_requests_of_a_policy_without_filters_wait_for_servers_of_their_model() -> None:
    config = load("policy: hanging-policy\nflowControl: {}\n", need_endpoints=False, registry=REGISTRY)
    policy = build_policy(config, registry=REGISTRY)
    controller = build_flow_controller(config, policy, registry=REGISTRY)
    assert controller is not None
    known = fleet(*(endpoint(name, f"{name}:80", labels={MODEL_LABEL: name}) for name in "xy"))
    leases = [known.charge(request(id=id_, prompt_tokens=1000), 0, 1.0, 0, 10) for id_ in range(1, 9)]
    asked = request(id=20, model="x", prompt_tokens=1000)
    assert isinstance(controller.flow.arrived(asked, known, 1.0, slot=0), tuple)
    assert controller.flow.dispatch(known, 1.0) is None, "y is free but serves another model"
    for lease in leases:
        known.ledger.release(lease)
    bound = controller.flow.dispatch(known, 3.0)
    assert bound is not None and bound.slot == 0
