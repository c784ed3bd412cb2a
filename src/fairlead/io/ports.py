"""Whether a port can be listened on, before something is started that would need it."""

import socket


def obstacle(host: str, port: int) -> OSError | None:
    """Why nobody can listen there; `None` = somebody can. `host` is an IP address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # A server that has just ended leaves connections in TIME_WAIT, which hinder nobody that sets this option.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None
