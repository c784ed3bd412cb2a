"""The certificate authorities that a client trusts, and its own certificate, from files of the configuration."""

import ssl
from pathlib import Path


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
