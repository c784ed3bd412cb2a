"""Load and availability filters: queue-depth, memory-pressure, health."""

from random import Random

import numpy as np
import pytest

from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.fleet import EJECT_SECONDS, Fleet
from fairlead.core.policy import Context, Cycle, Filter, Stage
from fairlead.core.request import Request
from fairlead.plugins.filters.availability import Health, HealthParams
from fairlead.plugins.filters.load import MemoryPressure, MemoryPressureParams, QueueDepth, QueueDepthParams

REQUEST = Request(id=1, arrived=0.0)


def fleet_with(waiting: list[float] | None = None, kv: list[float] | None = None) -> Fleet:
    fleet = Fleet()
    for number in range(len(waiting or kv or [])):
        fleet.up(Endpoint(f"e{number}", f"10.0.0.{number}:8000"))
        sample = Sample(waiting=waiting[number] if waiting else 0.0, running=0.0, kv_usage=kv[number] if kv else 0.0)
        fleet.sampled(f"e{number}", 0.0, 0.0, sample)
    return fleet


def kept(plugin: Filter, fleet: Fleet, now: float = 0.0) -> list[int]:
    mask = plugin.keep(REQUEST, fleet, Cycle(Context(now, Random(0))))
    assert mask is None or (mask.dtype == np.bool_ and not mask.all()), "`None` says it cheaper"
    return [slot for slot, _ in fleet.table.slots() if mask is None or mask[slot]]


@pytest.mark.parametrize(
    ("params", "waiting", "expected"),
    [
        (QueueDepthParams(), [0, 49, 50, 51], [0, 1]),
        (QueueDepthParams(), [0, 49], [0, 1]),
        (QueueDepthParams(max_queue_length=200), [199, 200, 50], [0, 2]),
        (QueueDepthParams(max_queue_length=1), [0, 1], [0]),
        (QueueDepthParams(), [50, 60], []),
    ],
)
def test_queue_depth(params: QueueDepthParams, waiting: list[float], expected: list[int]) -> None:
    plugin = QueueDepth(params)
    assert kept(plugin, fleet_with(waiting)) == expected
    assert plugin.stage is not Stage.ABILITY


def test_queue_depth_counts_what_was_sent_since_the_scrape() -> None:
    fleet = fleet_with([49, 48])
    fleet.charge(Request(id=1, arrived=0.1), 0, 0.1, 0, 0.0)
    assert kept(QueueDepth(QueueDepthParams()), fleet) == [1]


@pytest.mark.parametrize(
    ("params", "kv", "expected"),
    [
        (MemoryPressureParams(), [0.0, 0.86, 0.9499, 0.95, 1.0], [0, 1, 2]),
        (MemoryPressureParams(), [0.0, 0.94], [0, 1]),
        (MemoryPressureParams(max_kv_utilization=0.5), [0.4, 0.5, 0.6], [0]),
        (MemoryPressureParams(), [0.96, 0.99], []),
    ],
)
def test_memory_pressure(params: MemoryPressureParams, kv: list[float], expected: list[int]) -> None:
    plugin = MemoryPressure(params)
    assert kept(plugin, fleet_with(kv=kv)) == expected
    assert plugin.stage is not Stage.ABILITY


def test_an_old_reading_does_not_speak_against_an_endpoint() -> None:
    fleet = fleet_with(kv=[0.99, 0.99, 0.1])
    fleet.sampled("e1", 4.0, 4.0, Sample(kv_usage=0.99))
    plugin = MemoryPressure(MemoryPressureParams(check_interval="5s"))
    assert kept(plugin, fleet, now=4.5) == [2]
    assert kept(plugin, fleet, now=5.5) == [0, 2]
    assert kept(plugin, fleet, now=9.5) == [0, 1, 2]


def test_demotion_begins_above_85_percent_and_takes_half_at_the_limit() -> None:
    fleet = fleet_with(kv=[0.0, 0.85, 0.9, 0.95, 1.0])
    factor = MemoryPressure(MemoryPressureParams()).demote(REQUEST, fleet, Cycle(Context(0.0, Random(0))))
    assert factor is not None
    assert factor.tolist() == pytest.approx([1.0, 1.0, 0.75, 0.5, 0.5])


@pytest.mark.parametrize("kv", [[0.0, 0.85], [0.2, 0.3]])
def test_no_demotion_below(kv: list[float]) -> None:
    plugin = MemoryPressure(MemoryPressureParams())
    assert plugin.demote(REQUEST, fleet_with(kv=kv), Cycle(Context(0.0, Random(0)))) is None


def test_a_limit_below_the_soft_one_demotes_nobody_that_is_kept() -> None:
    plugin = MemoryPressure(MemoryPressureParams(max_kv_utilization=0.5))
    factor = plugin.demote(REQUEST, fleet_with(kv=[0.5, 0.49, 0.7]), Cycle(Context(0.0, Random(0))))
    assert factor is not None
    assert factor.tolist() == [1.0, 1.0, 0.5]


def test_health_removes_after_three_failed_scrapes() -> None:
    fleet = fleet_with(kv=[0.0, 0.0])
    plugin = Health(HealthParams())
    for failures, expected in [(1, [0, 1]), (2, [0, 1]), (3, [0]), (4, [0])]:
        fleet.scrape_failed("e1", 1.0)
        assert kept(plugin, fleet) == expected, failures
    fleet.sampled("e1", 2.0, 2.0, Sample())
    assert kept(plugin, fleet) == [0, 1]


def test_an_answer_without_metrics_is_no_illness() -> None:
    """404, another program's page: what is sent there may well be served."""
    fleet = fleet_with(kv=[0.0, 0.0])
    plugin = Health(HealthParams())
    for _ in range(5):
        fleet.scrape_failed("e1", 1.0, answered=True)
    assert kept(plugin, fleet) == [0, 1]
    for _ in range(3):
        fleet.scrape_failed("e1", 1.0)
    assert kept(plugin, fleet) == [0]
    fleet.scrape_failed("e1", 1.0, answered=True)
    assert kept(plugin, fleet) == [0, 1], "it is there again"


def test_health_removes_for_a_moment_after_failed_responses() -> None:
    fleet = fleet_with(kv=[0.0, 0.0])
    plugin = Health(HealthParams())
    for _ in range(3):
        assert kept(plugin, fleet, now=10.0) == [0, 1]
        fleet.answered(1, ok=False, now=10.0)
    assert kept(plugin, fleet, now=10.0) == [0]
    assert kept(plugin, fleet, now=10.0 + EJECT_SECONDS - 0.1) == [0]
    assert kept(plugin, fleet, now=10.0 + EJECT_SECONDS) == [0, 1]
    fleet.answered(1, ok=False, now=20.0)
    assert kept(plugin, fleet, now=20.0) == [0], "one more failure at once"
    fleet.answered(1, ok=True, now=20.1)
    assert kept(plugin, fleet, now=20.1) == [0, 1]


def test_health_never_removes_the_last() -> None:
    fleet = fleet_with(kv=[0.0, 0.0, 0.0])
    plugin = Health(HealthParams(failed_scrapes=1))
    fleet.scrape_failed("e0", 1.0)
    fleet.scrape_failed("e1", 1.0)
    assert kept(plugin, fleet) == [2]
    fleet.scrape_failed("e2", 1.0)
    assert kept(plugin, fleet) == [0, 1, 2]


def test_health_does_not_count_the_departed() -> None:
    fleet = fleet_with(kv=[0.0, 0.0, 0.0])
    plugin = Health(HealthParams(failed_scrapes=1))
    fleet.scrape_failed("e0", 1.0)
    fleet.scrape_failed("e1", 1.0)
    fleet.down("e2")
    assert kept(plugin, fleet) == [0, 1], "the well one left: the ill are the last"
