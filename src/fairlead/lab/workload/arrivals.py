"""When requests arrive: seeded offsets in seconds. Chance comes in as a `random.Random`, time is only counted."""

from collections.abc import Callable, Iterator
from itertools import accumulate, count, islice, repeat, takewhile
from random import Random

#: Endless ascending seconds from 0.
Arrivals = Callable[[Random], Iterator[float]]


def poisson(rate: float) -> Arrivals:
    """Independent users: exponential gaps, `rate` per second."""
    _positive(rate)

    return lambda rng: accumulate(rng.expovariate(rate) for _ in repeat(None))


def constant(rate: float) -> Arrivals:
    """Equal gaps, the first at 0."""
    _positive(rate)

    return lambda _: (index / rate for index in count())


def bursty(rate: float, cv: float = 3.0) -> Arrivals:
    """Gamma-distributed gaps with this coefficient of variation: 1 is Poisson, more comes in clumps."""
    _positive(rate, cv)
    shape = 1.0 / (cv * cv)

    return lambda rng: accumulate(rng.gammavariate(shape, 1.0 / (rate * shape)) for _ in repeat(None))


def ramp(first: float, last: float, seconds: float) -> Arrivals:
    """Poisson whose rate goes straight from `first` to `last` in `seconds`, and stays there."""
    _positive(first, last, seconds)

    return _thinned(max(first, last), lambda offset_s: first + (last - first) * min(offset_s / seconds, 1.0))


def tides(low: float, high: float, period_s: float) -> Arrivals:
    """Poisson whose rate goes straight from `low` to `high` in the first half of each period, and back in the
    second."""
    _positive(low, high, period_s)

    return _thinned(
        max(low, high), lambda offset_s: low + (high - low) * (1.0 - abs(1.0 - 2.0 * (offset_s / period_s % 1.0)))
    )


def _thinned(most: float, rate_at: Callable[[float], float]) -> Arrivals:
    """Poisson whose rate changes with time and is never above `most`: of arrivals at `most`, a share is taken."""

    def offsets(rng: Random) -> Iterator[float]:
        offset_s = 0.0
        while True:
            offset_s += rng.expovariate(most)
            if rng.random() * most <= rate_at(offset_s):
                yield offset_s

    return offsets


def times(arrivals: Arrivals, rng: Random, *, count: int = 0, seconds: float = 0.0) -> list[float]:
    """The first `count` offsets, or those within `seconds`, whichever is less; one of both must be given."""
    if count <= 0 and seconds <= 0:
        raise ValueError("give a count or a duration, arrivals have no end of their own")
    offsets = arrivals(rng)
    if seconds > 0:
        offsets = takewhile(lambda offset_s: offset_s < seconds, offsets)
    return list(islice(offsets, count) if count > 0 else offsets)


def _positive(*values: float) -> None:
    for value in values:
        if not value > 0:
            raise ValueError(f"rates, durations and variations must be above 0, not {value}")
