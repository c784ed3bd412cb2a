"""`queue-depth`: avoid endpoints whose queue is long."""

from typing import Annotated

from msgspec import Meta

from fairlead.fleet.columns import BoolColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.masks import below
from fairlead.plugins.params import Params
from fairlead.schedule.cycle import Cycle


class QueueDepthParams(Params, frozen=True, kw_only=True):
    #: Keep while fewer requests wait. Recommended: 80 % of the engine's max_num_seqs (256 → 200).
    max_queue_length: Annotated[int, Meta(ge=1)] = 50


class QueueDepth:
    """Keeps endpoints with fewer than `maxQueueLength` effectively waiting requests (scraped, corrected by our own)."""

    type = "queue-depth"
    Params = QueueDepthParams
    hard = False

    def __init__(self, params: QueueDepthParams, name: str = type) -> None:
        self.name = name
        self._limit = params.max_queue_length

    def keep(self, request: Request, fleet: Fleet, cycle: Cycle) -> BoolColumn | None:
        return below(fleet.table.queue, self._limit)
