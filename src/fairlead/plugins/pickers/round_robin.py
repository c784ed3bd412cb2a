"""`round-robin` and `random`: the baselines that look at nothing."""

import numpy as np

from fairlead.fleet.columns import FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.masks import entries
from fairlead.plugins.params import NoParams
from fairlead.schedule.cycle import Cycle


class RoundRobin:
    """The next candidate in slot order."""

    type = "round-robin"
    Params = NoParams

    def __init__(self, params: NoParams, name: str = type) -> None:
        self.name = name
        self._last = -1

    def pick(self, request: Request, fleet: Fleet, totals: FloatColumn, cycle: Cycle) -> int:
        candidates = entries(totals > -np.inf)
        later = candidates[candidates > self._last]
        self._last = int(later[0] if len(later) else candidates[0])
        return self._last


class Uniform:
    """Any candidate, all alike."""

    type = "random"
    Params = NoParams

    def __init__(self, params: NoParams, name: str = type) -> None:
        self.name = name

    def pick(self, request: Request, fleet: Fleet, totals: FloatColumn, cycle: Cycle) -> int:
        candidates = entries(totals > -np.inf)
        return int(candidates[int(cycle.rng.random() * len(candidates))])
