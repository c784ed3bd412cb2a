"""The index in a file, so that a restarted scheduler starts warm: written now and then and at the end, atomically."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from fairlead.fleet.kv.cache import RankCache
from fairlead.fleet.kv.index import KvIndex
from fairlead.fleet.kv.snapshot import Place, save

#: Index, slot → endpoint id, and up to where each rank is true.
What = tuple[KvIndex, Mapping[int, str], Callable[[RankCache], Place]]


class Keeper:
    """`what` is asked whenever it is time; `trouble` is told why a file could not be read or written."""

    def __init__(self, path: Path, interval: float, what: Callable[[], What], trouble: Callable[[str], None]) -> None:
        self._path = path
        self._interval = interval
        self._what = what
        self._trouble = trouble
        self._task: asyncio.Task[None] | None = None

    async def read(self) -> bytes:
        """What was written last; empty = nothing was, or it cannot be read."""
        try:
            return await asyncio.to_thread(self._path.read_bytes)
        except FileNotFoundError:
            return b""
        except OSError as error:
            self._trouble(f"{self._path}: {error.strerror or error}")
            return b""

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Write once more, and end."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self.save()

    async def save(self) -> None:
        """Write what is known now. The event loop is held for one segment at a time (1,024 blocks)."""
        pieces = []
        for piece in save(*self._what()):
            pieces.append(piece)
            await asyncio.sleep(0)
        try:
            await asyncio.to_thread(_write, self._path, b"".join(pieces))
        except OSError as error:
            self._trouble(f"{self._path}: {error.strerror or error}")

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            await self.save()


def _write(path: Path, content: bytes) -> None:
    fresh = path.with_name(path.name + ".new")
    fresh.write_bytes(content)
    os.replace(fresh, path)
