from random import Random

import msgspec
import pytest

from fairlead.lab.load.spec import Histogram


def test_quantiles_are_within_one_percent() -> None:
    chance = Random(5)
    values = sorted(chance.lognormvariate(-4, 1.5) for _ in range(5000))
    histogram = Histogram()
    histogram.add_all(values)
    for share in (0.01, 0.5, 0.9, 0.99):
        assert histogram.quantile(share) == pytest.approx(values[int(share * len(values)) - 1], rel=0.0102)
    assert histogram.mean() == pytest.approx(sum(values) / len(values))


def test_adding_many_at_once_is_adding_each() -> None:
    chance = Random(6)
    values = [chance.lognormvariate(-4, 3) for _ in range(2000)] + [0.0, -1.0, 1e9]
    one, many = Histogram(), Histogram()
    for value in values:
        one.add_all([value])
    many.add_all(values[:500])
    many.add_all([])
    many.add_all(values[500:])
    assert (many.count, many.buckets) == (one.count, one.buckets)
    assert many.total == pytest.approx(one.total)


def test_an_empty_one_has_no_quantiles() -> None:
    assert Histogram().quantile(0.5) is None
    assert Histogram().mean() is None


@pytest.mark.parametrize("value", [-1.0, 0.0, 1e-12, 1e12])
def test_extremes_stay_within_bounds(value: float) -> None:
    histogram = Histogram()
    histogram.add_all([value])
    assert histogram.count == 1
    assert 0 <= next(iter(histogram.buckets)) <= 1200


def test_it_survives_messagepack() -> None:
    histogram = Histogram()
    histogram.add_all([0.01])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(histogram), type=Histogram) == histogram


def test_instances_do_not_share_buckets() -> None:
    Histogram().add_all([1.0])
    assert Histogram().buckets == {}
