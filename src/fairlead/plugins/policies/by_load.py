"""Published rules that send a request to where the least work waits."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import Field

from fairlead.core.columns import FloatColumn
from fairlead.core.policy import Cycle, Filter, prefix_share
from fairlead.core.profile import Profile
from fairlead.core.request import Request
from fairlead.core.view import FleetView
from fairlead.plugins.columns import entries
from fairlead.plugins.params import NoParams, Params
from fairlead.plugins.policies.ranked import Ranked


class LeastRequests(Ranked):
    """Waiting + running."""

    type = "least-requests"

    def cost(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn:
        return fleet.table.queue + fleet.table.active


class PowerOfTwo(Profile):
    """Needs two readings instead of all (Mitzenmacher 2001)."""

    type = "power-of-two"
    Params = NoParams
    takes_filters = True

    def __init__(self, params: Any = None, name: str = type, filters: Sequence[Filter] = ()) -> None:
        super().__init__(name, filters, [], FewerOfTwo())


class FewerOfTwo:
    """The picker."""

    name = "fewer-of-two"

    def pick(self, request: Request, fleet: FleetView, totals: FloatColumn, cycle: Cycle) -> int:
        candidates = entries(totals > -np.inf)
        first = int(cycle.rng.random() * len(candidates))
        if len(candidates) == 1:
            return int(candidates[0])
        second = int(cycle.rng.random() * (len(candidates) - 1))
        second += second >= first
        load = fleet.table.queue[candidates] + fleet.table.active[candidates]
        return int(candidates[first if load[first] <= load[second] else second])


class Lpwl(Ranked):
    """argmin pending + max(1, prompt - hit)."""

    type = "lpwl"

    def cost(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn:
        return fleet.table.pending_tokens + uncached(request, fleet, cycle)


def uncached(request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | float:
    """Prompt tokens that each endpoint would have to compute, at least 1."""
    share = prefix_share(request, fleet, cycle)
    tokens = float(max(request.prompt_tokens, 1))
    return tokens if share is None else (tokens - share * tokens).clip(1.0)


class Lmetric(Ranked):
    """argmin (pending + uncached) · (batch + 1). The + 1 keeps an idle endpoint from costing nothing whatever it must
    compute."""

    type = "lmetric"

    def cost(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn:
        table = fleet.table
        return (table.pending_tokens + uncached(request, fleet, cycle)) * (table.queue + table.active + 1.0)


BLOCK_TOKENS = 16


class DynamoLinearParams(Params):
    prefill_load_scale: float = Field(default=1.0, ge=0)
    overlap_credit: float = Field(default=1.0, ge=0)


class DynamoLinear(Ranked):
    """scale · max(blocks pending + incoming - credit · overlap, 0) + blocks held; temperature 0."""

    type = "dynamo-linear"
    Params = DynamoLinearParams

    def cost(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn:
        table, params = fleet.table, self.params
        work = (table.pending_tokens + request.prompt_tokens) / BLOCK_TOKENS
        share = prefix_share(request, fleet, cycle)
        if share is not None:
            work = work - params.overlap_credit * share * (request.prompt_tokens / BLOCK_TOKENS)
        scale = float(params.prefill_load_scale)
        return scale * np.maximum(work, 0.0) + table.kv_tokens / BLOCK_TOKENS
