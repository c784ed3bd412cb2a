"""Small helpers for columns."""

import re
from collections.abc import Mapping
from typing import Final

import numpy as np

from fairlead.core.columns import BoolColumn, FloatColumn, scalar
from fairlead.core.policy import Cycle
from fairlead.core.profile import estimate
from fairlead.core.request import Request
from fairlead.core.table import FLOATS
from fairlead.core.view import FleetView

_ZERO = scalar(0.0)


def unless_all(mask: BoolColumn) -> BoolColumn | None:
    """Return the mask, or `None` ("keep all") if it is all true, so that later filters need not combine it."""
    return None if np.count_nonzero(mask) == len(mask) else mask


def below(column: FloatColumn, limit: float) -> BoolColumn | None:
    """Return a mask of the slots where the column is below `limit`; `None` = all are."""
    return None if column[column.argmax()] < limit else column < limit


def not_negative(column: FloatColumn) -> FloatColumn:
    """Return the column with negative values replaced by 0; to save time, the column itself if it has none."""
    return column if column[column.argmin()] >= 0.0 else np.maximum(column, _ZERO)


def entries(mask: BoolColumn) -> "np.ndarray[tuple[int], np.dtype[np.intp]]":
    """Return the slots where the mask is true. Seven times as fast as `np.flatnonzero` for few endpoints."""
    return mask.nonzero()[0]


# Columns by name: built-in ones, and those that a configuration adds under `metrics.engines.NAME.extra`.

#: Name in a configuration → name of the table's column.
COLUMNS: Final[Mapping[str, str]] = {
    "waiting": "waiting",
    "running": "running",
    "kvUsage": "kv",
    "queue": "queue",
    "active": "active",
    "inflight": "inflight",
    "pendingTokens": "pending_tokens",
}


def metric_column(fleet: FleetView, name: str) -> FloatColumn:
    """Return the column of that name; NaN where an endpoint does not report it."""
    row = COLUMNS.get(name)
    return fleet.table.extra(name) if row is None else fleet.table.floats[FLOATS.index(row)]


# The label with the context lengths that an endpoint is for, used by the filter and the scorer `context-length`.

LABEL = "llm-d.ai/context-length-range"
_RANGE = re.compile(r"\s*(\d{1,12})\s*-\s*(\d{1,12})\s*")


class ContextRanges:
    """The range (`0-8192`) of each endpoint as two columns of tokens, both inclusive; NaN = no label or no range."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._ids: tuple[str, ...] | None = None
        self.low: FloatColumn = np.zeros(0)
        self.high: FloatColumn = np.zeros(0)

    def read(self, fleet: FleetView) -> bool:
        """Read the labels if endpoints have changed. Return whether any endpoint has a range."""
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


def backlog_ms(fleet: FleetView, throughput: float) -> FloatColumn:
    """Return the milliseconds to compute the uncached prompt tokens in flight, at `throughput` tokens per second."""
    return fleet.table.pending_tokens * (1000.0 / throughput)


def ttft_ms(request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn:
    """Return the TTFT in milliseconds predicted by the fleet's predictor."""
    terms = estimate(request, fleet, cycle)
    ttft: FloatColumn = terms.ttft + fleet.predictor.memory_wait(terms)
    return ttft


def tpot_ms(request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn:
    """Return the TPOT in milliseconds predicted by the fleet's predictor."""
    tpot: FloatColumn = fleet.predictor.tpot_kappa * estimate(request, fleet, cycle).step
    return tpot


def headroom(
    request: Request, fleet: FleetView, cycle: Cycle, ttft: float, tpot: float
) -> tuple[FloatColumn, BoolColumn]:
    """Return (headroom of each endpoint, mask of the endpoints that keep all SLOs).

    The headroom is a weighted sum (`ttft`, `tpot`: weights) over the request's SLOs, of which there must be at least
    one. Each counts as the share of the SLO that is left: 1 = immediate, 0 = just in time, below 0 = too late.
    """
    left: FloatColumn | float = 0.0
    keeps: BoolColumn = fleet.table.alive
    for slo, weight, predict in ((request.slo_ttft_ms, ttft, ttft_ms), (request.slo_tpot_ms, tpot, tpot_ms)):
        if slo > 0:
            share = 1.0 - predict(request, fleet, cycle) / slo
            left = left + weight * share
            keeps = keeps & (share > 0)
    assert not isinstance(left, float)
    return left, keeps


def lower_is_better(column: FloatColumn, candidates: BoolColumn | None) -> FloatColumn:
    """Return (highest - value) / (highest - lowest) over the candidates (`None` = all); 1 for all if they are equal.

    NaN is ignored and stays NaN. The values of other slots are cut to 0..1.
    """
    among = column if candidates is None else column[candidates]
    among = among[~np.isnan(among)]
    if not len(among):
        return np.full(len(column), np.nan)
    lowest, highest = float(among.min()), float(among.max())
    if not highest > lowest:
        return np.where(np.isnan(column), np.nan, 1.0)
    return np.clip((highest - column) / (highest - lowest), 0.0, 1.0)
