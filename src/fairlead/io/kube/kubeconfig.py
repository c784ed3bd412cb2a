"""A kubeconfig file → which server, whom to trust, who we are."""

import base64
import binascii
import os
import time
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from fairlead.io.kube.secrets import ExecPlugin, ExecSecret, FixedSecret, Secret, SecretSource, TokenFile
from fairlead.model.errors import ConfigError

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
    """A server and how to speak to it."""

    server: str
    #: PEM; empty = the system's authorities.
    authority: str = ""
    verify: bool = True
    #: Name in the server's certificate, where it is not the URL's.
    server_name: str = ""
    proxy: str = ""
    namespace: str = ""


def read_kubeconfig(path: Path, context: str = "") -> tuple[Where, SecretSource]:
    """`context`: empty = the file's current one. Raises `ConfigError`."""
    file = _load(path)
    name = context or file.current_context
    found = _named(file.contexts, "context", name, path).context
    cluster: _Cluster = _named(file.clusters, "cluster", found.cluster, path).cluster
    user: _User = (_named(file.users, "user", found.user, path).user if found.user else None) or _User()
    if not cluster.server:
        raise ConfigError(f"cluster {found.cluster!r} has no server", "$.kubernetes.kubeconfig", str(path))
    where = Where(
        cluster.server.rstrip("/"),
        _text(cluster.certificate_authority, cluster.certificate_authority_data, path),
        not cluster.insecure_skip_tls_verify,
        cluster.tls_server_name,
        cluster.proxy_url,
        found.namespace,
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
    """Inline data counts before a file, as kubectl has it. Files are relative to the kubeconfig."""
    try:
        if data:
            return base64.b64decode(data, validate=True).decode()
        return Path(os.path.join(path.parent, name)).read_text() if name else ""
    except (OSError, binascii.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{name or 'certificate data'}: {error}", "$.kubernetes.kubeconfig", str(path)) from None
