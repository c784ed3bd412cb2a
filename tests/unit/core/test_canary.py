"""A canary decides its share also among requests that wait, and both sides are told apart."""

from collections import Counter
from collections.abc import Callable
from importlib.metadata import EntryPoint
from random import Random
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from fairlead.compat.load import load
from fairlead.config.building import build_pipeline
from fairlead.config.registry import GROUP, Registry
from fairlead.core.binding import Bound, PairBinder, WaitingRules
from fairlead.core.canary import Canary, CanaryRules
from fairlead.core.errors import NeverReturned, PluginError
from fairlead.core.events import EndpointUp, RequestArrived, ResponseEnded
from fairlead.core.fleet import Fleet
from fairlead.core.flow import EXPIRED, Waiting
from fairlead.core.policy import Stage
from fairlead.core.records import DecisionRecord
from fairlead.core.request import Request
from fairlead.plugins.policies.cost_model import CostModel
from fairlead.plugins.policies.ranked import Ranked
from fairlead.server.observe import exposition
from fairlead.server.observe.component_metrics import ChooserMetrics
from fairlead.testing import SimClock, builders

NOW = 100.0


class Prefers(CostModel):
    """Milliseconds of its own: the best slot is the one given."""

    def __init__(self, slot: int, error: BaseException | None = None) -> None:
        super().__init__(name=f"prefers-{slot}")
        self._slot, self._error = slot, error

    def cost(self, request: Any, fleet: Any, cycle: Any) -> Any:
        if self._error is not None:
            raise self._error
        return np.where(np.arange(len(fleet.table)) == self._slot, 10.0, 20.0) * request.prompt_tokens


def one(number: int, session: str = "") -> Request:
    return Request(id=number, arrived=NOW, prompt_tokens=100, session=session)


def bound(rules: WaitingRules, fleet: Fleet, *requests: Request) -> Bound:
    binder = PairBinder(rules)
    window = [Waiting(request, NOW, 1e9, 100.0, request.id) for request in requests]
    for waiting in window:
        _, waiting.known = binder.look(waiting.request, fleet, NOW)
    found = binder.bind(window, fleet, np.ones(3, dtype=np.bool_), NOW)
    assert isinstance(found, Bound)
    return found


def rules(canary: Canary) -> CanaryRules:
    primary, own = canary.primary, canary.canary
    return CanaryRules(canary, WaitingRules(own, own), WaitingRules(primary, primary))  # type: ignore[arg-type]


def test_each_side_chooses_for_its_own_requests_that_wait() -> None:
    fleet, canary = builders.fleet(), Canary(Prefers(0), Prefers(2), 50.0, label="canary:x")
    by_rules, seen = rules(canary), set()
    for number in range(40):
        request = one(number)
        found = bound(by_rules, fleet, request)
        assert (found.slot, found.by) == ((2, "canary:x") if canary.takes(request) else (0, ""))
        seen.add(found.by)
    assert seen == {"canary:x", ""}
    both = [one(number) for number in range(10)]
    assert bound(by_rules, fleet, *both).slot in (0, 2)


def test_a_canary_is_asked_only_for_the_requests_that_it_takes() -> None:
    asked: list[int] = []

    class Listening(Prefers):
        def cost(self, request: Any, fleet: Any, cycle: Any) -> Any:
            asked.append(request.id)
            return super().cost(request, fleet, cycle)

    canary = Canary(Prefers(0), Listening(2), 20.0)
    waiting = [one(number) for number in range(50)]
    bound(rules(canary), builders.fleet(), *waiting)
    assert asked == [request.id for request in waiting if canary.takes(request)] and 0 < len(asked) < 25


@pytest.mark.parametrize(("error", "goes_on"), [(KeyError("no"), True), (NeverReturned(), False)])
def test_a_canary_that_fails_leaves_the_choice_to_the_primary(error: BaseException, goes_on: bool) -> None:
    told: list[PluginError] = []
    canary = Canary(Prefers(0), Prefers(2, error), 100.0, told.append)
    found = bound(rules(canary), builders.fleet(), one(1))
    assert (found.slot, found.by) == (0, "")
    assert [failure.plugin for failure in told] == ["prefers-2"]
    assert canary.takes(one(1)) is goes_on, "one that did not return decides nothing more"


def test_the_filters_are_those_of_the_side_that_decides() -> None:
    class Only(WaitingRules):
        def __init__(self, slot: int) -> None:
            super().__init__(Prefers(slot), Prefers(slot))
            self.slot = slot

        def __call__(self, request: Any, fleet: Any, now: float) -> Any:
            return np.arange(3) == self.slot

    canary = Canary(Prefers(0), Prefers(2), 50.0)
    by_rules = CanaryRules(canary, Only(2), Only(0))
    for number in range(20):
        found = bound(by_rules, builders.fleet(), one(number))
        assert found.slot == (2 if canary.takes(one(number)) else 0)


def decided(
    text: str, registry: Registry | None = None, report: Callable[[PluginError], None] | None = None
) -> list[DecisionRecord]:
    """400 requests for two endpoints that take few: most of them wait if there is flow control."""
    config = load(text, need_endpoints=False, registry=registry)
    pipeline = build_pipeline(config, SimClock(), Random(1), registry=registry, on_plugin_error=report)
    for name in ("e0", "e1"):
        pipeline.handle(EndpointUp(builders.endpoint(name)))
    records: list[DecisionRecord] = []

    def handle(event: Any) -> None:
        records.extend(made for made in pipeline.handle(event) if isinstance(made, DecisionRecord))

    waiting, done = [builders.request("word " * 200, arrived=float(number)) for number in range(400)], 0
    for request in waiting:
        handle(RequestArrived(request))
    waited = len(waiting) - len(records)
    assert waited > 300 or "false" in text
    while done < len(records):
        handle(ResponseEnded(request_id=records[done].request.id, status=200))
        done += 1
    assert done == len(waiting)
    return records


SAME_TYPE = "canary: {policy: {type: cost-model, parameters: {decode: 0}}, percent: 30}\n"
QUEUE = "flowControl: {saturation: {type: concurrency-detector, maxConcurrency: 2}}\n"


def test_a_canary_of_the_same_type_decides_its_share_of_those_that_wait_and_is_told_apart() -> None:
    records, watch = decided(SAME_TYPE + QUEUE), ChooserMetrics(registry := exposition.Registry())
    by = Counter(record.policy for record in records)
    assert 80 <= by["canary:cost-model"] <= 160 and by.total() == by["canary:cost-model"] + by["cost-model"]
    canary = Canary(CostModel(), CostModel(), 30.0, label="canary:cost-model")
    assert all((record.policy == canary.label) is canary.takes(record.request) for record in records)
    watch.follow({}, canary)
    expired = replace(records[0], outcome=EXPIRED, endpoint="")
    watch.on_decisions([*records, expired])
    page = b"".join(exposition.page_of([registry])).decode()
    assert f'fairlead_canary_decisions_total{{side="canary"}} {by["canary:cost-model"]}' in page
    assert f'fairlead_canary_decisions_total{{side="primary"}} {by["cost-model"]}' in page


class Fails:
    """A filter that fails once there is a queue: late binding asks it, too."""

    name, stage = "fails", Stage.ABILITY

    def keep(self, request: Any, fleet: Any, cycle: Any) -> Any:
        if fleet.table.queue.max() >= 2.0:
            raise KeyError("filter")


class OwnFilter(Ranked):
    type = "own-filter"

    def __init__(self, params: Any, name: str, filters: Any = ()) -> None:
        super().__init__(params, name, [Fails(), *filters])

    def cost(self, request: Any, fleet: Any, cycle: Any) -> Any:
        return fleet.table.queue + 0.0


class FailsToRemember(Ranked):
    type = "fails-to-remember"

    def cost(self, request: Any, fleet: Any, cycle: Any) -> Any:
        return fleet.table.queue + 0.0

    def chosen(self, request: Any, slot: int, fleet: Any, cycle: Any) -> None:
        fleet.table.kv[slot] = 1.0


REGISTRY = Registry(
    lambda: [EntryPoint(cls.type, f"{__name__}:{cls.__name__}", GROUP) for cls in (OwnFilter, FailsToRemember)]
)


@pytest.mark.parametrize("flow", [QUEUE, "flowControl: {enabled: false}\n"])
@pytest.mark.parametrize(("name", "plugin"), [("own-filter", "fails"), ("fails-to-remember", "fails-to-remember")])
def test_what_fails_beside_its_choice_costs_no_request(name: str, plugin: str, flow: str) -> None:
    told: list[PluginError] = []
    records = decided(f"canary: {{policy: {name}, percent: 30}}\n{flow}", REGISTRY, told.append)
    assert len(records) == 400
    assert {error.plugin for error in told} <= {plugin}
    if name == "fails-to-remember":
        assert len(told) == sum(record.policy == "canary:fails-to-remember" for record in records)
        assert "wrote to kv of fleet.table, which are read only" in str(told[0])


def test_processes_that_number_alike_assign_differently() -> None:
    canary = Canary(CostModel(), CostModel(), 10.0)
    here, there = ([canary.takes(builders.request(id=n, arrived=at + n)) for n in range(3000)] for at in (0.1, 7.3))
    assert here != there and 200 < sum(here) < 400 and 200 < sum(there) < 400
    assert len({canary.takes(builders.request(id=n, arrived=n, session="s")) for n in range(50)}) == 1


def test_a_conversation_stays_on_one_side_from_its_first_turn_on() -> None:
    canary = Canary(CostModel(), CostModel(), 50.0)
    sides = []
    for n in range(50):
        first, second = (builders.request(id=n, opening=f"~{n}", session=named) for named in ("", "~later"))
        sides.append(canary.takes(first))
        assert canary.takes(second) == sides[-1]
    assert 10 < sum(sides) < 40
