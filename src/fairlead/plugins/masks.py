"""Small helpers over bool columns."""

import numpy as np

from fairlead.fleet.columns import BoolColumn


def unless_all(mask: BoolColumn) -> BoolColumn | None:
    """`None` ("keep all") for an all-true mask: spares everybody after it the work of combining."""
    return None if np.count_nonzero(mask) == len(mask) else mask
