"""The certificate authorities that a client trusts, and its own certificate, from files of the configuration."""

import asyncio
import logging
import os
import ssl
import time
from pathlib import Path

from fairlead.pool.watched_files import read_regular

log = logging.getLogger("fairlead.tls")

#: Seconds between two looks at a bundle that is followed.
LOOK_S = 1.0


def trusting(ca_file: str, cert_dir: str = "") -> ssl.SSLContext:
    """A context that trusts the authorities of a PEM bundle; empty = the system's. `cert_dir`: the directory with the
    client's `tls.crt` and `tls.key`; empty = it has none. Raises an `OSError` that names the file or the directory,
    which those of `ssl` do not."""
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:
        raise OSError(f"cannot use the certificate authorities in {ca_file}: {error.strerror}") from error
    if cert_dir:
        chain, key = Path(cert_dir, "tls.crt"), Path(cert_dir, "tls.key")
        for file in chain, key:
            file.read_bytes()
        try:
            context.load_cert_chain(chain, key, password="")  # without one, OpenSSL would ask on the terminal
        except ssl.SSLError as error:
            raise OSError(f"cannot use tls.crt and tls.key in {cert_dir}: {error.strerror}") from error
    return context


class FollowedAuthorities:
    """A context that trusts the authorities of a PEM bundle, which is read again when it changes. A bundle that cannot
    be used, or that ends within a certificate, changes nothing; this is logged once. Belongs to one event loop."""

    def __init__(self, ca_file: str) -> None:
        """Raises an `OSError` that names the file."""
        self._file = ca_file
        read_regular(ca_file, 0)  # OpenSSL would wait for a pipe's writer
        self._stamp = self._identify()
        self._context = trusting(ca_file)
        self._looked = time.monotonic()
        self._looking: asyncio.Future[None] | None = None
        self._problem = ""

    def context(self) -> ssl.SSLContext:
        """The context for the next connection. Never waits: a mount that hangs would hold up the connection."""
        now = time.monotonic()
        if now - self._looked >= LOOK_S and (self._looking is None or self._looking.done()):
            self._looked = now
            self._looking = asyncio.get_running_loop().run_in_executor(None, self._look)
        return self._context

    def _look(self) -> None:
        problem = ""
        try:
            stamp = self._identify()
            if stamp != self._stamp:
                pem = read_regular(self._file, -1)
                if pem.count(b"-----BEGIN ") != pem.count(b"-----END "):
                    raise OSError(f"{self._file} ends within a certificate")
                self._context, self._stamp = trusting(self._file), stamp
        except OSError as error:
            problem = str(error)
        if problem and problem != self._problem:
            log.warning("cannot load new certificate authorities, the old ones stay in use: %s", problem)
        self._problem = problem

    def _identify(self) -> tuple[int, int, int]:
        status = os.stat(self._file)
        return status.st_ino, status.st_mtime_ns, status.st_size
