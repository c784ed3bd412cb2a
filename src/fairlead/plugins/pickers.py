"""Pickers: they choose one of the rated endpoints."""

from math import nextafter

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fairlead.core.columns import FloatColumn
from fairlead.core.policy import Cycle
from fairlead.core.request import Request
from fairlead.core.view import FleetView
from fairlead.plugins.columns import entries
from fairlead.plugins.params import NoParams, Params, Plain


class MaxScoreParams(Params):
    near_tie: float = Field(
        default=0.005, ge=0, lt=1, description="Totals within this share of the best count as equal."
    )


class MaxScore(Plain[MaxScoreParams]):
    """The highest total; among those within `nearTie` of it, a random one."""

    type = "max-score"
    Params = MaxScoreParams

    def pick(self, request: Request, fleet: FleetView, totals: FloatColumn, cycle: Cycle) -> int:
        leader = totals.argmax()
        best = float(totals[leader])
        near = totals >= best - abs(best) * self._params.near_tie
        if np.count_nonzero(near) == 1:
            return int(leader)
        return self.one_of(entries(near), totals, fleet, cycle)

    def one_of(self, ties: NDArray[np.intp], totals: FloatColumn, fleet: FleetView, cycle: Cycle) -> int:
        """Return a random one of the slots whose totals count as equal."""
        return int(ties[int(cycle.rng.random() * len(ties))])


# `top-k`: a random one of the k best (`selection.topK`).
#
# The single best endpoint would get every request of a burst until the next scrape. The documents report a P99 of 3.5 s
# for k = 1 and of 450 ms for k = 3 at 20 requests/s, at the cost of about 5 % of cache hits.


class TopKParams(Params):
    k: int = Field(default=3, ge=1, description="How many of the best to choose from.")


class TopK(Plain[TopKParams]):
    """A random one of the `k` highest totals. Equal totals at the border of the `k` are also drawn at random."""

    type = "top-k"
    Params = TopKParams

    def pick(self, request: Request, fleet: FleetView, totals: FloatColumn, cycle: Cycle) -> int:
        finite = totals > -np.inf
        k = min(self._params.k, int(np.count_nonzero(finite)))
        border = np.partition(totals, -k)[-k]
        above = entries(totals > border)
        rank = int(cycle.rng.random() * k)
        if rank < len(above):
            return int(above[rank])
        ties = entries(totals == border)
        return int(ties[int(cycle.rng.random() * len(ties))])


class WeightedRandom(Plain[NoParams]):
    """Probability proportional to the total; uniform over the candidates if every total is 0."""

    type = "weighted-random"

    def pick(self, request: Request, fleet: FleetView, totals: FloatColumn, cycle: Cycle) -> int:
        finite = totals > -np.inf
        weights = np.where(finite, np.maximum(totals, 0.0), 0.0)
        sums = np.cumsum(weights if weights.any() else finite.astype(np.float64))
        drawn = min(cycle.rng.random() * sums[-1], nextafter(sums[-1], 0.0))  # the product may round up to the sum
        return int(np.searchsorted(sums, drawn, side="right"))


class RoundRobin(Plain[NoParams]):
    """The next candidate in slot order."""

    type = "round-robin"
    _last = -1

    def pick(self, request: Request, fleet: FleetView, totals: FloatColumn, cycle: Cycle) -> int:
        candidates = entries(totals > -np.inf)
        later = candidates[candidates > self._last]
        self._last = int(later[0] if len(later) else candidates[0])
        return self._last


class Uniform(Plain[NoParams]):
    """A random candidate, all with the same probability."""

    type = "random"

    def pick(self, request: Request, fleet: FleetView, totals: FloatColumn, cycle: Cycle) -> int:
        candidates = entries(totals > -np.inf)
        return int(candidates[int(cycle.rng.random() * len(candidates))])
