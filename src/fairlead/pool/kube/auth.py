"""The address of the API server, and the credentials for it: tokens and client certificates, kept fresh.

Rules
* A token file is read again every minute, because kubelet renews it long before it expires, and after a 401. The
  authority's certificate is read again every minute too, and after it failed to verify a server.
* An exec plugin (client-go's `client.authentication.k8s.io`) is run when its credentials expire, and after a 401.
* Credentials that cannot be renewed keep their last value; the API server's next answer shows whether they are valid.
"""

import asyncio
import base64
import binascii
import json
import os
import ssl
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import Struct, structs

from fairlead.core.errors import ConfigError

REREAD_S = 60.0
_EXEC_TIMEOUT_S = 60.0
#: Credentials are renewed this many seconds before they expire.
_MARGIN_S = 30.0


class Secret(Struct, frozen=True):
    """Credentials. Empty parts are not used. `certificate` and `key` are PEM texts."""

    token: str = ""
    certificate: str = ""
    key: str = ""


class SecretSource(Protocol):
    async def get(self) -> Secret:
        """The current credentials. Raises `ConfigError` if there are none at all."""
        ...

    def refused(self) -> None:
        """Take note of a 401 from the API server: get newer credentials next time."""


class FixedSecret:
    def __init__(self, secret: Secret) -> None:
        self._secret = secret

    async def get(self) -> Secret:
        return self._secret

    def refused(self) -> None:
        pass


class FreshFile:
    """A file whose text changes from time to time. `what` names it in errors."""

    def __init__(self, path: str | Path, now: Callable[[], float], what: str) -> None:
        self._path = Path(path)
        self._now = now
        self._what = what
        self._text = ""
        self._read_at = -inf
        #: Held while the file is read: all who ask meanwhile wait for its text.
        self._reading = asyncio.Lock()

    async def text(self) -> str:
        """The current text. Raises `ConfigError` if it could never be read."""
        async with self._reading:
            now = self._now()
            if now - self._read_at >= REREAD_S:
                try:
                    self._text = (await asyncio.to_thread(self._path.read_text)).strip() or self._text
                except (OSError, UnicodeDecodeError) as error:
                    if not self._text:
                        raise ConfigError(f"cannot read {self._what} {self._path}: {error}", "$.kubernetes") from None
                self._read_at = now
        return self._text

    def forget(self) -> None:
        """Read it again next time."""
        self._read_at = -inf


class TokenFile:
    """A token from a file. `base` may add a client certificate."""

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
        extra = {variable.get("name", ""): variable.get("value", "") for variable in plugin.env or ()}
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


# Reads a kubeconfig file: the server, the authority to trust, and the credentials.

_MAX_BYTES = 1 << 20


class _Cluster(Struct, rename="kebab"):
    server: str = ""
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    insecure_skip_tls_verify: bool = False
    tls_server_name: str = ""
    proxy_url: str = ""


class _User(Struct, rename={"token_file": "tokenFile"}):
    token: str = ""
    token_file: str = ""
    certificate: str = msgspec.field(name="client-certificate", default="")
    certificate_data: str = msgspec.field(name="client-certificate-data", default="")
    key: str = msgspec.field(name="client-key", default="")
    key_data: str = msgspec.field(name="client-key-data", default="")
    exec_: ExecPlugin | None = msgspec.field(name="exec", default=None)


class _Context(Struct):
    cluster: str = ""
    user: str = ""
    namespace: str = ""


class _NamedCluster(Struct):
    name: str
    cluster: _Cluster


class _NamedUser(Struct):
    name: str
    user: _User | None = None


class _NamedContext(Struct):
    name: str
    context: _Context


class _File(Struct):
    clusters: list[_NamedCluster] | None = None
    users: list[_NamedUser] | None = None
    contexts: list[_NamedContext] | None = None
    current_context: str = msgspec.field(name="current-context", default="")


class Where(Struct, frozen=True):
    """An API server and how to connect to it."""

    server: str
    #: Certificates of the authority as PEM; empty = the system's authorities.
    authority: str = ""
    verify: bool = True
    #: The name in the server's certificate, if it differs from the URL's.
    server_name: str = ""
    proxy: str = ""
    namespace: str = ""


def read_kubeconfig(path: Path, context: str = "") -> tuple[Where, SecretSource]:
    """Read a kubeconfig. `context`: empty = the file's current context. Raises `ConfigError`."""
    file = _load(path)
    name = context or file.current_context
    chosen = _named(file.contexts, "context", name, path).context
    cluster: _Cluster = _named(file.clusters, "cluster", chosen.cluster, path).cluster
    user: _User = (_named(file.users, "user", chosen.user, path).user if chosen.user else None) or _User()
    if not cluster.server:
        raise ConfigError(f"cluster {chosen.cluster!r} has no server", "$.kubernetes.kubeconfig", str(path))
    where = Where(
        cluster.server.rstrip("/"),
        _text(cluster.certificate_authority, cluster.certificate_authority_data, path),
        not cluster.insecure_skip_tls_verify,
        cluster.tls_server_name,
        cluster.proxy_url,
        chosen.namespace,
    )
    return where, _secret(user, where, path)


def _load(path: Path) -> _File:
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise ConfigError("larger than 1 MiB", "$.kubernetes.kubeconfig", str(path))
        return msgspec.yaml.decode(text, type=_File)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}", "$.kubernetes.kubeconfig", str(path)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        message = f"not a kubeconfig: {str(error).splitlines()[0]}"
        raise ConfigError(message, "$.kubernetes.kubeconfig", str(path)) from None


def _named(entries: Any, kind: str, name: str, path: Path) -> Any:
    for entry in entries or ():
        if entry.name == name:
            return entry
    known = ", ".join(entry.name for entry in entries or ()) or "none"
    raise ConfigError(f"there is no {kind} {name!r}; known: {known}", "$.kubernetes.context", str(path))


def _secret(user: _User, where: Where, path: Path) -> SecretSource:
    certificate = _text(user.certificate, user.certificate_data, path)
    base = Secret(user.token, certificate, _text(user.key, user.key_data, path))
    if user.exec_ is not None:
        authority = base64.b64encode(where.authority.encode()).decode()
        cluster = {"server": where.server, "certificate-authority-data": authority}
        return ExecSecret(user.exec_, path.parent, time.time, cluster)
    if user.token_file and not user.token:
        return TokenFile(path.parent / user.token_file, time.monotonic, base)
    return FixedSecret(base)


def _text(name: str, data: str, path: Path) -> str:
    """The text of inline data or a file. As in kubectl, inline data takes precedence, and paths are relative to the
    kubeconfig."""
    try:
        if data:
            return base64.b64decode(data, validate=True).decode()
        return Path(os.path.join(path.parent, name)).read_text(encoding="utf-8") if name else ""
    except (OSError, binascii.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{name or 'certificate data'}: {error}", "$.kubernetes.kubeconfig", str(path)) from None


# Finds the API server and the credentials for it: the service account inside a cluster, otherwise a kubeconfig.
#
# Order: the kubeconfig that the configuration names; the service account's files, inside a pod; `$KUBECONFIG`;
# `~/.kube/config`. TLS is verified unless a kubeconfig says `insecure-skip-tls-verify`.

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Access:
    """What a client needs to connect. `where.namespace` is the default namespace, empty if unknown."""

    def __init__(self, where: Where, secrets: SecretSource, authority: FreshFile | None = None) -> None:
        """`authority`: a file of certificates, which may be rotated. It takes precedence over `where.authority`."""
        self.where = where
        self._secrets = secrets
        self._authority = authority
        self._context: ssl.SSLContext | None = None
        self._made_of: tuple[str, str, str] = ("", "", "")

    async def credentials(self) -> tuple[dict[str, str], ssl.SSLContext | bool]:
        """The headers to send, and the TLS context or True for plain HTTP. Raises `ConfigError`."""
        secret = await self._secrets.get()
        headers = {"Authorization": f"Bearer {secret.token}"} if secret.token else {}
        if not self.where.server.startswith("https:"):
            return headers, True
        authority = await self._authority.text() if self._authority is not None else self.where.authority
        made_of = authority, secret.certificate, secret.key
        if self._context is None or made_of != self._made_of:
            where = structs.replace(self.where, authority=authority)
            try:
                self._context = tls_context(where, secret)
            except ConfigError:
                if self._context is None:
                    raise
            self._made_of = made_of
        return headers, self._context

    def refused(self) -> None:
        """Take note of a 401 from the API server."""
        self._secrets.refused()

    def distrusted(self) -> None:
        """Take note that the API server's certificate could not be verified: it may have a new authority."""
        if self._authority is not None:
            self._authority.forget()


def tls_context(where: Where, secret: Secret) -> ssl.SSLContext:
    """The TLS context for a server. Raises `ConfigError`."""
    try:
        context = ssl.create_default_context(cadata=where.authority or None)
        if not where.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if secret.certificate:
            _use_certificate(context, secret)
    except (ssl.SSLError, ValueError, OSError) as error:
        raise ConfigError(f"the certificates cannot be used: {error}", "$.kubernetes") from None
    return context


def _use_certificate(context: ssl.SSLContext, secret: Secret) -> None:
    """Load a client certificate. `ssl` accepts only files, so a file of mode 600 is written and soon deleted."""
    handle, name = tempfile.mkstemp(prefix="fairlead-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(f"{secret.certificate}\n{secret.key}\n")
        context.load_cert_chain(name)
    finally:
        os.unlink(name)


def find_access(kubeconfig: str = "", context: str = "", account: Path = SERVICE_ACCOUNT) -> Access:
    """Find access in the order above. Raises a `ConfigError` that says where it was looked for."""
    if kubeconfig:
        return Access(*read_kubeconfig(Path(kubeconfig).expanduser().absolute(), context))
    if os.environ.get("KUBERNETES_SERVICE_HOST") and (account / "token").exists():
        return in_cluster(account)
    named = [name for name in os.environ.get("KUBECONFIG", "").split(os.pathsep) if name]
    for path in map(Path, named or [str(Path.home() / ".kube" / "config")]):
        if path.exists():
            return Access(*read_kubeconfig(path.absolute(), context))
    raise ConfigError(
        "no access to Kubernetes: this is not a pod with a service account, and there is no kubeconfig",
        "$.kubernetes.kubeconfig",
    )


def in_cluster(account: Path = SERVICE_ACCOUNT) -> Access:
    """Access with a pod's service account. Raises `ConfigError`."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if ":" in host:
        host = f"[{host}]"
    try:
        authority = (account / "ca.crt").read_text(encoding="utf-8")
        namespace = (
            (account / "namespace").read_text(encoding="utf-8").strip() if (account / "namespace").exists() else ""
        )
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the service account cannot be used: {error}", "$.kubernetes") from None
    where = Where(f"https://{host}:{port}", authority, namespace=namespace)
    fresh = FreshFile(account / "ca.crt", time.monotonic, "the certificate of the API server's authority")
    return Access(where, TokenFile(account / "token", time.monotonic), fresh)
