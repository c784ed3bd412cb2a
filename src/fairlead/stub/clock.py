"""Engine time: the event loop's time, faster by a ratio, and able to stand still."""

from collections.abc import Callable
from math import inf


class EngineClock:
    """Starts at 0. `now` and `wall` are inverse to each other while the clock runs."""

    __slots__ = ("_frozen_at", "_origin", "_wall", "ratio")

    def __init__(self, wall: Callable[[], float], ratio: float) -> None:
        if not 0 < ratio < inf:
            raise ValueError(f"time_ratio must be above 0 and finite, got {ratio:g}")
        self._wall = wall
        self.ratio = ratio
        self._origin = wall()
        self._frozen_at: float | None = None

    @property
    def frozen(self) -> bool:
        return self._frozen_at is not None

    def now(self) -> float:
        """Engine seconds."""
        if self._frozen_at is not None:
            return self._frozen_at
        return (self._wall() - self._origin) * self.ratio

    def wall(self, engine: float) -> float:
        """When on the loop's clock that will be."""
        return self._origin + engine / self.ratio

    def freeze(self) -> None:
        if self._frozen_at is None:
            self._frozen_at = self.now()

    def thaw(self) -> None:
        """Go on from where it stood."""
        if self._frozen_at is not None:
            self._origin = self._wall() - self._frozen_at / self.ratio
            self._frozen_at = None
