"""Policies that remember their picks hear of each request once: when it is sent, and where to."""

from random import Random

import pytest

from fairlead.compat.load import load
from fairlead.config.building import build_pipeline
from fairlead.core.events import EndpointUp, Reconfigured, RequestArrived
from fairlead.core.instructions import Route
from fairlead.core.records import DecisionRecord
from fairlead.core.request import Request
from fairlead.core.view import FleetView
from fairlead.lab.simulator.build import ScenarioSpec, build
from fairlead.lab.simulator.run import simulate
from fairlead.plugins.policies.by_load import DynamoLinear
from fairlead.testing import SimClock, builders

pytestmark = pytest.mark.simulation


@pytest.mark.parametrize("canary", ["", "canary: {policy: dynamo-linear, percent: 40}\n"])
@pytest.mark.parametrize("flow", ["", "flowControl: {}\n", "flowControl: {limits: {band: {requests: 20}}}\n"])
def test_they_hear_of_each_request_that_is_sent(monkeypatch: pytest.MonkeyPatch, flow: str, canary: str) -> None:
    told: list[tuple[int, str]] = []
    waited: list[float] = []
    by: set[str] = set()
    sent: list[tuple[int, str]] = []

    def chosen(self: DynamoLinear, request: Request, slot: int, fleet: FleetView, cycle: object) -> None:
        told.append((request.id, fleet.table.ids[slot]))

    def watch(record: object) -> None:
        if isinstance(record, DecisionRecord) and record.endpoint:
            sent.append((record.request.id, record.endpoint))
            waited.append(record.queued_ms)
            by.add(record.policy)

    monkeypatch.setattr(DynamoLinear, "chosen", chosen)
    scenario = build(ScenarioSpec(name="overload", source="overload", head=250, speedup=3.0))
    simulate(scenario, f"policy: dynamo-linear\n{flow}{canary}", watch=watch)
    assert told == sent
    assert by == {"dynamo-linear", *(["canary:dynamo-linear"] if canary else [])}
    assert (sum(ms > 0.0 for ms in waited) > 20) is bool(flow), "some of them had to wait"


def test_they_also_hear_of_what_is_sent_while_another_scheduler_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, str]] = []

    def chosen(self: DynamoLinear, request: Request, slot: int, fleet: FleetView, cycle: object) -> None:
        told.append((request.id, fleet.table.ids[slot]))

    monkeypatch.setattr(DynamoLinear, "chosen", chosen)
    text = "policy: dynamo-linear\n"
    pipeline = build_pipeline(load(text, need_endpoints=False), SimClock(), Random(1))
    for name in ("e0", "e1"):
        pipeline.handle(EndpointUp(builders.endpoint(name)))
    sent = []
    for more in ("", "scheduler: {address: '127.0.0.1:9'}\n", ""):
        pipeline.handle(Reconfigured(load(text + more, need_endpoints=False)))
        for _ in range(3):
            (route, *_) = pipeline.handle(RequestArrived(builders.request("word " * 100)))
            assert isinstance(route, Route)
            sent.append((route.request_id, route.endpoint.id))
    assert told == sent
