"""`weighted-random`: an endpoint with a probability proportional to its total."""

from math import nextafter

import numpy as np

from fairlead.fleet.columns import FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.params import NoParams
from fairlead.schedule.cycle import Cycle


class WeightedRandom:
    """Probability ∝ total; uniform over the candidates when every total is 0."""

    type = "weighted-random"
    Params = NoParams

    def __init__(self, params: NoParams, name: str = type) -> None:
        self.name = name

    def pick(self, request: Request, fleet: Fleet, totals: FloatColumn, cycle: Cycle) -> int:
        finite = totals > -np.inf
        weights = np.where(finite, np.maximum(totals, 0.0), 0.0)
        sums = np.cumsum(weights if weights.any() else finite.astype(np.float64))
        drawn = min(cycle.rng.random() * sums[-1], nextafter(sums[-1], 0.0))  # the product may round up to the sum
        return int(np.searchsorted(sums, drawn, side="right"))
