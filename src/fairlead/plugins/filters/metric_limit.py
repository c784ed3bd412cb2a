"""`metric-limit`: avoid endpoints whose metric is on the wrong side of a value."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal

import numpy as np
from msgspec import Meta

from fairlead.fleet.columns import BoolColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.masks import unless_all
from fairlead.plugins.metric_columns import metric_column
from fairlead.plugins.params import Params
from fairlead.schedule.cycle import Cycle

_KEEP: Final[Mapping[str, Callable[[Any, float], BoolColumn]]] = {
    "LessThan": np.less,
    "LessThanOrEqual": np.less_equal,
    "GreaterThan": np.greater,
    "GreaterThanOrEqual": np.greater_equal,
    "Equal": np.equal,
    "NotEqual": np.not_equal,
}


class MetricLimitParams(Params, frozen=True, kw_only=True):
    #: A name under `metrics.engines.NAME.extra`, or a built-in column.
    metric: Annotated[str, Meta(min_length=1)]
    operator: Literal["LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual", "Equal", "NotEqual"]
    value: float
    #: Keep endpoints that do not report the metric.
    keep_missing: bool = True


class MetricLimit:
    """Keeps endpoints where `metric operator value` holds. When none is left the fallback takes over, as for load."""

    type = "metric-limit"
    Params = MetricLimitParams
    hard = False

    def __init__(self, params: MetricLimitParams, name: str = type) -> None:
        self.name = name
        self._params = params

    def keep(self, request: Request, fleet: Fleet, cycle: Cycle) -> BoolColumn | None:
        params = self._params
        values = metric_column(fleet, params.metric)
        holds = _KEEP[params.operator](values, params.value)
        return unless_all(np.where(np.isnan(values), params.keep_missing, holds))
