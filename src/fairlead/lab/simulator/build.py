"""Scenarios from plain values: a built-in name, a workload file or a kind of workload. Reads and writes such files."""

from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct, structs

from fairlead.config.problems import suggestion
from fairlead.core.errors import ConfigError
from fairlead.lab.engine.presets import preset
from fairlead.lab.engine.spec import EngineSpec
from fairlead.lab.simulator.drawn import drawn_names, drawn_scenario
from fairlead.lab.simulator.scenarios import TRACES, cut, names, parted, scenario
from fairlead.lab.simulator.world import ADAPTER_SLOTS, Replica, Scenario, replicas
from fairlead.lab.workload.formats import FORMATS, guess
from fairlead.lab.workload.generate import KINDS, PACED, Pace, generate
from fairlead.lab.workload.record import Workload, dispatch_of, from_first
from fairlead.server.files import write_output

#: The first bytes of files of gzip, bzip2, xz, zstd and zip.
_PACKED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")


def read_workload(path: Path, format: str = "") -> Workload:
    """Read a workload file. Times count from its first request, as a file may be a part of a longer trace or tell the
    time of day. Raises `ConfigError` (bad content, unknown format) or `OSError`."""
    data = path.read_bytes().removeprefix(BOM_UTF8)
    if data.startswith(_PACKED):
        raise ConfigError("is compressed; unpack it first", source=str(path))
    if data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        raise ConfigError("is UTF-16; convert it to UTF-8 first", source=str(path))
    name = format or guess(data)
    if name not in FORMATS:
        known = ", ".join(FORMATS)
        message = (
            f"unknown format {name!r}; known: {known}" if name else f"is in no known format: looks like none of {known}"
        )
        raise ConfigError(message, source=str(path))
    return from_first(FORMATS[name].read(path.stem, data, str(path)))


def write_workload(workload: Workload, path: Path, format: str = "native") -> None:
    """Write a workload file. Raises `ConfigError` for an unknown format, or `OSError`."""
    if format not in FORMATS:
        raise ConfigError(f"unknown format {format!r}; {suggestion(format, FORMATS)}", source=str(path))
    write_output(path, FORMATS[format].write(workload))


def at_own_pace(scenario: Scenario) -> Workload:
    """The workload with the times at which the scenario sends it."""
    made, pace = scenario.workload, scenario.speedup
    records = [
        structs.replace(record, arrival_us=round(record.arrival_us / pace), think_ms=record.think_ms / pace)
        for record in made.records
    ]
    return Workload(name=scenario.name, records=records, dispatch=made.dispatch)


class ScenarioSpec(Struct, frozen=True, kw_only=True):
    """A scenario as plain values, for a command line and for other processes. `source` is the name of a built-in
    scenario, the path of a workload file, or a kind of workload."""

    name: str
    source: str
    #: The seed of the traffic, where it is generated (`is_generated`).
    seed: int = 0
    #: Directory with the published traces; empty = none.
    traces: str = ""
    #: The format of a workload file; empty = recognized by its name and content.
    format: str = ""
    speedup: float = 1.0
    #: Requests per second; for a kind of workload with sessions, sessions per second. 0 = 1 for a kind whose pace can
    #: be chosen (`is_paced`), otherwise the rate of the workload itself.
    rate: float = 0.0
    #: For a kind whose pace can be chosen: the time during which requests, or sessions, begin.
    seconds: float = 300.0
    #: The number of requests to use, from the first; 0 = all.
    head: int = 0
    #: The number of servers. Here and below, 0 and empty keep the scenario's own values.
    servers: int = 0
    #: The name of an engine preset, or the text of one.
    preset: str = ""
    kv_tokens: int = 0
    block_size: int = 0
    max_num_seqs: int = 0
    max_model_len: int = 0
    speeds: tuple[float, ...] = ()
    dispatch: str = ""
    #: Delay of KV events; below 0 = no KV events.
    kv_lag_ms: float = -1.0
    #: Whether the scheduler begins with wrong beliefs about engines, tokens and answers (`world.unknowing`).
    unknowing: bool = False
    #: The number of servers that only prefill, while the others decode (see `parted`); 0 = all do both.
    prefill: int = 0


def listed() -> tuple[str, ...]:
    """The names to show to people, including the form of the names of drawn scenarios."""
    return (*names(), "drawn-SEED-NUMBER")


def is_name(name: str) -> bool:
    """Whether `name` is a built-in scenario, drawn ones included."""
    return name in names() or drawn_names(name) == [name]


def is_paced(source: str) -> bool:
    """Whether `source` is a kind of workload that is generated at the wanted pace, for the wanted time."""
    return source in PACED and not is_name(source) and not Path(source).is_file()


def is_generated(source: str, traces: str = "") -> bool:
    """Whether each seed gives traffic of its own. Recorded traffic is the same for all."""
    if is_name(source):
        return not (traces and source in TRACES and Path(traces, TRACES[source]).is_file())
    return not Path(source).is_file()


def build(spec: ScenarioSpec) -> Scenario:
    """Build the scenario. Raises `ValueError`, `ConfigError` or `OSError`."""
    made = _base(spec)
    if spec.head:
        workload = cut(made.workload, spec.head)
        counted = made.counted_from_s if made.counted_from_s <= workload.duration_s else 0.0
        made = structs.replace(made, workload=workload, counted_from_s=counted)
    if spec.rate and not is_paced(spec.source):
        lasts_s, count = made.workload.duration_s / made.speedup, len(made.workload)
        made = structs.replace(made, speedup=made.speedup * spec.rate * lasts_s / count if lasts_s else made.speedup)
    if spec.dispatch:
        workload = structs.replace(made.workload, dispatch=dispatch_of(spec.dispatch))
        made = structs.replace(made, workload=workload)
    servers = _servers(spec, made.replicas)
    if spec.kv_lag_ms >= 0:
        made = structs.replace(made, world=structs.replace(made.world, kv_lag_ms=spec.kv_lag_ms))
    made = structs.replace(made, name=spec.name, replicas=servers, speedup=made.speedup * spec.speedup)
    return parted(made, spec.prefill) if spec.prefill else made


def _servers(spec: ScenarioSpec, own: Sequence[Replica]) -> Sequence[Replica]:
    """The servers to simulate: the scenario's own with the number, limits and speeds that `spec` gives, or new ones if
    `spec` names a preset. Raises `ValueError`."""
    speeds = spec.speeds
    count = spec.servers or (len(speeds) if len(speeds) > 1 else len(own))
    if len(speeds) > 1 and len(speeds) != count:
        raise ValueError(f"{len(speeds)} speeds for {count} replicas: give one for each, or one for all")
    if spec.preset:
        kind = preset(spec.preset)
        return replicas(
            count,
            kind,
            block_size=spec.block_size or kind.block_size or own[0].engine.block_size,
            kv_tokens=spec.kv_tokens,
            max_num_seqs=spec.max_num_seqs,
            max_model_len=spec.max_model_len,
            max_loras=own[0].engine.max_loras,
            speeds=speeds or tuple(replica.speed for replica in own),
        )
    kept = [own[index % len(own)] for index in range(count)]
    speeds = speeds or tuple(replica.speed for replica in kept)
    return tuple(
        structs.replace(replica, engine=_limited(replica.engine, spec), speed=speeds[index % len(speeds)])
        for index, replica in enumerate(kept)
    )


def _limited(engine: EngineSpec, spec: ScenarioSpec) -> EngineSpec:
    """The engine with the limits that `spec` gives. Raises `ValueError` if no server could start with them."""
    size, sequences = spec.block_size or engine.block_size, spec.max_num_seqs or engine.max_num_seqs
    blocks = (spec.kv_tokens or engine.kv_tokens) // size
    if not blocks:
        raise ValueError(
            f"a KV cache of {spec.kv_tokens or engine.kv_tokens} tokens has no whole block of {size} tokens"
        )
    return structs.replace(
        engine,
        block_size=size,
        num_blocks=blocks + 1,
        max_num_seqs=sequences,
        max_batched_tokens=max(engine.max_batched_tokens, sequences * (1 + engine.draft_tokens)),
        max_model_len=spec.max_model_len or min(engine.max_model_len, blocks * size),
    )


def _base(spec: ScenarioSpec) -> Scenario:
    if spec.source in names():
        return scenario(spec.source, Path(spec.traces) if spec.traces else None, spec.seed)
    if drawn := drawn_scenario(spec.source, spec.seed):
        return drawn.scenario
    path = Path(spec.source)
    if path.is_file():
        workload = read_workload(path, spec.format)
    elif spec.source in KINDS:
        paced, seed = is_paced(spec.source), spec.seed
        pace = Pace(rate=spec.rate or 1.0, seconds=spec.seconds, seed=seed) if paced else Pace(seed=seed)
        workload = generate(spec.source, pace, {})
    else:
        there = suggestion(spec.source, dict.fromkeys((*listed(), *KINDS)))
        raise ValueError(f"{spec.source!r} is neither a scenario nor a file; {there}")
    slots = ADAPTER_SLOTS if any(record.lora for record in workload.records) else 0
    servers = replicas(8, block_size=workload.block_size or 64, max_loras=slots)
    return Scenario(name=spec.name, workload=workload, replicas=servers)
