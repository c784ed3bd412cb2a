"""Scorers that prefer endpoints with a low predicted latency.

The predictor learns at run time in the same process (`fairlead.core.predictor`); nothing has to be trained or deployed.
"""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fairlead.core.columns import BoolColumn, FloatColumn
from fairlead.core.policy import CANDIDATES, Cycle, prefix_share
from fairlead.core.profile import estimate
from fairlead.core.request import Request
from fairlead.core.view import FleetView
from fairlead.plugins.columns import headroom, lower_is_better, tpot_ms, ttft_ms
from fairlead.plugins.params import Params, Plain

#: Predictions below this many milliseconds count the same.
_LEAST = 1e-3


class PredictedLatencyParams(Params):
    target_metric: Literal["ttft", "tpot"] = Field(
        default="ttft", description="Time to first token, or time per output token."
    )
    percentile: float = Field(
        default=0.5,
        ge=0.05,
        le=0.95,
        description="Which quantile of the expected distribution counts. Above 0.5 prefers endpoints that are "
        "predictable.",
    )


class PredictedLatency(Plain[PredictedLatencyParams]):
    """Lowest prediction among the candidates / prediction: 1 for the fastest, 0.5 where it takes twice as long."""

    type = "predicted-latency"
    Params = PredictedLatencyParams
    weight = 30.0

    def score(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None:
        terms = estimate(request, fleet, cycle)
        if self._params.target_metric == "tpot":
            predicted = fleet.predictor.tpot_kappa * terms.step
        else:
            predicted = fleet.predictor.ttft_quantile(terms, request.prompt_tokens, self._params.percentile)
        predicted = np.maximum(predicted, _LEAST)
        candidates = cycle.get(CANDIDATES)
        if candidates is None:
            candidates = fleet.table.alive
        return np.minimum(float(predicted[candidates].min()) / predicted, 1.0)


Weight = Annotated[float, Field(ge=0)]
#: The lowest score of an endpoint with headroom, so that all of these score higher than those without.
_FLOOR = 0.01


class SloHeadroomParams(Params):
    ttft_weight: Weight = Field(default=0.8, description="How much the headroom of the first token counts.")
    tpot_weight: Weight = Field(default=0.2, description="How much the headroom of the later tokens counts.")
    headroom_selection_strategy: Literal["least", "most"] = Field(
        default="least",
        description="`least` packs requests where they just fit and keeps others free; `most` spreads them.",
    )
    without_slo: Literal["composite", "latency"] = Field(
        default="composite",
        description="What counts for requests without an SLO: a mean of load and prefix hit, or the lowest prediction.",
    )
    composite_kv_weight: Weight = Field(
        default=1.0,
        validation_alias="compositeKVWeight",
        serialization_alias="compositeKVWeight",
        description="Without an SLO, `composite` is a weighted mean; this is the weight of free KV memory.",
    )
    composite_queue_weight: Weight = Field(default=1.0, description="The weight of a short queue.")
    composite_prefix_weight: Weight = Field(default=1.0, description="The weight of the prefix hit.")


class SloHeadroom(Plain[SloHeadroomParams]):
    """Headroom (the share of the SLOs that is left) scaled over the candidates that keep all SLOs, 0 for the others; if
    none keeps them, the smallest deficit scores highest.

    Source: the reference picker's latency-scorer. There, separate services predict; here, the fleet's predictor does.
    """

    type = "slo-headroom"
    Params = SloHeadroomParams

    def score(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None:
        candidates = cycle.get(CANDIDATES)
        if request.slo_ttft_ms <= 0 and request.slo_tpot_ms <= 0:
            if self._params.without_slo == "latency":
                return self._fastest(request, fleet, cycle, candidates)
            return self._composite(request, fleet, cycle, candidates)
        left, keeps = headroom(request, fleet, cycle, self._params.ttft_weight, self._params.tpot_weight)
        keeps = keeps if candidates is None else keeps & candidates
        if not keeps.any():
            return lower_is_better(-left, candidates)
        rated = left if self._params.headroom_selection_strategy == "least" else -left
        return np.where(keeps, _FLOOR + (1.0 - _FLOOR) * lower_is_better(rated, keeps), 0.0)

    def _fastest(
        self, request: Request, fleet: FleetView, cycle: Cycle, candidates: BoolColumn | None
    ) -> FloatColumn | None:
        first, later = self._params.ttft_weight, self._params.tpot_weight
        if not first + later:
            return None
        rated = first * lower_is_better(ttft_ms(request, fleet, cycle), candidates)
        rated += later * lower_is_better(tpot_ms(request, fleet, cycle), candidates)
        return _FLOOR + (1.0 - _FLOOR) * rated / (first + later)

    def _composite(
        self, request: Request, fleet: FleetView, cycle: Cycle, candidates: BoolColumn | None
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
