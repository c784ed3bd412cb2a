"""Whether something that was measured at equal intervals grows."""

from collections.abc import Sequence
from math import sqrt
from statistics import fmean

from msgspec import Struct

#: The second half is cut into so many parts, and their means are what a line is put through: what lies close together
#: in time is alike (a page of memory stays where it is), and would make the band too narrow.
PARTS = 12
#: Student's t for 99 % on both sides with PARTS - 2 degrees of freedom.
_T = 3.169


class Slope(Struct, frozen=True):
    """Per hour: least squares over the second half, and half the width of its 99 % band."""

    per_hour: float
    band: float

    @property
    def zero(self) -> bool:
        return abs(self.per_hour) <= self.band


def slope(values: Sequence[float], hours: float, grain: float) -> Slope:
    """Of what was measured over `hours`. `grain`: what the value may step by once without meaning anything; a line
    that rises by less over the second half is within the band."""
    half = values[len(values) // 2 :]
    if len(half) < PARTS:
        raise ValueError(f"{len(half)} values in the second half, at least {PARTS}")
    means = [fmean(half[len(half) * i // PARTS : len(half) * (i + 1) // PARTS]) for i in range(PARTS)]
    step = hours / 2 / PARTS
    middle, level = (PARTS - 1) / 2, fmean(means)
    square = sum((i - middle) ** 2 for i in range(PARTS))
    rise = sum((i - middle) * value for i, value in enumerate(means)) / square
    left = sum((value - level - rise * (i - middle)) ** 2 for i, value in enumerate(means))
    return Slope(rise / step, _T * sqrt(left / (PARTS - 2) / square) / step + grain / (hours / 2))
