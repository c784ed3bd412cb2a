"""Where a scheduler is: `host:port`, or `unix:/path`."""

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from fairlead.model.errors import ConfigError

UNIX = "unix:"


class ClientTls(Struct, frozen=True, kw_only=True):
    """How the scheduler's certificate is checked, and our own. PEM files; empty = the system's, or none."""

    ca_file: str = ""
    verify: bool = True
    #: Name in the certificate; empty = the host of the address.
    server_name: str = ""
    #: Directory with `tls.crt` and `tls.key`.
    cert_dir: str = ""

    def context(self) -> ssl.SSLContext:
        """Raises `ConfigError` when a file cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
            if self.cert_dir:
                base = Path(self.cert_dir)
                context.load_cert_chain(base / "tls.crt", base / "tls.key")
        except (OSError, ValueError) as error:
            raise ConfigError(f"TLS files of the scheduler's connection: {error}", "$.scheduler.tls") from error
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        return context


def authority(address: str) -> str:
    """What goes into `:authority`."""
    return "localhost" if address.startswith(UNIX) else address


async def connect(address: str, make: Callable[[], asyncio.Protocol], tls: ClientTls | None = None) -> None:
    """Open a connection for the protocol that `make` gives. Raises `OSError` or `ConfigError`."""
    loop = asyncio.get_running_loop()
    context = tls.context() if tls is not None else None
    if address.startswith(UNIX):
        name = (tls.server_name or "localhost") if tls else None
        await loop.create_unix_connection(make, address.removeprefix(UNIX), ssl=context, server_hostname=name)
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"{address!r} is neither host:port nor unix:/path", "$.scheduler.address")
    name = (tls.server_name or host.strip("[]")) if tls else None
    await loop.create_connection(make, host.strip("[]"), int(port), ssl=context, server_hostname=name)
