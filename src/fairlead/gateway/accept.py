"""The form of the metrics page that a client wants by its Accept header (RFC 9110, 12.5.1)."""

OPENMETRICS = "application/openmetrics-text"
OPENMETRICS_TYPE = f"{OPENMETRICS}; version=1.0.0; charset=utf-8"
TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def wants_openmetrics(accept: str) -> bool:
    """Whether the header names OpenMetrics, with at least the quality of plain text.

    A client that accepts anything (`*/*`) gets plain text, which every client reads. A quality that is not a number
    counts as 0.
    """
    open_quality = text_quality = any_quality = 0.0
    for entry in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in entry.split(";"))
        quality = _quality(parameters)
        if kind == OPENMETRICS:
            open_quality = max(open_quality, quality)
        elif kind in ("text/plain", "text/*"):
            text_quality = max(text_quality, quality)
        elif kind == "*/*":
            any_quality = quality
    return open_quality > 0.0 and open_quality >= (text_quality or any_quality)


def _quality(parameters: list[str]) -> float:
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return min(max(float(parameter[2:]), 0.0), 1.0)
            except ValueError:
                return 0.0
    return 1.0
