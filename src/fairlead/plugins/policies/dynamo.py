"""`dynamo-linear`: the linear cost of Dynamo's KV router: prefill blocks to compute plus blocks in use for decoding."""

from typing import Annotated

import numpy as np
from msgspec import Meta

from fairlead.fleet.columns import FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.params import Params
from fairlead.plugins.policies.ranked import Ranked
from fairlead.schedule.cycle import Cycle
from fairlead.schedule.framework import prefix_share

BLOCK_TOKENS = 16


class DynamoLinearParams(Params, frozen=True, kw_only=True):
    prefill_load_scale: Annotated[float, Meta(ge=0)] = 1.0
    overlap_credit: Annotated[float, Meta(ge=0)] = 1.0


class DynamoLinear(Ranked):
    """scale · max(blocks pending + incoming - credit · overlap, 0) + blocks held; temperature 0."""

    type = "dynamo-linear"
    Params = DynamoLinearParams

    def cost(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn:
        table, params = fleet.table, self.params
        work = (table.pending_tokens + request.prompt_tokens) / BLOCK_TOKENS
        share = prefix_share(request, fleet, cycle)
        if share is not None:
            work = work - params.overlap_credit * share * (request.prompt_tokens / BLOCK_TOKENS)
        scale = float(params.prefill_load_scale)
        return scale * np.maximum(work, 0.0) + table.kv_tokens / BLOCK_TOKENS
