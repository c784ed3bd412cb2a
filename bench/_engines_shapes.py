"""The engines of `engines.py`: model servers that the scheduler's prior does not describe, and traffic for each.

Times are chosen, not fitted: what counts is that shapes differ from each other and from the prior. Prompts and answers
are such that an engine of that kind is used as it is meant to be.
"""

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct, structs

from fairlead.lab.engine.presets import read_preset
from fairlead.lab.engine.spec import EngineSpec, LatencyModel
from fairlead.lab.simulator.build import read_workload
from fairlead.lab.simulator.world import Replica, Scenario, World
from fairlead.lab.workload.conversation import Conversation, conversation
from fairlead.lab.workload.record import Record, Workload

BLOCK = 16
#: Of the shape's capacity.
LOADS = (0.4, 0.7, 0.9)
LOCK_IN = Path(__file__).parents[1] / "tests" / "data" / "lock-in"


class Shape(Struct, frozen=True, kw_only=True):
    """A pool of servers, and conversations that suit it."""

    what: str
    servers: tuple[Replica, ...]
    talk: Conversation
    #: What the pool can do, as `engines.py --capacity` finds it; 1 for captured traffic.
    capacity_rps: float = 1.0
    #: Requests of a run are this many times those of other shapes, so that it lasts longer than its answers.
    times: int = 1
    #: Captured traffic instead of `talk`, at these multiples of its pace instead of shares of a capacity.
    captured: str = ""
    paces: tuple[float, ...] = ()


def _engine(latency: LatencyModel, *, slots: int = 256, kv: int = 200_000, **fields: object) -> EngineSpec:
    values: dict[str, object] = {"max_model_len": 8192, "max_batched_tokens": 8192, **fields}
    return EngineSpec(latency=latency, num_blocks=kv // BLOCK + 1, block_size=BLOCK, max_num_seqs=slots, **values)  # type: ignore[arg-type]


def _alike(count: int, engine: EngineSpec, machine: str = "") -> tuple[Replica, ...]:
    return tuple(Replica(engine=engine, machine=machine) for _ in range(count))


def _talk(prompt: int, answer: int, *, gap_s: float = 8.0, systems: int = 10, turns: float = 4) -> Conversation:
    """First prompts of about that many tokens, two thirds of them a system prompt that others have too."""
    return Conversation(
        systems=systems,
        system_tokens=prompt * 2 // 3 // BLOCK * BLOCK,
        turns=turns,
        first_tokens=prompt // 3,
        turn_tokens=prompt // 6,
        output_tokens=answer,
        gap_s=gap_s,
        spread=0.8,
        max_tokens=8000,
        block_size=BLOCK,
    )


_CPU = LatencyModel(c0_ms=14, c_pf_us=280, c_attn_ns=30, c_seq_us=1500, c_kv_ns=300)
_MOE_JUMPS = ((2, 3.0), (4, 5.0), (8, 8.0), (16, 12.0), (32, 15.0), (64, 15.0), (256, 10.0))
_FAST, _SLOW = LatencyModel(9, 45, 2, 30, 60), LatencyModel(27, 135, 6, 90, 180)


def _lock_in(name: str) -> Shape:
    spec = read_preset((LOCK_IN / f"{name}.yaml").read_text()).spec(max_num_seqs=4)
    return Shape(
        what=f"two servers, captured conversations, preset {name}",
        servers=_alike(2, spec),
        talk=_talk(100, 10),
        captured="conversation-5rps.jsonl",
        paces=(0.5, 1.0, 1.6),
    )


SHAPES: dict[str, Shape] = {
    "slots-4": Shape(
        what="4 slots",
        capacity_rps=9.9,
        servers=_alike(3, _engine(LatencyModel(10, 60, 1, 200, 60), slots=4, kv=60_000)),
        talk=_talk(600, 80),
    ),
    "slots-1024": Shape(
        what="1,024 slots, long answers",
        capacity_rps=267,
        servers=_alike(2, _engine(LatencyModel(6, 8, 0.2, 30, 4), slots=1024, kv=2_000_000)),
        talk=_talk(400, 200, systems=40),
        times=4,
    ),
    "compute-bound": Shape(
        what="prompts cost nearly all; roofline",
        capacity_rps=11.7,
        servers=_alike(4, _engine(LatencyModel(3, 250, 12, 250, 40, weights_ms=6), slots=32)),
        talk=_talk(1800, 40, systems=16),
    ),
    "memory-bound": Shape(
        what="cache for 20 requests",
        capacity_rps=30,
        servers=_alike(4, _engine(LatencyModel(8, 25, 1, 30, 60), kv=32_000)),
        talk=_talk(1200, 250, systems=24),
    ),
    "bandwidth-bound": Shape(
        what="reading the cache costs nearly all; roofline",
        capacity_rps=14.1,
        servers=_alike(4, _engine(LatencyModel(2, 12, 0.2, 20, 900, weights_ms=22), slots=32)),
        talk=_talk(1800, 150, systems=16),
    ),
    "long-step": Shape(
        what="150 ms for any step",
        capacity_rps=19.5,
        servers=_alike(4, _engine(LatencyModel(150, 20, 0.5, 60, 20), slots=32)),
        talk=_talk(900, 60),
    ),
    "cpu": Shape(
        what="CPU: 4 slots, batches gain little, 15 % noise",
        capacity_rps=5.9,
        servers=_alike(2, _engine(_CPU, slots=4, kv=12_288, max_model_len=4096, noise=0.15)),
        talk=_talk(500, 40),
    ),
    "neighbours": Shape(
        what="CPU, two servers on each of two machines slow each other down by 80 %",
        capacity_rps=7.2,
        servers=tuple(
            replica
            for machine in "ab"
            for replica in _alike(2, _engine(_CPU, slots=4, kv=24_000, max_model_len=4096, contention=0.8), machine)
        ),
        talk=_talk(500, 40),
    ),
    "moe": Shape(
        what="mixture of experts: steps jump with the tokens in them",
        capacity_rps=45,
        servers=_alike(4, _engine(LatencyModel(5, 30, 1, 40, 30, jumps=_MOE_JUMPS), slots=48)),
        talk=_talk(1200, 120),
    ),
    "speculative": Shape(
        what="4 drafted tokens a step, 70 % accepted",
        capacity_rps=71,
        servers=_alike(4, _engine(LatencyModel(14, 30, 1, 60, 40), slots=32, draft_tokens=4, acceptance=0.7)),
        talk=_talk(1200, 150),
    ),
    "whole-prompts": Shape(
        what="no chunked prefill: nobody decodes while prompts are computed",
        capacity_rps=33.4,
        servers=_alike(4, _engine(LatencyModel(10, 60, 2, 40, 40), slots=32, chunked_prefill=False)),
        talk=_talk(1500, 120, systems=16),
    ),
    "noise": Shape(
        what="30 % noise per step",
        capacity_rps=67,
        servers=_alike(8, _engine(LatencyModel(16, 90, 3, 100, 120), slots=32, noise=0.3)),
        talk=_talk(1200, 100, systems=24),
        times=2,
    ),
    "mixed": Shape(
        what="two GPUs, two that are 3 times slower, one CPU with 4 slots",
        capacity_rps=59,
        servers=(
            *_alike(2, _engine(_FAST, slots=64)),
            *_alike(2, _engine(_SLOW, slots=32, noise=0.1)),
            *_alike(1, _engine(_CPU, slots=4, kv=32_000)),
        ),
        talk=_talk(900, 120),
        times=3,
    ),
    "lock-in-hand": _lock_in("hand"),
    "lock-in-low": _lock_in("low"),
}


def scenario(shape: Shape, rate: float, requests: int, seed: int) -> Scenario:
    """`rate`: requests per second, or for captured traffic the multiple of its pace."""
    if shape.captured:
        workload, speedup = read_workload(LOCK_IN / shape.captured), rate
    else:
        workload, speedup = _workload(shape.talk, rate, requests, seed), 1.0
    return Scenario(name="engines", workload=workload, replicas=shape.servers, speedup=speedup, world=World())


def _workload(talk: Conversation, rate: float, requests: int, seed: int) -> Workload:
    """So many requests in a row of conversations that began long before, so that the rate is the same throughout."""
    settled = talk.gap_s * talk.turns * 2
    seconds = settled + 1.3 * requests / rate
    made = conversation(talk, seconds=seconds, rate=rate / talk.turns, seed=seed, dispatch="timestamp")
    kept = [record for record in made.records if record.arrival_us >= settled * 1e6][:requests]
    return Workload(name="conversations", records=_from_zero(kept))


def _from_zero(records: Sequence[Record]) -> list[Record]:
    first = records[0].arrival_us
    return [structs.replace(record, arrival_us=record.arrival_us - first) for record in records]
