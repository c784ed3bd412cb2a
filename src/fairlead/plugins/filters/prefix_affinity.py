"""`prefix-affinity`: stay where the prompt is cached, until that costs too much waiting."""

from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, field

from fairlead.fleet.columns import BoolColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.latency import backlog_ms, ttft_ms
from fairlead.plugins.params import Params
from fairlead.schedule.cycle import Cycle
from fairlead.schedule.framework import prefix_share

Share = Annotated[float, Meta(ge=0, le=1)]


class PrefixAffinityParams(Params, frozen=True, kw_only=True):
    #: Share of the prompt that an endpoint must hold to count as its home.
    affinity_threshold: Share = 0.8
    #: So often all endpoints are kept, to spread hot prefixes.
    exploration_probability: Share = 0.0
    #: Keep all when the best home would answer so much later than the best other, in ms.
    max_ttft_penalty_ms: Annotated[float, Meta(ge=0)] = field(default=18_000.0, name="maxTTFTPenaltyMs")
    #: How long an endpoint makes wait: its prompt tokens in flight over a fixed throughput, or what the predictor says.
    ttft_source: Literal["prefillThroughput", "latencyPredictor"] = "prefillThroughput"
    #: Prompt tokens per second of one endpoint.
    peak_prefill_throughput: Annotated[float, Meta(gt=0)] = 15_928.0


class PrefixAffinity:
    """Keeps endpoints that hold at least `affinityThreshold` of the prompt; all when nobody does, or none is worth it.

    Source: the reference picker's prefix-cache-affinity-filter, "sticky until saturated". A hit also saves work, which
    the penalty deliberately does not count: it bounds waiting.
    """

    type = "prefix-affinity"
    Params = PrefixAffinityParams
    hard = False
    availability = True

    def __init__(self, params: PrefixAffinityParams, name: str = type) -> None:
        self.name = name
        self._params = params

    def keep(self, request: Request, fleet: Fleet, cycle: Cycle) -> BoolColumn | None:
        params = self._params
        share = prefix_share(request, fleet, cycle)
        if share is None or (params.exploration_probability and cycle.rng.random() < params.exploration_probability):
            return None
        left = fleet.table.alive if cycle.left is None else cycle.left
        sticky = (share >= params.affinity_threshold) & left
        others = left & ~sticky
        if not np.count_nonzero(sticky) or not np.count_nonzero(others):
            return None
        if params.ttft_source == "latencyPredictor":
            waits = ttft_ms(request, fleet, cycle)
        else:
            waits = backlog_ms(fleet, params.peak_prefill_throughput)
        if float(waits[sticky].min() - waits[others].min()) > params.max_ttft_penalty_ms:
            return None
        return sticky
