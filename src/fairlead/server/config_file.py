"""Follows the configuration file.

Rules
* It is followed as `watched_files` says; loading also happens in a thread. The same bytes again are no change.
* The first content is reported too: the file may have changed since it was loaded at the start.
* A file that cannot be read or has problems changes nothing; it is reported, once per content.
"""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fairlead.compat.load import load, read_bytes
from fairlead.config.schema import Config
from fairlead.core.errors import ConfigError, FairleadError
from fairlead.pool.watched_files import WatchedFiles


class ConfigFile:
    """Calls `changed(config)` for each new valid content, `refused(lines)` for each invalid one."""

    def __init__(
        self,
        path: str | Path,
        changed: Callable[[Config], object],
        refused: Callable[[list[str]], object],
        *,
        poll_s: float = 0.5,
        need_endpoints: bool = True,
        flags: Mapping[str, Any] | None = None,
    ) -> None:
        self._path = Path(path)
        self._changed = changed
        self._refused = refused
        self._need_endpoints = need_endpoints
        self._flags = flags
        self._seen: bytes | str | None = None
        self._watched = WatchedFiles(lambda: [str(self._path)], self._take, poll_s, "the configuration file")

    async def start(self) -> None:
        self._watched.start()

    async def close(self) -> None:
        await self._watched.close()

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
        except Exception as error:  # continue to follow after an error in a consumer
            context = {"message": "taking over a configuration raised", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)

    def _load(self) -> Config:
        return load(self._path, need_endpoints=self._need_endpoints, flags=self._flags)

    def _read(self) -> bytes | str:
        """The content, or the reason why it cannot be read."""
        try:
            return read_bytes(self._path)
        except ConfigError as error:
            return str(error)
