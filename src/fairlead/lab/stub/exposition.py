"""Prometheus text as vLLM's Python client formats it, and the metric families of its HTTP server and its process."""

import gc
import os
import platform
import resource
from collections.abc import Callable, Mapping, Sequence

from fairlead.lab.engine.stats import Histogram


def number(value: float) -> str:
    """`7.0`, `1.5`, `1.795146e+09`: Go's notation, with an exponent from one million on."""
    text = repr(float(value))
    dot = text.find(".")
    if dot <= 6 or "e" in text or value <= 0:
        return text
    mantissa = f"{text[0]}.{text[1:dot]}{text[dot + 1 :]}".rstrip("0.")
    return f"{mantissa}e+{dot - 1:02d}"


def labels(values: Mapping[str, str]) -> str:
    """`{a="x",b="y"}` in alphabetical order, escaped; empty if there are no labels."""
    if not values:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(values[name])}"' for name in sorted(values)) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def header(name: str, kind: str, help_text: str) -> str:
    return f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n"


def created(name: str, help_text: str, series: Sequence[str], unix: str) -> str:
    """The gauge that says when each series of the metric `name` began. `series`: their labels; without any, no text."""
    lines = "".join(f"{name}_created{text} {unix}\n" for text in series)
    return header(f"{name}_created", "gauge", help_text) + lines if series else ""


Read = Callable[[], float]
#: A part of a page: a function that is called for each page and returns the text of this part.
Part = Callable[[], str]


def sample(name: str, label_values: Mapping[str, str], read: Read) -> Part:
    """The line of a gauge or counter, whose value is read for each page."""
    prefix = f"{name}{labels(label_values)} "
    return lambda: f"{prefix}{number(read())}\n"


def fixed(text: str) -> Part:
    """Text that never changes."""
    return lambda: text


class HistogramLines:
    """All lines of one histogram. They are formatted again only after it has observed a value."""

    __slots__ = ("_prefixes", "_read", "_seen", "_sum", "_text", "_total")

    def __init__(self, name: str, label_values: Mapping[str, str], read: Callable[[], Histogram]) -> None:
        bound_texts = [*(number(bound) for bound in read().bounds), "+Inf"]
        self._prefixes = [f"{name}_bucket{labels({**label_values, 'le': bound})} " for bound in bound_texts]
        self._total = f"{name}_count{labels(label_values)} "
        self._sum = f"{name}_sum{labels(label_values)} "
        self._read = read
        self._seen: tuple[Histogram, int] | None = None
        self._text = ""

    def text(self) -> str:
        histogram = self._read()
        if self._seen == (histogram, histogram.count):
            return self._text
        self._seen = histogram, histogram.count
        total = 0
        lines = []
        for prefix, count in zip(self._prefixes, histogram.buckets, strict=True):
            total += count
            # The same text as from `number`, but faster while the count is small.
            lines.append(f"{prefix}{total}.0\n" if total < 1_000_000 else f"{prefix}{number(total)}\n")
        lines.append(f"{self._total}{number(histogram.count)}\n{self._sum}{number(histogram.sum)}\n")
        self._text = "".join(lines)
        return self._text


def page(parts: Sequence[Part]) -> bytes:
    return "".join([part() for part in parts]).encode("utf-8", "replace")


# The http_* families, which the real server's page has in addition to its own.

#: Bucket bounds of vLLM 0.32.0, in seconds.
_FINE = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0),
    *(7.5, 10.0, 30.0, 60.0),
)
_COARSE = (0.1, 0.5, 1.0)
#: Requests that do not count in these families: probes and the page itself.
_UNCOUNTED = frozenset({"/metrics", "/health", "/load", "/ping", "/version", "/fault"})

_REQUESTS_HELP = "Total number of requests by method, status and handler."
_SIZE_HELP = (
    "Content length of {} by handler. Only value of header is respected. Otherwise ignored. No percentile calculated. "
)
_FINE_HELP = "Latency with many buckets but no API specific labels. Made for more accurate percentile calculations. "
_COARSE_HELP = "Latency with only few buckets by handler. Made to be only used if aggregation by handler is important. "


class HttpStats:
    """Counts answers by route. The number of routes is small and fixed, so the memory is bounded."""

    def __init__(self, unix: float) -> None:
        self._created = number(unix)
        self._requests: dict[tuple[str, str, str], int] = {}
        self._in_bytes: dict[str, list[int]] = {}
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
            )
        coarse.observe(seconds)

    def parts(self) -> list[Part]:
        fine = "http_request_duration_highr_seconds"
        return [
            self._request_lines,
            self._size_lines,
            fixed(header(fine, "histogram", _FINE_HELP)),
            HistogramLines(fine, {}, lambda: self._fine).text,
            fixed(header(f"{fine}_created", "gauge", _FINE_HELP) + f"{fine}_created {self._created}\n"),
            self._duration_lines,
        ]

    def _request_lines(self) -> str:
        name = "http_requests"
        series = [
            (labels({"handler": path, "method": method, "status": status}), count)
            for (path, method, status), count in self._requests.items()
        ]
        lines = [header(f"{name}_total", "counter", _REQUESTS_HELP)]
        lines += [f"{name}_total{text} {number(count)}\n" for text, count in series]
        lines.append(created(name, _REQUESTS_HELP, [text for text, _ in series], self._created))
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
                # Streams have no Content-Length; the real page shows 0.0 for their size.
                total = size if counted else 0
                lines.append(f"{name}_count{text} {number(count)}\n{name}_sum{text} {number(total)}\n")
            series = [labels({"handler": path}) for path in self._in_bytes]
            lines.append(created(name, help_text, series, self._created))
        return "".join(lines)

    def _duration_lines(self) -> str:
        name = "http_request_duration_seconds"
        lines = [header(name, "histogram", _COARSE_HELP)]
        lines += [entry.text() for entry in self._coarse_lines.values()]
        series = [labels({"handler": path, "method": method}) for path, method in self._coarse]
        lines.append(created(name, _COARSE_HELP, series, self._created))
        return "".join(lines)


# The process_* and python_* families of the real server's page, with values of the stub's own process.


def process_parts(started_unix: float) -> list[Part]:
    """What the Prometheus client reports about the Python process; the same for all replicas in it."""
    return [_gc_lines, fixed(_python_line()), lambda: _process_lines(started_unix)]


def _gc_lines() -> str:
    lines = []
    for name, key, help_text in (
        ("python_gc_objects_collected_total", "collected", "Objects collected during gc"),
        ("python_gc_objects_uncollectable_total", "uncollectable", "Uncollectable objects found during GC"),
        ("python_gc_collections_total", "collections", "Number of times this generation was collected"),
    ):
        lines.append(header(name, "counter", help_text))
        stats = enumerate(gc.get_stats())
        lines += [f'{name}{{generation="{generation}"}} {number(stat[key])}\n' for generation, stat in stats]
    return "".join(lines)


def _python_line() -> str:
    major, minor, patch = platform.python_version_tuple()
    values = {
        "implementation": platform.python_implementation(),
        "major": major,
        "minor": minor,
        "patchlevel": patch,
        "version": platform.python_version(),
    }
    return f"{header('python_info', 'gauge', 'Python platform information')}python_info{labels(values)} 1.0\n"


def _process_lines(started_unix: float) -> str:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    virtual, resident = _memory()
    cpu_s, most_fds = usage.ru_utime + usage.ru_stime, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    values = (
        ("process_virtual_memory_bytes", "gauge", "Virtual memory size in bytes.", virtual),
        ("process_resident_memory_bytes", "gauge", "Resident memory size in bytes.", resident),
        ("process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds.", started_unix),
        ("process_cpu_seconds_total", "counter", "Total user and system CPU time spent in seconds.", cpu_s),
        ("process_open_fds", "gauge", "Number of open file descriptors.", _open_fds()),
        ("process_max_fds", "gauge", "Maximum number of open file descriptors.", most_fds),
    )
    return "".join(f"{header(name, kind, text)}{name} {number(value)}\n" for name, kind, text, value in values)


def _memory() -> tuple[float, float]:
    """Virtual and resident memory in bytes; zeros without /proc."""
    try:
        with open("/proc/self/statm", "rb") as file:
            pages = file.read().split()
    except OSError:
        return 0.0, 0.0
    size = resource.getpagesize()
    return float(int(pages[0]) * size), float(int(pages[1]) * size)


def _open_fds() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
