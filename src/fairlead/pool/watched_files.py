"""Follow changes of files, for endpoint discovery, model names and the configuration.

Rules
* Files are checked with stat every `poll_s`. So a rename over a file and a swapped symlink (ConfigMap volumes) are seen
  like a write, and inotify is not needed.
* A thread does the checks. A hung network mount blocks nothing, not even the end of the process, and the event loop is
  woken only for changes. Passing each check to a thread pool costs four times as much.
* A change counts once the files are unchanged for `SETTLE_S`: half of a file that is being written can be valid YAML,
  and applying it would drop endpoints.
* The next check follows after the change has been applied.
* A consumer that could not read the files calls `retry`. Stat does not show that they can be read now, be it after
  chmod or because the process has file descriptors again.
"""

import asyncio
import os
import stat
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

from fairlead.config.yaml import MAX_BYTES
from fairlead.pool.aio import cancelled

SETTLE_S = 0.1

_Stamp = tuple[tuple[str, int, int, int, int], ...]


def read_regular(path: str | Path, most: int = MAX_BYTES + 1) -> bytes:
    """The first `most` bytes of a file, -1 = all. Raises `OSError`, also for a pipe, which would wait for its writer,
    and for a device, which may have no end."""
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # at once, whatever it is
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(0, "it is not a regular file", str(path))
    with open(opened, "rb") as file:
        return file.read(most)


class WatchedFiles:
    """Awaits `changed()` whenever files of `names()` have changed. `names` runs in a thread and may raise `OSError`."""

    def __init__(
        self,
        names: Callable[[], Sequence[str]],
        changed: Callable[[], Coroutine[Any, Any, object]],
        poll_s: float,
        what: str = "files",
    ) -> None:
        self._names = names
        self._changed = changed
        self._poll_s = poll_s
        self._what = what
        self._stamp: _Stamp | None = None
        self._retry = False
        self._stop = Event()
        self._taken = Event()
        self._task: asyncio.Task[object] | None = None

    async def note(self) -> None:
        """Record the present state, before the files are read. Without this, the first check finds a change."""
        self._stamp = await asyncio.to_thread(self._look)

    def retry(self) -> None:
        """Take the files at the next check even if they are unchanged."""
        self._retry = True

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        Thread(target=self._follow, args=(loop,), name=f"follows {self._what}", daemon=True).start()

    async def close(self) -> None:
        """Apply no further changes. The thread is not waited for: its last check may hang."""
        self._stop.set()
        await cancelled(self._task)
        self._taken.set()

    def _follow(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._stop.wait(self._poll_s):
            stamp = self._look()
            if stamp == self._stamp and not self._retry:
                continue
            if self._stop.wait(SETTLE_S):
                return
            if self._look() == stamp:
                self._stamp, self._retry = stamp, False
                self._taken.clear()
                try:
                    loop.call_soon_threadsafe(self._take)
                except RuntimeError:  # the loop has been closed
                    return
                self._taken.wait()

    def _take(self) -> None:
        """Apply a change, on the loop's thread."""
        if self._stop.is_set():
            self._taken.set()
            return
        self._task = asyncio.create_task(self._changed(), name=self._what)
        self._task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[object]) -> None:
        self._taken.set()
        if not task.cancelled() and (error := task.exception()) is not None:  # keep following
            context = {"message": f"taking over {self._what} raised", "exception": error}
            task.get_loop().call_exception_handler(context)

    def _look(self) -> _Stamp | None:
        try:
            files = [(name, os.stat(name)) for name in self._names()]
        except OSError:
            return None
        return tuple((name, status.st_mtime_ns, status.st_ino, status.st_size, status.st_dev) for name, status in files)
