"""`load-aware`: prefer endpoints with few waiting and running requests."""

from typing import Annotated

from msgspec import Meta

from fairlead.fleet.columns import FloatColumn, scalar
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.masks import not_negative
from fairlead.plugins.params import Params
from fairlead.schedule.cycle import Cycle

#: Load at which the score reaches 0: a load of 0, 10, 25, 40, 50 scores 1, .8, .5, .2, 0.
FULL_LOAD = 50.0
_ONE = scalar(1.0)


class LoadAwareParams(Params, frozen=True, kw_only=True):
    queue_weight_factor: Annotated[float, Meta(ge=0)] = 0.7
    active_requests_weight: Annotated[float, Meta(ge=0)] = 0.3


class LoadAware:
    """1 - load/50, load = 0.7 · waiting + 0.3 · running (effective: scraped, corrected by our own charges)."""

    type = "load-aware"
    Params = LoadAwareParams
    weight = 50.0

    def __init__(self, params: LoadAwareParams, name: str = type) -> None:
        self.name = name
        self._queue = scalar(params.queue_weight_factor / FULL_LOAD)
        self._active = scalar(params.active_requests_weight / FULL_LOAD)

    def score(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | None:
        table = fleet.table
        return not_negative(_ONE - self._queue * table.queue - self._active * table.active)
