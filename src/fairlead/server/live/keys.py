"""Follows the files of API keys and of an issuer's keys, and updates what Envoy requires of clients accordingly."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fairlead.config.schema import Gateway
from fairlead.core.errors import ConfigError
from fairlead.gateway.envoy.authentication import read_jwt, read_keys, write_jwt, write_keys
from fairlead.gateway.envoy.process import JWT, KEYS
from fairlead.pool.watched_files import WatchedFiles
from fairlead.server.observe.log import get

log = get("keys")


class FollowedKeys:
    """Writes a filter to where the gateway reads it, whenever the file of keys behind it has changed."""

    def __init__(
        self, what: str, file: str, read: Callable[[], Any], write: Callable[[Any], None], poll_s: float = 0.5
    ) -> None:
        """`what`: the name in the log. `read` raises `ConfigError`; `write` takes its result and raises `OSError`."""
        self._what, self._file, self._read, self._write = what, file, read, write
        self._watched = WatchedFiles(lambda: [file], self._load, poll_s, what)
        self._known: Any = None
        #: Why the file cannot be used; empty = it is in force.
        self.unusable = ""

    async def start(self) -> None:
        """Load the file and follow it. If it cannot be used, what the gateway had before stays in force."""
        await self._watched.note()
        await self._load()
        self._watched.start()

    async def close(self) -> None:
        await self._watched.close()

    async def _load(self) -> None:
        try:
            keys = await asyncio.to_thread(self._read)
            if keys != self._known:
                self._write(keys)
                log.info(f"loaded the {self._what}", file=self._file)
            self._known, self.unusable = keys, ""
        except (ConfigError, OSError) as error:
            problem = error.message if isinstance(error, ConfigError) else f"cannot write: {error.strerror}"
            self.unusable = f"the {self._what} cannot be used, those read before stay in force: {problem}"
            log.error(f"cannot load the {self._what}; the previous ones stay in use", problem=problem)


def followed_keys(gateway: Gateway, directory: Path) -> list[FollowedKeys]:
    """The files of keys to follow for the gateway whose files are in `directory`."""
    keys, jwt = gateway.keys, gateway.jwt
    followed = []
    if keys:
        write = partial(write_keys, directory / KEYS, forward=keys.forward)
        followed.append(FollowedKeys("API keys", keys.file, partial(read_keys, keys.file), write))
    if jwt and jwt.jwks_file:
        write_tokens = partial(write_jwt, directory / JWT, optional=bool(keys))
        followed.append(FollowedKeys("issuer's keys", jwt.jwks_file, partial(read_jwt, jwt), write_tokens))
    return followed
