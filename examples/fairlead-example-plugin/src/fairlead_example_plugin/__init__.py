"""`free-tokens`: prefer endpoints whose KV cache has room for the request."""

import numpy as np
from pydantic import Field

from fairlead.core.columns import FloatColumn
from fairlead.core.policy import Cycle
from fairlead.core.request import Request
from fairlead.core.view import FleetView
from fairlead.plugins.params import Params


class FreeTokensParams(Params):
    expected_output: int = Field(default=500, description="Output tokens to reserve where the client sets no limit.")


class FreeTokens:
    """1 where the whole request fits into free KV memory, less where part of it does, 0.5 where that is not known."""

    type = "free-tokens"
    Params = FreeTokensParams
    weight = 1.0

    def __init__(self, params: FreeTokensParams, name: str = type) -> None:
        self.name = name
        self._output = params.expected_output

    def score(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None:
        needed = request.prompt_tokens + (request.max_tokens or self._output)
        capacity = fleet.table.capacity_tokens
        free = capacity * (1.0 - fleet.table.kv)
        return np.where(capacity > 0, np.clip(free / max(needed, 1), 0.0, 1.0), 0.5)
