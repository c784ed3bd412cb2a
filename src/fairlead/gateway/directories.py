"""Temporary directories that hold secrets. What a killed process leaves is removed by the next one."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

#: The end of the names that `mkdtemp` makes.
MADE = "[a-z0-9_]" * 8


def remove_unlocked(path: Path) -> None:
    """Remove a directory of mode 0700 that belongs to this user, unless a process has locked it. Raises `OSError` if
    one has, or if there is no such directory."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        about = os.fstat(directory)
        if about.st_uid == os.getuid() and about.st_mode & 0o777 == 0o700:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(directory)


def lock_directory(path: Path) -> int:
    """Lock the directory against `remove_unlocked` until the returned descriptor is closed. Raises `OSError`."""
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with suppress(OSError):  # not every file system has locks
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return lock


@contextmanager
def temporary_directory(prefix: str) -> Iterator[Path]:
    """Make a directory and remove it at the end, and those with the prefix whose processes were killed. Raises
    `OSError`."""
    for leftover in Path(tempfile.gettempdir()).glob(prefix + MADE):
        with suppress(OSError):
            if os.listdir(leftover):  # an empty one may be about to be locked
                remove_unlocked(leftover)
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name:
        lock = lock_directory(Path(name))
        try:
            yield Path(name)
        finally:
            os.close(lock)
