"""`bench/autoscale.py`'s pool, which is made larger and smaller while it works."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fairlead.core.demand import Objective
from fairlead.lab.simulator.result import Summary, summarise

SECONDS, SHORT, SERVERS, FIRST = 300.0, 60.0, 6, 2
OBJECTIVE = Objective(startup_s=20.0)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "bench")
    return importlib.import_module("_autoscaling")


def ran(bench: Any, signal: Callable[[Any], int], seconds: float = SECONDS) -> tuple[Any, Summary]:
    scenario = bench.day("groups", seconds, SERVERS)
    pool = bench.Autoscaler(scenario, "policy: default\n", signal, first=FIRST, least=2, objective=OBJECTIVE)
    return pool, summarise(pool.run())


def test_by_demand_fewer_miss_the_objective_and_it_takes_about_as_many_servers(bench: Any) -> None:
    pool, summary = ran(bench, bench.by_demand)
    rival, other = ran(bench, bench.by_queue(0.2))
    assert summary.failed == summary.shed == other.failed == other.shed == 0, "who goes ends what it has"
    assert 1.0 - summary.goodput < 0.5 * (1.0 - other.goodput)
    assert pool.server_seconds < 1.1 * rival.server_seconds
    assert 2 * SECONDS < pool.server_seconds < SERVERS * SECONDS


def test_a_pool_stays_within_its_bounds_whatever_is_asked_for(bench: Any) -> None:
    least, _ = ran(bench, lambda pool: 0, SHORT)
    most, _ = ran(bench, lambda pool: 1000, SHORT)
    assert len(least.serving) == 2
    assert len(most.serving) == SERVERS


def test_memory_is_a_signal_too(bench: Any) -> None:
    greedy, _ = ran(bench, bench.by_memory(0.05), SHORT)
    assert len(greedy.serving) > FIRST
