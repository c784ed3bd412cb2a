"""Early shedding: sheddable requests are refused, more and more of them, before the pool is full.

A request with a priority below 0 is refused with probability `p = min(saturation^power · scale, 1)`, by the reference's
formula. What is refused early never waits, and what is left of the pool's reserve is for the others.

No chance is needed: with the golden ratio's multiples modulo 1 as draws, of any n requests in a row p·n are refused, to
within a few, and which ones has no period that clients' patterns could fall in with.
"""

_GOLDEN = 0.6180339887498949


class EarlyShedding:
    """Raises `ValueError` unless both are positive."""

    def __init__(self, power: float = 5.0, scale: float = 300.0) -> None:
        if not (power > 0 and scale > 0):
            raise ValueError("power and scale must be positive")
        self._power, self._scale = power, scale
        self._draw = 0.0

    def probability(self, level: float) -> float:
        if level <= 0.0:
            return 0.0
        return 1.0 if level >= 1.0 else min(level**self._power * self._scale, 1.0)

    def sheds(self, level: float) -> bool:
        """Whether the next one is refused; `level` as of `Gate.level`."""
        self._draw = (self._draw + _GOLDEN) % 1.0
        return self._draw < self.probability(level)
