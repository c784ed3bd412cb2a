"""When requests arrive: seeded offsets in seconds. The caller passes in a `random.Random`; no clock is read."""

from collections.abc import Callable, Iterator
from itertools import accumulate, count, islice, repeat, takewhile
from random import Random

#: A larger rate, duration or variation is a mistake, or leaves nothing to draw.
MOST = 1e9
#: Makes endless ascending offsets in seconds, from 0.
Arrivals = Callable[[Random], Iterator[float]]


def poisson(rate: float) -> Arrivals:
    """Exponential gaps as from independent users, `rate` per second."""
    _positive(rate)

    return lambda rng: accumulate(rng.expovariate(rate) for _ in repeat(None))


def constant(rate: float) -> Arrivals:
    """Equal gaps, the first at 0."""
    _positive(rate)

    return lambda _: (index / rate for index in count())


def bursty(rate: float, cv: float = 3.0) -> Arrivals:
    """Gamma-distributed gaps with this coefficient of variation: 1 is Poisson, above 1 arrivals cluster."""
    _positive(rate, cv)
    shape = 1.0 / (cv * cv)

    return lambda rng: accumulate(rng.gammavariate(shape, 1.0 / (rate * shape)) for _ in repeat(None))


def ramp(first: float, last: float, seconds: float) -> Arrivals:
    """Poisson arrivals whose rate changes linearly from `first` to `last` in `seconds`, and then stays constant."""
    _positive(first, last, seconds)

    return _thinned(max(first, last), lambda offset_s: first + (last - first) * min(offset_s / seconds, 1.0))


def tides(low: float, high: float, period_s: float) -> Arrivals:
    """Poisson arrivals whose rate changes linearly from `low` to `high` in the first half of each period, and back in
    the second half."""
    _positive(low, high, period_s)

    return _thinned(
        max(low, high), lambda offset_s: low + (high - low) * (1.0 - abs(1.0 - 2.0 * (offset_s / period_s % 1.0)))
    )


def _thinned(most: float, rate_at: Callable[[float], float]) -> Arrivals:
    """Poisson arrivals whose rate changes with time and never exceeds `most`, by thinning arrivals at the rate
    `most`."""

    def offsets(rng: Random) -> Iterator[float]:
        offset_s = 0.0
        while True:
            offset_s += rng.expovariate(most)
            if rng.random() * most <= rate_at(offset_s):
                yield offset_s

    return offsets


def times(arrivals: Arrivals, rng: Random, *, count: int = 0, seconds: float = 0.0) -> list[float]:
    """The first `count` offsets, or those within `seconds`, whichever are fewer. One of the two must be given."""
    if count <= 0 and not 0 < seconds < MOST:
        raise ValueError("give a count or a duration: arrivals never end by themselves")
    offsets = arrivals(rng)
    if seconds > 0:
        offsets = takewhile(lambda offset_s: offset_s < seconds, offsets)
    return list(islice(offsets, count) if count > 0 else offsets)


def _positive(*values: float) -> None:
    for value in values:
        if not 0 < value < MOST:
            raise ValueError(f"rates, durations and variations must be above 0 and below {MOST:,.0f}, not {value:g}")
