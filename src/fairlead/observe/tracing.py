"""Spans of requests, by OpenTelemetry, which is loaded with the first `Tracing`.

    gateway.request                 SERVER; from the request's arrival to the end of its response
    ├── fairlead.queue              while it waited in flow control; absent if it did not
    └── fairlead.decision           choosing the endpoint

Rules
* Whether a request is traced is decided before anything is made for it. Measured: 0.4 us without a header, 1.2 us with
  one that says no, 79 us for two spans with their attributes.
* The caller's trace is continued, and the model server's spans become children of `gateway.request`: it gets our
  `traceparent`. A request that is not traced keeps its caller's headers as they are.
* Callers cannot make us work without bound: at most `max_rate` requests a second are traced, at most `_OPEN` at a time.
* Never a prompt: attributes are names, sizes, counts and times.
* Names are those of OpenTelemetry's conventions for `gen_ai`, `http`, `server`, `error`; ours begin with `fairlead.`.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from random import Random
from typing import TYPE_CHECKING

from msgspec import Struct

from fairlead.model.decision import DecisionRecord, OutcomeRecord
from fairlead.model.request import Request
from fairlead.parse import api
from fairlead.wire import traceparent as w3c

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

#: Requests whose span is open. Beyond that, and after `_LONGEST` seconds, the oldest are ended: nobody told their end.
_OPEN = 10_000
_LONGEST = 3600.0
#: Requests whose trace can still be named after their end.
_REMEMBERED = 4096
_MAX_NAME = 200
_CHAT = dict.fromkeys((api.CHAT, api.MESSAGES, api.RESPONSES), "chat")
_TEXT = dict.fromkeys((api.COMPLETIONS, api.GENERATE, api.SGLANG, api.GRPC), "text_completion")
_OPERATIONS = {**_CHAT, **_TEXT, api.EMBEDDINGS: "embeddings", api.GRPC_EMBED: "embeddings"}

Attribute = str | bool | int | float


class Sampling(Struct, frozen=True):
    """See the section `tracing` of the configuration."""

    share: float = 0.1
    follow_parent: bool = True
    max_rate: float = 100.0


class Tracing:
    """`arrived` when a request is understood, `traceparent` when it is sent on, then the records.

    `now` is the clock of records; `epoch` what to add to it for seconds since 1970.
    """

    def __init__(
        self, tracer: "Tracer", sampling: Sampling, rng: Random, now: Callable[[], float], epoch: float
    ) -> None:
        import opentelemetry.trace as api

        self._api = api
        self._tracer = tracer
        self._sampling = sampling
        self._rng = rng
        self._now = now
        self._epoch = epoch
        self._allowed = sampling.max_rate
        self._refilled = now()
        #: By request, oldest first.
        self._open: OrderedDict[int, tuple[Span, float]] = OrderedDict()
        self._traces: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        """Spans that are open."""
        return len(self._open)

    # ---------------- before the decision ----------------

    def arrived(self, request: Request, headers: Mapping[str, str]) -> None:
        parent = w3c.parse(headers.get(w3c.HEADER, ""))
        if parent is not None and self._sampling.follow_parent:
            wanted = parent.sampled
        else:
            wanted = self._rng.random() < self._sampling.share
        if wanted and self._within_rate():
            self._begin(request, parent, headers.get(w3c.STATE_HEADER, ""))

    def traceparent(self, request_id: int) -> str:
        """What the model server is told; empty = the request is not traced."""
        found = self._open.get(request_id)
        if found is None:
            return ""
        context = found[0].get_span_context()
        return w3c.render(context.trace_id, context.span_id, True)

    def trace_id(self, request_id: int) -> str:
        """Of one of the last traced requests; empty = it is none of them."""
        found = self._traces.get(request_id)
        return "" if found is None else f"{found:032x}"

    def _within_rate(self) -> bool:
        now, rate = self._now(), self._sampling.max_rate
        self._allowed = min(self._allowed + (now - self._refilled) * rate, max(rate, 1.0))
        self._refilled = now
        if self._allowed < 1.0:
            return False
        self._allowed -= 1.0
        return True

    def _begin(self, request: Request, parent: w3c.TraceParent | None, state: str) -> None:
        api, context = self._api, None
        if parent is not None:
            flags = api.TraceFlags(api.TraceFlags.SAMPLED if parent.sampled else api.TraceFlags.DEFAULT)
            states = api.TraceState.from_header([state]) if state else None
            caller = api.SpanContext(parent.trace_id, parent.span_id, True, flags, states)
            context = api.set_span_in_context(api.NonRecordingSpan(caller))
        span = self._tracer.start_span(
            "gateway.request",
            context,
            api.SpanKind.SERVER,
            attributes=_asked(request),
            start_time=self._nanoseconds(request.arrived),
        )
        self._open[request.id] = span, request.arrived
        self._traces[request.id] = span.get_span_context().trace_id
        if len(self._traces) > _REMEMBERED:
            self._traces.popitem(last=False)
        self._drop_old(request.arrived)

    def _drop_old(self, now: float) -> None:
        while self._open:
            span, since = next(iter(self._open.values()))
            if len(self._open) <= _OPEN and now - since <= _LONGEST:
                return
            self._open.popitem(last=False)
            self._fail(span, "abandoned", now)

    # ---------------- records ----------------

    def on_decision(self, record: DecisionRecord, duration_s: float) -> None:
        found = self._open.get(record.request.id)
        if found is None:
            return
        span, _ = found
        parent = self._api.set_span_in_context(span)
        decided, queued = record.at, record.queued_ms * 1e-3
        if queued > 0.0:
            waited = self._tracer.start_span(
                "fairlead.queue", parent, start_time=self._nanoseconds(decided - queued), attributes=_waited(record)
            )
            waited.end(self._nanoseconds(decided))
        decision = self._tracer.start_span(
            "fairlead.decision", parent, start_time=self._nanoseconds(decided), attributes=_chosen(record)
        )
        decision.end(self._nanoseconds(decided + duration_s))
        if not record.endpoint:
            del self._open[record.request.id]
            span.set_attribute("http.response.status_code", record.status)
            span.set_attribute("fairlead.outcome", record.outcome)
            self._fail(span, record.outcome, max(self._now(), decided), failed=record.status >= 500)

    def on_outcome(self, record: OutcomeRecord) -> None:
        found = self._open.pop(record.request.id, None)
        if found is None:
            return
        span, began = found
        span.set_attributes(_answered(record))
        if record.ttft_ms >= 0.0:
            span.add_event("first token", timestamp=self._nanoseconds(began + record.ttft_ms * 1e-3))
        end = began + record.duration_ms * 1e-3 if record.duration_ms >= 0.0 else record.at
        if record.status >= 500:
            self._fail(span, str(record.status), end)
        elif record.cause not in ("natural", "client-disconnect"):
            self._fail(span, record.cause, end)
        else:
            span.end(self._nanoseconds(end))

    def close(self) -> None:
        """End what is open."""
        while self._open:
            _, (span, _) = self._open.popitem(last=False)
            self._fail(span, "shutdown", self._now())

    def _fail(self, span: "Span", why: str, at: float, failed: bool = True) -> None:
        span.set_attribute("error.type", why)
        if failed:
            span.set_status(self._api.Status(self._api.StatusCode.ERROR, why))
        span.end(self._nanoseconds(at))

    def _nanoseconds(self, at: float) -> int:
        return int((at + self._epoch) * 1e9)


def _asked(request: Request) -> dict[str, Attribute]:
    found: dict[str, Attribute] = {
        "gen_ai.operation.name": _OPERATIONS.get(request.api, request.api),
        "gen_ai.request.model": request.model[:_MAX_NAME],
        "gen_ai.request.stream": request.stream,
        "fairlead.request.body_bytes": request.body_bytes,
        "fairlead.request.prompt_tokens_estimated": request.prompt_tokens,
    }
    if request.external_id:
        found["gen_ai.request.id"] = request.external_id
    if request.max_tokens:
        found["gen_ai.request.max_tokens"] = request.max_tokens
    return found


def _waited(record: DecisionRecord) -> dict[str, Attribute]:
    return {"fairlead.queued_ms": record.queued_ms, "fairlead.priority": record.request.priority}


def _chosen(record: DecisionRecord) -> dict[str, Attribute]:
    found: dict[str, Attribute] = {
        "fairlead.policy": record.policy,
        "fairlead.outcome": record.outcome,
        "fairlead.priority": record.request.priority,
        "fairlead.overloaded": record.overloaded,
    }
    if record.endpoint:
        host, _, port = record.address.rpartition(":")
        found |= {
            "fairlead.endpoint": record.endpoint,
            "server.address": host,
            "fairlead.hit_tokens": record.hit_tokens,
            "fairlead.best_hit_tokens": record.best_hit_tokens,
        }
        if port.isdigit():
            found["server.port"] = int(port)
    if record.prefill:
        found["fairlead.prefill_endpoint"] = record.prefill
    if record.forecast is not None:
        found["fairlead.predicted_ttft_ms"] = record.forecast.ttft_ms
    return found


def _answered(record: OutcomeRecord) -> dict[str, Attribute]:
    found: dict[str, Attribute] = {
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
    found |= {name: value for name, value in counts.items() if value >= 0}
    if record.ttft_ms >= 0.0:
        found["gen_ai.response.time_to_first_chunk"] = record.ttft_ms * 1e-3
    return found
