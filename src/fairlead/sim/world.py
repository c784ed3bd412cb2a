"""What a simulation is made of beside its workload: replicas, delays, and what goes wrong when. All plain data."""

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct, field

from fairlead.engine.presets import DEFAULT_PRESET, Preset, preset
from fairlead.engine.spec import EngineSpec
from fairlead.workload.record import Workload

#: Room for the longest prompt of the Mooncake traces (126,195 tokens) and its answer.
MAX_MODEL_LEN = 200_000
#: Seconds from a run's start to the first request: the scheduler has read every server by then, as one that is ready.
WARM_UP = 1.0


class Replica(Struct, frozen=True, kw_only=True):
    """One model server."""

    engine: EngineSpec
    #: 0.5 = takes twice as long for every step.
    speed: float = 1.0
    labels: Mapping[str, str] = field(default_factory=dict)


class World(Struct, frozen=True, kw_only=True):
    """Delays between the parts; defaults are those of a live server beside its gateway."""

    #: One way between gateway and model server.
    network_ms: float = 0.5
    #: From a request's arrival to the decision about it.
    decision_ms: float = 0.5
    #: Period of scrapes, and how old a reading is when it arrives.
    scrape_interval_ms: float = 200.0
    scrape_age_ms: float = 5.0
    #: From an answer's last byte until its end is known: a gateway's access log is sent in batches.
    end_report_ms: float = 50.0
    #: Answers of which token counts are read: all of the first so many, then this share.
    usage_first: int = 20
    usage_share: float = 0.01
    #: From a failure to `EndpointDown`, and from a recovery to `EndpointUp` (readiness probes, watch).
    detect_s: float = 3.0
    #: Clients give up so long after their arrival; 0 = never.
    patience_s: float = 0.0
    #: Requests that are not over so long after the last arrival have failed.
    drain_s: float = 3600.0
    bytes_per_token: float = 4.2
    staleness_s: float = 2.0
    #: KV events: how late the scheduler knows what servers store and forget. Below 0 = there are none, and what it sent
    #: is all it knows.
    kv_lag_ms: float = -1.0


class Handover(Struct, frozen=True, kw_only=True):
    """What it costs to bring a prompt's KV cache from the server that computed it to the one that decodes.

    Defaults: a 32B model (262,144 bytes per token) over 26 GB/s, and 30 ms for two more requests and the registration
    of memory. The blocks that the decoding server holds already are not moved.
    """

    fixed_ms: float = 30.0
    gb_per_s: float = 26.2
    kv_bytes: int = 262_144

    def seconds(self, tokens: float) -> float:
        return self.fixed_ms * 1e-3 + tokens * self.kv_bytes / (self.gb_per_s * 1e9)


FaultKind = Literal["down", "slow", "freeze", "mute"]


class Fault(Struct, frozen=True, kw_only=True):
    """`down`: connections break, the cache is lost. `slow`: steps take `factor` times as long. `freeze`: the metrics
    page shows what it showed before. `mute`: it does not answer."""

    kind: FaultKind
    replica: int
    at_s: float
    #: 0 = to the end.
    for_s: float = 0.0
    factor: float = 2.0


class Scenario(Struct, kw_only=True):
    """One thing to simulate."""

    name: str
    workload: Workload
    replicas: Sequence[Replica]
    world: World = World()
    faults: Sequence[Fault] = ()
    #: Timestamps are divided by it.
    speedup: float = 1.0
    handover: Handover = Handover()
    #: Seconds after the start (before `speedup`) from which requests count; the ones before warm the caches.
    counted_from_s: float = 0.0
    #: What counts as good in `goodput`.
    slo_ttft_ms: float = 2000.0
    slo_tpot_ms: float = 50.0


def replicas(
    count: int = 8,
    name: str | Preset = DEFAULT_PRESET,
    *,
    block_size: int = 0,
    kv_tokens: int = 0,
    max_model_len: int = MAX_MODEL_LEN,
    max_num_seqs: int = 256,
    max_loras: int = 0,
    speeds: Sequence[float] = (),
) -> tuple[Replica, ...]:
    """Alike but for their `speeds` (cycled through). Raises `ValueError` for an unknown preset or impossible sizes."""
    if count < 1:
        raise ValueError("at least one replica is needed")
    made = name if isinstance(name, Preset) else preset(name)
    spec = made.spec(
        block_size=block_size or 16,
        kv_tokens=kv_tokens,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_loras=max_loras,
    )
    return tuple(Replica(engine=spec, speed=speeds[i % len(speeds)] if speeds else 1.0) for i in range(count))
