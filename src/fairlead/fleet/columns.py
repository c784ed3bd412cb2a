"""Column types: numpy arrays over slots, one entry per endpoint."""

import numpy as np
from numpy.typing import NDArray

FloatColumn = NDArray[np.float64]
BoolColumn = NDArray[np.bool_]
