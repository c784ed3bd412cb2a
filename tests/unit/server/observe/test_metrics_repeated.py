"""Requests that went elsewhere because their endpoint could not be reached."""

from fairlead.core.records import OutcomeRecord
from fairlead.core.request import Request
from fairlead.server.observe.fleet_gauges import FleetStatus
from fairlead.server.observe.metrics import SchedulerMetrics


def test_they_count_for_the_endpoint_that_could_not_be_reached() -> None:
    metrics = SchedulerMetrics(lambda: 1.0, FleetStatus)
    for unreached in ("", "ns/a", "ns/a", "ns/b"):
        request = Request(id=1, arrived=0.0, model="m")
        metrics.on_outcomes([OutcomeRecord(request=request, at=1.0, endpoint="ns/c", status=200, unreached=unreached)])
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith("fairlead_repeated_total")]
    assert lines == ['fairlead_repeated_total{endpoint="ns/a"} 2', 'fairlead_repeated_total{endpoint="ns/b"} 1']
