"""Instruments, their bounds on cardinality, and the text they render to, read back by prometheus_client's parser."""

from math import inf, isnan, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from fairlead.server.observe.exposition import Registry, number
from fairlead.server.observe.instruments import Family, Histogram, counters, gauges, histograms

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read_back(page: bytes) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} is shown twice"
            found[key] = sample.value
    return found


def shown(family: Family[Any], name: str = "x", **how: Any) -> Samples:
    registry = Registry()
    registry.show(name, "help", family, **how)
    return read_back(registry.render())


def test_counter_and_gauge() -> None:
    family = counters("a")
    family.child("1").inc()
    family.child("1").inc(2.5)
    family.child("2")
    assert shown(family, "x_total") == {("x_total", (("a", "1"),)): 3.5, ("x_total", (("a", "2"),)): 0.0}
    gauge = gauges()
    gauge.child().set(5)
    gauge.child().inc()
    assert shown(gauge) == {("x", ()): 6.0}


def test_the_text_itself() -> None:
    registry = Registry()
    family = histograms("b", "a", bounds=(0.5, 2.0))
    for value in (0.5, 0.6, 7):
        family.child('q"\\\n', "y").observe(value)
    registry.show("t_seconds", "Line one\nline \\ two", family)
    assert registry.render().decode() == (
        "# HELP t_seconds Line one\\nline \\\\ two\n"
        "# TYPE t_seconds histogram\n"
        't_seconds_bucket{a="y",b="q\\"\\\\\\n",le="0.5"} 1\n'
        't_seconds_bucket{a="y",b="q\\"\\\\\\n",le="2"} 2\n'
        't_seconds_bucket{a="y",b="q\\"\\\\\\n",le="+Inf"} 3\n'
        't_seconds_sum{a="y",b="q\\"\\\\\\n"} 8.1\n'
        't_seconds_count{a="y",b="q\\"\\\\\\n"} 3\n'
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (5, "5"),
        (5.0, "5"),
        (0.1, "0.1"),
        (-2.5, "-2.5"),
        (1e20, "1e+20"),
        (True, "1"),
        (np.float64(0.25), "0.25"),
        (np.int64(3), "3"),
        (nan, "NaN"),
        (inf, "+Inf"),
        (-inf, "-Inf"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_an_empty_family_shows_its_type_only() -> None:
    registry = Registry()
    registry.show("x", "help", histograms("a", bounds=(1.0,)))
    assert registry.render() == b"# HELP x help\n# TYPE x histogram\n"


def test_an_unlabelled_family_is_there_from_the_beginning() -> None:
    assert shown(counters(), "x_total") == {("x_total", ()): 0.0}
    assert shown(histograms(bounds=(1.0,)))[("x_count", ())] == 0.0


def test_a_view_can_sum_rename_and_coarsen() -> None:
    family = histograms("model", "user", bounds=(1.0, 2.0, 4.0))
    for user, value in (("u", 0.5), ("u", 3.0), ("v", 1.5), ("v", 9.0)):
        family.child("m", user).observe(value)
    coarse = shown(family, labels={"model": "model_name"}, bounds=(2.0,), constant={"pool": "p"})
    labels = (("model_name", "m"), ("pool", "p"))
    assert coarse == {
        ("x_bucket", (("le", "2"), *labels)): 2.0,
        ("x_bucket", (("le", "+Inf"), *labels)): 4.0,
        ("x_sum", labels): 14.0,
        ("x_count", labels): 4.0,
    }
    total = shown(family, labels={})
    assert total[("x_count", ())] == 4.0


def test_summing_leaves_the_children_alone() -> None:
    family = counters("a", "b")
    family.child("1", "x").inc(3)
    family.child("1", "y").inc(4)
    registry = Registry()
    registry.show("x_total", "help", family, labels={"a": "a"})
    for _ in range(2):
        assert read_back(registry.render()) == {("x_total", (("a", "1"),)): 7.0}


def test_past_the_cap_client_labels_are_folded() -> None:
    family = counters("model", "code", cap=3, fold=("model",))
    for i in range(10):
        family.child(f"m{i}", "200").inc()
        family.child(f"m{i}", "500").inc()
    found = {values: child.value for values, child in family.children.items()}
    assert found == {("m0", "200"): 1, ("m0", "500"): 1, ("m1", "200"): 1, ("other", "500"): 9, ("other", "200"): 8}


def test_past_four_times_the_cap_everything_is_folded() -> None:
    family = counters("code", cap=5)
    for i in range(1000):
        family.child(str(i)).inc()
    assert len(family.children) == 21
    assert family.children[("other",)].value == 980
    assert sum(child.value for child in family.children.values()) == 1000


def test_children_can_be_dropped() -> None:
    family = counters("a", "b")
    for a in "123":
        family.child(a, "x").inc()
    registry = Registry()
    registry.show("x_total", "help", family)
    registry.render()
    family.keep(["a"], [("2",)])
    assert read_back(registry.render()) == {("x_total", (("a", "2"), ("b", "x"))): 1.0}


def test_wrong_use() -> None:
    with pytest.raises(ValueError, match="expected values for"):
        counters("a").child()
    for bounds in ((), (1.0, 1.0), (2.0, 1.0), (1.0, inf)):
        with pytest.raises(ValueError, match="bounds"):
            histograms(bounds=bounds)
    registry = Registry()
    registry.show("x", "help", counters())
    with pytest.raises(ValueError, match="twice"):
        registry.show("x", "help", counters())


def test_half_a_surrogate_pair_does_not_break_the_page() -> None:
    family = counters("a")
    family.child("\ud83d").inc()
    registry = Registry()
    registry.show("x_total", "help", family)
    assert read_back(registry.render()) == {("x_total", (("a", "?"),)): 1.0}


def test_refreshing_before_rendering() -> None:
    gauge = gauges()
    registry = Registry()
    registry.before(lambda: gauge.child().inc())
    registry.show("x", "help", gauge)
    registry.show("y", "help", gauge)
    assert read_back(registry.render()) == {("x", ()): 1.0, ("y", ()): 1.0}
    assert len([part for part in registry.parts() if part]) == 2


label_values = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)


@given(
    st.lists(st.tuples(label_values, label_values, st.floats(-1e9, 1e9)), max_size=20),
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6, unique=True),
)
@settings(max_examples=200, deadline=None)
def test_anything_reads_back_as_it_was_counted(observed: list[tuple[str, str, float]], bounds: list[float]) -> None:
    family = histograms("a", "b", bounds=tuple(sorted(bounds)))
    model: dict[tuple[str, str], list[float]] = {}
    for a, b, value in observed:
        family.child(a, b).observe(value)
        model.setdefault((a, b), []).append(value)
    found = shown(family)
    for (a, b), values in model.items():
        labels = (("a", a), ("b", b))
        assert found[("x_count", labels)] == len(values)
        assert found[("x_sum", labels)] == pytest.approx(sum(values))
        for bound in bounds:
            key = ("x_bucket", (*labels, ("le", number(bound))))
            assert found[key] == sum(value <= bound for value in values)
    assert len(found) == len(model) * (len(bounds) + 3)


def test_histogram_counts() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.count, histogram.sum) == ([1, 2, 1], 4, 7.5)
    assert not isnan(histogram.sum)
