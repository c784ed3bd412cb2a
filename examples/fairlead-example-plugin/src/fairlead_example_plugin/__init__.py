"""`free-tokens`: prefer endpoints whose KV cache has room for the request."""

import numpy as np

from fairlead.fleet.columns import FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.params import Params
from fairlead.schedule.cycle import Cycle


class FreeTokensParams(Params, frozen=True, kw_only=True):
    #: Output tokens to reserve where the client sets no limit.
    expected_output: int = 500


class FreeTokens:
    """1 where the whole request fits into free KV memory, less where part of it does, 0.5 where that is not known."""

    type = "free-tokens"
    Params = FreeTokensParams
    weight = 1.0

    def __init__(self, params: FreeTokensParams, name: str = type) -> None:
        self.name = name
        self._output = params.expected_output

    def score(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | None:
        needed = request.prompt_tokens + (request.max_tokens or self._output)
        capacity = fleet.table.capacity_tokens
        free = capacity * (1.0 - fleet.table.kv)
        return np.where(capacity > 0, np.clip(free / max(needed, 1), 0.0, 1.0), 0.5)
