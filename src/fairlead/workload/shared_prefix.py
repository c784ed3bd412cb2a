"""The shared-prefix workload: many users per system prompt, in random order.

The anchor of most published figures on prefix-aware routing is 150 groups of 5 users, 6000 tokens of system prompt,
1200 of question, 1000 of answer, at 3 to 60 requests per second. A router either keeps a system prompt on few replicas,
or has it computed everywhere.
"""

from random import Random

from msgspec import Struct

from fairlead.workload.arrivals import Arrivals, poisson, times
from fairlead.workload.record import Record, Workload


class SharedPrefix(Struct, frozen=True, kw_only=True):
    """Parameters; the defaults are the anchor."""

    groups: int = 150
    users: int = 5
    system_tokens: int = 6000
    question_tokens: int = 1200
    output_tokens: int = 1000
    #: Tokens per hash id; must divide the system prompt, or its last block is never shared.
    block_size: int = 80
    model: str = ""

    def __post_init__(self) -> None:
        for name in ("groups", "users", "system_tokens", "question_tokens", "output_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")


def shared_prefix(
    spec: SharedPrefix,
    *,
    rate: float = 10.0,
    seconds: float = 0.0,
    count: int = 0,
    seed: int = 0,
    arrivals: Arrivals | None = None,
) -> Workload:
    """One shuffled order of groups × users, repeated; Poisson arrivals unless told otherwise."""
    rng = Random(f"shared-prefix/{seed}")
    order = [(group, user) for group in range(spec.groups) for user in range(spec.users)]
    rng.shuffle(order)
    ids = {place: _ids(spec, *place) for place in order}
    records = []
    for index, at in enumerate(times(arrivals or poisson(rate), rng, count=count, seconds=seconds)):
        group, user = order[index % len(order)]
        records.append(
            Record(
                id=str(index),
                arrival_us=int(at * 1e6),
                in_tokens=spec.system_tokens + spec.question_tokens,
                out_tokens=spec.output_tokens,
                max_tokens=spec.output_tokens,
                block_size=spec.block_size,
                hash_ids=ids[group, user],
                model=spec.model,
            )
        )
    return Workload(name=f"shared-prefix-{rate:g}rps", records=records)


def _ids(spec: SharedPrefix, group: int, user: int) -> tuple[int, ...]:
    """Blocks of the system prompt are the group's, all others the user's own."""
    total = -(-(spec.system_tokens + spec.question_tokens) // spec.block_size)
    shared = spec.system_tokens // spec.block_size
    first = (group * (spec.users + 1)) * total
    own = (group * (spec.users + 1) + 1 + user) * total
    return (*range(first, first + shared), *range(own, own + total - shared))
