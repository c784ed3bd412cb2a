"""The file of API keys is followed: what Envoy asks for changes with it."""

import asyncio
from pathlib import Path

from fairlead.config.schema import ApiKeys
from fairlead.core.errors import ConfigError
from fairlead.gateway.envoy.authentication import Key, KeysFile, read_keys
from fairlead.pool.watched_files import WatchedFiles
from fairlead.server.observe.log import get

log = get("keys")


class FollowedKeys:
    """Writes the keys to `path`, where the gateway looks, whenever their own file has changed."""

    def __init__(self, settings: ApiKeys, path: Path, poll_s: float = 0.5) -> None:
        self._file = settings.file
        self._written = KeysFile(path, settings.forward)
        self._watched = WatchedFiles(lambda: [self._file], self._load, poll_s, "API keys")
        self._known: tuple[Key, ...] | None = None
        #: Why the file cannot be used; empty = it is in force.
        self.unusable = ""

    async def start(self) -> None:
        """A file that cannot be used leaves in force what the gateway was given before."""
        await self._watched.note()
        await self._load()
        self._watched.start()

    async def close(self) -> None:
        await self._watched.close()

    async def _load(self) -> None:
        try:
            keys = await asyncio.to_thread(read_keys, self._file)
            if keys != self._known:
                self._written.write(keys)
                log.info("the API keys are in force", file=self._file, keys=len(keys))
            self._known, self.unusable = keys, ""
        except (ConfigError, OSError) as error:
            problem = error.message if isinstance(error, ConfigError) else f"cannot write: {error.strerror}"
            self.unusable = f"the API keys cannot be used, those read before stay in force: {problem}"
            log.error("the API keys cannot be used; those read before stay in force", problem=problem)
