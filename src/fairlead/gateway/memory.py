"""The memory and open files that the system allows this process and its siblings."""

import os
import resource
from contextlib import suppress
from pathlib import Path, PurePosixPath


def memory_limit(root: Path = Path("/")) -> int:
    """The memory limit in bytes: the lowest limit of the process's cgroups (v2 `memory.max`, v1
    `memory.limit_in_bytes`), or the machine's memory if it is less. `root`: the directory of `proc` and `sys`. Never
    raises."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                limits += _along(root / "sys/fs/cgroup", path, "memory.max")
            elif "memory" in controllers.split(","):
                limits += _along(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes")
    return min(limits)


def _along(mount: Path, path: str, name: str) -> list[int]:
    """The limits of a cgroup and its ancestors. A container may not see its own path, but sees the mount's root."""
    limits = []
    for directory in (PurePosixPath(path), *PurePosixPath(path).parents):
        with suppress(OSError, ValueError):  # `max` is not a number
            limits.append(int((mount / directory.relative_to("/") / name).read_text(encoding="utf-8")))
    return [limit for limit in limits if limit > 0]


#: The most open files a process needs, and the number below which a gateway serves only few concurrent requests.
_FILES, FEW_FILES = 1 << 20, 2048


def raise_file_limit() -> int:
    """Raise the limit of open files as far as allowed, because most systems start lower. Return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return _FILES if soft == resource.RLIM_INFINITY else soft
