"""Makes spans of requests and sends them to a collector. OpenTelemetry is imported when the first provider is made.

    gateway.request                 SERVER; from the request's arrival to the end of its response; alone if the request
                                    was refused because it cannot be read
    ├── fairlead.queue              while it waited in flow control; absent if it did not
    └── fairlead.decision           choosing the endpoint

Rules
* Whether a request is traced is decided before any span is made. Measured: 0.4 us without a header, 1.2 us with a
  header that says no, 79 us for two spans with their attributes.
* The caller's trace is continued, and the model server's spans become children of `gateway.request`, because the server
  gets our `traceparent`. A request that is not traced keeps its caller's headers unchanged.
* Callers cannot cause unbounded work: at most `max_rate` requests a second are traced, at most `_OPEN` at a time.
* Spans never contain a prompt: attributes are names, sizes, counts and times.
* Names follow OpenTelemetry's conventions for `gen_ai`, `http`, `server`, `error`; ours begin with `fairlead.`.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from random import Random
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from msgspec import Struct

from fairlead import __version__
from fairlead.config.checks import is_loopback
from fairlead.config.schema import Tracing as Settings
from fairlead.core import apis
from fairlead.core.flow import LEFT
from fairlead.core.headers import REQUEST_ID
from fairlead.core.records import DecisionRecord, OutcomeRecord
from fairlead.core.request import Request
from fairlead.gateway import traceparent as w3c
from fairlead.server.observe.decisions import forecast_of
from fairlead.server.observe.log import get

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

log = get("tracing")

#: The most open spans, and the most seconds that one stays open. Beyond that, the oldest spans are ended as abandoned,
#: because the end of their request was never reported.
_OPEN = 10_000
_LONGEST = 3600.0
#: The trace ids of this many last requests are kept.
_REMEMBERED = 4096
_MAX_NAME = 200
_CHAT = dict.fromkeys(apis.CONVERSED, "chat")
_TEXT = dict.fromkeys((apis.COMPLETIONS, apis.GENERATE, apis.SGLANG, apis.GRPC), "text_completion")
_OPERATIONS = {**_CHAT, **_TEXT, apis.EMBEDDINGS: "embeddings", apis.GRPC_EMBED: "embeddings"}

Attribute = str | bool | int | float


class RequestTrace(Struct, eq=False):
    """The open span of a request. `Tracing` makes it; the request keeps it in `Request.trace`."""

    span: "Span"
    #: When the request arrived, in clock seconds.
    began: float
    trace_id: int
    #: The value of the header `traceparent` for the model server.
    traceparent: str


class Tracing:
    """Call `arrived` when a request is understood, and keep its result in `Request.trace`. Then pass the request's
    records to `on_decision` and `on_outcome`.

    `now` is the clock of records; `epoch` returns the seconds to add to it to get seconds since 1970.
    """

    def __init__(
        self, tracer: "Tracer", settings: Settings, rng: Random, now: Callable[[], float], epoch: Callable[[], float]
    ) -> None:
        import opentelemetry.trace as apis

        #: How many spans could not be sent to the collector.
        self.dropped = 0
        self._api = apis
        self._tracer = tracer
        self._settings = settings
        self._rng = rng
        self._now = now
        self._epoch = epoch
        self._allowed = settings.max_rate
        self._refilled = now()
        #: Open spans, oldest first.
        self._open: dict[RequestTrace, None] = {}
        #: Trace ids of the last traced requests, by request number, for exemplars of metrics.
        self._traces: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        """The number of open spans."""
        return len(self._open)

    def drop(self, spans: int) -> None:
        """Count spans that could not be sent to the collector."""
        self.dropped += spans

    # ---------------- before the decision ----------------

    def arrived(self, request: Request, headers: Mapping[str, str]) -> RequestTrace | None:
        """Begin the trace of a request, if it is to be traced; `None` = it is not."""
        parent = w3c.parse(headers.get(w3c.HEADER, ""))
        return self._begin(request, parent, headers) if self._wanted(parent) else None

    def unread(self, api: str, status: int, reason: str, headers: Mapping[str, str]) -> None:
        """Trace a request that was refused because it cannot be read. Its span takes no time."""
        parent = w3c.parse(headers.get(w3c.HEADER, ""))
        if self._wanted(parent):
            now = self._now()
            attributes: dict[str, Attribute] = {
                "gen_ai.operation.name": _OPERATIONS.get(api, api),
                "http.response.status_code": status,
                "fairlead.outcome": reason,
            }
            if name := headers.get(REQUEST_ID):
                attributes["gen_ai.request.id"] = name
            self._fail(self._span(parent, headers, attributes, now), reason, now, failed=status >= 500)

    def _wanted(self, parent: w3c.TraceParent | None) -> bool:
        if parent is not None and self._settings.follow_parent:
            wanted = parent.sampled
        else:
            wanted = self._rng.random() < self._settings.sample
        return wanted and self._within_rate()

    def trace_id(self, request_id: int) -> str:
        """The trace id of a recently traced request; empty = not known."""
        trace = self._traces.get(request_id)
        return "" if trace is None else f"{trace:032x}"

    def _within_rate(self) -> bool:
        now, rate = self._now(), self._settings.max_rate
        self._allowed = min(self._allowed + (now - self._refilled) * rate, max(rate, 1.0))
        self._refilled = now
        if self._allowed < 1.0:
            return False
        self._allowed -= 1.0
        return True

    def _span(
        self,
        parent: w3c.TraceParent | None,
        headers: Mapping[str, str],
        attributes: dict[str, Attribute],
        start_s: float,
    ) -> "Span":
        api, context, state = self._api, None, headers.get(w3c.STATE_HEADER, "")
        if parent is not None:
            flags = api.TraceFlags(api.TraceFlags.SAMPLED if parent.sampled else api.TraceFlags.DEFAULT)
            states = api.TraceState.from_header([state]) if state else None
            caller = api.SpanContext(parent.trace_id, parent.span_id, True, flags, states)
            context = api.set_span_in_context(api.NonRecordingSpan(caller))
        start, server = self._nanoseconds(start_s), api.SpanKind.SERVER
        return self._tracer.start_span("gateway.request", context, server, attributes=attributes, start_time=start)

    def _begin(self, request: Request, parent: w3c.TraceParent | None, headers: Mapping[str, str]) -> RequestTrace:
        span = self._span(parent, headers, _asked(request), request.arrived)
        own = span.get_span_context()
        header = w3c.render(own.trace_id, own.span_id, True)
        trace = RequestTrace(span, request.arrived, own.trace_id, header)
        self._open[trace] = None
        self._traces[request.id] = trace.trace_id
        if len(self._traces) > _REMEMBERED:
            self._traces.popitem(last=False)
        self._drop_old(request.arrived)
        return trace

    def _drop_old(self, now: float) -> None:
        while self._open:
            oldest = next(iter(self._open))
            if len(self._open) <= _OPEN and now - oldest.began <= _LONGEST:
                return
            del self._open[oldest]
            self._fail(oldest.span, "abandoned", now)

    # ---------------- records ----------------

    def on_decision(self, record: DecisionRecord, duration_s: float) -> None:
        trace = record.request.trace
        if trace not in self._open:
            return
        span = trace.span
        parent = self._api.set_span_in_context(span)
        decided, queued = record.at, record.queued_ms * 1e-3
        if queued > 0.0:
            waited = self._tracer.start_span(
                "fairlead.queue",
                parent,
                start_time=self._nanoseconds(decided - queued),
                attributes={"fairlead.queued_ms": record.queued_ms, "fairlead.priority": record.request.priority},
            )
            waited.end(self._nanoseconds(decided))
        decision = self._tracer.start_span(
            "fairlead.decision", parent, start_time=self._nanoseconds(decided), attributes=_chosen(record)
        )
        decision.end(self._nanoseconds(decided + duration_s))
        if not record.endpoint:
            del self._open[trace]
            span.set_attribute("fairlead.outcome", record.outcome)
            end = max(self._now(), decided)
            if record.outcome == LEFT.reason:  # no error, and nobody receives the status
                span.end(self._nanoseconds(end))
            else:
                span.set_attribute("http.response.status_code", record.status)
                self._fail(span, record.outcome, end, failed=record.status >= 500)

    def on_outcome(self, record: OutcomeRecord) -> None:
        trace = record.request.trace
        if trace not in self._open:
            return
        del self._open[trace]
        span, began = trace.span, trace.began
        span.set_attributes(_answered(record))
        end = began + record.duration_ms * 1e-3 if record.duration_ms >= 0.0 else record.at
        if record.ttft_ms >= 0.0:
            first = began + record.ttft_ms * 1e-3
            span.add_event("first token", timestamp=self._nanoseconds(first))
            end = max(end, first)  # gateways round the duration to milliseconds
        if record.status >= 500:
            self._fail(span, str(record.status), end)
        elif record.cause not in ("natural", "client-disconnect", "stream-lost"):
            self._fail(span, record.cause, end)
        else:
            span.end(self._nanoseconds(end))

    def close(self) -> None:
        """End all open spans."""
        while self._open:
            trace, _ = self._open.popitem()
            self._fail(trace.span, "shutdown", self._now())

    def _fail(self, span: "Span", why: str, now: float, failed: bool = True) -> None:
        span.set_attribute("error.type", why)
        if failed:
            span.set_status(self._api.Status(self._api.StatusCode.ERROR, why))
        span.end(self._nanoseconds(now))

    def _nanoseconds(self, time_s: float) -> int:
        return int((time_s + self._epoch()) * 1e9)


def _asked(request: Request) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": _OPERATIONS.get(request.api, request.api),
        "gen_ai.request.model": request.model[:_MAX_NAME],
        "gen_ai.request.stream": request.stream,
        "fairlead.request.body_bytes": request.body_bytes,
        "fairlead.request.prompt_tokens_estimated": request.prompt_tokens,
    }
    if request.external_id:
        attributes["gen_ai.request.id"] = request.external_id
    if request.max_tokens:
        attributes["gen_ai.request.max_tokens"] = request.max_tokens
    return attributes


def _chosen(record: DecisionRecord) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        "fairlead.policy": record.policy,
        "fairlead.outcome": record.outcome,
        "fairlead.priority": record.request.priority,
        "fairlead.overloaded": record.overloaded,
    }
    if record.endpoint:
        host, _, port = record.address.rpartition(":")
        attributes |= {
            "fairlead.endpoint": record.endpoint,
            "server.address": host,
            "fairlead.hit_tokens": record.hit_tokens,
            "fairlead.best_hit_tokens": record.best_hit_tokens,
        }
        if port.isdigit():
            attributes["server.port"] = int(port)
    if record.prefill:
        attributes["fairlead.prefill_endpoint"] = record.prefill
    if forecast := forecast_of(record):
        attributes["fairlead.predicted_ttft_ms"] = forecast.ttft_ms
    return attributes


def _answered(record: OutcomeRecord) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        "gen_ai.response.model": record.request.target_model[:_MAX_NAME],
        "fairlead.endpoint": record.endpoint,
        "fairlead.end_cause": record.cause,
    }
    counts = {
        "http.response.status_code": record.status or -1,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
    }
    attributes |= {name: value for name, value in counts.items() if value >= 0}
    if record.ttft_ms >= 0.0 and record.request.stream:
        attributes["gen_ai.response.time_to_first_chunk"] = record.ttft_ms * 1e-3
    return attributes


# Spans are sent to a collector by OTLP over HTTP.
#
# A thread of OpenTelemetry sends them in batches. If the collector is slow or absent, spans are lost, but no request
# waits: the queue is bounded, and spans that do not fit are dropped. Headers for the collector and further attributes
# of this process come from OpenTelemetry's environment variables (`OTEL_EXPORTER_OTLP_HEADERS`,
# `OTEL_RESOURCE_ATTRIBUTES`).

_QUEUE = 4096
_BATCH = 512
_EVERY_MS = 1000.0
#: If one of these is set, it names a plugin of OpenTelemetry that makes the HTTP session.
_CREDENTIALS = (
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER",
)


def make_provider(
    endpoint: str, service_name: str, timeout_s: float, on_dropped: Callable[[int], object]
) -> "TracerProvider":
    """Make a provider. Its `shutdown()` sends the remaining spans and may take long: call it in a thread.
    `on_dropped` is called in another thread with the number of spans that could not be sent. Raises `ImportError` if
    OpenTelemetry is not installed."""
    import requests
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    from fairlead.server.observe.collector import ShortAnswers

    class Exporter(OTLPSpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            result = SpanExportResult.FAILURE
            statuses.clear()
            try:
                result = super().export(spans)  # before 1.40 it raises
            finally:
                if result is not SpanExportResult.SUCCESS:
                    on_dropped(len(spans))
                    # OpenTelemetry's lines about different answers count as repeats of one (`log.RepeatFilter`).
                    log.warning("spans are lost", problem=f"status {statuses[-1]}" if statuses else "no status seen")
            return result

        def shutdown(self) -> None:
            super().shutdown()  # type: ignore[no-untyped-call]
            if session is not None:
                session.close()

    statuses: list[int] = []

    def refuse_redirect(answer: Any, *arguments: object, **more: object) -> None:
        """Note the status. Raise an error for a redirect, which OpenTelemetry follows or takes for success."""
        statuses.append(answer.status_code)
        if 300 <= answer.status_code < 400:
            answer.close()
            raise requests.HTTPError(f"{answer.status_code} is not followed; name the collector itself")

    session = None
    if not any(os.environ.get(variable) for variable in _CREDENTIALS):  # else OpenTelemetry makes the session
        session = ShortAnswers()
        session.trust_env = not is_loopback(urlsplit(endpoint).hostname or "")  # no proxy for this machine's own
        session.hooks["response"].append(refuse_redirect)
    resource = Resource.create({"service.name": service_name, "service.version": __version__})
    # ALWAYS_ON, because `Tracing` decides which requests are traced before spans are made.
    provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
    exporter = Exporter(endpoint=endpoint, timeout=timeout_s, session=session)
    processor = BatchSpanProcessor(
        exporter,
        max_queue_size=_QUEUE,
        schedule_delay_millis=_EVERY_MS,
        max_export_batch_size=_BATCH,
        export_timeout_millis=timeout_s * 1e3,
    )
    provider.add_span_processor(processor)
    return provider
