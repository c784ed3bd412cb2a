"""Small helpers over columns."""

import numpy as np

from fairlead.fleet.columns import BoolColumn, FloatColumn, scalar

_ZERO = scalar(0.0)


def unless_all(mask: BoolColumn) -> BoolColumn | None:
    """`None` ("keep all") for an all-true mask: spares everybody after it the work of combining."""
    return None if np.count_nonzero(mask) == len(mask) else mask


def below(column: FloatColumn, limit: float) -> BoolColumn | None:
    """Where the column is below `limit`; `None` when it is everywhere."""
    return None if column[column.argmax()] < limit else column < limit


def not_negative(column: FloatColumn) -> FloatColumn:
    """The column with 0 for what is below; the column itself when nothing is, which is the cheaper way."""
    return column if column[column.argmin()] >= 0.0 else np.maximum(column, _ZERO)


def entries(mask: BoolColumn) -> "np.ndarray[tuple[int], np.dtype[np.intp]]":
    """The slots where the mask is true; seven times as fast as `np.flatnonzero` over few endpoints."""
    return mask.nonzero()[0]
