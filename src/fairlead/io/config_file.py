"""The configuration file, followed while it changes.

Rules
* It is looked at each `poll_s` by stat, as endpoints files are: renames over it and swapped symlinks (ConfigMap
  volumes) show like plain writes. File work and loading happen in a thread.
* A change counts once the file held still for `SETTLE_S`, and is loaded once: the same bytes again are no change.
* The first content is told too: the file may have changed since somebody loaded it.
* A file that cannot be read or has problems changes nothing; it is reported, once per content.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from fairlead.config.load import load, read_bytes
from fairlead.config.schema import Config
from fairlead.model.errors import ConfigError, FairleadError

SETTLE_S = 0.1

_Stamp = tuple[int, int, int, int]


class ConfigFile:
    """Calls `changed(config)` for each new valid content, `refused(lines)` for each that is not."""

    def __init__(
        self,
        path: str | Path,
        changed: Callable[[Config], object],
        refused: Callable[[list[str]], object],
        *,
        poll_s: float = 0.5,
        need_endpoints: bool = True,
    ) -> None:
        self._path = Path(path)
        self._changed = changed
        self._refused = refused
        self._poll_s = poll_s
        self._need_endpoints = need_endpoints
        self._stamp: _Stamp | None = None
        self._seen: bytes | str | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._follow(), name="configuration file")

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
                    await self._take()

    async def _take(self) -> None:
        content = await asyncio.to_thread(self._read)
        if content == self._seen:
            return
        self._seen = content
        try:
            config = await asyncio.to_thread(self._load)
        except FairleadError as error:
            self._tell(self._refused, str(error).splitlines())
        else:
            self._tell(self._changed, config)

    def _tell(self, callback: Callable[..., object], what: object) -> None:
        try:
            callback(what)
        except Exception as error:  # following goes on after a broken consumer
            context = {"message": "taking over a configuration raised", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)

    def _load(self) -> Config:
        return load(self._path, need_endpoints=self._need_endpoints)

    def _read(self) -> bytes | str:
        """The content, or why it cannot be read."""
        try:
            return read_bytes(self._path)
        except ConfigError as error:
            return str(error)

    def _look(self) -> _Stamp | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size, found.st_dev
