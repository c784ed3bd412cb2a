"""Journals of simulated runs: the recorder's and the writer's own code, in virtual time and without the thread."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from fairlead import __version__
from fairlead.compat.load import load
from fairlead.compat.recorded import record
from fairlead.core.reports import SharedFleet
from fairlead.lab.simulator.scenarios import headline
from fairlead.lab.simulator.simulation import Simulation
from fairlead.lab.simulator.world import Replica, replicas
from fairlead.plugins.policies.by_load import LeastRequests
from fairlead.server import plugin_watch
from fairlead.server.journal.recorder import Recorder
from fairlead.server.journal.records import Segment
from fairlead.server.journal.writer import Directory, Writer

#: What no journal may contain.
CANARY = "the-words-of-a-prompt"


class SharedSimulation(Simulation):
    """Of a scheduler that reports to others."""

    fleet_type = SharedFleet


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

    def make(
        path: Path,
        policy: str = "policy: default\nflowControl: {enabled: false}",
        *,
        seconds: float = 10.0,
        rate: float = 12.0,
        turns: int = 100,
        midway: Mapping[int, Callable[[Simulation], None]] = {},
        sample: float = 1.0,
        model: str = "",
        fields: Mapping[str, Any] = {},
        shared: bool = False,
        run: str = "0000cafe",
        servers: Sequence[Replica] = replicas(4, block_size=80),
        **sizes: Any,
    ) -> Recorded:
        config = load(policy, need_endpoints=False)
        scenario = headline(rate, seconds, seed=3, servers=servers)
        scenario.workload.records = [
            msgspec.structs.replace(r, model=model, **fields) for r in scenario.workload.records
        ]
        decisions: list[Any] = []
        recorder = Recorder()

        def watch(record: Any) -> None:
            decisions.append(record)
            recorder.take(record.at, record)

        scenario = msgspec.structs.replace(
            scenario, world=msgspec.structs.replace(scenario.world, staleness_s=config.metrics.staleness)
        )
        simulation = (SharedSimulation if shared else Simulation)(scenario, config, seed=5, watch=watch, snapshots=True)
        pipeline = simulation.pipeline
        chance = Random("pipeline/5").getstate()
        of_run = {"run": run, "program": __version__, "sample": sample, "shared": shared}
        head = Segment(scheduling=record(config), chance=chance, **of_run)
        bounds = {"max_bytes": 1 << 30, "segment_bytes": 64 << 20, "keep_oldest": False, "label": "t"} | sizes
        writer = Writer(recorder, Directory(path, **bounds), head, flush_s=0.0)
        writer.begin()
        handle, seen = pipeline.handle, [0]

        def recorded(event: Any) -> Any:
            recorder.take(simulation.kernel.now, event)
            seen[0] += 1
            if seen[0] % turns == 0:
                writer.turn(False)
            found = handle(event)
            if seen[0] in midway:
                simulation.kernel.call_at(simulation.kernel.now, midway[seen[0]], simulation)
            return found

        pipeline.handle = recorded  # type: ignore[method-assign]
        simulation.run()
        writer.turn(True)
        return Recorded(path, simulation, decisions, recorder)

    return make


@pytest.fixture
def never_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy `least-requests` does not return, and is interrupted soon."""

    def endless(self: Any, *given: Any) -> Any:
        while True:
            sum(range(10))

    monkeypatch.setattr(plugin_watch, "ALONE_S", 0.1)
    monkeypatch.setattr(LeastRequests, "cost", endless)


@pytest.fixture(scope="session")
def recorded(record_run: Callable[..., Recorded], tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """About 120 requests under the default policy."""
    return record_run(tmp_path_factory.mktemp("journal"))
