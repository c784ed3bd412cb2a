"""The same series as in plain text, with the decision beside each bucket; read back by prometheus_client's parser."""

import re

from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_open
from prometheus_client.parser import text_string_to_metric_families as read_plain

from fairlead.core.fleet import Fleet
from fairlead.core.records import DecisionRecord, OutcomeRecord
from fairlead.core.request import Request
from fairlead.server.observe.exposition import Registry
from fairlead.server.observe.instruments import Readings, counters, histograms
from fairlead.server.observe.watch import Watch
from fairlead.testing import builders


def canonical(page: str) -> str:
    """Whole numbers as `le` with a fraction, on which the parser insists; see the rules of `exposition`."""
    return re.sub(r'le="(\d+)"', r'le="\1.0"', page)


class Traces:
    """Only the third request is traced."""

    def on_decision(self, record: DecisionRecord, duration_s: float) -> None: ...

    def on_outcome(self, record: OutcomeRecord) -> None: ...

    def trace_id(self, request_id: int) -> str:
        return "ab" * 16 if request_id == 3 else ""


def busy(tracing: Traces | None = None) -> Watch:
    fleet = builders.fleet("default/e0", "default/e1", samples={"default/e0": {"waiting": 3, "kv_usage": 0.5}})
    watch = Watch(fleet, lambda: 1.0, tracing=tracing)
    watch.naming(lambda number: f"run.{number:016x}")
    for number in range(1, 4):
        asked = Request(id=number, arrived=0.0, model='m"\\\n', stream=True, prompt_tokens=10)
        decided = DecisionRecord(request=asked, at=0.0, policy="p", endpoint="default/e0", address="x:1")
        watch.on_decision(decided, 0.0003 * number)
        watch.on_outcome(
            OutcomeRecord(request=asked, at=1.0, endpoint="default/e0", status=200, ttft_ms=700.0 * number)
        )
    return watch


def test_both_forms_have_the_same_series() -> None:
    watch = busy()
    plain = b"".join(watch.exposition()).decode()
    shown = b"".join(watch.exposition(openmetrics=True)).decode()
    assert shown.endswith("\n# EOF\n")
    assert " # {" not in plain
    counted = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in read_plain(canonical(plain))
        for sample in family.samples
        if sample.value == sample.value
    }
    again = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in read_open(canonical(shown))
        for sample in family.samples
        if sample.value == sample.value
    }
    assert again == counted
    assert len(again) > 200


def test_a_bucket_tells_its_last_decision() -> None:
    watch = busy(Traces())
    shown = b"".join(watch.exposition(openmetrics=True)).decode()
    told = {
        sample.labels["le"]: (sample.exemplar.labels, sample.exemplar.value)
        for family in read_open(canonical(shown))
        for sample in family.samples
        if sample.name == "llm_d_epp_request_ttft_seconds_bucket" and sample.exemplar
    }
    assert told == {
        "0.8": ({"decision_id": "run.0000000000000001"}, 0.7),
        "1.5": ({"decision_id": "run.0000000000000002"}, 1.4),
        "3.0": ({"decision_id": "run.0000000000000003", "trace_id": "ab" * 16}, 2.1),
    }


def test_a_view_with_fewer_bounds_shows_examples_of_what_it_merges() -> None:
    family = histograms(bounds=(1.0, 2.0, 3.0))
    for number, value in enumerate((0.5, 1.5, 2.5, 9.0)):
        family.child().observe_all([value], [number])
    registry = Registry()
    registry.naming = lambda number: {"decision_id": str(number)}
    registry.show("x", "help", family, bounds=(2.0,))
    lines = b"".join(registry.parts(openmetrics=True)).decode().splitlines()
    assert lines[2:4] == [
        'x_bucket{le="2"} 2 # {decision_id="1"} 1.5',
        'x_bucket{le="+Inf"} 4 # {decision_id="3"} 9',
    ]


def test_counters_lose_their_ending_in_the_heading_only() -> None:
    family = counters()
    family.child().inc()
    registry = Registry()
    registry.show("x_total", "help", family)
    assert b"".join(registry.parts(openmetrics=True)) == b"# HELP x help\n# TYPE x counter\nx_total 1\n# EOF\n"
    assert registry.render() == b"# HELP x_total help\n# TYPE x_total counter\nx_total 1\n"


def test_every_counter_can_be_told_as_openmetrics() -> None:
    """There, samples of counters end in `_total`, and nothing else does."""
    views = Watch(Fleet(), lambda: 0.0).metrics.registry.views
    assert [view.name for view in views if (view.kind == "counter") is not view.name.endswith("_total")] == []


def test_readings_follow_what_is_put_in_their_place() -> None:
    readings, registry = Readings("gauge", "endpoint"), Registry()
    registry.show("x", "help", readings)
    head = "# HELP x help\n# TYPE x gauge\n"
    seen = []
    for values in ({}, {("a",): 1}, {("a",): 1, ("b",): 2.5}, {("a",): 1, ("b",): 2.5}, {("b",): float("nan")}, {}):
        readings.values = values
        seen.append(registry.render().decode().removeprefix(head))
    both = 'x{endpoint="a"} 1\nx{endpoint="b"} 2.5\n'
    assert seen == ["", 'x{endpoint="a"} 1\n', both, both, 'x{endpoint="b"} NaN\n', ""]
