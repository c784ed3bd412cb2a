"""Scorers by any metric (a new metric only needs configuration), and by a label with context lengths."""

from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from fairlead.core.columns import FloatColumn
from fairlead.core.policy import CANDIDATES, Cycle
from fairlead.core.request import Request
from fairlead.core.view import FleetView
from fairlead.plugins.columns import LABEL, ContextRanges, lower_is_better, metric_column
from fairlead.plugins.params import Params, Plain


class MetricParams(Params):
    metric: str = Field(min_length=1, description="A name under `metrics.engines.NAME.extra`, or a built-in column.")
    better: Literal["low", "high"] = Field(description="Which end of the range is good.")
    range: tuple[float, float] | None = Field(
        default=None, description="Values of the two ends; absent = lowest and highest of the candidates at hand."
    )
    missing: float = Field(default=0.0, ge=0, le=1, description="Score of endpoints that do not report the metric.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.range is not None and not self.range[0] < self.range[1]:
            raise ValueError("range: the second number must be the larger one")
        return self


class Metric(Plain[MetricParams]):
    """The metric's position between the ends of `range`, 1 at the better end. Values outside of the range are cut."""

    type = "metric"
    Params = MetricParams

    def score(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None:
        params = self._params
        values = metric_column(fleet, params.metric)
        if params.range is None:
            scores = lower_is_better(values if params.better == "low" else -values, cycle.get(CANDIDATES))
        else:
            low, high = params.range
            scores = np.clip((values - low) / (high - low), 0.0, 1.0)
            if params.better == "low":
                scores = 1.0 - scores
        return np.where(np.isnan(scores), params.missing, scores)


UNLABELLED = 0.5


class ContextLengthScorerParams(Params):
    label: str = Field(default=LABEL, description="Label with the range, in tokens.")


class ContextLengthScorer(Plain[ContextLengthScorerParams]):
    """In range 0.3 + 0.7 · (0.7 / (1 + width/10000) + 0.3 · headroom/width); outside 0.3 / (1 + distance/1000); 0.5
    without a label.

    Narrow ranges score higher than wide ones, then those with room above the prompt. Source: the reference picker's
    context-length-aware.
    """

    type = "context-length"
    Params = ContextLengthScorerParams

    def __init__(self, params: ContextLengthScorerParams, name: str = type) -> None:
        super().__init__(params, name)
        self._ranges = ContextRanges(params.label)

    def score(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None:
        if not self._ranges.read(fleet):
            return None
        low, high, tokens = self._ranges.low, self._ranges.high, float(request.prompt_tokens)
        width = np.maximum(high - low, 1.0)
        inside = 0.3 + 0.7 * (0.7 / (1.0 + width / 10_000.0) + 0.3 * (high - tokens) / width)
        distance = np.maximum(low - tokens, tokens - high)
        outside = 0.3 / (1.0 + np.maximum(distance, 0.0) / 1000.0)
        score = np.where(distance <= 0, np.clip(inside, 0.0, 1.0), outside)
        return np.where(np.isnan(low), UNLABELLED, score)
