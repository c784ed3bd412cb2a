"""`queue-threshold`: prefer short queues, by an absolute measure."""

from typing import Annotated

from msgspec import Meta

from fairlead.fleet.columns import FloatColumn, scalar
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.masks import not_negative
from fairlead.plugins.params import Params
from fairlead.schedule.cycle import Cycle

_BEST = scalar(0.5)


class QueueThresholdParams(Params, frozen=True, kw_only=True):
    #: Waiting requests at which the score reaches 0.
    threshold: Annotated[int, Meta(ge=1)] = 128


class QueueThreshold:
    """0.5 · (1 - waiting / threshold), at least 0. The best is 0.5, so that beside other scorers it weighs half.

    Source: the reference picker's load-aware-scorer.
    """

    type = "queue-threshold"
    Params = QueueThresholdParams
    weight = 1.0

    def __init__(self, params: QueueThresholdParams, name: str = type) -> None:
        self.name = name
        self._per_request = scalar(0.5 / params.threshold)

    def score(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | None:
        return not_negative(_BEST - self._per_request * fleet.table.queue)
