"""Orderings within a flow by their names in a configuration; what they do is in `fairlead.admit.ordering`."""

from typing import Annotated

from msgspec import Meta

from fairlead.admit.ordering import EarliestDeadline, Fcfs, LeastWork
from fairlead.plugins.params import NoParams, Params


class FirstCome(Fcfs):
    """First come, first served."""

    type = "fcfs"
    Params = NoParams

    def __init__(self, params: NoParams | None = None, name: str = type) -> None:
        self.name = name


class Deadline(EarliestDeadline):
    """The earlier of the time to live's end and the client's TTFT objective."""

    type = "edf"
    Params = NoParams

    def __init__(self, params: NoParams | None = None, name: str = type) -> None:
        self.name = name


class LeastWorkParams(Params, frozen=True, kw_only=True):
    #: Uncached prompt tokens forgiven per second of waiting.
    ageing: Annotated[float, Meta(gt=0)] = 1000.0


class LeastWorkOrdering(LeastWork):
    """The least predicted work first, with ageing. The default."""

    type = "least-work"
    Params = LeastWorkParams

    def __init__(self, params: LeastWorkParams | None = None, name: str = type) -> None:
        super().__init__((params or LeastWorkParams()).ageing)
        self.name = name
