"""Usage ceilings: how full the pool may be for a band to be served. Room is kept free for those above it.

Saturation is that of the gate, 1 = its set point; `c_i` is the ceiling of band i of N, the highest being band 0. By the
reference's formulas:

* static     c_i = threshold
* holdback   c_i = max - i·(max - min)/(N - 1), or by the priorities' values instead of their ranks
* reflective c_i = 1 - i·saturation/(N - 1). A band past its ceiling is not stopped but slowed down: it is served at
             one look in `round(saturation/(1 - saturation))`. The highest band is never held back.

Holding back is preventive: what is kept free is wasted when nobody comes. The alternative is eviction.
"""

from collections.abc import Sequence
from typing import Literal

from fairlead.admit.framework import Ceiling

#: Looks of which a slowed band gets one, at most.
_LONGEST = 1000


class Static(Ceiling):
    """The same for all."""

    name = "static"

    def __init__(self, threshold: float = 1.0) -> None:
        if not threshold > 0:
            raise ValueError("a ceiling of 0 would stop all traffic")
        self._threshold = threshold

    def allowed(self, level: float, priorities: Sequence[int]) -> list[bool]:
        return [level < self._threshold] * len(priorities)


class Holdback(Ceiling):
    """Linear from `highest` for the first band to `lowest` for the last."""

    name = "holdback"

    def __init__(self, lowest: float, highest: float = 1.0, domain: Literal["rank", "value"] = "rank") -> None:
        if not 0.0 < lowest <= highest:
            raise ValueError("the ceilings must satisfy 0 < lowest <= highest")
        self._lowest, self._highest, self._domain = lowest, highest, domain

    def allowed(self, level: float, priorities: Sequence[int]) -> list[bool]:
        return [level < ceiling for ceiling in self.ceilings(priorities)]

    def ceilings(self, priorities: Sequence[int]) -> list[float]:
        """Of each band; of a single one `highest`."""
        span = self._highest - self._lowest
        if self._domain == "rank" or priorities[0] == priorities[-1]:
            last = max(len(priorities) - 1, 1)
            return [self._highest - rank * span / last for rank in range(len(priorities))]
        top, whole = priorities[0], priorities[0] - priorities[-1]
        return [self._highest - (top - priority) * span / whole for priority in priorities]


class Reflective(Ceiling):
    """The fuller the pool, the lower; past it, a share of the looks."""

    name = "reflective"

    def __init__(self) -> None:
        self._looks = 0

    def allowed(self, level: float, priorities: Sequence[int]) -> list[bool]:
        last = max(len(priorities) - 1, 1)
        self._looks += 1
        period = _LONGEST if level >= 1.0 else min(max(round(level / (1.0 - level)), 1), _LONGEST)
        turn = self._looks % period == 0
        return [rank == 0 or turn or level < 1.0 - rank * level / last for rank in range(len(priorities))]
