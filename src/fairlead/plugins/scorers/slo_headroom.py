"""`slo-headroom`: the endpoint that keeps the request's SLOs with just enough to spare."""

from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, field

from fairlead.fleet.columns import BoolColumn, FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.latency import headroom
from fairlead.plugins.params import Params
from fairlead.plugins.ranges import lower_is_better
from fairlead.schedule.cycle import Cycle
from fairlead.schedule.framework import CANDIDATES, prefix_share

Weight = Annotated[float, Meta(ge=0)]
#: What an endpoint with headroom scores at least, so that all of them stand above all without.
_FLOOR = 0.01


class SloHeadroomParams(Params, frozen=True, kw_only=True):
    #: How much of the headroom is that of the first token, and of those after it.
    ttft_weight: Weight = 0.8
    tpot_weight: Weight = 0.2
    #: `least` packs requests where they just fit and keeps others free; `most` spreads them.
    headroom_selection_strategy: Literal["least", "most"] = "least"
    #: Without an SLO the score is the mean of free KV memory, short queue and prefix hit, weighted so.
    composite_kv_weight: Weight = field(default=1.0, name="compositeKVWeight")
    composite_queue_weight: Weight = 1.0
    composite_prefix_weight: Weight = 1.0


class SloHeadroom:
    """Headroom (the share of the SLOs that is left) scaled over the candidates that keep all SLOs, 0 for the others;
    when none keeps them, the smallest deficit wins.

    Source: the reference picker's latency-scorer; there services beside the picker predict, here the fleet's own
    predictor.
    """

    type = "slo-headroom"
    Params = SloHeadroomParams
    weight = 1.0

    def __init__(self, params: SloHeadroomParams, name: str = type) -> None:
        self.name = name
        self._params = params

    def score(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | None:
        candidates = cycle.get(CANDIDATES)
        if request.slo_ttft_ms <= 0 and request.slo_tpot_ms <= 0:
            return self._composite(request, fleet, cycle, candidates)
        left, keeps = headroom(request, fleet, cycle, self._params.ttft_weight, self._params.tpot_weight)
        keeps = keeps if candidates is None else keeps & candidates
        if not keeps.any():
            return lower_is_better(-left, candidates)
        rated = left if self._params.headroom_selection_strategy == "least" else -left
        return np.where(keeps, _FLOOR + (1.0 - _FLOOR) * lower_is_better(rated, keeps), 0.0)

    def _composite(
        self, request: Request, fleet: Fleet, cycle: Cycle, candidates: BoolColumn | None
    ) -> FloatColumn | None:
        params = self._params
        total = params.composite_kv_weight + params.composite_queue_weight + params.composite_prefix_weight
        if not total:
            return None
        score = params.composite_kv_weight * (1.0 - fleet.table.kv)
        score += params.composite_queue_weight * lower_is_better(fleet.table.queue, candidates)
        share = prefix_share(request, fleet, cycle)
        if share is not None:
            score += params.composite_prefix_weight * share
        return score / total
