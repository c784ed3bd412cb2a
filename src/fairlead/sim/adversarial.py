"""Scenarios that break routers: the adversarial workloads, and faults of servers under the shared-prefix one."""

from collections.abc import Callable

from fairlead.sim.scenarios import headline
from fairlead.sim.world import Fault, Scenario, replicas
from fairlead.workload import adversarial as made
from fairlead.workload.record import Workload


def _plain(workload: Workload, block_size: int = made.BLOCK) -> Scenario:
    return Scenario(name=workload.name, workload=workload, replicas=replicas(8, block_size=block_size))


def _faulty(name: str, *faults: Fault, rate: float = 9.0, seconds: float = 120.0) -> Scenario:
    scenario = headline(rate, seconds)
    scenario.name = name
    scenario.faults = faults
    return scenario


def restart() -> Scenario:
    """One server dies at 40 s, its cache with it, and is back 30 s later."""
    return _faulty("restart", Fault(kind="down", replica=2, at_s=40.0, for_s=30.0))


def frozen_metrics() -> Scenario:
    """All metrics pages show what they showed at 20 s, for 60 s."""
    return _faulty("frozen-metrics", *(Fault(kind="freeze", replica=i, at_s=20.0, for_s=60.0) for i in range(8)))


def mute_metrics() -> Scenario:
    """No metrics page answers between 20 s and 80 s."""
    return _faulty("mute-metrics", *(Fault(kind="mute", replica=i, at_s=20.0, for_s=60.0) for i in range(8)))


def slow_replica() -> Scenario:
    """One server takes twice as long for everything from 20 s on."""
    return _faulty("slow-replica", Fault(kind="slow", replica=5, at_s=20.0, factor=2.0))


ADVERSARIAL: dict[str, Callable[[], Scenario]] = {
    "paced-prefix": lambda: _plain(made.paced_prefix()),
    "cold-bursts": lambda: _plain(made.cold_bursts()),
    "viral-prompt": lambda: _plain(made.viral_prompt()),
    "long-and-short": lambda: _plain(made.long_and_short()),
    "cancel-storm": lambda: _plain(made.cancel_storm(), 80),
    "overload": lambda: _plain(made.overload(), 80),
    "restart": restart,
    "frozen-metrics": frozen_metrics,
    "mute-metrics": mute_metrics,
    "slow-replica": slow_replica,
}
