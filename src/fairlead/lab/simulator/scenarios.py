"""Scenarios by name, for comparing policies. Sizes and rates are chosen for 8 servers of Qwen3-32B on H100.

Each function takes the seed of its traffic; traces stay as they are. Published figures are of seed 0.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random

from msgspec import structs

from fairlead.core.endpoint import ROLE_LABEL
from fairlead.lab.simulator.world import Fault, FaultKind, Replica, Scenario, World, replicas
from fairlead.lab.workload import adversarial as made
from fairlead.lab.workload.arrivals import Arrivals, poisson, tides, times
from fairlead.lab.workload.conversation import Conversation, SharedPrefix, conversation, shared_prefix
from fairlead.lab.workload.formats import read_azure, read_mooncake
from fairlead.lab.workload.generate import CATALOGUE
from fairlead.lab.workload.record import Record, Workload, arranged

MOONCAKE = "mooncake_conversation.jsonl"
AZURE_CODE = "azure_2023_code.csv"
#: Three of eight servers take 2.5 times as long for each step.
UNLIKE = (1.0, 0.4, 1.0, 1.0, 0.4, 1.0, 0.4, 1.0)
#: Seconds of the shared-prefix workload at each rate. The durations of the published comparison are unknown. With
#: these, the mean TTFT of round robin is close to the published figures.
HEADLINE_SECONDS = {10.0: 180.0, 14.0: 180.0, 20.0: 90.0}
#: The length of the Mooncake trace, in seconds.
_LIKE_SECONDS = 3537.0


def _plain(workload: Workload, block_size: int = made.BLOCK, servers: Sequence[Replica] = ()) -> Scenario:
    """The workload under its own name, on 8 servers with KV blocks of `block_size` tokens unless others are given."""
    servers = servers or replicas(8, block_size=block_size)
    return Scenario(name=workload.name, workload=workload, replicas=servers)


def _generated(make: Callable[..., Workload], block_size: int = made.BLOCK, seed: int = 0) -> Scenario:
    return _plain(make(seed=seed), block_size)


def headline(rate: float = 20.0, seconds: float = 0.0, seed: int = 0, servers: Sequence[Replica] = ()) -> Scenario:
    """150 groups of 5, with prompts of 6000 + 1200 tokens and answers of 1000, on 8 servers."""
    spec = SharedPrefix()
    workload = shared_prefix(spec, rate=rate, seconds=seconds or HEADLINE_SECONDS.get(rate, 120.0), seed=seed)
    return _plain(workload, spec.block_size, servers)


def mooncake(path: Path, speedup: float = 1.0, servers: Sequence[Replica] = (), head: int = 0) -> Scenario:
    """The first `head` requests of a Mooncake trace at `speedup` times its pace. Raises `TraceError` or `OSError`."""
    records = read_mooncake(path.read_bytes(), str(path))
    return _of_trace(path, records[: head or None], speedup, servers or replicas(8, block_size=512))


def azure(path: Path) -> Scenario:
    """An Azure 2023 trace, ten times as fast: no shared prefixes, short answers. Raises `TraceError` or `OSError`."""
    return _of_trace(path, read_azure(path.read_bytes(), str(path)), 10.0, replicas(8, block_size=64))


def _of_trace(path: Path, records: list[Record], speedup: float, servers: Sequence[Replica]) -> Scenario:
    name = f"{path.stem.replace('_', '-')}-x{speedup:g}"
    return Scenario(name=name, workload=arranged(path.stem, records), replicas=servers, speedup=speedup)


def agents(sessions: int = 320, rate: float = 0.8, servers: Sequence[Replica] = (), seed: int = 0) -> Scenario:
    """Agents with tools: long shared system prompts, and many quick turns that each wait for the previous one."""
    spec = Conversation(
        systems=12,
        system_tokens=6400,
        turns=12,
        first_tokens=1500,
        turn_tokens=1200,
        output_tokens=300,
        gap_s=6.0,
        spread=0.7,
    )
    return _plain(conversation(spec, sessions=sessions, rate=rate, seed=seed, name="agents"), 64, servers)


def conversation_like(speedup: float, seed: int = 0) -> Scenario:
    """A generated replacement for a missing Mooncake trace, with about its rate, mean lengths and share of reuse."""
    spec = Conversation(
        systems=40,
        system_tokens=512,
        turns=1.3,
        first_tokens=9500,
        turn_tokens=1500,
        output_tokens=343,
        gap_s=60.0,
        spread=1.3,
        block_size=512,
    )
    made = conversation(
        spec, seconds=_LIKE_SECONDS, rate=2.3, seed=seed, dispatch="timestamp", name="conversation-like"
    )
    made.records = [record for record in made.records if record.arrival_us < _LIKE_SECONDS * 1e6]
    return Scenario(
        name=f"conversation-like-x{speedup:g}", workload=made, replicas=replicas(8, block_size=512), speedup=speedup
    )


def unlike(scenario: Scenario) -> Scenario:
    """The scenario on servers of different speeds (`UNLIKE`)."""
    servers = tuple(
        structs.replace(replica, speed=UNLIKE[i % len(UNLIKE)]) for i, replica in enumerate(scenario.replicas)
    )
    return structs.replace(scenario, name=f"unlike-{scenario.name}", replicas=servers)


def parted(scenario: Scenario, prefill: int) -> Scenario:
    """The scenario with its first `prefill` servers only computing prompts. The other servers decode, and compute
    prompts if a policy finds that better. Raises `ValueError` if no server would be left to prefill or to decode."""
    if not 0 < prefill < len(scenario.replicas):
        raise ValueError(f"{prefill} prefill servers of {len(scenario.replicas)} leave none for one of the two parts")
    servers = tuple(
        structs.replace(replica, labels={**replica.labels, ROLE_LABEL: "prefill" if i < prefill else "decode"})
        for i, replica in enumerate(scenario.replicas)
    )
    return structs.replace(scenario, replicas=servers)


def cut(workload: Workload, head: int) -> Workload:
    """The first `head` records of a workload."""
    return Workload(name=workload.name, records=workload.records[:head], dispatch=workload.dispatch)


def _conversation(traces: Path | None, seed: int = 0, *, speedup: float) -> Scenario:
    path = traces / MOONCAKE if traces else None
    return mooncake(path, speedup) if path and path.is_file() else conversation_like(speedup, seed)


def _code(traces: Path | None, seed: int = 0) -> Scenario:
    path = traces / AZURE_CODE if traces else None
    if path and path.is_file():
        return azure(path)
    spec = Conversation(
        systems=1, system_tokens=0, turns=1, first_tokens=2048, output_tokens=28, spread=0.9, block_size=64
    )
    return _plain(conversation(spec, sessions=8800, rate=26.0, seed=seed, dispatch="timestamp", name="code-like"), 64)


def _apart(traces: Path | None, seed: int = 0, *, name: str) -> Scenario:
    """A scenario for separate prefill and decode servers. Separating them improves TPOT, so its limit is strict."""
    made = _chat(seed) if name == "chat" else structs.replace(QUALITY[name](traces, seed))
    return structs.replace(made, slo_tpot_ms=25.0)


def _chat(seed: int) -> Scenario:
    spec = CATALOGUE["interactive-chat"].spec
    made = conversation(spec, seconds=120.0, rate=9.0, seed=seed, dispatch="timestamp", name="chat")
    return _plain(made, spec.block_size)


#: Each function takes the directory with the published traces, or `None`, and the seed. Generated workloads replace
#: missing traces.
QUALITY: dict[str, Callable[[Path | None, int], Scenario]] = {
    "shared-prefix-10": lambda _, seed: headline(10.0, seed=seed),
    "shared-prefix-14": lambda _, seed: headline(14.0, seed=seed),
    "shared-prefix-20": lambda _, seed: headline(20.0, seed=seed),
    "conversation-1x": partial(_conversation, speedup=1.0),
    "conversation-1.5x": partial(_conversation, speedup=1.5),
    "conversation-2x": partial(_conversation, speedup=2.0),
    "azure-code": _code,
    "agents": lambda _, seed: agents(seed=seed),
    "unlike-hardware": lambda traces, seed: unlike(_conversation(traces, seed, speedup=1.0)),
}


#: Scenario → the published trace that it uses. Other scenarios use none.
TRACES = {
    **dict.fromkeys((f"conversation-{pace}" for pace in ("1x", "1.5x", "2x")), MOONCAKE),
    "unlike-hardware": MOONCAKE,
    "apart-conversation-1x": MOONCAKE,
    "azure-code": AZURE_CODE,
}


def usable_traces(directory: str, scenarios: Sequence[str]) -> tuple[str, str]:
    """The directory if it has any published trace, otherwise ""; and a note about traces that these scenarios need and
    that are missing, "" if there are none."""
    path = Path(directory)
    there = [name for name in (MOONCAKE, AZURE_CODE) if (path / name).is_file()]
    missing = dict.fromkeys(TRACES[name] for name in scenarios if name in TRACES and TRACES[name] not in there)
    where = directory or "--traces"
    note = f"note: no {' and no '.join(missing)} in {where}; made-up workloads stand in" if missing else ""
    return (str(path.resolve()) if there else ""), note


#: Scenarios for pools with separate prefill and decode servers (`parted`), compared with pools whose servers do both.
APART: dict[str, Callable[[Path | None, int], Scenario]] = {
    f"apart-{name}": partial(_apart, name=name) for name in ("chat", "conversation-1x", "agents", "shared-prefix-10")
}


# The published shared-prefix benchmark, with its loads, pauses and memory.
#
# Source: llm-d's benchmark reports of 2025 and 2026 ("X-70R-6kSys", and the optimised baseline's guide): Qwen3-32B on 8
# x 2 H100, with 307,328 tokens of KV cache each; 150 system prompts of 6000 tokens, 5 questions of 1200 each, 1000
# tokens out. A stage of 750 requests (15/s) warms the caches with every prompt once. Then follow stages of 20 to 50 s,
# from 3 to 60 requests per second. A stage begins when the stage before it is over, and is measured alone: its output
# tokens per second count from its first arrival to its last answer, including the drain. So "60 requests per second"
# means 1500 requests that arrive within 25 s, and 15,000 tokens per second are reached if they are finished within 100
# s.

KV_TOKENS = 307_328
#: (requests per second, seconds) of the stage that warms the caches; and the seconds of pause after it. Round robin
#: needs 60 s of the pause to finish the stage's requests.
WARM_UP_STAGE = (15.0, 50.0)
PAUSE_S = 250.0
#: Seconds of the published stages, by rate.
STAGES = {20.0: 38.0, 40.0: 38.0, 60.0: 25.0}


def stage(rate: float, seconds: float, preset: str = "", *, seed: int = 0) -> Scenario:
    """The stage that warms the caches, then one stage of `rate` requests per second for `seconds`; only the requests of
    the latter are counted. `preset`: servers with their own memory instead of the published ones; empty = those."""
    spec = SharedPrefix()
    first, lasts = WARM_UP_STAGE
    warm, counted = int(first * lasts), int(rate * seconds)
    begin = lasts + PAUSE_S
    rng = Random(f"stage/{rate:g}/{seconds:g}" + (f"/{seed}" if seed else ""))
    arrivals = list(times(poisson(first), rng, count=warm))
    arrivals += [begin + arrival_s for arrival_s in times(poisson(rate), rng, count=counted)]
    made = shared_prefix(spec, rate=rate, count=warm + counted, seed=seed)
    records = [
        structs.replace(r, arrival_us=int(arrival_s * 1e6)) for r, arrival_s in zip(made.records, arrivals, strict=True)
    ]
    size = spec.block_size
    servers = replicas(8, preset, block_size=size) if preset else replicas(8, block_size=size, kv_tokens=KV_TOKENS)
    return Scenario(
        name=f"headline-stage-{rate:g}",
        workload=Workload(name="shared-prefix-stage", records=records),
        replicas=servers,
        counted_from_s=begin,
    )


PUBLISHED: dict[str, Callable[..., Scenario]] = {
    **{f"headline-stage-{rate:g}": partial(stage, rate, seconds) for rate, seconds in STAGES.items()},
    # The same memory and warm caches under a steady load, about as much as the servers can handle.
    "headline-steady-16": partial(stage, 16.0, 1200.0),
    # With this model, a prompt costs more relative to an answer, and the answers fit into the memory.
    "headline-70b-20": partial(stage, 20.0, 600.0, "llama-70b-h100-tp4"),
}

# Scenarios that break routers: the adversarial workloads, and server faults under the shared-prefix workload.


def _faulty(name: str, *faults: Fault, seconds: float = 120.0, seed: int = 0) -> Scenario:
    scenario = headline(9.0, seconds, seed)
    scenario.name = name
    scenario.faults = faults
    return scenario


_METRICS_FAULTS: dict[str, FaultKind] = {"frozen": "freeze", "mute": "mute"}
ADVERSARIAL: dict[str, Callable[..., Scenario]] = {
    "paced-prefix": partial(_generated, made.paced_prefix),
    "cold-bursts": partial(_generated, made.cold_bursts),
    "viral-prompt": partial(_generated, made.viral_prompt),
    "long-and-short": partial(_generated, made.long_and_short),
    "cancel-storm": partial(_generated, made.cancel_storm, block_size=80),
    "overload": partial(_generated, made.overload, block_size=80),
    # One server dies at 40 s, losing its cache, and is back 30 s later.
    "restart": partial(_faulty, "restart", Fault(kind="down", replica=2, at_s=40.0, for_s=30.0)),
    # `frozen`: from 20 s to 80 s, all metrics pages show their values of second 20. `mute`: no page answers then.
    **{
        f"{name}-metrics": partial(
            _faulty, f"{name}-metrics", *(Fault(kind=kind, replica=i, at_s=20.0, for_s=60.0) for i in range(8))
        )
        for name, kind in _METRICS_FAULTS.items()
    },
    # One server takes twice as long for every step from 20 s on.
    "slow-replica": partial(_faulty, "slow-replica", Fault(kind="slow", replica=5, at_s=20.0, factor=2.0)),
}

# Situations that occur in pools of every size. Half of them are in the development set, half in the held-out set.


def _chat_at(rate: float, seconds: float, servers: Sequence[Replica], seed: int) -> Scenario:
    """Conversations of `interactive-chat`. `rate` of them begin per second; many are in progress at the start."""
    spec = CATALOGUE["interactive-chat"].spec
    settled = 2 * spec.gap_s * spec.turns
    made = conversation(spec, seconds=settled + seconds, rate=rate, seed=seed, dispatch="timestamp")
    records = [
        structs.replace(record, arrival_us=record.arrival_us - int(settled * 1e6))
        for record in made.records
        if settled * 1e6 <= record.arrival_us < (settled + seconds) * 1e6
    ]
    return _plain(Workload(name="chat", records=records), servers=servers)


def _groups(arrivals: Arrivals, seconds: float, servers: Sequence[Replica], spec: SharedPrefix, seed: int) -> Scenario:
    """The shared-prefix workload with the numbers of `spec`."""
    made = shared_prefix(spec, arrivals=arrivals, seconds=seconds, seed=seed)
    return Scenario(name="shared-prefix", workload=made, replicas=servers)


def think_time(seed: int = 0) -> Scenario:
    """Chat with turns 45 s after the previous answer, on servers with too little memory for all conversations."""
    spec = CATALOGUE["interactive-chat"].spec
    servers = replicas(4, block_size=spec.block_size, kv_tokens=150_000)
    return _plain(conversation(spec, seconds=150.0, rate=4.0, seed=seed, name="think-time"), servers=servers)


def lora(dynamic: bool, seed: int = 0) -> Scenario:
    """Static: three servers that list all six adapters, ready for use. Dynamic: eight servers that hold four of 24
    adapters in memory and take 1.5 s to load one."""
    if not dynamic:
        servers = replicas(3, block_size=64, max_loras=8)
        return Scenario(name="lora-static", workload=made.adapters(seed=seed), replicas=servers)
    servers = tuple(
        structs.replace(
            replica, dynamic_adapters=True, engine=structs.replace(replica.engine, lora_load_ms=1500.0, max_cpu_loras=4)
        )
        for replica in replicas(8, block_size=64, max_loras=4)
    )
    workload = made.adapters(24, rate=18.0, seconds=75.0, base=0.2, seed=seed)
    return Scenario(name="lora-dynamic", workload=workload, replicas=servers)


def unlike_memory(seed: int = 0) -> Scenario:
    """The agents on servers of equal speed, with memory for 270,000, 135,000 and 68,000 tokens."""
    sizes = (270_000, 135_000, 68_000, 270_000, 68_000, 135_000, 68_000, 270_000)
    servers = tuple(replicas(1, block_size=64, kv_tokens=size)[0] for size in sizes)
    return agents(sessions=150, rate=0.8, servers=servers, seed=seed)


def unlike_chat(world: World, seed: int = 0) -> Scenario:
    """Chat on eight servers, three of which are slower, with the delays and observations of `world`."""
    made = _chat_at(4.0, 75.0, replicas(8, block_size=64, speeds=UNLIKE), seed)
    return structs.replace(made, world=world)


def unstreamed(seed: int = 0) -> Scenario:
    """`unlike_chat` without streamed answers."""
    made = unlike_chat(World(), seed)
    records = [structs.replace(record, stream=False) for record in made.workload.records]
    return structs.replace(made, workload=Workload(name="unstreamed", records=records))


def restarts(seed: int = 0) -> Scenario:
    """A roll-out: every other server is down for 15 s, one after another."""
    faults = (Fault(kind="down", replica=index, at_s=20.0 + 10.0 * index, for_s=15.0) for index in (0, 2, 4, 6))
    return _faulty("restarts", *faults, seconds=100.0, seed=seed)


def diurnal(seed: int = 0) -> Scenario:
    """A day in five minutes: three servers at night and eight at noon, added and removed a little late."""
    spec = SharedPrefix(groups=60, output_tokens=300)
    made = _groups(tides(3.0, 20.0, 300.0), 300.0, replicas(8, block_size=80), spec, seed)
    late_s, day_s, step_s = 12.0, 300.0, 22.0
    for index in range(3, 8):
        comes, goes = late_s + step_s * (index - 2), day_s + late_s - step_s * (index - 2)
        night = Fault(kind="away", replica=index, at_s=0.0, for_s=comes)
        made.faults = (*made.faults, night, Fault(kind="away", replica=index, at_s=goes))
    return made


def silently_slow(seed: int = 0) -> Scenario:
    """One of eight servers takes three times as long for every step from the start and does not report it."""
    return _chat_at(6.0, 75.0, replicas(8, block_size=64, speeds=(1, 1, 1, 1 / 3, 1, 1, 1, 1)), seed)


def dp_ranks(seed: int = 0) -> Scenario:
    """Three addresses with four data-parallel ranks each, where the server spreads requests by load alone."""
    servers = tuple(structs.replace(replica, ranks=4) for replica in replicas(3, block_size=80))
    spec = SharedPrefix(groups=40, system_tokens=4000, output_tokens=300)
    return _groups(poisson(45.0), 50.0, servers, spec, seed)


def many(count: int, seed: int = 0) -> Scenario:
    """64 servers: shared prefixes. 256 servers: chat."""
    if count == 64:
        spec = SharedPrefix(groups=400, system_tokens=4000, output_tokens=200)
        return _groups(poisson(95.0), 25.0, replicas(64, block_size=80), spec, seed)
    return _chat_at(1.1 * count / 4, 10.0, replicas(count, block_size=64), seed)


def _catalogued(name: str, count: int, rate: float, seed: int = 0) -> Scenario:
    spec = CATALOGUE[name].spec
    return _plain(conversation(spec, sessions=count, rate=rate, seed=seed, name=name), spec.block_size)


def short_chat(seed: int = 0) -> Scenario:
    """The lengths of Azure's conversation trace at about 18 times its pace: no shared prefixes, near saturation."""
    spec = Conversation(systems=1, system_tokens=0, turns=1, first_tokens=1155, output_tokens=211, spread=1.0)
    return _plain(conversation(spec, seconds=40.0, rate=100.0, seed=seed, dispatch="timestamp", name="short-chat"), 64)


#: Rules and parameters may be tuned on these scenarios and on the ones above.
SITUATIONS: dict[str, Callable[..., Scenario]] = {
    "hot-prefix": partial(_generated, made.hot_prefix),
    "rare-giants": partial(_generated, made.rare_giants),
    "restarts": restarts,
    "think-time": think_time,
    "lora-static": partial(lora, dynamic=False),
    "endpoints-64": partial(many, 64),
    "unlike-memory": unlike_memory,
    "unstreamed": unstreamed,
    "unwatched": partial(unlike_chat, World(watched=False)),
    "slow-scrapes": partial(unlike_chat, World(scrape_interval_ms=5000.0)),
}
#: These scenarios must not be used for tuning. They are run once per release, and reported unchanged.
HELD_OUT: dict[str, Callable[..., Scenario]] = {
    "same-prompts": partial(_generated, made.same_prompts),
    "silently-slow": silently_slow,
    "lora-dynamic": partial(lora, dynamic=True),
    "one-hog": partial(_generated, made.one_hog),
    "endpoints-256": partial(many, 256),
    "diurnal": diurnal,
    "dp-ranks": dp_ranks,
    "short-chat": short_chat,
    "deep-research": partial(_catalogued, "deep-research", 60, 0.5),
    "reasoning": partial(_catalogued, "reasoning", 500, 3.3),
}


def names() -> tuple[str, ...]:
    """The names of the built-in scenarios, except drawn ones (`drawn-SEED-NUMBER`)."""
    return (*QUALITY, *ADVERSARIAL, *PUBLISHED, *APART, *SITUATIONS, *HELD_OUT)


def scenario(name: str, traces: Path | None = None, seed: int = 0) -> Scenario:
    """A built-in scenario by name. `seed`: of traffic that is not recorded. Raises `ValueError` that lists the names,
    `TraceError` or `OSError`."""
    if make := (QUALITY | APART).get(name):
        return structs.replace(make(traces, seed), name=name)
    if alone := (ADVERSARIAL | PUBLISHED | SITUATIONS | HELD_OUT).get(name):
        return structs.replace(alone(seed=seed), name=name)
    raise ValueError(f"unknown scenario {name!r}; known: {', '.join(names())}")
