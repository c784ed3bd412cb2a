"""Sends spans to a collector, by OTLP over HTTP. OpenTelemetry is loaded with the first provider.

A thread of OpenTelemetry's sends them in batches. A collector that is slow or away costs spans, never a request: the
queue is bounded, and what finds no place in it is dropped. Headers for the collector and further attributes of this
process come from OpenTelemetry's own environment variables (`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_RESOURCE_ATTRIBUTES`).
"""

from typing import TYPE_CHECKING

from fairlead import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_QUEUE = 4096
_BATCH = 512
_EVERY_MS = 1000.0


def make_provider(endpoint: str, service_name: str, timeout_s: float) -> "TracerProvider":
    """Its `shutdown()` sends what is left, and may take that long: call it in a thread. Raises `ImportError`."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    resource = Resource.create({"service.name": service_name, "service.version": __version__})
    # Which requests are traced is decided before spans are made, see `tracing`.
    provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=timeout_s)
    processor = BatchSpanProcessor(
        exporter,
        max_queue_size=_QUEUE,
        schedule_delay_millis=_EVERY_MS,
        max_export_batch_size=_BATCH,
        export_timeout_millis=timeout_s * 1e3,
    )
    provider.add_span_processor(processor)
    return provider
