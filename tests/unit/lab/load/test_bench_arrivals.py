from itertools import islice, pairwise
from statistics import mean, pstdev

import msgspec
import pytest

from fairlead.core.errors import ConfigError
from fairlead.lab.load.workload import AnyArrivals, ClosedLoop, Paced, Poisson
from fairlead.lab.workload.arrivals import constant


def test_constant_is_exact_and_starts_at_once() -> None:
    assert list(islice(Paced(constant(4)).offsets(), 5)) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_poisson_has_exponential_gaps_of_the_given_rate() -> None:
    offsets = list(islice(Poisson(20, seed=3).offsets(), 20_000))
    gaps = [later - earlier for earlier, later in pairwise(offsets)]
    assert all(gap >= 0 for gap in gaps)
    # An exponential distribution's deviation equals its mean.
    assert mean(gaps) == pytest.approx(1 / 20, rel=0.03)
    assert pstdev(gaps) == pytest.approx(1 / 20, rel=0.05)


def test_the_seed_decides() -> None:
    def first(seed: int) -> list[float]:
        return list(islice(Poisson(5, seed=seed).offsets(), 10))

    assert first(1) == first(1) != first(2)


@pytest.mark.parametrize("arrivals", [Poisson(3.5, seed=9), ClosedLoop(7)])
def test_arrivals_survive_json(arrivals: AnyArrivals) -> None:
    assert msgspec.json.decode(msgspec.json.encode(arrivals), type=AnyArrivals) == arrivals


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: Poisson(0), "$.arrivals.rate"),
        (lambda: Poisson(float("nan")), "$.arrivals.rate"),
        (lambda: ClosedLoop(0), "$.arrivals.workers"),
    ],
)
def test_impossible_arrivals_are_named(make: object, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()  # type: ignore[operator]
    assert caught.value.path == path
