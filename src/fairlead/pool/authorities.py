"""The certificate authorities that a client trusts, from a file that the configuration names."""

import ssl


def trusting(ca_file: str) -> ssl.SSLContext:
    """A context that trusts the authorities of a PEM bundle; empty = the system's. Raises an `OSError` that names the
    file, which those of `ssl` do not."""
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:
        raise OSError(f"cannot use the certificate authorities in {ca_file}: {error.strerror}") from error
