"""What goes wrong during a run, and when the scheduler notices."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fairlead.model.events import EndpointDown, EndpointUp
from fairlead.sim.world import WARM_UP, Fault

if TYPE_CHECKING:
    from fairlead.sim.simulation import Simulation


class Faults:
    """Sets the timers of all faults. Times count from the workload's start."""

    def __init__(self, simulation: "Simulation", faults: Sequence[Fault]) -> None:
        self._sim = simulation
        self._faults = faults
        for fault in faults:
            if not 0 <= fault.replica < len(simulation.servers):
                raise ValueError(f"fault {fault.kind!r} names replica {fault.replica} of {len(simulation.servers)}")

    def plan(self) -> None:
        kernel = self._sim.kernel
        begin = kernel.now + WARM_UP
        for fault in self._faults:
            kernel.call_at(begin + fault.at_s, self._begin, fault)
            if fault.for_s > 0:
                kernel.call_at(begin + fault.at_s + fault.for_s, self._end, fault)

    def _begin(self, fault: Fault) -> None:
        server = self._sim.servers[fault.replica]
        if fault.kind == "slow":
            server.slow(fault.factor)
        elif fault.kind == "down":
            self._crash(fault.replica)
        else:
            server.freeze(fault.kind)

    def _end(self, fault: Fault) -> None:
        server = self._sim.servers[fault.replica]
        if fault.kind == "slow":
            server.slow(1.0)
        elif fault.kind == "down":
            server.restart()
            self._later(self._rejoined, fault.replica)
        else:
            server.freeze("")

    def _crash(self, index: int) -> None:
        sim = self._sim
        sim.servers[index].crash()
        for job in sim.jobs:
            if job.leg()[0] == index and job.leg()[1] is not None:
                sim.broken(job, "connection lost", status=0)
        self._later(self._gone, index)

    def _later(self, callback: object, index: int) -> None:
        sim = self._sim
        sim.kernel.call_at(sim.kernel.now + sim.world.detect_s, callback, index)  # type: ignore[arg-type]

    def _gone(self, index: int) -> None:
        server = self._sim.servers[index]
        if not server.up:
            self._sim.feed(EndpointDown(server.endpoint.id))

    def _rejoined(self, index: int) -> None:
        server = self._sim.servers[index]
        if server.up:
            self._sim.feed(EndpointUp(server.endpoint))
