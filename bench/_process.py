"""What a process uses, as the kernel counts it. Imports nothing of the product: some measure what that adds."""

import contextlib
import os
from pathlib import Path

from msgspec import Struct


class Usage(Struct, frozen=True):
    """What a process has used up so far."""

    cpu_s: float
    wakeups: int

    def __sub__(self, other: "Usage") -> "Usage":
        return Usage(self.cpu_s - other.cpu_s, self.wakeups - other.wakeups)


def usage(pid: int) -> Usage:
    """CPU seconds (scheduler's nanosecond accounting) and voluntary context switches of all threads."""
    cpu = wakeups = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread may end while we look
            cpu += int((task / "schedstat").read_text().split()[0])
            for line in (task / "status").read_text().splitlines():
                if line.startswith("voluntary_ctxt_switches"):
                    wakeups += int(line.split()[1])
    return Usage(cpu / 1e9, wakeups)


def cpu_s(pid: int) -> float:
    """CPU seconds in the kernel's ticks, those of threads that ended included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss(pid: int | str = "self") -> int:
    """Resident memory in bytes: what a process shares with others counts in full."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(text.split("Rss:")[1].split()[0]) * 1024


def children(pid: int) -> list[int]:
    """Of all its threads: a scheduler that is started again is the child of another one than the first."""
    lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for text in lists for child in text.split()]
