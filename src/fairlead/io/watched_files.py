"""Files that are followed while they change: what discovery, model names and the configuration have in common.

Rules
* Looked at each `poll_s` by stat, so renames over a file and swapped symlinks (ConfigMap volumes) show like plain
  writes, and no inotify is needed. File work happens in a thread: a hung network mount blocks nothing.
* A change counts once the files held still for `SETTLE_S`: half of a file that is being written can be valid YAML, and
  taking it at its word would drop endpoints.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence

SETTLE_S = 0.1

_Stamp = tuple[tuple[str, int, int, int, int], ...]


class WatchedFiles:
    """Awaits `changed()` whenever files of `names()` have changed; `names` runs in a thread and may raise `OSError`."""

    def __init__(
        self,
        names: Callable[[], Sequence[str]],
        changed: Callable[[], Awaitable[object]],
        poll_s: float,
        task: str = "",
    ) -> None:
        self._names = names
        self._changed = changed
        self._poll_s = poll_s
        self._name = task or None
        self._stamp: _Stamp | None = None
        self._task: asyncio.Task[None] | None = None

    async def note(self) -> None:
        """What is there now is about to be read. Without it, the first look finds a change."""
        self._stamp = await asyncio.to_thread(self._look)

    def start(self) -> None:
        self._task = asyncio.create_task(self._follow(), name=self._name)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            stamp = await asyncio.to_thread(self._look)
            if stamp != self._stamp:
                await asyncio.sleep(SETTLE_S)
                if await asyncio.to_thread(self._look) == stamp:
                    self._stamp = stamp
                    await self._changed()

    def _look(self) -> _Stamp | None:
        try:
            found = [(name, os.stat(name)) for name in self._names()]
        except OSError:
            return None
        return tuple((name, one.st_mtime_ns, one.st_ino, one.st_size, one.st_dev) for name, one in found)
