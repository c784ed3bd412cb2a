"""The process_* and python_* families that the real server's page carries, about the stub's own process."""

import gc
import os
import platform
import resource

from fairlead.stub.exposition import Fixed, Made, Part, header, labels, number


def process_parts(started_unix: float) -> list[Part]:
    """What the Prometheus client reports of the Python process; the same for all replicas in it."""
    return [Made(_gc_lines), Fixed(_python_line()), Made(lambda: _process_lines(started_unix))]


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
    values = (
        ("process_virtual_memory_bytes", "gauge", "Virtual memory size in bytes.", virtual),
        ("process_resident_memory_bytes", "gauge", "Resident memory size in bytes.", resident),
        (
            "process_start_time_seconds",
            "gauge",
            "Start time of the process since unix epoch in seconds.",
            started_unix,
        ),
        (
            "process_cpu_seconds_total",
            "counter",
            "Total user and system CPU time spent in seconds.",
            usage.ru_utime + usage.ru_stime,
        ),
        ("process_open_fds", "gauge", "Number of open file descriptors.", _open_fds()),
        (
            "process_max_fds",
            "gauge",
            "Maximum number of open file descriptors.",
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        ),
    )
    return "".join(f"{header(name, kind, text)}{name} {number(value)}\n" for name, kind, text, value in values)


def _memory() -> tuple[float, float]:
    """Virtual and resident bytes; zeros where there is no /proc."""
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
