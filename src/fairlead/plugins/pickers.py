"""Which of the rated endpoints gets the request."""

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


class MaxScore:
    """The highest total; among those within `nearTie` of it, a random one."""

    type = "max-score"
    Params = MaxScoreParams

    def __init__(self, params: MaxScoreParams, name: str = type) -> None:
        self.name = name
        self._near = params.near_tie

    def pick(self, request: Request, fleet: FleetView, totals: FloatColumn, cycle: Cycle) -> int:
        leader = totals.argmax()
        best = float(totals[leader])
        near = totals >= best - abs(best) * self._near
        if np.count_nonzero(near) == 1:
            return int(leader)
        return self.one_of(entries(near), totals, fleet, cycle)

    def one_of(self, ties: NDArray[np.intp], totals: FloatColumn, fleet: FleetView, cycle: Cycle) -> int:
        """Of equals, a random one."""
        return int(ties[int(cycle.rng.random() * len(ties))])


# `top-k`: a random one of the k best (`selection.topK`).
#
# Taking the single best sends every request of a burst to the same endpoint until the next scrape. The documents report
# P99 3.5 s for k = 1 against 450 ms for k = 3 at 20 requests/s, at the price of about 5 % cache hits.


class TopKParams(Params):
    k: int = Field(default=3, ge=1, description="How many of the best to choose from.")


class TopK:
    """Sort, take k, random among them. Equal totals at the border of the k are drawn at random too."""

    type = "top-k"
    Params = TopKParams

    def __init__(self, params: TopKParams, name: str = type) -> None:
        self.name = name
        self._k = params.k

    def pick(self, request: Request, fleet: FleetView, totals: FloatColumn, cycle: Cycle) -> int:
        finite = totals > -np.inf
        k = min(self._k, int(np.count_nonzero(finite)))
        border = np.partition(totals, -k)[-k]
        above = entries(totals > border)
        rank = int(cycle.rng.random() * k)
        if rank < len(above):
            return int(above[rank])
        ties = entries(totals == border)
        return int(ties[int(cycle.rng.random() * len(ties))])


class WeightedRandom(Plain):
    """Probability ∝ total; uniform over the candidates when every total is 0."""

    type = "weighted-random"

    def pick(self, request: Request, fleet: FleetView, totals: FloatColumn, cycle: Cycle) -> int:
        finite = totals > -np.inf
        weights = np.where(finite, np.maximum(totals, 0.0), 0.0)
        sums = np.cumsum(weights if weights.any() else finite.astype(np.float64))
        drawn = min(cycle.rng.random() * sums[-1], nextafter(sums[-1], 0.0))  # the product may round up to the sum
        return int(np.searchsorted(sums, drawn, side="right"))


class RoundRobin:
    """The next candidate in slot order."""

    type = "round-robin"
    Params = NoParams

    def __init__(self, params: NoParams, name: str = type) -> None:
        self.name = name
        self._last = -1

    def pick(self, request: Request, fleet: FleetView, totals: FloatColumn, cycle: Cycle) -> int:
        candidates = entries(totals > -np.inf)
        later = candidates[candidates > self._last]
        self._last = int(later[0] if len(later) else candidates[0])
        return self._last


class Uniform(Plain):
    """Any candidate, all alike."""

    type = "random"

    def pick(self, request: Request, fleet: FleetView, totals: FloatColumn, cycle: Cycle) -> int:
        candidates = entries(totals > -np.inf)
        return int(candidates[int(cycle.rng.random() * len(candidates))])
