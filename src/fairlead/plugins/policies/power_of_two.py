"""`power-of-two`: of two endpoints drawn at random the one with fewer requests in flight."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fairlead.fleet.columns import FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.masks import entries
from fairlead.plugins.params import NoParams
from fairlead.schedule.cycle import Cycle
from fairlead.schedule.framework import Filter
from fairlead.schedule.profile import Profile


class PowerOfTwo(Profile):
    """Needs two readings instead of all (Mitzenmacher 2001)."""

    type = "power-of-two"
    Params = NoParams
    takes_filters = True

    def __init__(self, params: Any = None, name: str = type, filters: Sequence[Filter] = ()) -> None:
        super().__init__(name, filters, [], FewerOfTwo())


class FewerOfTwo:
    """The picker."""

    name = "fewer-of-two"

    def pick(self, request: Request, fleet: Fleet, totals: FloatColumn, cycle: Cycle) -> int:
        candidates = entries(totals > -np.inf)
        first = int(cycle.rng.random() * len(candidates))
        if len(candidates) == 1:
            return int(candidates[0])
        second = int(cycle.rng.random() * (len(candidates) - 1))
        second += second >= first
        load = fleet.table.queue[candidates] + fleet.table.active[candidates]
        return int(candidates[first if load[first] <= load[second] else second])
