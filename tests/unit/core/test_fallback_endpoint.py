"""The fallback endpoint, and a lease that moves to it."""

from math import inf
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from fairlead.core.endpoint import Endpoint
from fairlead.core.events import EndpointDown, EndpointUp, FirstTokenSeen, RequestArrived, RequestMoved, ResponseEnded
from fairlead.core.fleet import Fleet
from fairlead.core.instructions import Record, Route
from fairlead.core.policy import Context, Picked, Policy
from fairlead.core.profile import in_order, runner_up
from fairlead.core.records import Forecast, OutcomeRecord, Trace
from fairlead.core.request import Request
from fairlead.core.scheduler import Pipeline
from fairlead.core.table import EndpointTable
from fairlead.core.tokens import TokenEstimator
from fairlead.core.view import FleetView
from fairlead.plugins.policies.cost_model import CostModel


def fallback(pick: Picked, table: EndpointTable) -> str:
    """Address of the fallback endpoint; empty = none."""
    slot = runner_up(pick, table)
    endpoint = table.endpoints[slot] if slot >= 0 else None
    return endpoint.address if endpoint is not None else ""


def table(*addresses: str) -> Fleet:
    fleet = Fleet()
    for number, address in enumerate(addresses):
        fleet.up(Endpoint(id=f"e{number}", address=address))
    return fleet


@pytest.mark.parametrize("column", [list, np.array])
def test_it_is_the_best_that_is_left(column) -> None:
    fleet = table("a:1", "b:1", "c:1", "d:1")
    total = column([-1.0, -2.0, -inf, -1.5])
    assert fallback(Picked(0, trace=Trace(endpoints=fleet.table.ids, total=total)), fleet.table) == "d:1"
    assert fallback(Picked(3, trace=Trace(endpoints=fleet.table.ids, total=total)), fleet.table) == "a:1"
    assert (
        fallback(Picked(0, prefill_slot=3, trace=Trace(endpoints=fleet.table.ids, total=total)), fleet.table) == "b:1"
    ), "not who prefills"
    assert list(total) == [-1.0, -2.0, -inf, -1.5]
    only = column([-1.0, -inf, -inf, -inf])
    assert fallback(Picked(0, trace=Trace(endpoints=fleet.table.ids, total=only)), fleet.table) == ""


def test_in_overload_it_is_the_least_loaded_of_those_that_can() -> None:
    fleet = table("a:1", "b:1", "c:1", "d:1")
    fleet.table.queue[:4] = [1, 2, 3, 0]
    assert fallback(Picked(3, trace=Trace(endpoints=fleet.table.ids, outcome="fallback")), fleet.table) == "a:1"
    able = np.zeros(len(fleet.table), dtype=bool)
    able[[2, 3]] = True
    assert (
        fallback(Picked(3, trace=Trace(endpoints=fleet.table.ids, outcome="fallback", candidates=able)), fleet.table)
        == "c:1"
    )


def test_no_reasons_or_no_other_endpoint_is_no_fallback() -> None:
    fleet = table("a:1", "b:1")
    ids = fleet.table.ids
    assert fallback(Picked(0), fleet.table) == ""
    assert fallback(Picked(0, trace=Trace(endpoints=ids, total=np.array([1.0, np.nan]))), fleet.table) == ""
    assert fallback(Picked(0, trace=Trace(endpoints=("e1",), total=[1.0])), fleet.table) == "", (
        "columns of another's making"
    )
    assert fallback(Picked(0, trace=Trace(endpoints=ids, total=[1.0, 0.5])), fleet.table) == "b:1"
    alone = table("a:1").table
    assert fallback(Picked(0, trace=Trace(endpoints=alone.ids, total=[1.0])), alone) == ""


def test_who_decided_may_name_it() -> None:
    fleet = table("a:1", "b:1", "c:1")
    trace = Trace(endpoints=fleet.table.ids, total=[3.0, 2.0, 1.0])
    assert fallback(Picked(0, trace=trace, fallback_slot=2), fleet.table) == "c:1"
    assert fallback(Picked(0, fallback_slot=1), fleet.table) == "b:1"
    assert fallback(Picked(0, prefill_slot=1, fallback_slot=1), fleet.table) == "", "not who prefills"


def test_the_ones_behind_it_come_in_the_order_of_their_ratings() -> None:
    fleet = table("a:1", "b:1", "c:1", "d:1", "e:1")
    trace = Trace(endpoints=fleet.table.ids, total=[1.0, 5.0, -inf, 4.0, 3.0])

    def order(pick: Picked, most: int) -> list[int]:
        return in_order(pick, runner_up(pick, fleet.table), fleet.table, most)

    assert [order(Picked(1, trace=trace), most) for most in (2, 3, 9)] == [[1, 3], [1, 3, 4], [1, 3, 4, 0]]
    assert order(Picked(1, trace=trace, fallback_slot=0), 3) == [1, 0, 3], "who decided named the first of them"
    assert order(Picked(1, prefill_slot=3, trace=trace), 3) == [1, 4, 0], "not who prefills"
    assert order(Picked(1), 3) == [1], "nobody rated them"
    assert order(Picked(3, trace=Trace(endpoints=fleet.table.ids)), 2)[0] == 3


def test_a_route_names_as_many_as_it_is_to() -> None:
    assert Rig().send(1).destination == ""
    route = Rig(endpoints=4, alternatives=2).send(1)
    named = route.destination.split(",")
    assert named[:2] == [route.endpoint.address, route.fallback] and len({*named}) == 3
    alone = Rig(endpoints=1, alternatives=2).send(1)
    assert alone.destination == alone.endpoint.address


class Rig:
    def __init__(self, endpoints: int = 3, alternatives: int = 0, policy: Policy | None = None) -> None:
        self.clock = SimpleNamespace(now=100.0, time=lambda: self.clock.now)
        fleet, tokens, policy = Fleet(), TokenEstimator(), policy or CostModel()
        self.pipeline = Pipeline(self.clock, Random(1), fleet, policy, tokens, alternatives=alternatives)  # type: ignore[arg-type]
        for number in range(endpoints):
            self.pipeline.handle(EndpointUp(Endpoint(id=f"e{number}", address=f"10.0.0.{number}:80")))

    def send(self, number: int, stream: bool = True) -> Route:
        request = Request(id=number, model="m", prompt_tokens=100, stream=stream, arrived=self.clock.now)
        (route,) = (i for i in self.pipeline.handle(RequestArrived(request)) if isinstance(i, Route))
        self.pipeline.validate()
        return route

    def feed(self, event) -> list[OutcomeRecord]:
        self.clock.now += 0.1
        found = [i for i in self.pipeline.handle(event) if isinstance(i, Record)]
        self.pipeline.validate()
        return found

    def held(self) -> dict[str, int]:
        table = self.pipeline.fleet.table
        return {e.address: int(table.inflight[slot]) for slot, e in table.slots() if table.inflight[slot]}


class Pairs:
    """The decoders take turns, with one server for prefill."""

    name = "pairs"
    asked = -1

    def choose(self, request: Request, fleet: FleetView, context: Context) -> Picked:
        self.asked += 1
        return Picked(self.asked % 3, prefill_slot=3, fallback_slot=(self.asked + 1) % 3)


@pytest.mark.parametrize("status", [200, 500])
def test_the_prefill_server_of_a_pair_is_to_blame_if_both_decoders_fail(status: int) -> None:
    rig = Rig(4, policy=Pairs())
    for number in range(1, 4):
        route = rig.send(number)
        rig.feed(RequestMoved(number, route.fallback, first_token=status == 200))
        rig.feed(ResponseEnded(request_id=number, status=status))
    failures, until = rig.pipeline.fleet.table.errors, rig.pipeline.fleet.table.ejected_until
    assert (failures[3], until[3] > rig.clock.now) == ((0.0, False) if status == 200 else (3.0, True))
    assert not (until[:3] > rig.clock.now).any()


@pytest.mark.parametrize("stream", [True, False])
def test_the_lease_goes_where_the_request_went(stream: bool) -> None:
    rig = Rig()
    route = rig.send(1, stream)
    assert route.fallback not in ("", route.endpoint.address)
    assert rig.held() == {route.endpoint.address: 1}
    table = rig.pipeline.fleet.table
    kappa = table.endpoints, rig.pipeline.fleet.predictor.kappa.copy()
    for _ in range(2):
        assert rig.feed(RequestMoved(1, route.fallback)) == []
        assert rig.held() == {route.fallback: 1}
    chosen = table.slot(route.endpoint.id)
    assert chosen is not None and table.errors[chosen] == 1, "counted once"
    rig.feed(FirstTokenSeen(1))
    (outcome,) = rig.feed(ResponseEnded(request_id=1, status=200, ttft_ms=300.0, duration_ms=900.0))
    assert (outcome.endpoint != route.endpoint.id, outcome.unreached, outcome.status) == (True, route.endpoint.id, 200)
    assert rig.held() == {} and len(rig.pipeline.fleet.ledger) == 0
    assert (rig.pipeline.fleet.predictor.kappa == kappa[1]).all(), "nothing is learned of it"
    assert table.errors[chosen] == 1, "an answer from elsewhere is none of its own"


@pytest.mark.parametrize("again", [False, True], ids=["", "another one has its slot"])
def test_one_whose_endpoint_left_goes_where_the_gateway_repeats_it(again: bool) -> None:
    rig = Rig()
    route = rig.send(1)
    rig.feed(EndpointDown(route.endpoint.id))
    if again:
        rig.feed(EndpointUp(Endpoint("new", "10.0.0.9:8000")))
    there = "10.0.0.9:8000" if again else route.fallback
    assert rig.feed(RequestMoved(1, "nobody:1")) == [] and rig.held() == {}
    rig.feed(RequestMoved(1, there))
    assert rig.held() == {there: 1}
    assert not rig.pipeline.fleet.table.errors.any(), "the one that left has no successor to blame"
    (outcome,) = rig.feed(ResponseEnded(request_id=1, status=200, ttft_ms=300.0, duration_ms=900.0))
    answered = next(e.id for _, e in rig.pipeline.fleet.table.slots() if e.address == there)
    assert (outcome.endpoint, outcome.unreached, outcome.cause) == (answered, route.endpoint.id, "natural")
    assert outcome.forecast == Forecast() and rig.held() == {}


def test_a_fallback_endpoint_that_fails_too_is_to_blame_as_well() -> None:
    rig = Rig()
    route = rig.send(1)
    rig.feed(RequestMoved(1, route.fallback))
    (outcome,) = rig.feed(ResponseEnded(request_id=1, status=503))
    assert (outcome.status, outcome.unreached) == (503, route.endpoint.id)
    assert sorted(rig.pipeline.fleet.table.errors[:3]) == [0, 1, 1]


def test_an_endpoint_that_cannot_be_reached_is_soon_avoided() -> None:
    rig = Rig()
    gone = rig.send(1).endpoint.id
    moved, number = 0, 1
    while moved < 3:
        entry = rig.pipeline.requests.get(number)
        if entry is not None and entry.lease is not None and entry.lease.endpoint_id == gone:
            other = next(e.address for _, e in rig.pipeline.fleet.table.slots() if e.id != gone)
            rig.feed(RequestMoved(number, other))
            moved += 1
        number += 1
        rig.send(number)
    slot = rig.pipeline.fleet.table.slot(gone)
    assert slot is not None and rig.pipeline.fleet.table.ejected_until[slot] > rig.clock.now


@pytest.mark.parametrize("address", ["nobody:1", ""])
def test_an_address_of_nobody_moves_nothing(address: str) -> None:
    rig = Rig()
    route = rig.send(1)
    rig.feed(RequestMoved(1, address))
    rig.feed(RequestMoved(99, route.fallback))
    rig.feed(RequestMoved(1, route.endpoint.address))
    assert rig.held() == {route.endpoint.address: 1}
    (outcome,) = rig.feed(ResponseEnded(request_id=1, status=200))
    assert outcome.unreached == ""


@pytest.mark.parametrize(("status", "ttft_ms"), [(200, 300.0), (503, -1.0), (404, -1.0)])
def test_only_an_answer_has_a_first_token(status: int, ttft_ms: float) -> None:
    rig = Rig()
    rig.send(1)
    (outcome,) = rig.feed(ResponseEnded(request_id=1, status=status, ttft_ms=300.0, duration_ms=900.0))
    assert (outcome.ttft_ms, outcome.duration_ms) == (ttft_ms, 900.0)
