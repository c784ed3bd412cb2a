"""Files of a running scheduler that must be whole whenever it ends, and belong to one process."""

import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, pieces: Iterable[bytes]) -> int:
    """A new file that takes the place of the one before once it is on the disk; only its owner may read it. Returns its
    bytes. Raises `OSError`, and then the one before is still there."""
    new, size = path.with_name(path.name + ".new"), 0
    try:
        with open(os.open(new, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb") as file:
            for piece in pieces:
                size += file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    return size


def lock(path: Path, held: str) -> int:
    """A descriptor that keeps others out until it is closed or the process ends. Raises `OSError`, which says `held`
    where another one has the lock."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise OSError(held) if isinstance(error, BlockingIOError) else error from None
    return descriptor
