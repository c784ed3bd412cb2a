"""Files that must be complete whenever their process ends, and files that belong to one process."""

import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def unfinished(path: Path) -> Path:
    """Where a new version of the file is until it is complete. A process that is killed leaves it there."""
    return path.with_name(path.name + ".new")


def write_whole(path: Path, pieces: Iterable[bytes], *, on_disk: bool = True, mode: int = 0o600) -> int:
    """Write a new file, by default readable by its owner only, that replaces the old one once it is complete. Returns
    its size in bytes. `on_disk`: first wait for the disk, so that it outlives the machine. Raises `OSError`; then the
    old file is unchanged."""
    new, size = unfinished(path), 0
    try:
        with open(os.open(new, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, mode), "wb") as file:
            for piece in pieces:
                size += file.write(piece)
            file.flush()
            if on_disk:
                os.fsync(file.fileno())
        os.replace(new, path)
    except OSError:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    return size


def write_output(path: Path, content: str | bytes) -> None:
    """Write what a command was asked to write. Raises `OSError`, with the name; then a file there is unchanged."""
    data = content.encode() if isinstance(content, str) else content
    try:
        if path.exists() and not path.is_file():  # a device or a pipe
            path.write_bytes(data)
        else:
            write_whole(path.resolve(), [data], on_disk=False, mode=0o666)
    except OSError as error:
        error.filename = str(path)
        raise


class Held(OSError):
    """Another process has the lock."""


def lock(path: Path, held: str) -> int:
    """A descriptor that holds the lock until it is closed or the process ends. Raises `OSError`; that is
    `Held`, with the text `held`, if another process has the lock."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise Held(held) if isinstance(error, BlockingIOError) else error from None
    return descriptor
