"""What proves who we are: tokens and client certificates, kept fresh.

Rules
* A token file is read again each minute, and at once after a 401: kubelet renews it long before it runs out. So is the
  certificate of the authority, at once after a server that it does not vouch for.
* An exec plugin (client-go's `client.authentication.k8s.io`) is run when what it gave runs out, and after a 401.
* What cannot be renewed keeps the last value; the next answer of the API server tells.
"""

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from fairlead.model.errors import ConfigError

REREAD_S = 60.0
_EXEC_TIMEOUT_S = 60.0
#: Renewed so many seconds before it runs out.
_MARGIN_S = 30.0


class Secret(Struct, frozen=True):
    """Empty parts are not used. `certificate` and `key` are PEM texts."""

    token: str = ""
    certificate: str = ""
    key: str = ""


class SecretSource(Protocol):
    async def get(self) -> Secret:
        """What to use now. Raises `ConfigError` when there is nothing at all."""
        ...

    def refused(self) -> None:
        """The API server said 401: look for something newer."""


class FixedSecret:
    def __init__(self, secret: Secret) -> None:
        self._secret = secret

    async def get(self) -> Secret:
        return self._secret

    def refused(self) -> None:
        pass


class FreshFile:
    """A file whose text changes now and then. `what` names it in errors."""

    def __init__(self, path: str | Path, now: Callable[[], float], what: str) -> None:
        self._path = Path(path)
        self._now = now
        self._what = what
        self._text = ""
        self._read_at = -inf

    async def text(self) -> str:
        """Raises `ConfigError` when it could never be read."""
        now = self._now()
        if now - self._read_at >= REREAD_S:
            self._read_at = now
            try:
                self._text = (await asyncio.to_thread(self._path.read_text)).strip() or self._text
            except (OSError, UnicodeDecodeError) as error:
                if not self._text:
                    raise ConfigError(f"cannot read {self._what} {self._path}: {error}", "$.kubernetes") from None
        return self._text

    def forget(self) -> None:
        """Read it again next time."""
        self._read_at = -inf


class TokenFile:
    """`base` brings a client certificate along."""

    def __init__(self, path: str | Path, now: Callable[[], float], base: Secret = Secret()) -> None:  # noqa: B008 frozen
        self._file = FreshFile(path, now, "the token file")
        self._base = base

    async def get(self) -> Secret:
        return msgspec.structs.replace(self._base, token=await self._file.text())

    def refused(self) -> None:
        self._file.forget()


class ExecPlugin(Struct, frozen=True, rename="camel"):
    """`user.exec` of a kubeconfig."""

    command: str
    api_version: str = "client.authentication.k8s.io/v1"
    args: list[str] | None = None
    env: list[dict[str, str]] | None = None
    install_hint: str = ""
    provide_cluster_info: bool = False
    interactive_mode: str = ""


class _ExecStatus(Struct, rename="camel"):
    token: str = ""
    client_certificate_data: str = ""
    client_key_data: str = ""
    expiration_timestamp: str | None = None


class _ExecCredential(Struct):
    status: _ExecStatus


class ExecSecret:
    """Runs a credential plugin. Relative commands with a slash are relative to the kubeconfig's directory."""

    def __init__(
        self, plugin: ExecPlugin, directory: Path, wall: Callable[[], float], cluster: Mapping[str, object]
    ) -> None:
        self._plugin = plugin
        self._directory = directory
        self._wall = wall
        self._cluster = cluster
        self._secret: Secret | None = None
        self._until = -inf
        self._running = asyncio.Lock()

    async def get(self) -> Secret:
        async with self._running:
            if self._secret is None or self._wall() >= self._until - _MARGIN_S:
                try:
                    self._secret, self._until = await self._run()
                except ConfigError:
                    if self._secret is None:
                        raise
                    self._until = self._wall() + 2 * _MARGIN_S
            return self._secret

    def refused(self) -> None:
        self._until = -inf

    async def _run(self) -> tuple[Secret, float]:
        plugin = self._plugin
        command = plugin.command
        if "/" in command:
            command = str(self._directory / command)
        spec: dict[str, object] = {"interactive": False}
        if plugin.provide_cluster_info:
            spec["cluster"] = self._cluster
        info = {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": spec}
        extra = {one.get("name", ""): one.get("value", "") for one in plugin.env or ()}
        extra.pop("", None)
        environment = {**os.environ, **extra, "KUBERNETES_EXEC_INFO": json.dumps(info)}
        try:
            process = await asyncio.create_subprocess_exec(
                command,
                *(plugin.args or ()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment,
            )
        except OSError as error:
            hint = f"; {plugin.install_hint}" if plugin.install_hint else ""
            raise ConfigError(f"cannot run the credential plugin {command}: {error}{hint}", "$.kubernetes") from None
        try:
            async with asyncio.timeout(_EXEC_TIMEOUT_S):
                out, err = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            raise ConfigError(f"the credential plugin {command} gave no answer", "$.kubernetes") from None
        if process.returncode:
            said = err.decode(errors="replace").strip()[-300:]
            raise ConfigError(f"the credential plugin {command} failed: {said}", "$.kubernetes")
        return self._read(command, out)

    def _read(self, command: str, out: bytes) -> tuple[Secret, float]:
        try:
            status = msgspec.json.decode(out, type=_ExecCredential).status
            said = status.expiration_timestamp
            moment = datetime.fromisoformat(said) if said else None
        except (msgspec.DecodeError, ValueError) as error:
            message = f"the credential plugin {command} gave no ExecCredential: {error}"
            raise ConfigError(message, "$.kubernetes") from None
        until = moment.replace(tzinfo=moment.tzinfo or UTC).timestamp() if moment else inf
        return Secret(status.token, status.client_certificate_data, status.client_key_data), until
