"""Where the API server is and who we are to it: in a cluster from the service account, elsewhere from a kubeconfig.

Order: the kubeconfig that the configuration names; the service account's files, inside a pod; `$KUBECONFIG`;
`~/.kube/config`. TLS is verified unless a kubeconfig says `insecure-skip-tls-verify`.
"""

import os
import ssl
import tempfile
import time
from pathlib import Path

from msgspec import structs

from fairlead.io.kube.kubeconfig import Where, read_kubeconfig
from fairlead.io.kube.secrets import FreshFile, Secret, SecretSource, TokenFile
from fairlead.model.errors import ConfigError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Access:
    """What a client needs to connect. `where.namespace` is the one to assume, empty if nobody said."""

    def __init__(self, where: Where, secrets: SecretSource, authority: FreshFile | None = None) -> None:
        """`authority`: a file of certificates that counts instead of `where.authority`, for it may be rotated."""
        self.where = where
        self._secrets = secrets
        self._authority = authority
        self._context: ssl.SSLContext | None = None
        self._made_of: tuple[str, str, str] = ("", "", "")

    async def credentials(self) -> tuple[dict[str, str], ssl.SSLContext | bool]:
        """(headers, TLS context or True for plain HTTP). Raises `ConfigError`."""
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
        """The API server said 401."""
        self._secrets.refused()

    def distrusted(self) -> None:
        """The API server's certificate did not stand the test: its authority may be a new one."""
        if self._authority is not None:
            self._authority.forget()


def tls_context(where: Where, secret: Secret) -> ssl.SSLContext:
    """Raises `ConfigError`."""
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
    """OpenSSL's binding takes files only; this one is readable by us alone and gone at once."""
    handle, name = tempfile.mkstemp(prefix="fairlead-")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(f"{secret.certificate}\n{secret.key}\n")
        context.load_cert_chain(name)
    finally:
        os.unlink(name)


def find_access(kubeconfig: str = "", context: str = "", account: Path = SERVICE_ACCOUNT) -> Access:
    """Raises `ConfigError` with what was looked for."""
    if kubeconfig:
        return Access(*read_kubeconfig(Path(kubeconfig).expanduser().absolute(), context))
    if os.environ.get("KUBERNETES_SERVICE_HOST") and (account / "token").exists():
        return in_cluster(account)
    named = [name for name in os.environ.get("KUBECONFIG", "").split(os.pathsep) if name]
    for path in map(Path, named or [str(Path.home() / ".kube" / "config")]):
        if path.exists():
            return Access(*read_kubeconfig(path.absolute(), context))
    raise ConfigError(
        "no access to Kubernetes: this is no pod with a service account, and there is no kubeconfig",
        "$.kubernetes.kubeconfig",
    )


def in_cluster(account: Path = SERVICE_ACCOUNT) -> Access:
    """As a pod. Raises `ConfigError`."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if ":" in host:
        host = f"[{host}]"
    try:
        authority = (account / "ca.crt").read_text()
        namespace = (account / "namespace").read_text().strip() if (account / "namespace").exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the service account cannot be used: {error}", "$.kubernetes") from None
    where = Where(f"https://{host}:{port}", authority, namespace=namespace)
    fresh = FreshFile(account / "ca.crt", time.monotonic, "the certificate of the API server's authority")
    return Access(where, TokenFile(account / "token", time.monotonic), fresh)
