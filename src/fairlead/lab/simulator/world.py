"""The parts of a simulation: time, replicas, delays, faults, and the requests in progress."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import astuple, replace

from fairlead.core.cost import PRIOR, StepModel
from fairlead.core.request import Request
from fairlead.lab.engine.presets import DEFAULT_PRESET, PRESETS, Preset, preset
from fairlead.lab.engine.request import EngineRequest
from fairlead.lab.engine.spec import EngineSpec
from fairlead.lab.workload.record import Record, Workload

#: Limit of a prompt and its answer for built-in presets, in tokens: the longest prompt of the Mooncake traces (126,195
#: tokens) and its answer fit.
MAX_MODEL_LEN = 200_000
#: Adapters that may be in one batch of a server, for a workload with adapters, if it is not known.
ADAPTER_SLOTS = 8
#: Seconds from a run's start to the start of its workload. By then, the scheduler has scraped every server, like a live
#: scheduler that is ready.
WARM_UP = 1.0


class Replica(Struct, frozen=True, kw_only=True):
    """One model server."""

    engine: EngineSpec
    #: 0.5 = every step takes twice as long.
    speed: float = 1.0
    #: From a request's arrival at the server until its engine receives it; and the same while a neighbour computes.
    overhead_ms: float = 0.0
    contended_overhead_ms: float = 0.0
    #: CPU time of the API server, which handles requests one after another: per request, and per prompt token.
    api_ms: float = 0.0
    api_us_per_token: float = 0.0
    #: KV bytes per token, the size of what a prefill server hands over.
    kv_bytes: int = 262_144
    labels: Mapping[str, str] = field(default_factory=dict)
    #: Engines behind its one address (data-parallel ranks), each with all the memory and sequences of `engine`.
    ranks: int = 1
    #: True: adapters are loaded on request, and the server's list of models has only those. False: it has all adapters.
    dynamic_adapters: bool = False
    #: The machine that servers of the same name share, see `EngineSpec.contention`; empty = its own.
    machine: str = ""


class World(Struct, frozen=True, kw_only=True):
    """Delays between the parts. Defaults are those of a live server beside its gateway."""

    #: One way between gateway and model server.
    network_ms: float = 0.5
    #: From a request's arrival to the decision about it.
    decision_ms: float = 0.5
    #: Period of scrapes, and how old a reading is when it arrives.
    scrape_interval_ms: float = 200.0
    scrape_age_ms: float = 5.0
    #: The largest share of the interval by which it varies; 0 = all servers are scraped at the same time.
    scrape_jitter: float = 0.0
    #: Whether the gateway shows responses; otherwise first tokens are known only at the end (`responseMode: none`).
    watched: bool = True
    #: From an answer's last byte until its end is known, because a gateway sends its access log in batches.
    end_report_ms: float = 50.0
    #: Answers whose token counts are read: the first `usage_first`, then a share of `usage_share`.
    usage_first: int = 20
    usage_share: float = 0.01
    #: Period at which the lists of models of servers with dynamic adapters are read.
    models_s: float = 30.0
    #: From a failure to `EndpointDown`, and from a recovery to `EndpointUp` (readiness probes, watch).
    detect_s: float = 3.0
    #: Clients give up this long after their arrival; 0 = never.
    patience_s: float = 0.0
    #: Requests that are not over this long after the last arrival have failed.
    drain_s: float = 3600.0
    #: Bytes of JSON per prompt token.
    bytes_per_token: float = 4.2
    #: Whether requests announce a limit for their answers, which the answers reach.
    lengths_told: bool = True
    #: The scheduler's initial belief about engines.
    prior: StepModel = PRIOR
    #: The age from which the scheduler does not trust a scrape.
    staleness_s: float = 2.0
    #: KV events: the delay until the scheduler knows what servers store and forget. Below 0 = no KV events: the
    #: scheduler knows only what it sent.
    kv_lag_ms: float = -1.0


class Handover(Struct, frozen=True, kw_only=True):
    """The cost of moving a prompt's KV cache from the server that computed it to the server that decodes.

    Defaults: 26 GB/s, and 30 ms for two more requests and the registration of memory. Blocks that the decoding server
    already holds are not moved.
    """

    fixed_ms: float = 30.0
    gb_per_s: float = 26.2

    def seconds(self, kv_bytes: float) -> float:
        return self.fixed_ms * 1e-3 + kv_bytes / (self.gb_per_s * 1e9)


FaultKind = Literal["down", "away", "slow", "freeze", "mute", "hang"]


class Fault(Struct, frozen=True, kw_only=True):
    """A fault of one server from `at_s` seconds after the workload's start. `down`: connections break and the cache is
    lost. `away`: the server leaves the pool and finishes its requests; when it returns, its cache is empty if it was
    idle. `slow`: steps take `factor` times as long. `freeze`: the metrics page shows old values. `mute`: the page does
    not answer. `hang`: the engine makes no step, but the page answers."""

    kind: FaultKind
    replica: int
    at_s: float
    #: 0 = to the end.
    for_s: float = 0.0
    factor: float = 2.0


class Scenario(Struct, kw_only=True):
    """A complete setup to simulate."""

    name: str
    workload: Workload
    replicas: Sequence[Replica]
    world: World = World()
    faults: Sequence[Fault] = ()
    #: Timestamps and pauses before a next turn are divided by this.
    speedup: float = 1.0
    handover: Handover = Handover()
    #: Seconds of the workload's own time (before `speedup`) from which requests count. Earlier ones warm the caches.
    counted_from_s: float = 0.0
    #: The limits of a request that counts for `Summary.goodput`.
    slo_ttft_ms: float = 2000.0
    slo_tpot_ms: float = 50.0


def unknowing(scenario: Scenario, seed: int) -> Scenario:
    """The scenario for a scheduler that does not begin with the truth. Each coefficient of its prior and the bytes per
    token are wrong by a factor drawn from 0.5 to 1.5. No request announces how long its answer may become. Servers are
    scraped once per second, ± 20 %."""
    chance = Random(f"unknowing/{scenario.name}/{seed}")

    def wrong(value: float) -> float:
        return value * chance.uniform(0.5, 1.5)

    world = replace(
        scenario.world,
        prior=StepModel(*map(wrong, astuple(scenario.world.prior))),
        bytes_per_token=wrong(scenario.world.bytes_per_token),
        lengths_told=False,
        scrape_interval_ms=max(scenario.world.scrape_interval_ms, 1000.0),
        scrape_jitter=0.2,
    )
    return replace(scenario, world=world)


def replicas(
    count: int = 8,
    name: str | Preset = DEFAULT_PRESET,
    *,
    block_size: int = 0,
    kv_tokens: int = 0,
    max_model_len: int = 0,
    max_num_seqs: int = 0,
    max_loras: int = 0,
    speeds: Sequence[float] = (),
) -> tuple[Replica, ...]:
    """Replicas that differ only in their `speeds` (cycled through); 0 keeps the preset's own limits. With built-in
    presets, requests may be as long as their memory and `MAX_MODEL_LEN` allow. Raises `ValueError` for an unknown
    preset or impossible sizes."""
    if count < 1:
        raise ValueError("at least one replica is needed")
    made = name if isinstance(name, Preset) else preset(name)
    size = block_size or made.block_size or 16
    if made in PRESETS.values():
        max_model_len = max_model_len or min((kv_tokens or made.kv_tokens) // size * size, MAX_MODEL_LEN)
    spec = made.spec(
        block_size=size,
        kv_tokens=kv_tokens,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_loras=max_loras,
    )
    alike = Replica(
        engine=spec,
        overhead_ms=made.overhead_ms,
        contended_overhead_ms=max(made.contended_overhead_ms, made.overhead_ms),
        api_ms=made.api_ms,
        api_us_per_token=made.api_us_per_token,
        kv_bytes=made.kv_bytes,
        machine="shared" if made.contention else "",
    )
    return tuple(replace(alike, speed=speeds[i % len(speeds)] if speeds else 1.0) for i in range(count))


#: `waiting` = not over; `done` = served; `shed` = refused or evicted by the scheduler; `failed` = broken off or refused
#: by a server, or not over at the end of the run; `cancelled` = the client left.
Status = Literal["waiting", "done", "shed", "failed", "cancelled"]


class Job(Struct, gc=False):
    """A request and its progress. Times are kernel seconds; -1 = it did not happen."""

    index: int
    record: Record
    arrived: float
    request: Request | None = None
    served: EngineRequest | None = None
    #: If `n` > 1: the engine requests of the other answers. `left`: how many answers are not over.
    siblings: tuple[EngineRequest, ...] = ()
    left: int = 1
    #: The server that only computes the prompt (-1 = the answering server does it), and the engine request there.
    prefill_server: int = -1
    prefilled: EngineRequest | None = None
    #: Index of the server that the request was sent to; -1 = none.
    server: int = -1
    status: Status = "waiting"
    reason: str = ""
    #: When the client received the first token and the end of the answer.
    first_at: float = -1.0
    ended_at: float = -1.0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0

    def leg(self) -> tuple[int, EngineRequest | None]:
        """(server, engine request) of the part in progress: the prefill elsewhere, or the answer."""
        if self.served is None and self.prefilled is not None:
            return self.prefill_server, self.prefilled
        return self.server, self.served

    @property
    def ttft_ms(self) -> float:
        return (self.first_at - self.arrived) * 1e3

    @property
    def e2e_ms(self) -> float:
        return (self.ended_at - self.arrived) * 1e3

    @property
    def tpot_ms(self) -> float:
        """Milliseconds per token after the first; 0 if there are none."""
        more = self.output_tokens / self.record.n - 1
        return (self.ended_at - self.first_at) * 1e3 / more if more > 0 else 0.0
