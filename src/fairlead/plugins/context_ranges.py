"""The label that says which context lengths an endpoint is for, shared by the filter and the scorer of that name."""

import re

import numpy as np

from fairlead.fleet.columns import FloatColumn
from fairlead.fleet.fleet import Fleet

LABEL = "llm-d.ai/context-length-range"
_RANGE = re.compile(r"\s*(\d{1,12})\s*-\s*(\d{1,12})\s*")


class ContextRanges:
    """`0-8192` per endpoint as two columns of tokens, both ends included; NaN where the label is absent or no range."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._ids: tuple[str, ...] | None = None
        self.low: FloatColumn = np.zeros(0)
        self.high: FloatColumn = np.zeros(0)

    def read(self, fleet: Fleet) -> bool:
        """Whether any endpoint has a range. Labels are read once per set of endpoints."""
        if fleet.table.ids is not self._ids:
            self._ids = fleet.table.ids
            labels = [e.labels.get(self._label, "") if e else "" for e in fleet.table.endpoints]
            ends = np.array([_ends(text) for text in labels], dtype=np.float64).reshape(-1, 2)
            self.low, self.high = ends[:, 0], ends[:, 1]
        return not bool(np.isnan(self.low).all())


def _ends(text: str) -> tuple[float, float]:
    match = _RANGE.fullmatch(text)
    if match is None or int(match[1]) > int(match[2]):
        return np.nan, np.nan
    return float(match[1]), float(match[2])
