"""A file that only one process writes, while a disk may hang."""

import asyncio
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from fairlead.pool.aio import in_own_thread
from fairlead.server.files import lock, write_whole

#: Seconds after which a disk hangs; and those that it gets when the process ends, which may soon be killed.
HANGS_S, LAST_S = 30.0, 10.0


class OwnFile:
    """A file that only one process writes: the one that has the lock beside it, until it calls `release` or ends.

    Threads do the work, one after the other (`in_own_thread`). `path` and `held`: the file, and the text of `Held`.
    """

    def __init__(self) -> None:
        self._lock = -1
        #: The last piece of work, also after its caller was cancelled.
        self._work: asyncio.Future[int | Exception] | None = None

    async def take(self, path: Path, held: str, within_s: float) -> None:
        """Make the directory and take the lock, again if somebody removed the directory: the lock that was there would
        not keep others out of the new one. Raises `OSError`, also if that takes longer than `within_s`."""
        await self._do(partial(self._take, path, held), within_s)

    async def write(self, path: Path, held: str, pieces: Iterable[bytes], within_s: float) -> int:
        """`take`, and `write_whole`."""
        return await self._do(partial(self._write, path, held, pieces), within_s)

    def release(self) -> None:
        """Release the lock; if a disk hangs, when that ends, because the file is written until then."""
        if self._work is not None and not self._work.done():
            self._work.add_done_callback(lambda _: self._unlock())
        else:
            self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _take(self, path: Path, held: str) -> int:
        beside = path.with_name(path.name + ".lock")
        if self._lock >= 0:
            with suppress(OSError):
                if os.path.samestat(os.fstat(self._lock), beside.stat()):
                    return 0
            self._unlock()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = lock(beside, held)
        return 0

    def _write(self, path: Path, held: str, pieces: Iterable[bytes]) -> int:
        self._take(path, held)
        return write_whole(path, pieces)

    async def _do(self, work: Callable[[], int], within_s: float) -> int:
        try:
            async with asyncio.timeout(within_s):
                while self._work is not None and not self._work.done():
                    await asyncio.wait((self._work,))
                self._work = in_own_thread(work, "writes a file")
                result = await asyncio.shield(self._work)
        except TimeoutError:
            raise OSError(f"the disk has not answered for {within_s:.0f} s") from None
        if isinstance(result, Exception):
            raise result
        return result
