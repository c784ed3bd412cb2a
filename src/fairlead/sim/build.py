"""A scenario as a few plain values that can be named on a command line and sent to another process."""

from pathlib import Path

from msgspec import Struct, structs

from fairlead.sim.adversarial import ADVERSARIAL
from fairlead.sim.scenarios import QUALITY, cut, scenario
from fairlead.sim.workfiles import read_workload
from fairlead.sim.world import Scenario, replicas


class ScenarioSpec(Struct, frozen=True, kw_only=True):
    """`source` is the name of a built-in scenario or the path of a workload file."""

    name: str
    source: str
    #: Directory with the published traces; empty = none.
    traces: str = ""
    #: Of a workload file; empty = by its name and content.
    format: str = ""
    speedup: float = 1.0
    #: Only the first so many requests; 0 = all.
    head: int = 0
    #: The servers; 0 and empty leave the scenario's own.
    servers: int = 0
    preset: str = ""
    kv_tokens: int = 0
    block_size: int = 0
    speeds: tuple[float, ...] = ()
    dispatch: str = ""


def names() -> tuple[str, ...]:
    """Of the built-in scenarios."""
    return (*QUALITY, *ADVERSARIAL)


def build(spec: ScenarioSpec) -> Scenario:
    """Raises `ValueError`, `TraceError` or `OSError`."""
    made = _base(spec)
    if spec.head:
        made = structs.replace(made, workload=cut(made.workload, spec.head))
    if spec.dispatch:
        workload = structs.replace(made.workload, dispatch=spec.dispatch)
        made = structs.replace(made, workload=workload)
    servers = made.replicas
    if spec.servers or spec.preset or spec.kv_tokens or spec.block_size or spec.speeds:
        servers = replicas(
            spec.servers or len(servers),
            spec.preset or "qwen3-32b-h100",
            block_size=spec.block_size or servers[0].engine.block_size,
            kv_tokens=spec.kv_tokens,
            speeds=spec.speeds or tuple(replica.speed for replica in servers),
        )
    return structs.replace(made, name=spec.name, replicas=servers, speedup=made.speedup * spec.speedup)


def _base(spec: ScenarioSpec) -> Scenario:
    if spec.source in QUALITY:
        return scenario(spec.source, Path(spec.traces) if spec.traces else None)
    if spec.source in ADVERSARIAL:
        return ADVERSARIAL[spec.source]()
    path = Path(spec.source)
    if not path.is_file():
        raise ValueError(f"{spec.source!r} is neither a scenario nor a file; scenarios: {', '.join(names())}")
    workload = read_workload(path, spec.format)
    return Scenario(name=spec.name, workload=workload, replicas=replicas(8, block_size=workload.block_size or 64))
