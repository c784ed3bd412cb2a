"""Fairness policies by their names in a configuration; what they do is in `fairlead.admit.fairness`."""

from typing import Annotated

from msgspec import Meta

from fairlead.admit.fairness import DeficitRoundRobin, LeastAttained, RoundRobin, Strict
from fairlead.plugins.params import NoParams, Params


class GlobalStrict(Strict):
    """One queue per band: the first of all by the ordering, whoever's it is."""

    type = "global-strict"
    Params = NoParams

    def __init__(self, params: NoParams | None = None, name: str = type) -> None:
        super().__init__()
        self.name = name


class RoundRobinFairness(RoundRobin):
    """One request of each flow in turn."""

    type = "round-robin"
    Params = NoParams

    def __init__(self, params: NoParams | None = None, name: str = type) -> None:
        super().__init__()
        self.name = name


class DeficitParams(Params, frozen=True, kw_only=True):
    #: Uncached prompt tokens that a flow may spend per round.
    quantum: Annotated[float, Meta(gt=0)] = 8192.0


class DeficitFairness(DeficitRoundRobin):
    """Equal work for each flow, in rounds. The default."""

    type = "deficit-round-robin"
    Params = DeficitParams

    def __init__(self, params: DeficitParams | None = None, name: str = type) -> None:
        super().__init__((params or DeficitParams()).quantum)
        self.name = name


class LeastAttainedFairness(LeastAttained):
    """The flow that was served least goes first."""

    type = "least-attained-service"
    Params = NoParams

    def __init__(self, params: NoParams | None = None, name: str = type) -> None:
        super().__init__()
        self.name = name
