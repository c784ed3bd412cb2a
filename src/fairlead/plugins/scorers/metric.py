"""`metric`: rate endpoints by any metric of theirs; a new one takes configuration only."""

from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from fairlead.fleet.columns import FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.metric_columns import metric_column
from fairlead.plugins.params import Params
from fairlead.plugins.ranges import lower_is_better
from fairlead.schedule.cycle import Cycle
from fairlead.schedule.framework import CANDIDATES


class MetricParams(Params, frozen=True, kw_only=True):
    #: A name under `metrics.engines.NAME.extra`, or a built-in column.
    metric: Annotated[str, Meta(min_length=1)]
    better: Literal["low", "high"]
    #: Values of the two ends; absent = lowest and highest of the candidates at hand.
    range: tuple[float, float] | None = None
    #: Score of endpoints that do not report the metric.
    missing: Annotated[float, Meta(ge=0, le=1)] = 0.0

    def __post_init__(self) -> None:
        if self.range is not None and not self.range[0] < self.range[1]:
            raise ValueError("range: the second number must be the larger one")


class Metric:
    """The metric's place between the ends of `range`, 1 at the better end. Outside of the range it is cut."""

    type = "metric"
    Params = MetricParams
    weight = 1.0

    def __init__(self, params: MetricParams, name: str = type) -> None:
        self.name = name
        self._params = params

    def score(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | None:
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
