"""What runs is complete when it is made: nobody assigns to the attributes of another object afterwards."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import Struct

import fairlead
from fairlead.core.scheduler import Pipeline
from fairlead.gateway.driver import Driver
from fairlead.lab.simulator.capture import Captured
from fairlead.lab.simulator.journal import Faults, JournaledDecision
from fairlead.lab.simulator.replay import Compared, Replayed
from fairlead.lab.simulator.world import Job, Scenario
from fairlead.lab.workload.record import Workload
from fairlead.server.observe.component_metrics import WarmingCounts
from fairlead.server.remote.messages import State
from fairlead.server.sdk.server import SchedulerStats

SOURCES = Path(fairlead.__file__).parent
FOLDERS = ("server/live", "server/sdk", "lab/simulator")
#: Tallies and records: plain data, filled in by the code that follows what happens. By the name of the variable.
RECORDS: dict[str, tuple[type[Struct], ...]] = {
    "_stats": (SchedulerStats,),
    "counts": (WarmingCounts,),
    "faults": (Faults,),
    "job": (Job,),
    "made": (Captured, Scenario, Workload),
    "mine": (JournaledDecision,),
    "result": (Replayed, Compared),
    "scenario": (Scenario,),
    "state": (State,),
    "stats": (SchedulerStats,),
}


def assigned(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, last name before the attribute, attribute) of each assignment to an attribute of anything but `self`."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
            continue
        owner = node.value
        if isinstance(owner, ast.Name) and owner.id in ("self", "cls"):
            continue
        name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
        yield node.lineno, name, node.attr


def foreign(source: str) -> list[tuple[int, str]]:
    return [
        (line, f"{name or '…'}.{attribute}")
        for line, name, attribute in assigned(source)
        if not any(attribute in record.__struct_fields__ for record in RECORDS.get(name, ()))
    ]


def files() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((SOURCES / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SOURCES)))
def test_no_attribute_of_another_object_is_assigned(path: Path) -> None:
    assert foreign(path.read_text()) == []


@pytest.mark.parametrize(
    "statement",
    [
        "pipeline.policy = policy",
        "self.driver.judge = judge",
        "core.fleet.ledger.ttl += 1.0",
        "watch.scrapes: Totals = totals",
        "kept.fallback, kept.able = fallback, able",
        "for host.max_body in limits: pass",
        "gauge.child().value = 1.0",
        "made.policy = policy",
    ],
)
def test_it_would_be_seen(statement: str) -> None:
    assert foreign(statement)


def test_what_an_object_does_with_itself_is_its_own() -> None:
    assert foreign("self.policy = policy\nself._left -= 1\njob.server = 2\nresult.events += 1") == []


def test_records_are_data() -> None:
    assert not issubclass(Pipeline, Struct) and not issubclass(Driver, Struct)
    assert all(issubclass(record, Struct) for records in RECORDS.values() for record in records)
