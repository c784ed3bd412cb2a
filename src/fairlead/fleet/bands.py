"""How far off forecasts are: quantiles of log(observed / forecast), tracked without keeping the observations.

Theory (Robbins and Monro 1951). A tracked quantile goes up by p steps when an observation is above it, and down by
1 - p when one is below. It rests where a share p lies below, whatever the distribution, and follows one that drifts.
"""

from math import log

from msgspec import Struct, field

#: The band is that of the middle 90 %.
LOW, HIGH = 0.05, 0.95
#: In log ratio.
STEP = 0.06
#: Quantiles stay within ± this.
LIMIT = 5.0


class Quantile(Struct):
    """One quantile of a stream."""

    p: float
    value: float

    def add(self, x: float) -> None:
        self.value = min(max(self.value + STEP * (self.p - (x < self.value)), -LIMIT), LIMIT)


class Band(Struct):
    """The middle 90 % of a stream of log ratios, and its median. Before any: half to twice what was forecast."""

    low: Quantile = field(default_factory=lambda: Quantile(LOW, log(0.5)))
    middle: Quantile = field(default_factory=lambda: Quantile(0.5, 0.0))
    high: Quantile = field(default_factory=lambda: Quantile(HIGH, log(2.0)))

    def at(self, p: float) -> float:
        """The quantile `p`, between those that are tracked."""
        middle = self.middle.value
        other = self.low if p < self.middle.p else self.high
        return middle + (other.value - middle) * (p - self.middle.p) / (other.p - self.middle.p)

    def add(self, x: float) -> None:
        self.low.add(x)
        self.middle.add(x)
        self.high.add(x)

    def validate(self) -> None:
        assert all(-LIMIT <= one.value <= LIMIT for one in (self.low, self.middle, self.high))
