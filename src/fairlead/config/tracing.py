"""The section `tracing`: spans of requests, sent to an OpenTelemetry collector."""

from typing import Annotated

from msgspec import Meta

from fairlead.config.section import Section
from fairlead.config.units import PositiveSeconds


class Tracing(Section, frozen=True, kw_only=True):
    """Off without `endpoint`: then nothing of OpenTelemetry is loaded or called."""

    #: Where OTLP over HTTP is taken, e.g. `http://localhost:4318/v1/traces`.
    endpoint: Annotated[str, Meta(pattern="^(https?://.+)?$")] = ""
    #: Share of the requests that are traced, of those that no caller has decided about.
    sample: Annotated[float, Meta(ge=0, le=1)] = 0.1
    #: A caller's `traceparent` decides whether its request is traced. `false`: `sample` does, and the trace goes on.
    follow_parent: bool = True
    #: Traced requests per second, whatever callers ask for.
    max_rate: Annotated[float, Meta(gt=0)] = 100.0
    service_name: Annotated[str, Meta(min_length=1)] = "fairlead"
    #: For sending a batch of spans; what could not be sent by then is dropped.
    timeout: PositiveSeconds = 5.0
