"""Policies that remember their picks hear of each request once: when it is sent, and where to."""

import pytest

from fairlead.core.records import DecisionRecord
from fairlead.core.request import Request
from fairlead.core.view import FleetView
from fairlead.lab.simulator.build import ScenarioSpec, build
from fairlead.lab.simulator.run import simulate
from fairlead.plugins.policies.by_load import DynamoLinear

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
