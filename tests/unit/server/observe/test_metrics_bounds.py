"""However many names clients make up, the page and its memory stay bounded."""

import re
from collections import Counter

from fairlead.core.flow_control import FlowController
from fairlead.core.records import DecisionRecord, Forecast, OutcomeRecord
from fairlead.core.request import Request
from fairlead.server.observe.watch import Watch
from fairlead.testing import builders

#: Series of one metric that any client can cause, at most: buckets included.
MOST = 100 * 45 * 2


class _On:
    """A flow_controller that nobody asks anything here; only that there is one counts."""


def hostile(watch: Watch, number: int) -> None:
    asked = Request(
        id=number,
        arrived=0.0,
        model=f"model-{number}" + "x" * 500,
        target=f"target-{number}",
        fairness_id=f"tenant-{number}",
        priority=number % 3 - 1,  # which clients do not choose: objectives do
        rewritten_by=f"ns/rewrite-{number % 7}",
        stream=True,
        slo_ttft_ms=1.0,
        slo_tpot_ms=0.001,
        prompt_tokens=10,
    )
    outcome = ("routed", "rejected-saturated", "model_not_found")[number % 3]
    endpoint = "default/e0" if outcome == "routed" else ""
    record = DecisionRecord(
        request=asked,
        at=0.0,
        policy="pairs",
        endpoint=endpoint,
        address="x:1",
        prefill="default/e1" if endpoint else "",
        outcome=outcome,
        status=200 if endpoint else 429,
    )
    watch.on_decision(record, 0.001)
    watch.on_client_error("chat", 400, "bad-request", {})
    watch.on_fallback(f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}:8000", 200)
    if endpoint:
        forecast = Forecast(ttft_ms=10.0, low_ms=5.0, high_ms=20.0, tpot_ms=3.0)
        status = (200, 500, 418)[number % 9 // 3]
        end = OutcomeRecord(
            request=asked, at=1.0, endpoint=endpoint, status=status, ttft_ms=50.0, duration_ms=900.0,
            completion_tokens=9, prompt_tokens=10, cached_tokens=5, forecast=forecast,
        )  # fmt: skip
        watch.on_outcome(end)


def series(watch: Watch) -> Counter[str]:
    page = b"".join(watch.exposition()).decode()
    return Counter(re.findall(r"^(\w+)(?:\{| )", page, re.MULTILINE))


def test_no_metric_grows_with_what_clients_say() -> None:
    watch = Watch(builders.fleet("default/e0", "default/e1"), lambda: 1.0)
    watch.queue.flow_controller = _On()  # type: ignore[assignment]
    assert not isinstance(watch.queue.flow_controller, FlowController)
    for number in range(6000):
        hostile(watch, number)
    watch.queue.flow_controller = None
    before = series(watch)
    for number in range(6000, 12_000):
        hostile(watch, number)
    after = series(watch)
    grown = {name: (before[name], after[name]) for name in after if after[name] > 1.01 * before[name] + 5}
    assert grown == {}
    assert max(after.values()) <= MOST
    assert sum(after.values()) < 70_000
