"""The numbers that one decision was made from: enough to make it again, by the same policy or another."""

from typing import Any

from msgspec import Struct

from fairlead.model.endpoint import Endpoint


class Snapshot(Struct, frozen=True, gc=False):
    """Of all endpoints, at the moment before the choice. Arrays are copies, or never change; taking one costs 3 µs."""

    #: Clock seconds.
    at: float
    #: By slot; `None` = free.
    endpoints: tuple[Endpoint | None, ...]
    #: By slot; `None` = the endpoint reports none.
    adapters: tuple[frozenset[str] | None, ...]
    #: (columns of `fleet.table.FLOATS`) × slots.
    floats: Any
    #: 4 × slots: the learned factors of first tokens, of output tokens, of prefill and of a step.
    learned: Any
    #: Learned for the pool: how long memory is held (ms), and the steps of an answer.
    hold_ms: float = 0.0
    answer_steps: float = 0.0
