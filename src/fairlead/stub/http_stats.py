"""The http_* families that the real server's page carries beside its own."""

from fairlead.engine.stats import Histogram
from fairlead.stub.exposition import Fixed, HistogramLines, Made, Part, header, labels, number

#: Bounds as exposed by vLLM 0.32.0.
_FINE = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    1.5,
    2.0,
    2.5,
    3.0,
    3.5,
    4.0,
    4.5,
    5.0,
    7.5,
    10.0,
    30.0,
    60.0,
)
_COARSE = (0.1, 0.5, 1.0)
#: Probes and the page itself are not counted there.
_UNCOUNTED = frozenset({"/metrics", "/health", "/load", "/ping", "/version", "/fault"})

_REQUESTS_HELP = "Total number of requests by method, status and handler."
_SIZE_HELP = (
    "Content length of {} by handler. Only value of header is respected. Otherwise ignored. No percentile calculated. "
)
_FINE_HELP = "Latency with many buckets but no API specific labels. Made for more accurate percentile calculations. "
_COARSE_HELP = "Latency with only few buckets by handler. Made to be only used if aggregation by handler is important. "


class HttpStats:
    """Counts answers by route. Routes are few and fixed, so nothing here grows."""

    def __init__(self, unix: float) -> None:
        self._created = number(unix)
        self._requests: dict[tuple[str, str, str], int] = {}
        self._in_bytes: dict[str, list[int]] = {}
        self._out_bytes: dict[str, int] = {}
        self._fine = Histogram(_FINE)
        self._coarse: dict[tuple[str, str], Histogram] = {}
        self._coarse_lines: dict[tuple[str, str], HistogramLines] = {}

    def answered(self, path: str, method: str, status: int, seconds: float, received: int) -> None:
        if path in _UNCOUNTED:
            return
        key = (path, method, f"{status // 100}xx")
        self._requests[key] = self._requests.get(key, 0) + 1
        sizes = self._in_bytes.setdefault(path, [0, 0])
        sizes[0] += 1
        sizes[1] += received
        self._fine.observe(seconds)
        coarse = self._coarse.get((path, method))
        if coarse is None:
            coarse = self._coarse[path, method] = Histogram(_COARSE)
            self._coarse_lines[path, method] = HistogramLines(
                "http_request_duration_seconds",
                {"handler": path, "method": method},
                lambda: self._coarse[path, method],
                _COARSE,
            )
        coarse.observe(seconds)

    def parts(self) -> list[Part]:
        fine = "http_request_duration_highr_seconds"
        return [
            Made(self._request_lines),
            Made(self._size_lines),
            Fixed(header(fine, "histogram", _FINE_HELP)),
            HistogramLines(fine, {}, lambda: self._fine, _FINE),
            Fixed(header(f"{fine}_created", "gauge", _FINE_HELP) + f"{fine}_created {self._created}\n"),
            Made(self._duration_lines),
        ]

    def _request_lines(self) -> str:
        name = "http_requests"
        series = [
            (labels({"handler": path, "method": method, "status": status}), count)
            for (path, method, status), count in self._requests.items()
        ]
        lines = [header(f"{name}_total", "counter", _REQUESTS_HELP)]
        lines += [f"{name}_total{text} {number(count)}\n" for text, count in series]
        lines += self._created_lines(name, _REQUESTS_HELP, [text for text, _ in series])
        return "".join(lines)

    def _size_lines(self) -> str:
        lines = []
        for name, what, counted in (
            ("http_request_size_bytes", "incoming requests", True),
            ("http_response_size_bytes", "outgoing responses", False),
        ):
            help_text = _SIZE_HELP.format(what)
            lines.append(header(name, "summary", help_text))
            for path, (count, size) in self._in_bytes.items():
                text = labels({"handler": path})
                # Streams have no Content-Length, and the real page shows 0.0 for what they sent.
                total = size if counted else 0
                lines.append(f"{name}_count{text} {number(count)}\n{name}_sum{text} {number(total)}\n")
            lines += self._created_lines(name, help_text, [labels({"handler": path}) for path in self._in_bytes])
        return "".join(lines)

    def _duration_lines(self) -> str:
        name = "http_request_duration_seconds"
        lines = [header(name, "histogram", _COARSE_HELP)]
        lines += [entry.text() for entry in self._coarse_lines.values()]
        series = [labels({"handler": path, "method": method}) for path, method in self._coarse]
        lines += self._created_lines(name, _COARSE_HELP, series)
        return "".join(lines)

    def _created_lines(self, name: str, help_text: str, series: list[str]) -> list[str]:
        if not series:
            return []
        head = header(f"{name}_created", "gauge", help_text)
        return [head, *(f"{name}_created{text} {self._created}\n" for text in series)]
