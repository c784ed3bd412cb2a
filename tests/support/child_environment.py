"""The environment of Fairlead's processes in tests."""

import os


def environment() -> dict[str, str]:
    """The authorities that the machine trusts are left out: to read them takes 50 ms of each start, and what tests dial
    is on this machine, or has a certificate of its own."""
    return {**os.environ, "SSL_CERT_FILE": os.devnull, "SSL_CERT_DIR": os.devnull}
