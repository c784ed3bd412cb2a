"""Random scenarios: pools, workloads, loads and faults are drawn from a seed, so that nobody chooses them.

`drawn-SEED-NUMBER` is always the same scenario. It has 2 to 16 servers of one preset, or of two presets of one model,
with equal or different speeds and all or part of their memory. The workload has drawn lengths: conversations, agents,
groups that share a prompt, documents by popularity, or prompts that share nothing. Arrivals are Poisson, bursty or
tidal. The load is 0.3 to 1.1 of the pool's roughly estimated capacity. One of four scenarios has a fault.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from math import exp, log
from random import Random
from statistics import fmean

from msgspec import Struct
from msgspec.structs import replace

from fairlead.lab.engine.presets import PRESETS
from fairlead.lab.simulator.world import MAX_MODEL_LEN, Fault, FaultKind, Replica, Scenario, replicas
from fairlead.lab.workload.arrivals import Arrivals, bursty, poisson, tides, times
from fairlead.lab.workload.conversation import Conversation, SharedPrefix, conversation, shared_prefix
from fairlead.lab.workload.record import Dispatch, Record, Workload

BLOCK = 64
KINDS = ("conversations", "agents", "groups", "documents", "unshared")
#: Requests of a scenario; and the number of requests that an engine is assumed to decode at once.
REQUESTS, SEQUENCES = 1500, 48
FAULTS: tuple[FaultKind, ...] = ("down", "slow", "hang", "freeze", "mute")
#: The number of scenarios in the set of a seed.
COUNT = 24
#: More than all numbers of scenarios.
_NUMBERS = 10**9
_NAME = re.compile(r"drawn-(\d{1,9})(?:-(\d{1,9}))?")


def drawn_names(name: str) -> list[str]:
    """The names that `name` stands for: for `drawn-SEED` the `COUNT` scenarios of that seed, for `drawn-SEED-NUMBER`
    itself, for any other name an empty list."""
    match = _NAME.fullmatch(name)
    if match is None:
        return []
    return [name] if match[2] else [f"{name}-{number}" for number in range(COUNT)]


def drawn_scenario(name: str, traffic: int = 0) -> "Drawn | None":
    """The scenario named `drawn-SEED-NUMBER`, with the traffic of a seed; `None` for any other name."""
    match = _NAME.fullmatch(name)
    return draw(int(match[1]), int(match[2]), traffic=traffic) if match and match[2] else None


class Drawn(Struct, frozen=True):
    """A drawn scenario, and its description for people."""

    scenario: Scenario
    words: str


@lru_cache(maxsize=2)
def draw(seed: int, number: int, requests: int = REQUESTS, traffic: int = 0) -> Drawn:
    """Draw scenario `number` of a seed, with about `requests` requests. `traffic`: a seed of lengths and arrivals
    alone."""
    chance = Random(f"drawn/{seed}/{number}")
    servers, pool = _pool(chance)
    memory = min(replica.engine.block_size * replica.engine.num_blocks for replica in servers)
    kind = chance.choice(KINDS)
    spec = lengths(kind, chance, memory)
    load = chance.uniform(0.3, 1.1)
    pattern = chance.choice(("poisson", "poisson", "bursty", "tides"))
    swing = chance.uniform(2.0, 4.0)
    # The workload is generated twice: first to estimate the cost of its requests, then at the rate of the drawn load.
    trial = requests_of(kind, spec, poisson(1.0), number, requests)
    per_s = load * capacity(trial.records, servers)
    starts_per_s = per_s * len({record.session or record.id for record in trial.records}) / len(trial.records)
    lasts_s = requests / per_s
    arrivals: dict[str, Arrivals] = {
        "poisson": poisson(starts_per_s),
        "bursty": bursty(starts_per_s, swing),
        "tides": tides(0.5 * starts_per_s, 1.5 * starts_per_s, lasts_s / 3),
    }
    workload = requests_of(kind, spec, arrivals[pattern], number + traffic * _NUMBERS, requests)
    faults: tuple[Fault, ...] = ()
    if chance.random() < 0.25:
        begin_s, for_s = chance.uniform(0.2, 0.5) * lasts_s, min(chance.uniform(0.05, 0.2) * lasts_s, 60.0)
        which = chance.randrange(len(servers))
        faults = (Fault(kind=chance.choice(FAULTS), replica=which, at_s=begin_s, for_s=for_s, factor=swing),)
    prompt = fmean(record.in_tokens for record in workload.records)
    answer = fmean(record.out_tokens for record in workload.records)
    words = f"{pool}, {kind} of {prompt:.0f} + {answer:.0f} tokens, {pattern}, load {load:.2f}"
    words += "".join(f", {fault.kind} at {fault.at_s:.0f} s for {fault.for_s:.0f} s" for fault in faults)
    name = f"drawn-{seed}-{number}"
    return Drawn(Scenario(name=name, workload=workload, replicas=servers, faults=faults), words)


def _pool(chance: Random) -> tuple[tuple[Replica, ...], str]:
    """Draw the servers. Returns them with their description for people."""
    preset, count = PRESETS[chance.choice(sorted(PRESETS))], chance.choice((2, 3, 4, 6, 8, 12, 16))
    share = chance.uniform(0.4, 0.9) if chance.random() < 0.25 else 1.0
    memory = int(preset.kv_tokens * share) // BLOCK * BLOCK
    servers = replicas(count, preset, block_size=BLOCK, kv_tokens=memory)
    words = preset.name + (f" with {share:.0%} of its memory" if share < 1.0 else "")
    same_model = [entry for entry in PRESETS.values() if entry.model == preset.model and entry is not preset]
    look = chance.random()
    if look < 0.2 and same_model:
        another = chance.choice(same_model)
        servers = servers[: count // 2] + replicas(count - count // 2, another, block_size=BLOCK)
        return servers, f"{count // 2} × {words} and {count - count // 2} × {another.name}"
    if look < 0.4:
        servers = tuple(replace(server, speed=chance.uniform(0.4, 1.0)) for server in servers)
        words += ", unlike speeds"
    return servers, f"{count} × {words}"


def lengths(kind: str, chance: Random, memory: int) -> Conversation | SharedPrefix:
    """Draw the parameters of a workload. Each length is at most a twelfth of `memory`, the KV tokens of a server."""

    def tokens(low: int, high: int) -> int:
        """A log-uniform length in whole blocks: as likely from 100 to 200 tokens as from 1,000 to 2,000."""
        high = max(min(high, memory // 12), low + 1)
        return max(round(exp(chance.uniform(log(low), log(high)))) // BLOCK, 1) * BLOCK

    if kind in ("groups", "documents"):
        return SharedPrefix(
            groups=chance.randrange(10, 300),
            prompts=chance.randrange(3, 30),
            system_tokens=tokens(500, 12_000),
            question_tokens=tokens(64, 2000),
            output_tokens=tokens(64, 1500),
            block_size=BLOCK,
        )
    turns = {"conversations": chance.uniform(2, 8), "agents": chance.uniform(8, 25), "unshared": 1.0}[kind]
    first, turn = tokens(100, 16_000 if kind == "unshared" else 6000), tokens(64, 1500)
    return Conversation(
        systems=1 if kind == "unshared" else chance.randrange(1, 40),
        system_tokens=0 if kind == "unshared" else tokens(200, 6000),
        turns=turns,
        first_tokens=first,
        turn_tokens=turn,
        output_tokens=tokens(64, 1500),
        gap_s=chance.uniform(2, 10) if kind == "agents" else chance.uniform(10, 60),
        spread=chance.uniform(0.2, 1.2),
        max_tokens=min(memory // 3, MAX_MODEL_LEN),
        block_size=BLOCK,
    )


def requests_of(kind: str, spec: Conversation | SharedPrefix, arrivals: Arrivals, seed: int, requests: int) -> Workload:
    """A workload of about `requests` requests. `arrivals` gives the starts of its sessions, or of its requests if the
    kind has no sessions."""
    if isinstance(spec, Conversation):
        sessions = max(round(requests / spec.turns), 1)
        dispatch: Dispatch = "think" if kind == "agents" else "timestamp"
        return conversation(spec, sessions=sessions, arrivals=arrivals, seed=seed, dispatch=dispatch, name=kind)
    made = shared_prefix(spec, arrivals=arrivals, count=requests, seed=seed)
    return _popular(spec, made, arrivals, seed) if kind == "documents" else made


def _popular(spec: SharedPrefix, made: Workload, arrivals: Arrivals, seed: int) -> Workload:
    """The workload with its system prompts as documents: each request asks a new question about a document, which is
    chosen in proportion to 1 / rank."""
    chance = Random(f"documents/{seed}")
    shared, own = spec.system_tokens // BLOCK, spec.question_tokens // BLOCK
    ranks = chance.choices(range(spec.groups), [1.0 / (rank + 1) for rank in range(spec.groups)], k=len(made.records))
    records = []
    for index, (rank, at_s) in enumerate(zip(ranks, times(arrivals, chance, count=len(ranks)), strict=True)):
        question = spec.groups * shared + index * own
        ids = (*range(rank * shared, (rank + 1) * shared), *range(question, question + own))
        records.append(replace(made.records[index], arrival_us=int(at_s * 1e6), hash_ids=ids))
    return Workload(name="documents", records=records)


def capacity(records: Sequence[Record], servers: Sequence[Replica]) -> float:
    """A rough estimate of how many of these requests per second the pool can answer if each block is computed once."""
    blocks = {block for record in records for block in record.hash_ids}
    computed = len(blocks) * BLOCK / len(records)
    held = fmean(record.in_tokens + record.out_tokens / 2 for record in records)
    steps = fmean(record.out_tokens for record in records)
    total = 0.0
    for server in servers:
        engine, latency = server.engine, server.engine.latency
        at_once = max(min(engine.max_num_seqs, SEQUENCES, engine.num_blocks * engine.block_size / held), 1.0)
        token_ms = latency.c0_ms / at_once + latency.c_seq_us * 1e-3 + latency.c_kv_ns * 1e-6 * held
        prefill_ms = computed * (latency.c_pf_us * 1e-3 + latency.c_attn_ns * 1e-6 * held)
        total += server.speed * 1e3 / (prefill_ms + steps * token_ms)
    return total
