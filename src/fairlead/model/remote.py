"""What travels between the pipeline and a scheduler in another process, as nouns of the pure core.

Contract and meaning of every field: `proto/fairlead/scheduler/v1/scheduler.proto`.
"""

from enum import IntEnum

from msgspec import Struct


class Outcome(IntEnum):
    UNSPECIFIED = 0
    PICKED = 1
    REFUSED = 2
    PASSED = 3


class RemotePick(Struct, frozen=True, gc=False):
    """A scheduler's word on one request; not yet checked."""

    request_id: int
    outcome: int = Outcome.PICKED
    #: Endpoint ids.
    endpoint: str = ""
    score: float = 0.0
    reason: str = ""
    #: (endpoint id, score), the best first.
    alternatives: tuple[tuple[str, float], ...] = ()
    prefill: str = ""
