"""`max-score`: the best endpoint; near-ties at random, so that several schedulers do not herd."""

from typing import Annotated

import numpy as np
from msgspec import Meta

from fairlead.fleet.columns import FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.masks import entries
from fairlead.plugins.params import Params
from fairlead.schedule.cycle import Cycle


class MaxScoreParams(Params, frozen=True, kw_only=True):
    #: Totals within this share of the best count as equal.
    near_tie: Annotated[float, Meta(ge=0, lt=1)] = 0.005


class MaxScore:
    """The highest total; among those within `nearTie` of it, a random one."""

    type = "max-score"
    Params = MaxScoreParams

    def __init__(self, params: MaxScoreParams, name: str = type) -> None:
        self.name = name
        self._near = params.near_tie

    def pick(self, request: Request, fleet: Fleet, totals: FloatColumn, cycle: Cycle) -> int:
        leader = totals.argmax()
        best = float(totals[leader])
        near = totals >= best - abs(best) * self._near
        if np.count_nonzero(near) == 1:
            return int(leader)
        ties = entries(near)
        return int(ties[int(cycle.rng.random() * len(ties))])
