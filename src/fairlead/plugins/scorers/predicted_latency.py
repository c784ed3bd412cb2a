"""`predicted-latency`: prefer endpoints where the first token, or each further one, is expected soonest.

The predictor learns while it runs, in the process (`fairlead.fleet.predictor`); nothing has to be trained or deployed.
"""

from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from fairlead.fleet.columns import FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.params import Params
from fairlead.schedule.cycle import Cycle
from fairlead.schedule.forecasts import estimate
from fairlead.schedule.framework import CANDIDATES

#: Predictions below this many milliseconds are alike.
_LEAST = 1e-3


class PredictedLatencyParams(Params, frozen=True, kw_only=True):
    #: Time to first token, or time per output token.
    target_metric: Literal["ttft", "tpot"] = "ttft"
    #: Which quantile of the expected distribution counts. Above 0.5 prefers endpoints that are predictable.
    percentile: Annotated[float, Meta(ge=0.05, le=0.95)] = 0.5


class PredictedLatency:
    """Lowest prediction among the candidates / prediction: 1 for the fastest, 0.5 where it takes twice as long."""

    type = "predicted-latency"
    Params = PredictedLatencyParams
    weight = 30.0

    def __init__(self, params: PredictedLatencyParams, name: str = type) -> None:
        self.name = name
        self._tpot = params.target_metric == "tpot"
        self._percentile = params.percentile

    def score(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | None:
        terms = estimate(request, fleet, cycle)
        if self._tpot:
            predicted = fleet.predictor.tpot_kappa * terms.step
        else:
            predicted = fleet.predictor.ttft_quantile(terms, request.prompt_tokens, self._percentile)
        predicted = np.maximum(predicted, _LEAST)
        candidates = cycle.get(CANDIDATES)
        if candidates is None:
            candidates = fleet.table.alive
        return np.minimum(float(predicted[candidates].min()) / predicted, 1.0)
