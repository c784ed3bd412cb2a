"""Columns scaled to 0..1 over the candidates of a decision."""

import numpy as np

from fairlead.fleet.columns import BoolColumn, FloatColumn


def lower_is_better(column: FloatColumn, candidates: BoolColumn | None) -> FloatColumn:
    """(highest - value) / (highest - lowest) over the candidates (`None` = all), 1 everywhere when they are equal.

    NaN does not count and stays NaN. What is no candidate is cut to 0..1.
    """
    among = column if candidates is None else column[candidates]
    among = among[~np.isnan(among)]
    if not len(among):
        return np.full(len(column), np.nan)
    lowest, highest = float(among.min()), float(among.max())
    if not highest > lowest:
        return np.where(np.isnan(column), np.nan, 1.0)
    return np.clip((highest - column) / (highest - lowest), 0.0, 1.0)
