"""Writes files that are complete even if the process is killed, and locks files against others."""

import errno
import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def unfinished(path: Path) -> Path:
    """The path of a new version of the file until it is complete. A process that is killed leaves that file behind."""
    return path.with_name(path.name + ".new")


def write_whole(path: Path, pieces: Iterable[bytes], *, on_disk: bool = True) -> int:
    """Write a new file, readable by its owner only, and replace the old one once it is complete. Returns its size in
    bytes. `on_disk`: fsync it before that, so that it survives a crash of the machine. Raises `OSError`, also if `path`
    is a pipe or a device; then the old file is unchanged."""
    if path.exists() and not path.is_file():
        raise OSError("it is not a regular file")
    new, size = unfinished(path), 0
    try:
        with open(os.open(new, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb") as file:
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


#: Errors of a directory or mount where no file can be replaced.
_FIXED = (errno.EACCES, errno.EBUSY, errno.EPERM, errno.EROFS, errno.EXDEV)


def write_output(path: Path, content: str | bytes, new: bool = False) -> None:
    """Write the output file of a command. `new`: no file may be there. Raises `OSError` with the file's name.

    A file keeps its permissions, and its content if writing fails. If it cannot be replaced, it is overwritten.
    """
    data = content.encode() if isinstance(content, str) else content
    real = path.resolve()
    aside = real if new else real.with_name(f".{real.name}.{os.getpid()}")
    try:
        if path.exists() and not path.is_file():  # a device or a pipe
            path.write_bytes(data)
            return
        with aside.open("xb" if new else "wb") as file:
            try:
                file.write(data)
                file.flush()
                if not new:
                    if real.exists():
                        aside.chmod(real.stat().st_mode)
                    aside.replace(real)
            except BaseException:
                aside.unlink(missing_ok=True)
                raise
    except OSError as error:
        if not new and error.errno in _FIXED:
            path.write_bytes(data)
            return
        error.filename = str(path)
        raise


class Held(OSError):
    """Another process has the lock."""


def lock(path: Path, held: str) -> int:
    """Lock the file. The returned descriptor holds the lock until it is closed or the process ends. Raises `Held`, with
    the text `held`, if another process has the lock, or another `OSError`."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise Held(held) if isinstance(error, BlockingIOError) else error from None
    return descriptor
