"""Files that are followed while a scheduler runs: its configuration, and the keys that Envoy requires of clients and
sends to model servers.

Rules
* `pool.watched_files` detects changes; loading also happens in a thread. The same content again is no change.
* The first content of the configuration is reported too: the file may have changed since it was loaded at the start.
* A file that cannot be read or has problems changes nothing. The problem is reported once per content.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from fairlead.compat.load import load, read_bytes
from fairlead.config.schema import Config, Gateway
from fairlead.core.errors import ConfigError, FairleadError
from fairlead.gateway.envoy.authentication import (
    read_authorities,
    read_jwt,
    read_keys,
    write_authorities,
    write_jwt,
    write_keys,
    write_upstream_token,
)
from fairlead.gateway.envoy.process import JWKS_CA, JWT, KEYS, UPSTREAM
from fairlead.pool.scrape import TokenFile
from fairlead.pool.watched_files import WatchedFiles
from fairlead.server.files import write_whole
from fairlead.server.observe.log import get

log = get("keys")


class ConfigFile(WatchedFiles):
    """Calls `changed(config)` for each new valid content, `refused(lines)` with the problems of each invalid one.
    `flags`: values that override the file's. `keep`: a file for the last valid content; `None` = none."""

    def __init__(
        self,
        path: str | Path,
        changed: Callable[[Config], object],
        refused: Callable[[list[str]], object],
        *,
        poll_s: float = 0.5,
        flags: Mapping[str, Any] | None = None,
        keep: Path | None = None,
    ) -> None:
        super().__init__(lambda: [str(path)], self._load, poll_s, "the configuration file")
        self._path, self._flags, self._keep = Path(path), flags, keep
        self.retry()  # a file that is missing from the start on is reported too
        self._tell, self._refused = changed, refused
        self._seen: bytes | str | None = None

    async def _load(self) -> None:
        content = await asyncio.to_thread(self._content)
        if isinstance(content, str):
            self.retry()
        if content == self._seen:
            return
        self._seen = content
        if isinstance(content, str):
            self._refused(content.splitlines())
            return
        try:
            config = await asyncio.to_thread(load, self._path, flags=self._flags, content=content)
        except FairleadError as error:
            self._refused(str(error).splitlines())
        else:
            if self._keep is not None:
                with suppress(OSError):
                    await asyncio.to_thread(write_whole, self._keep, [content], on_disk=False)
            self._tell(config)

    def _content(self) -> bytes | str:
        """The content, or the reason why it cannot be read."""
        try:
            return read_bytes(self._path)
        except ConfigError as error:
            return str(error)


class FollowedKeys(WatchedFiles):
    """Writes Envoy's filter with the keys, whenever the file of keys has changed or the filter's file was removed."""

    def __init__(
        self, keys: str, file: str, read: Callable[[], Any], into: Path, write: Callable[[Path, Any], None]
    ) -> None:
        """`keys`: their name in the log. `file`: the file of keys, which `read` reads; it raises `ConfigError`. `into`:
        the filter's file, to which `write` writes the result of `read`; it raises `OSError`."""
        super().__init__(lambda: [file, str(into)], self._load, 0.5, keys)
        self._keys, self._file, self._read, self._into, self._write = keys, file, read, into, write
        self._known: Any = None
        #: Why the file of keys cannot be used; empty = its keys are in use.
        self.unusable = ""

    async def begin(self) -> None:
        """Load the file and follow it. If it cannot be used, the gateway keeps the keys that it had before."""
        await self.note()
        await self._load()
        self.start()

    async def _load(self) -> None:
        keys, problem = self._known, ""
        try:
            keys = await asyncio.to_thread(self._read)
        except ConfigError as error:
            problem = error.message
        try:
            if keys != self._known or (keys is not None and not self._into.exists()):
                self._write(self._into, keys)
                log.info(f"wrote the {self._keys} for Envoy", file=self._file)
            self._known = keys
        except OSError as error:
            problem = problem or f"cannot write: {error.strerror}"
        if problem:
            self.retry()
            if problem not in self.unusable:
                log.error(f"cannot load the {self._keys}; the previous ones stay in use", problem=problem)
            problem = f"the {self._keys} cannot be used, those read before stay in force: {problem}"
        self.unusable = problem


def read_upstream_token(file: str) -> str:
    """Read the token that model servers require. Raises `ConfigError` if the file has none."""
    try:
        return TokenFile(file).read()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot use {file}: {why}", "$.gateway.upstreamTokenFile") from None


def followed_keys(gateway: Gateway, directory: Path) -> list[FollowedKeys]:
    """The files of keys to follow for the gateway whose files are in `directory`."""
    keys, jwt = gateway.keys, gateway.jwt
    followed = []
    if keys:
        write = partial(write_keys, forward=keys.forward)
        followed.append(FollowedKeys("API keys", keys.file, partial(read_keys, keys.file), directory / KEYS, write))
    if jwt and jwt.jwks_file:
        write_tokens = partial(write_jwt, optional=bool(keys))
        read = partial(read_jwt, jwt)
        followed.append(FollowedKeys("issuer's keys", jwt.jwks_file, read, directory / JWT, write_tokens))
    if jwt and jwt.jwks_uri.startswith("https:"):
        bundle, into = read_jwt(jwt).ca_file, directory / JWKS_CA
        read_bundle = partial(read_authorities, bundle)
        followed.append(FollowedKeys("authorities of the issuer", bundle, read_bundle, into, write_authorities))
    if file := gateway.upstream_token_file:
        read_token, into = partial(read_upstream_token, file), directory / UPSTREAM
        followed.append(FollowedKeys("keys of model servers", file, read_token, into, write_upstream_token))
    return followed
