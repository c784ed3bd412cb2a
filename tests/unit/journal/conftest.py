"""Journals of simulated runs: the recorder's and the writer's own code, in virtual time and without the thread."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fairlead.config.flow import build_desk
from fairlead.config.load import load
from fairlead.config.recorded import record
from fairlead.config.registry import build_policy
from fairlead.fleet.snapshot import Snapshots
from fairlead.io.journal.directory import Directory
from fairlead.io.journal.recorder import Recorder
from fairlead.io.journal.writer import Writer
from fairlead.sim.scenarios import headline
from fairlead.sim.simulation import Simulation
from fairlead.sim.world import replicas
from fairlead.wire.journal.records import Segment

#: What no journal may contain.
CANARY = "the-words-of-a-prompt"


class Recorded:
    """A run, its journal and what it decided."""

    def __init__(self, path: Path, simulation: Simulation, decisions: list[Any], recorder: Recorder) -> None:
        self.path = path
        self.simulation = simulation
        self.decisions = decisions
        self.recorder = recorder


@pytest.fixture(scope="session")
def record_run() -> Callable[..., Recorded]:
    """Simulate some seconds of the shared-prefix workload on four servers and write the journal of it."""

    def run(
        path: Path,
        policy: str = "policy: default",
        *,
        seconds: float = 10.0,
        rate: float = 12.0,
        turns: int = 100,
        midway: Callable[[Simulation, Recorder], None] | None = None,
        **sizes: Any,
    ) -> Recorded:
        config = load(policy, need_endpoints=False)
        made = build_policy(config)
        scenario = headline(rate, seconds, seed=3, servers=replicas(4, block_size=80))
        decisions: list[Any] = []
        recorder = Recorder()
        desk = build_desk(config, made)

        def watch(record: Any) -> None:
            decisions.append(record)
            recorder.take(record.at, record)

        simulation = Simulation(scenario, made, seed=5, watch=watch, desk=desk)
        pipeline = simulation.pipeline
        pipeline.snapshot = Snapshots()
        pipeline.fleet.ledger.ttl = config.ledger.lease_ttl
        pipeline.fleet.staleness = config.metrics.staleness
        head = Segment(run="0000cafe", scheduling=record(config), chance=pipeline._rng.getstate())
        bounds = {"max_bytes": 1 << 30, "segment_bytes": 64 << 20, "keep_oldest": False, "label": "t"} | sizes
        writer = Writer(recorder, Directory(path, **bounds), head, flush_s=0.0)
        writer._begin()
        handle, seen = pipeline.handle, [0]

        def recorded(event: Any) -> Any:
            recorder.take(simulation.kernel.now, event)
            seen[0] += 1
            if seen[0] % turns == 0:
                writer.turn(False)
            if midway is not None and seen[0] == 400:
                midway(simulation, recorder)
            return handle(event)

        pipeline.handle = recorded  # type: ignore[method-assign]
        simulation.run()
        writer.turn(True)
        return Recorded(path, simulation, decisions, recorder)

    return run


@pytest.fixture(scope="session")
def recorded(record_run: Callable[..., Recorded], tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """About 120 requests under the default policy."""
    return record_run(tmp_path_factory.mktemp("journal"))
