"""Policies that remember their picks hear of each request once: when it is sent, and where to."""

import pytest

from fairlead.core.records import DecisionRecord
from fairlead.core.request import Request
from fairlead.core.view import FleetView
from fairlead.lab.simulator.build import ScenarioSpec, build
from fairlead.lab.simulator.run import simulate
from fairlead.plugins.policies.by_load import DynamoLinear

pytestmark = pytest.mark.simulation


@pytest.mark.parametrize("flow", ["", "flowControl: {}\n", "flowControl: {limits: {band: {requests: 20}}}\n"])
def test_they_hear_of_each_request_that_is_sent(monkeypatch: pytest.MonkeyPatch, flow: str) -> None:
    told: list[tuple[int, str]] = []
    waited: list[float] = []
    sent: list[tuple[int, str]] = []

    def chosen(self: DynamoLinear, request: Request, slot: int, fleet: FleetView, cycle: object) -> None:
        told.append((request.id, fleet.table.ids[slot]))

    def watch(record: object) -> None:
        if isinstance(record, DecisionRecord) and record.endpoint:
            sent.append((record.request.id, record.endpoint))
            waited.append(record.queued_ms)

    monkeypatch.setattr(DynamoLinear, "chosen", chosen)
    scenario = build(ScenarioSpec(name="overload", source="overload", head=250, speedup=3.0))
    simulate(scenario, f"policy: dynamo-linear\n{flow}", watch=watch)
    assert told == sent
    assert (sum(ms > 0.0 for ms in waited) > 20) is bool(flow), "some of them had to wait"
