"""Workload files: which format a file has, reading and writing it."""

from pathlib import Path

from fairlead.workload.formats import FORMATS, guess
from fairlead.workload.formats.problems import TraceError
from fairlead.workload.record import Workload


def read_workload(path: Path, format: str = "") -> Workload:
    """Raises `TraceError` (bad content, unknown format) or `OSError`."""
    data = path.read_bytes()
    name = format or guess(data)
    if name not in FORMATS:
        known = ", ".join(FORMATS)
        raise TraceError(
            str(path),
            0,
            "",
            f"unknown format {name!r}; known: {known}" if name else f"looks like none of {known}; name one",
        )
    return FORMATS[name].read(path.stem, data, str(path))


def write_workload(workload: Workload, path: Path, format: str = "native") -> None:
    """Raises `TraceError` for an unknown format, `OSError`."""
    if format not in FORMATS:
        raise TraceError(str(path), 0, "", f"unknown format {format!r}; known: {', '.join(FORMATS)}")
    path.write_bytes(FORMATS[format].write(workload))
