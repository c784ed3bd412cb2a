"""The shared-prefix benchmark as published, with its loads, its pauses and its memory.

Source: llm-d's benchmark reports of 2025 and 2026 ("X-70R-6kSys", and the optimised baseline's guide): Qwen3-32B on
8 x 2 H100, 307,328 tokens of KV cache each; 150 system prompts of 6000 tokens, 5 questions of 1200 each, 1000 tokens
out. A stage of 750 requests (15/s) warms the caches: every prompt once. Then come stages of 20 to 50 s, from 3 to 60
requests per second. A stage begins when the one before is over, and is measured alone: its output tokens per second are
over the time from its first arrival to its last answer, drain included. So "60 requests per second" are 1500 requests
that arrive within 25 s, and 15,000 tokens per second are what is possible when they are worked off in 100 s.
"""

from collections.abc import Callable
from functools import partial
from random import Random

from msgspec import structs

from fairlead.sim.world import Scenario, replicas
from fairlead.workload.arrivals import poisson, times
from fairlead.workload.record import Workload
from fairlead.workload.shared_prefix import SharedPrefix, shared_prefix

KV_TOKENS = 307_328
#: (requests per second, seconds) of the stage that warms the caches, and the pause after it: round robin needs 60 s.
WARM_UP_STAGE = (15.0, 50.0)
PAUSE_S = 250.0
#: Seconds of the published stages, by their rate.
STAGES = {20.0: 38.0, 40.0: 38.0, 60.0: 25.0}


def stage(rate: float, seconds: float, preset: str = "") -> Scenario:
    """One stage behind the one that warms the caches; only the former is counted. `preset`: other servers than the
    published ones, with the memory that they have."""
    spec = SharedPrefix()
    first, lasts = WARM_UP_STAGE
    warm, counted = int(first * lasts), int(rate * seconds)
    begin = lasts + PAUSE_S
    rng = Random(f"stage/{rate:g}/{seconds:g}")
    arrivals = list(times(poisson(first), rng, count=warm))
    arrivals += [begin + at for at in times(poisson(rate), rng, count=counted)]
    made = shared_prefix(spec, rate=rate, count=warm + counted)
    records = [structs.replace(r, arrival_us=int(at * 1e6)) for r, at in zip(made.records, arrivals, strict=True)]
    size = spec.block_size
    servers = replicas(8, preset, block_size=size) if preset else replicas(8, block_size=size, kv_tokens=KV_TOKENS)
    return Scenario(
        name=f"headline-stage-{rate:g}",
        workload=Workload(name="shared-prefix-stage", records=records),
        replicas=servers,
        counted_from_s=begin,
    )


PUBLISHED: dict[str, Callable[[], Scenario]] = {
    **{f"headline-stage-{rate:g}": partial(stage, rate, seconds) for rate, seconds in STAGES.items()},
    # The same memory and warm caches under a load that lasts: about what the servers bear.
    "headline-steady-16": partial(stage, 16.0, 1200.0),
    # Where a prompt costs more in comparison with an answer, and the answers fit into the memory.
    "headline-70b-20": partial(stage, 20.0, 600.0, "llama-70b-h100-tp4"),
}
