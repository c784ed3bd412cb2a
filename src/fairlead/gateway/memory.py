"""What the machine allows this process and its siblings: memory, open files."""

import os
import resource
from contextlib import suppress
from pathlib import Path, PurePosixPath


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes: the least that any of our cgroups allows (v2 `memory.max`, v1 `memory.limit_in_bytes`), or the machine's
    memory where no cgroup says less. Never raises. `root`: where `proc` and `sys` are."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                limits += _along(root / "sys/fs/cgroup", path, "memory.max")
            elif "memory" in controllers.split(","):
                limits += _along(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes")
    return min(limits)


def _along(mount: Path, path: str, name: str) -> list[int]:
    """What the cgroup says and those around it. A container may not see its own path, but it sees the mount's root."""
    limits = []
    for directory in (PurePosixPath(path), *PurePosixPath(path).parents):
        with suppress(OSError, ValueError):  # `max` is no number
            limits.append(int((mount / directory.relative_to("/") / name).read_text()))
    return [limit for limit in limits if limit > 0]


#: No process needs more open files, and with fewer than these the gateway serves but few requests at a time.
_FILES, FEW_FILES = 1 << 20, 2048


def raise_file_limit() -> int:
    """Take as many open files as we are allowed to; most systems begin with fewer. Returns how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return _FILES if soft == resource.RLIM_INFINITY else soft
