"""Spans of requests, as OpenTelemetry's own exporter gets them."""

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import SpanKind
from opentelemetry.trace.status import StatusCode

from fairlead.config.schema import Tracing as Settings
from fairlead.core.flow import LEFT
from fairlead.core.records import DecisionRecord, Forecast, OutcomeRecord
from fairlead.core.request import Request
from fairlead.server.observe import tracing as room
from fairlead.server.observe.tracing import Tracing

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TRACE, SPAN = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
EPOCH = 1_700_000_000.0


class Traced:
    """A tracer with a clock of ours."""

    def __init__(self, **sampling: Any) -> None:
        self.now = 100.0
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=ALWAYS_ON, shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        tracer = self.provider.get_tracer("test")
        self.tracing = Tracing(
            tracer, Settings(**{"sample": 1.0, **sampling}), Random(1), lambda: self.now, lambda: EPOCH
        )

    def arrive(self, number: int = 1, headers: dict[str, str] | None = None, **fields: Any) -> Request:
        asked = request(number, arrived=self.now, **fields)
        return replace(asked, trace=self.tracing.arrived(asked, headers or {}))

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


@pytest.fixture
def traced() -> Iterator[Traced]:
    made = Traced()
    yield made
    made.provider.shutdown()


def request(number: int, **fields: Any) -> Request:
    base = {"id": number, "arrived": 100.0, "api": "chat", "model": "m", "stream": True, "prompt_tokens": 100}
    return Request(**(base | fields))


def routed(asked: Request, **fields: Any) -> DecisionRecord:
    base = {"at": 100.0, "policy": "p", "endpoint": "ns/vllm-0", "address": "10.0.0.1:8000", "hit_tokens": 40}
    return DecisionRecord(request=asked, **(base | fields))


def ended(asked: Request, **fields: Any) -> OutcomeRecord:
    return OutcomeRecord(request=asked, **({"at": 103.0, "endpoint": "ns/vllm-0", "status": 200} | fields))


def seconds(stamp: int | None) -> float:
    assert stamp is not None
    return round(stamp / 1e9 - EPOCH, 6)


def test_a_request_that_waited(traced: Traced) -> None:
    asked = traced.arrive(headers={"traceparent": CALLER, "tracestate": "vendor=1"}, max_tokens=50, external_id="r-1")
    told = asked.trace.traceparent
    traced.tracing.on_decision(routed(asked, at=101.0, queued_ms=800.0, forecast=Forecast(ttft_ms=300.0)), 0.002)
    traced.now = 103.0
    outcome = ended(asked, ttft_ms=1500.0, duration_ms=2500.0, prompt_tokens=90, completion_tokens=7, cached_tokens=64)
    traced.tracing.on_outcome(outcome)
    spans = traced.spans()
    assert set(spans) == {"gateway.request", "fairlead.queue", "fairlead.decision"}
    whole = spans["gateway.request"]
    context = whole.get_span_context()
    assert context is not None
    assert whole.kind is SpanKind.SERVER
    assert (context.trace_id, whole.parent and whole.parent.span_id) == (TRACE, SPAN)
    assert context.trace_state.get("vendor") == "1"
    assert told == f"00-{TRACE:032x}-{context.span_id:016x}-01"
    assert (seconds(whole.start_time), seconds(whole.end_time)) == (100.0, 102.5)
    assert [(event.name, seconds(event.timestamp)) for event in whole.events] == [("first token", 101.5)]
    assert dict(whole.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.id": "r-1",
        "gen_ai.response.model": "m",
        "gen_ai.response.time_to_first_chunk": 1.5,
        "gen_ai.usage.input_tokens": 90,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 64,
        "http.response.status_code": 200,
        "fairlead.endpoint": "ns/vllm-0",
        "fairlead.end_cause": "natural",
        "fairlead.request.body_bytes": 0,
        "fairlead.request.prompt_tokens_estimated": 100,
    }
    for name, start, end in (("fairlead.queue", 100.2, 101.0), ("fairlead.decision", 101.0, 101.002)):
        span = spans[name]
        assert span.parent is not None and span.parent.span_id == context.span_id
        assert (seconds(span.start_time), seconds(span.end_time)) == (start, end)
    chosen = spans["fairlead.decision"].attributes or {}
    assert (chosen["server.address"], chosen["server.port"]) == ("10.0.0.1", 8000)
    assert (chosen["fairlead.hit_tokens"], chosen["fairlead.predicted_ttft_ms"]) == (40, 300.0)
    assert whole.status.status_code is StatusCode.UNSET
    assert len(traced.tracing) == 0
    assert traced.tracing.trace_id(asked.id) == f"{TRACE:032x}"


def test_a_pair_has_no_forecast(traced: Traced) -> None:
    traced.tracing.on_decision(routed(traced.arrive(), prefill="ns/vllm-1", forecast=Forecast()), 0.002)
    chosen = traced.spans()["fairlead.decision"].attributes or {}
    assert chosen["fairlead.prefill_endpoint"] == "ns/vllm-1"
    assert "fairlead.predicted_ttft_ms" not in chosen


def test_an_unstreamed_answer_ends_no_earlier_than_it_began(traced: Traced) -> None:
    asked = traced.arrive(stream=False)
    traced.tracing.on_outcome(ended(asked, ttft_ms=14.244, duration_ms=14.0))
    whole = traced.spans()["gateway.request"]
    assert [(event.name, event.timestamp) for event in whole.events] == [("first token", whole.end_time)]
    assert "gen_ai.response.time_to_first_chunk" not in (whole.attributes or {}), "it has no chunks"


def test_a_request_that_went_at_once_has_no_queue_span(traced: Traced) -> None:
    asked = traced.arrive()
    traced.tracing.on_decision(routed(asked), 0.001)
    traced.tracing.on_outcome(ended(asked))
    assert set(traced.spans()) == {"gateway.request", "fairlead.decision"}
    assert seconds(traced.spans()["gateway.request"].end_time) == 103.0


@pytest.mark.parametrize(("status", "failed"), [(503, True), (429, False), (404, False)])
def test_a_refused_request(traced: Traced, status: int, failed: bool) -> None:
    asked = traced.arrive()
    record = DecisionRecord(request=asked, at=100.0, policy="p", outcome="rejected-saturated", status=status)
    traced.tracing.on_decision(record, 0.001)
    whole = traced.spans()["gateway.request"]
    assert (whole.attributes or {})["error.type"] == "rejected-saturated"
    assert (whole.attributes or {})["http.response.status_code"] == status
    assert (whole.status.status_code is StatusCode.ERROR) is failed
    assert len(traced.tracing) == 0


def test_a_client_that_left_before_a_decision_is_no_error(traced: Traced) -> None:
    record = DecisionRecord(request=traced.arrive(), at=100.0, policy="", outcome=LEFT.reason, status=LEFT.status)
    traced.tracing.on_decision(record, 0.0)
    whole = traced.spans()["gateway.request"]
    assert (whole.attributes or {})["fairlead.outcome"] == "rejected-context-cancelled"
    assert not {"error.type", "http.response.status_code"} & (whole.attributes or {}).keys()
    assert whole.status.status_code is not StatusCode.ERROR


@pytest.mark.parametrize(("flags", "spans"), [("01", 1), ("00", 0)])
def test_a_request_that_cannot_be_read(traced: Traced, flags: str, spans: int) -> None:
    traced.tracing.unread("chat", 400, "bad-request", {"traceparent": CALLER[:-2] + flags, "x-request-id": "mine"})
    assert len(traced.spans()) == spans
    for span in traced.spans().values():
        assert f"{span.context.trace_id:032x}" == CALLER[3:35]
        assert dict(span.attributes or {}) == {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.id": "mine",
            "http.response.status_code": 400,
            "fairlead.outcome": "bad-request",
            "error.type": "bad-request",
        }
        assert span.status.status_code is StatusCode.UNSET
        assert seconds(span.end_time) == 100.0
    assert len(traced.tracing) == 0


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"status": 500}, "500"),
        ({"status": 0, "cause": "endpoint-gone"}, "endpoint-gone"),
        ({"status": 0, "cause": "expired"}, "expired"),
        ({"status": 400}, None),
        ({"status": 0, "cause": "client-disconnect"}, None),
        ({"status": 0, "cause": "stream-lost"}, None),
    ],
)
def test_ends(traced: Traced, fields: dict[str, Any], error: str | None) -> None:
    asked = traced.arrive()
    traced.tracing.on_outcome(ended(asked, **fields))
    whole = traced.spans()["gateway.request"]
    assert (whole.attributes or {}).get("error.type") == error
    assert (whole.status.status_code is StatusCode.ERROR) is (error is not None)


def test_a_caller_that_does_not_trace_is_not_traced(traced: Traced) -> None:
    asked = traced.arrive(headers={"traceparent": CALLER[:-2] + "00"})
    traced.tracing.on_decision(routed(asked), 0.001)
    traced.tracing.on_outcome(ended(asked))
    assert asked.trace is None
    assert traced.tracing.trace_id(asked.id) == ""
    assert traced.spans() == {}


def test_callers_that_are_not_followed_keep_their_trace() -> None:
    traced = Traced(follow_parent=False, sample=0.25, max_rate=1e6)
    requests = [traced.arrive(number, {"traceparent": CALLER}) for number in range(2000)]
    assert 420 < len(traced.tracing) < 580
    some = next(asked for asked in requests if asked.trace is not None)
    assert traced.tracing.trace_id(some.id) == f"{TRACE:032x}"


def test_a_share_of_the_others_is_traced() -> None:
    traced = Traced(sample=0.1, max_rate=1e6)
    for number in range(2000):
        traced.arrive(number, {"traceparent": "nonsense"} if number % 2 else {})
    assert 140 < len(traced.tracing) < 260
    assert len({traced.tracing.trace_id(number) for number in range(2000)}) == len(traced.tracing) + 1


def test_callers_cannot_make_us_trace_without_bound() -> None:
    traced = Traced(max_rate=10.0)
    for number in range(1000):
        traced.arrive(number, {"traceparent": CALLER})
    assert len(traced.tracing) == 10
    traced.now += 0.55
    for number in range(1000, 2000):
        traced.arrive(number, {"traceparent": CALLER})
    assert len(traced.tracing) == 15


def test_spans_whose_end_nobody_tells_are_ended(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_OPEN", 5)
    for number in range(8):
        traced.arrive(number)
    assert len(traced.tracing) == 5
    traced.now += 2 * room._LONGEST
    traced.arrive(99)
    assert len(traced.tracing) == 1
    finished = traced.exporter.get_finished_spans()
    assert [(span.attributes or {})["error.type"] for span in finished] == ["abandoned"] * 8
    traced.tracing.close()
    last = traced.exporter.get_finished_spans()[-1]
    assert (last.attributes or {})["error.type"] == "shutdown"
    assert len(traced.tracing) == 0


def test_names_of_clients_are_cut(traced: Traced) -> None:
    asked = traced.arrive(model="x" * 5000)
    traced.tracing.on_outcome(ended(asked))
    attributes = traced.spans()["gateway.request"].attributes or {}
    assert attributes["gen_ai.request.model"] == "x" * 200
    assert attributes["gen_ai.response.model"] == "x" * 200
