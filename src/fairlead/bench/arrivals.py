"""When requests arrive. Pure: chance comes from a seed, time from whoever walks the offsets."""

from collections.abc import Iterator
from random import Random
from typing import Protocol

import msgspec

from fairlead.model.errors import ConfigError


def _positive(value: float, name: str) -> None:
    if not value > 0:
        raise ConfigError("must be above 0", f"$.arrivals.{name}")


class OpenLoop(Protocol):
    """Anything that says when requests arrive; `fairlead.bench.runner.run` takes any of these, or a `ClosedLoop`."""

    def offsets(self) -> Iterator[float]:
        """Seconds after the start, ascending. An iterator that ends ends the run."""
        ...


class Poisson(msgspec.Struct, frozen=True, tag="poisson", forbid_unknown_fields=True):
    """Open loop with exponential gaps: independent users."""

    #: Requests per wall-clock second.
    rate: float = 10.0
    seed: int = 0

    def __post_init__(self) -> None:
        _positive(self.rate, "rate")

    def offsets(self) -> Iterator[float]:
        """Seconds after the start, ascending, without end."""
        chance = Random(self.seed)
        at = 0.0
        while True:
            at += chance.expovariate(self.rate)
            yield at


class Constant(msgspec.Struct, frozen=True, tag="constant", forbid_unknown_fields=True):
    """Open loop with equal gaps, the first request at once."""

    rate: float = 10.0

    def __post_init__(self) -> None:
        _positive(self.rate, "rate")

    def offsets(self) -> Iterator[float]:
        """Seconds after the start, ascending, without end."""
        index = 0
        while True:
            yield index / self.rate
            index += 1


class ClosedLoop(msgspec.Struct, frozen=True, tag="closed_loop", forbid_unknown_fields=True):
    """Each worker sends its next request when its previous one has ended: measures capacity, hides queueing."""

    workers: int = 8
    #: Pause of a worker between two requests, seconds.
    think_s: float = 0.0

    def __post_init__(self) -> None:
        _positive(self.workers, "workers")
        if self.think_s < 0:
            raise ConfigError("must not be negative", "$.arrivals.think_s")


AnyArrivals = Poisson | Constant | ClosedLoop
