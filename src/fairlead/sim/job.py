"""One request on its way through a simulation, and how it ended."""

from typing import Literal

from msgspec import Struct

from fairlead.engine.request import EngineRequest
from fairlead.model.request import Request
from fairlead.workload.record import Record

#: `done`; `shed` = refused by the scheduler; `failed` = broken off by a server, refused by it, or never over;
#: `cancelled` = the client went.
Status = Literal["waiting", "done", "shed", "failed", "cancelled"]


class Job(Struct, gc=False):
    """Times are kernel seconds; -1 = it did not happen."""

    index: int
    record: Record
    arrived: float
    request: Request | None = None
    served: EngineRequest | None = None
    #: Where its prompt is computed for the server that answers, and the engine's side of that; -1 = there.
    prefill_server: int = -1
    prefilled: EngineRequest | None = None
    #: Index of the server that it was sent to; -1 = none.
    server: int = -1
    status: Status = "waiting"
    reason: str = ""
    routed_at: float = -1.0
    #: As the client sees it, network included.
    first_at: float = -1.0
    ended_at: float = -1.0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0

    def leg(self) -> tuple[int, EngineRequest | None]:
        """(server, the engine's side) of the part that is on its way now: the prefill elsewhere, or the answer."""
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
        """Of the tokens after the first; 0 when there are none."""
        return (self.ended_at - self.first_at) * 1e3 / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0
